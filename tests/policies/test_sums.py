"""What a run's numbers say, and that its lists say the same."""

import csv
import io
from datetime import UTC, datetime, timedelta

import pytest
from django.test import Client
from django.urls import reverse

from images.models import Image, Policy, PolicyPick, PolicyRun
from images.policies import clock, forgetting, runs, selectors, services
from storage_admin.jobs.models import Job
from tests.factories import (
    GIB,
    HostFactory,
    ImageFactory,
    PolicyFactory,
    PolicyPickFactory,
    PolicyRunFactory,
    StoragePoolFactory,
)
from tests.jobs.test_claims import at_once
from tests.policies.test_runs import MINUTE, NOW, begun, end, images, night, stepped
from tests.web.html import text_of
from tests.working import OPERATOR, client_as, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet"), pytest.mark.sql]


@pytest.fixture
def viewer(db: None) -> Client:
    return client_as(role="viewer")


def counts_of(run: PolicyRun, *, meant: bool = True) -> dict[str, int]:
    return {one.code: one.count for one in selectors.skips_of([run])[run.pk] if one.meant == meant}


def listed(run: PolicyRun, code: str) -> int:
    return selectors.picks_of(run, left_out=True, code=code).count()


def test_what_was_withdrawn_is_no_job_predicts_nothing_and_is_listed_where_it_is_counted() -> None:
    run = night(3, max_jobs_per_host=2)
    assert selectors.sums_of([run])[run.pk].predicted == 5 * (GIB // 8)
    services.stop(OPERATOR, run)
    sums = selectors.sums_of([run])[run.pk]
    assert (sums.jobs, sums.predicted, sums.won) == (0, None, 0)
    assert counts_of(run) == {"policy_stopped": 3} == {"policy_stopped": listed(run, "policy_stopped")}
    assert selectors.picks_of(run, left_out=False).count() == 0


def test_a_job_that_was_cancelled_is_listed_with_what_was_left_out_and_leads_to_the_job(viewer: Client) -> None:
    run = night(2, max_jobs_per_host=2)
    first, second = Job.objects.order_by("pk")
    Job.objects.filter(pk=first.pk).update(state="succeeded", finished=NOW)
    Job.objects.filter(pk=second.pk).update(state="cancelled", finished=NOW)
    runs.work(NOW + MINUTE)
    sums = selectors.sums_of([run])[run.pk]
    assert (sums.jobs, sums.predicted) == (1, 2 * (GIB // 8))
    assert counts_of(run) == {"cancelled": 1} == {"cancelled": listed(run, "cancelled")}
    page = viewer.get(reverse("policy_run", args=[run.policy_id, run.pk]), {"code": "cancelled"})
    assert f'href="/jobs/{second.pk}/"' in page.content.decode().partition("<h2>Skipped</h2>")[2]


@pytest.fixture
def old(db: None) -> PolicyRun:
    """A run of long ago that left out two by a rule, and one that was gone when its turn came; others were gone."""
    images(2)
    images(2, reclaimable_bytes=0)
    ImageFactory.create(state="missing")
    policy = PolicyFactory.create()
    run = begun(policy)
    Image.objects.filter(name="disk1", reclaimable_bytes__gt=0).delete()
    end()
    assert (stepped(run, NOW + MINUTE).state, counts_of(run)) == ("finished", {"too_little": 2, "gone": 1})
    return run


def test_what_was_left_out_long_ago_is_counted_as_before(old: PolicyRun, viewer: Client) -> None:
    before = selectors.sums_of([old])[old.pk]
    forgetting.forget(old.policy_id, NOW + timedelta(days=31))
    assert not reread(old).picks.filter(state="skipped").exists()
    assert selectors.sums_of([old])[old.pk] == before
    assert before.counts == {"succeeded": 1, "skipped": 3}
    assert counts_of(old) == {"too_little": 2, "gone": 1}
    assert counts_of(old, meant=False) == {"gone": 1}
    answer = viewer.get(reverse("policy_runs_csv", args=[old.policy_id]))
    text = b"".join(answer.streaming_content).decode("utf-8-sig")  # type: ignore[attr-defined]
    assert [line["left_out"] for line in csv.DictReader(io.StringIO(text))] == ["3"]
    page = text_of(viewer.get(reverse("policy_run", args=[old.policy_id, old.pk])).content.decode())
    assert "Skipped items are listed for 30 days, then only counted" in page


def test_what_was_forgotten_before_is_kept_when_more_is(old: PolicyRun) -> None:
    later = NOW + timedelta(days=31)
    forgetting.forget(old.policy_id, later)
    PolicyPick.objects.create(run=old, label="late", state="skipped", code="gone")
    forgetting.forget(old.policy_id, later)
    assert counts_of(reread(old)) == {"too_little": 2, "gone": 2}


@pytest.mark.django_db(transaction=True)
def test_of_many_who_forget_at_the_same_moment_each_pick_is_counted_once(old: PolicyRun) -> None:
    answers = at_once(4, lambda _number: forgetting.forget(old.policy_id, NOW + timedelta(days=31)))
    assert answers == [None] * 4
    assert counts_of(reread(old)) == {"too_little": 2, "gone": 1}


def test_the_last_run_is_the_one_whose_window_opened_last() -> None:
    policy = PolicyFactory.create(clock=datetime(2026, 5, 1, 12, tzinfo=UTC))
    other = PolicyFactory.create(name="other", enabled=False)
    run = services.run_now(OPERATOR, policy, datetime(2026, 5, 2, 11, tzinfo=UTC))
    [missed] = clock.advance(datetime(2026, 5, 2, 12, tzinfo=UTC))
    assert (missed.pk > run.pk, missed.due < run.due) == (True, True)
    assert selectors.last_runs(OPERATOR, [policy, other]) == {policy.pk: run}
    assert Policy.objects.count() == 2


@pytest.mark.parametrize(
    "reached", ["all", "their host", "a removed host", "a removed pool", "a node that was removed"]
)
def test_a_run_that_reached_more_than_somebody_sees_does_not_exist_for_them_whatever_its_policy_has_become(
    reached: str,
) -> None:
    mine, other = HostFactory.create(slug="mine"), HostFactory.create(slug="other")
    own, theirs = StoragePoolFactory.create(host=mine), StoragePoolFactory.create(host=other)
    columns = {
        "their host": {"hosts": [mine.pk, other.pk]}, "a removed host": {"hosts": [mine.pk, other.pk]},
        "a removed pool": {"pools": [own.pk, theirs.pk]}, "a node that was removed": {"pools": [own.pk]},
    }.get(reached, {})  # fmt: skip
    policy = PolicyFactory.create(**columns)
    wide = PolicyRunFactory.create(policy=policy, detail="secret detail", due=NOW + MINUTE, chosen_at=NOW)
    PolicyPickFactory.create(run=wide, image=ImageFactory.create(pool=theirs, name="secret"), state="skipped", code="x")
    if "removed" in reached:
        other.delete()
    else:
        Policy.objects.update(hosts=[mine.pk])
    rules = wide.rules | {"hosts": [mine.pk]}
    here = PolicyRunFactory.create(policy=policy, rules=rules, due=NOW, state="finished", finished=NOW)
    address, rest = f"/policies/{policy.pk}/", f"/api/v1/policies/{policy.pk}/"
    of_wide = [
        *(f"{address}runs/{wide.pk}/{page}" for page in ("", "picks.csv")),
        *(f"{rest}runs/{wide.pk}/{page}/" for page in ("picks", "stop")),
    ]
    lists = [
        "/policies/",
        "/policies/export.csv",
        address,
        f"{address}runs.csv",
        "/api/v1/policies/",
        rest,
        f"{rest}runs/",
    ]
    for hosts, runs_there, status in ((["mine"], [here], 404), ([], [wide, here], 200)):
        client = client_as(role="operator", hosts=hosts)
        answers = [client.get(one) for one in lists]
        assert [answer.status_code for answer in answers] == [200] * len(lists)
        texts = ["".join(chunk.decode() for chunk in answer) for answer in answers]
        assert any("secret" in text for text in texts) == (not hosts)
        assert [one["id"] for one in client.get(f"{rest}runs/").json()["results"]] == [run.pk for run in runs_there]
        assert client.get(rest).json()["last_run"]["id"] == runs_there[0].pk
        for one in of_wide:
            answer = client.post(one, content_type="application/json") if one.endswith("stop/") else client.get(one)
            assert answer.status_code == status, one
        assert client.get(f"{address}runs/{here.pk}/").status_code == 200


def test_a_new_run_of_a_policy_whose_other_host_was_removed_exists_for_who_sees_the_one_that_is_left() -> None:
    mine, gone = HostFactory.create(slug="mine"), HostFactory.create()
    policy = PolicyFactory.create(hosts=[gone.pk, mine.pk])
    lost = PolicyFactory.create(hosts=[gone.pk])
    removed = gone.pk
    gone.delete()
    limited = client_as(role="operator", hosts=["mine"])
    made = limited.post(f"/api/v1/policies/{policy.pk}/run/", content_type="application/json").json()["id"]
    assert limited.get(f"/policies/{policy.pk}/runs/{made}/").status_code == 200
    # What is left of it is nothing, not everything.
    assert services.run_now(OPERATOR, lost, NOW).rules["hosts"] == [removed]
