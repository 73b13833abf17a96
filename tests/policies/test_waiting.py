"""Images that other jobs have when a run chooses: they wait for their turn, and nothing is done to them twice."""

from typing import Any

import pytest
from django.template.loader import render_to_string
from django.test import RequestFactory

from images.api.policy_shapes import preview_of
from images.models import Image, PolicyPick, PolicyRun
from images.policies import runs, services, submitting
from images.policies.preview import preview
from images.policies.shape import Rules
from storage_admin.jobs.models import Job, ResourceLock
from tests.factories import GIB, HostFactory, ImageFactory, JobFactory, PolicyFactory, StoragePoolFactory, UserFactory
from tests.policies.test_runs import MINUTE, NOW, at_work, begun, images, picks, stepped
from tests.working import OPERATOR, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


def taken(one: Image, kind: str = "flatten") -> Job:
    job = JobFactory.create(target=one, kind=kind, state="running")
    ResourceLock.objects.create(job=job, key=f"image:{one.pk}", exclusive=True)
    return job


def waits(one: Image, **rules: Any) -> tuple[PolicyRun, Job]:
    """A run of a policy with these rules, and the job of another that has its only image."""
    job = taken(one)
    run = begun(PolicyFactory.create(**rules))
    assert picks(run) == [("disk0", "chosen", "busy")]
    return run, job


def ended(job: Job, state: str = "succeeded", **columns: Any) -> None:
    Job.objects.filter(pk=job.pk).update(state=state, finished=NOW + MINUTE, **columns)
    ResourceLock.objects.filter(job=job).delete()


def test_an_image_that_another_job_has_waits_its_turn_and_keeps_no_other_from_the_slot() -> None:
    first, _second = images(2)
    job = taken(first)
    policy = PolicyFactory.create()
    run = begun(policy)
    assert picks(run) == [("disk0", "chosen", "busy"), ("disk1", "submitted", "")]
    assert run.picks.get(label="disk0").reason == "Another job is using it. The policy waits until that job has ended."
    own = Job.objects.get(created_by=f"policy {policy.name}")
    ended(job)
    runs.work(NOW + MINUTE)
    # Nothing keeps it any more but that there is one slot.
    assert picks(run)[0] == ("disk0", "chosen", "")
    ended(own)
    assert picks(stepped(run, NOW + 2 * MINUTE)) == [("disk0", "submitted", ""), ("disk1", "succeeded", "")]


def test_many_images_that_other_jobs_have_keep_nobody_behind_them_from_the_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("images.policies.submitting.MOST", 2)
    rows = images(5)
    for one in rows[:4]:
        taken(one)
    run = begun(PolicyFactory.create())
    assert [label for label, state, _code in picks(run) if state == "submitted"] == ["disk4"]


def test_many_that_wait_for_space_keep_nobody_behind_them_from_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("images.policies.submitting.MOST", 4)
    monkeypatch.setattr("images.policies.submitting.TOGETHER", 2)
    pool = StoragePoolFactory.create(capacity_bytes=100 * GIB, available_bytes=14 * GIB)
    other = ImageFactory.create(name="other", pool=pool, reclaimable_bytes=0)
    JobFactory.create(target=other, kind="convert", state="running", rewrites=True)
    wide = {"allocated_size": 40 * GIB, "virtual_size": 50 * GIB}
    images(9, pool=pool, **wide)
    Image.objects.filter(name__startswith="disk").update(estimate=copies(20 * GIB), reclaimable_bytes=20 * GIB)
    ImageFactory.create(name="small", pool=pool, reclaimable_bytes=3 * GIB, estimate=copies(GIB))
    run = begun(PolicyFactory.create(options={"method": "copy", "undo_hours": 0}))
    for step in range(1, 5):
        runs.work(NOW + step * MINUTE / 4)
    assert run.picks.filter(state="chosen", code="not_enough_space").count() == 9
    assert run.picks.get(label="small").state == "submitted"
    # All have been looked at: they go on being looked at, and the one behind the others comes when it fits.
    PolicyPick.objects.filter(label="small").update(state="chosen", code="not_enough_space", job=None)
    Job.objects.filter(target_label="small").delete()
    for step in range(5, 10):
        runs.work(NOW + step * MINUTE / 4)
    assert run.picks.get(label="small").state == "submitted"


def copies(after: int) -> dict[str, Any]:
    """An estimate by which an image takes so many bytes once it is copied."""
    sizes = dict.fromkeys(("predicted_after_bytes", "predicted_low", "predicted_high"), after)
    return {"methods": {"copy": {"reclaimable_bytes": 3 * GIB} | sizes}}


def test_the_first_ones_are_looked_at_in_each_step_however_many_wait_for_space() -> None:
    run = services.run_now(OPERATOR, PolicyFactory.create(), NOW)
    code = "not_enough_space"
    PolicyPick.objects.bulk_create(PolicyPick(run=run, place=place, code=code) for place in range(1000))
    waiting = run.picks.order_by("place", "id")
    every = list(waiting.values_list("pk", flat=True))
    seen: set[int] = set()
    for step in range(10):
        ids = submitting._looked_at(waiting, NOW + step * MINUTE / 4)
        assert (ids[:100], len(set(ids)), sorted(ids)) == (every[:100], submitting.MOST, ids)
        seen |= set(ids)
    assert seen == set(every)
    # Those that nobody has looked at come before all but the first ones.
    waiting.filter(pk__in=every[900:]).update(code="")
    assert submitting._looked_at(waiting, NOW) == every[:100] + every[900:]


def test_what_another_job_has_until_the_window_closes_is_left_out_and_says_so() -> None:
    run, _job = waits(*images(1))
    runs.work(run.ends)
    pick = run.picks.get()
    assert (pick.state, pick.code) == ("skipped", "busy")
    assert pick.reason.startswith("Another job was using it. The window closed before")
    assert reread(run).state == "finished"


def test_a_run_that_is_stopped_lets_nothing_wait_any_longer() -> None:
    run, job = waits(*images(1))
    services.stop(OPERATOR, run)
    assert picks(run) == [("disk0", "skipped", "busy")]
    ended(job)
    runs.work(NOW + MINUTE)
    assert not PolicyPick.objects.exclude(job=None).exists()


@pytest.mark.parametrize(("min_age_hours", "code"), [(0, "done_meanwhile"), (24, "too_young")])
def test_what_another_run_or_a_person_does_meanwhile_is_not_done_twice(min_age_hours: int, code: str) -> None:
    (one,) = images(1)
    run, job = waits(one, min_age_hours=min_age_hours)
    ended(job)
    done = taken(one, "reclaim")
    assert picks(stepped(run, NOW + MINUTE)) == [("disk0", "chosen", "busy")]
    ended(done, result={"before_bytes": 8 * GIB, "after_bytes": one.allocated_size})
    runs.work(NOW + 2 * MINUTE)
    pick = run.picks.get()
    assert (pick.state, pick.code) == ("skipped", code)
    assert f"job {done.pk}" in pick.reason.lower()
    assert at_work() == []


def test_what_has_gone_wrong_by_another_is_tried_all_the_same() -> None:
    run, job = waits(*images(1))
    ended(job, "failed")
    assert picks(stepped(run, NOW + MINUTE)) == [("disk0", "submitted", "")]


@pytest.mark.parametrize(
    ("rules", "columns", "code"),
    [
        ({"formats": ["vmdk"]}, {"declared_format": "qcow2"}, "other_format"),  # a conversion in its place
        ({"name_pattern": "disk*"}, {"name": "other"}, "other_name"),
        ({"min_chain_depth": 2}, {"chain_depth": 1}, "chain_too_short"),  # a flatten
        ({}, {"reclaimable_bytes": None}, "not_analyzed"),
        ({}, {"in_use": True, "in_use_detail": "guest web is running"}, "guest_running"),
    ],
)
def test_what_the_rules_would_not_choose_after_the_other_job_is_left_out(
    rules: dict[str, Any], columns: dict[str, Any], code: str
) -> None:
    (one,) = images(1, declared_format="vmdk", chain_depth=2)
    run, job = waits(one, **rules)
    Image.objects.filter(pk=one.pk).update(**columns)
    ended(job)
    assert picks(stepped(run, NOW + MINUTE)) == [("disk0", "skipped", code)]


def test_a_listing_that_another_hosts_has_come_before_is_worked_on_no_further() -> None:
    pools = [StoragePoolFactory.create(shared_key="nfs:nas:/vms", available_bytes=90 * GIB) for _ in range(2)]
    run, job = waits(*images(1, pool=pools[1]))
    images(1, pool=pools[0])
    ended(job)
    assert picks(stepped(run, NOW + MINUTE)) == [("disk0", "skipped", "listed_elsewhere")]


def test_an_image_that_another_node_lists_by_now_is_not_worked_on_there() -> None:
    (one,) = images(1)
    run, job = waits(one, hosts=[one.host_id])
    Image.objects.filter(pk=one.pk).update(host=HostFactory.create())
    ended(job)
    assert picks(stepped(run, NOW + MINUTE)) == [("disk0", "skipped", "lister_not_named")]


def test_what_a_scan_saw_of_the_job_that_has_an_image_does_not_leave_it_out() -> None:
    (one,) = images(1, in_use=True, in_use_detail="locked by qemu or a like program")
    run, job = waits(one)
    Image.objects.filter(pk=one.pk).update(in_use=False, in_use_detail="")
    ended(job)
    assert picks(stepped(run, NOW + MINUTE)) == [("disk0", "submitted", "")]


def test_the_preview_says_that_an_image_is_busy_now_and_would_wait(rf: RequestFactory) -> None:
    first, _second = images(2)
    taken(first)
    found = preview(Rules.of(PolicyFactory.create()), NOW, limit=10)
    assert [(one.candidate.label, one.candidate.waits) for one in found.accepted] == [("disk0", True), ("disk1", False)]
    assert [one["waits"] for one in preview_of(found)["chosen"]] == [True, False]
    request = rf.get("/")
    request.user = UserFactory.create()
    assert render_to_string("policies/choice.html", {"preview": found}, request).count("waiting for a job") == 1
