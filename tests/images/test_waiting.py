"""Jobs that wait for guests, by the rows alone: who waits, for how long, what lets them go on, what is started."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from images import liveness, waiting
from images.models import Image
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts import libvirt_control
from storage_admin.hosts.libvirt_reader import Domain
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.errors import InvalidError
from storage_admin.jobs.models import Job, ResourceLock
from tests.factories import GuestFactory, HostFactory, ImageFactory, ImageUseFactory, JobFactory, StoragePoolFactory
from tests.jobs.test_claims import at_once
from tests.patient import patient
from tests.working import ADMIN, OPERATOR, said

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet", "patient", "no_hypervisor")]

__all__ = ["patient"]


@pytest.fixture(autouse=True)
def rung(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids that were rung for."""
    ids: list[int] = []
    for module in (waiting, reaper):
        monkeypatch.setattr(module, "ring_now", ids.append)
    return ids


def used_by(image: Image, name: str = "web", state: str = "running", kind: str = "vm") -> Guest:
    """A guest of a hypervisor that only scans read, with the image as its disk."""
    guest = GuestFactory.create(host=image.host, name=name, state=state, kind=kind)
    ImageUseFactory.create(image=image, disk__guest=guest)
    if state == "running":
        Image.every.filter(pk=image.pk).update(in_use=True, in_use_detail=f"guest {name} is running")
    return guest


@pytest.fixture
def image() -> Image:
    return ImageFactory.create(pool=StoragePoolFactory.create(capacity_bytes=None, available_bytes=None))


def submit(image: Image, **options: Any) -> Job:
    return services.submit(OPERATOR, "reclaim", image.pk, {"when_running": "wait", **options})


def parked(image: Image, **options: Any) -> Job:
    job = submit(image, **options)
    assert claims.claim(job.pk, "w") is None
    job.refresh_from_db()
    assert job.parked_at is not None, job.waiting_for
    return job


def shut_down(guest: Guest) -> None:
    """As a scan finds it that begins now."""
    Guest.objects.filter(pk=guest.pk).update(state="shut off")
    Image.every.filter(uses__disk__guest=guest).update(in_use=False)
    now = timezone.now()
    JobFactory.create(kind="scan", target=guest.host, state="succeeded", started=now, finished=now)


def test_a_plan_is_refused_where_a_guest_runs_and_accepted_where_the_job_waits(image: Image) -> None:
    used_by(image, "web")
    with pytest.raises(RefusedError) as refused:
        services.submit(OPERATOR, "reclaim", image.pk, {})
    assert refused.value.code == "guest_running"
    plan = services.plan(OPERATOR, "reclaim", image.pk, {"when_running": "wait", "wait_hours": 1.5})
    assert plan.refusals == ()
    assert any("waits until guest web has been shut down, for at most 1.5 hours" in line for line in plan.warnings)


def test_a_base_waits_for_the_guests_of_its_overlays(image: Image) -> None:
    overlay = ImageFactory.create(backing=image)
    used_by(overlay, "clone")
    Image.every.filter(pk=image.pk).update(in_use=True, in_use_detail="guest clone is running")
    plan = services.plan(OPERATOR, "reclaim", image.pk, {})
    assert [refusal.code for refusal in plan.refusals] == ["image_in_use"]
    assert "guest clone to be shut down" in parked(image).waiting_for


def test_what_no_guest_holds_is_not_waited_for(image: Image) -> None:
    Image.every.filter(pk=image.pk).update(in_use=True, in_use_detail="qemu-nbd has it open")
    with pytest.raises(RefusedError) as refused:
        submit(image)
    assert refused.value.code == "image_in_use"


def test_other_refusals_stand(image: Image) -> None:
    used_by(image)
    Image.every.filter(pk=image.pk).update(encrypted=True)
    plan = services.plan(OPERATOR, "reclaim", image.pk, {"when_running": "wait"})
    assert [refusal.code for refusal in plan.refusals] == ["encrypted"]


@pytest.mark.parametrize(
    "options", [{"when_running": "kill"}, {"wait_hours": 169}, {"wait_hours": -1}, {"start_after": "yes"}]
)
def test_options_out_of_range_are_named(image: Image, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidError) as error:
        services.submit(OPERATOR, "reclaim", image.pk, options)
    assert set(error.value.fields) == set(options)


def test_a_job_waits_queued_with_its_lock_and_without_a_slot(image: Image) -> None:
    used_by(image, "web")
    job = parked(image)
    assert (job.state, job.worker, job.generation) == ("queued", "", 0)
    until = job.created + timedelta(hours=24)
    assert job.waiting_for == f"guest web to be shut down (until {until:%Y-%m-%d %H:%M} UTC)"
    assert said(job)[-1] == f"waits for {job.waiting_for}"
    assert ResourceLock.objects.filter(job=job, exclusive=True).exists()
    with pytest.raises(RefusedError, match="busy"):
        submit(image)
    other = JobFactory.create(kind="reclaim", target=ImageFactory.create(pool=image.pool))
    assert claims.claim(other.pk, "w") is not None  # the host's only slot is free


def test_nobody_rings_for_a_job_that_waits_and_a_message_that_comes_finds_nothing_to_do(
    image: Image, rung: list[int]
) -> None:
    used_by(image)
    job = parked(image)
    Job.objects.filter(pk=job.pk).update(rung=timezone.now() - timedelta(hours=1))
    assert reaper.sweep() == 0
    assert claims.claim(job.pk, "w") is None
    assert [line for line in said(job) if line.startswith("waits for")] == [said(job)[-1]]
    waiting.look()
    assert rung == []


def test_it_goes_on_after_a_scan_that_found_the_guest_off(image: Image, rung: list[int]) -> None:
    guest = used_by(image)
    job = parked(image)
    waiting.look()
    Guest.objects.filter(pk=guest.pk).update(state="shut off")
    waiting.look()  # nobody has read since what the guest wrote last
    job.refresh_from_db()
    assert (job.state, rung) == ("queued", [])
    assert job.waiting_for.startswith(f"a scan of {image.host.name}, now that guest web is off")
    assert Job.objects.filter(kind="scan", state="queued").count() == 1
    waiting.look()
    assert Job.objects.filter(kind="scan").count() == 1
    shut_down(guest)
    waiting.look()
    assert rung == [job.pk]
    taken = claims.claim(job.pk, "w")
    assert taken is not None
    assert (taken.waiting_for, taken.parked_at) == ("", None)
    assert taken.waited_guests == [{"kind": "vm", "uid": guest.uid, "name": "web"}]


def test_of_many_looks_at_once_one_lets_it_go_on(image: Image, rung: list[int]) -> None:
    guest = used_by(image)
    job = parked(image)
    shut_down(guest)
    for same in [Job.objects.get(pk=job.pk) for _ in range(3)]:
        waiting._look_at(same, {})
    assert rung == [job.pk]
    assert len([line for line in said(job) if "goes on" in line]) == 1


def test_it_waits_again_for_a_guest_that_was_started_meanwhile(image: Image) -> None:
    first = used_by(image, "web")
    job = parked(image)
    shut_down(first)
    waiting.look()
    used_by(image, "db")
    assert claims.claim(job.pk, "w") is None
    job.refresh_from_db()
    assert job.waiting_for.startswith("guest db to be shut down")
    assert [guest["name"] for guest in job.waited_guests] == ["web", "db"]


def test_after_its_hours_it_is_given_up_and_nothing_was_touched(image: Image, rung: list[int]) -> None:
    used_by(image)
    job = parked(image, wait_hours=2)
    Job.objects.filter(pk=job.pk).update(wait_until=timezone.now() - timedelta(seconds=1))
    waiting.look()
    waiting.look()
    job.refresh_from_db()
    assert (job.state, job.error_code, job.waiting_for, rung) == ("failed", "guest_running", "", [])
    assert "did not happen within 2 hours. Nothing was touched." in job.error_detail
    assert job.finished is not None
    assert not ResourceLock.objects.filter(job=job).exists()
    assert AuditEntry.objects.filter(what="reclaim given up").count() == 1
    assert claims.claim(job.pk, "w") is None


def test_a_guest_that_is_off_at_the_last_moment_is_in_time(image: Image, rung: list[int]) -> None:
    guest = used_by(image)
    job = parked(image)
    Job.objects.filter(pk=job.pk).update(wait_until=timezone.now() - timedelta(seconds=1))
    Guest.objects.filter(pk=guest.pk).update(state="shut off")
    waiting.look()
    shut_down(guest)
    waiting.look()
    assert rung == [job.pk]


def test_a_host_that_cannot_be_scanned_ends_the_waiting_as_well(image: Image) -> None:
    guest = used_by(image)
    job = parked(image)
    Guest.objects.filter(pk=guest.pk).update(state="shut off")
    Job.objects.filter(pk=job.pk).update(wait_until=timezone.now() - waiting.SCAN_WITHIN)
    waiting.look()
    job.refresh_from_db()
    assert (job.state, job.error_code) == ("failed", "stale_plan")


def test_a_job_that_waits_can_be_cancelled(image: Image, rung: list[int]) -> None:
    guest = used_by(image)
    job = parked(image)
    services.cancel(OPERATOR, job)
    shut_down(guest)
    waiting.look()
    job.refresh_from_db()
    assert (job.state, rung, ResourceLock.objects.count()) == ("cancelled", [], 0)


def test_a_scan_that_failed_just_now_is_not_asked_for_again_at_once(image: Image) -> None:
    guest = used_by(image)
    job = parked(image)
    Guest.objects.filter(pk=guest.pk).update(state="stopped")
    failed = JobFactory.create(kind="scan", target=image.host, state="failed", finished=timezone.now())
    waiting.look()
    assert not Job.objects.filter(kind="scan", state="queued").exists()
    Job.objects.filter(pk=failed.pk).update(finished=timezone.now() - waiting.SCAN_AGAIN)
    waiting.look()
    assert Job.objects.filter(kind="scan", state="queued").count() == 1
    job.refresh_from_db()
    assert job.state == "queued"


def test_looking_at_one_host_leaves_the_others_alone(image: Image, rung: list[int]) -> None:
    guest = used_by(image)
    parked(image)
    shut_down(guest)
    waiting.look(HostFactory.create().pk)
    assert rung == []
    waiting.look(image.host_id)
    assert len(rung) == 1


def test_long_names_of_many_guests_fit_into_the_reason(image: Image) -> None:
    for number in range(4):
        used_by(image, f"{number}" * 255)
    reason = parked(image).waiting_for
    assert len(reason) <= 200
    assert " and 2 more to be shut down (until " in reason
    assert reason.endswith(" UTC)")


def test_whoever_does_not_wait_is_not_asked_about_guests(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(liveness, "guests_known_to_run", never)
    monkeypatch.setattr(liveness, "running_domains", never)
    monkeypatch.setattr(libvirt_control, "states", never)
    job = services.submit(OPERATOR, "reclaim", image.pk, {})
    assert claims.claim(job.pk, "w") is not None
    waiting.look()


def test_nobody_asks_the_hypervisor_for_a_job_that_has_no_slot(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Image] = []

    def nothing_runs(image: Image) -> list[Domain]:
        asked.append(image)
        return []

    monkeypatch.setattr(liveness, "running_domains", nothing_runs)
    JobFactory.create(kind="reclaim", target=ImageFactory.create(pool=image.pool), state="running")
    job = submit(image)
    assert claims.claim(job.pk, "w") is None
    job.refresh_from_db()
    assert ("free slot" in job.waiting_for, asked) == (True, [])
    Job.objects.filter(state="running").update(state="succeeded")
    assert claims.claim(job.pk, "w") is not None
    assert asked == [image]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The uids that libvirt was asked to start; it says yes."""
    uids: list[str] = []

    def start(uid: str) -> str:
        uids.append(uid)
        return "started"

    monkeypatch.setattr(libvirt_control, "start", start)
    return uids


def ended(image: Image, state: str = "succeeded", code: str = "", **columns: Any) -> Job:
    """A job that was claimed with ``start_after`` and has ended."""
    job = claims.claim(submit(image, start_after=True).pk, "w")
    assert job is not None
    assert job.start_due
    assert claims.finish(job, state, error_code=code, **columns)
    job.refresh_from_db()
    return job


@pytest.mark.parametrize(
    ("state", "code", "starts"),
    [
        ("succeeded", "", True), ("failed", "not_enough_space", True), ("failed", "stale_plan", True),
        ("interrupted", "interrupted", True), ("cancelled", "", False), ("failed", "dirty_or_corrupt", False),
        ("failed", "bug", False),
    ],
)  # fmt: skip
def test_the_guest_is_started_where_the_image_is_whole_and_nobody_decided_otherwise(
    image: Image, started: list[str], state: str, code: str, starts: bool
) -> None:
    guest = used_by(image, state="shut off", kind="domain")
    job = ended(image, state, code)
    waiting.look()
    waiting.look()
    job.refresh_from_db()
    assert (started, job.start_due) == ([guest.uid] if starts else [], False)
    entries = AuditEntry.objects.filter(what="guest started", target="web")
    assert entries.count() == starts
    assert ("guest web was started" in said(job)) is starts
    assert any("no guest is started" in line for line in said(job)) is not starts


def test_nothing_is_started_before_a_recovery_has_told_what_stands_there(image: Image, started: list[str]) -> None:
    guest = used_by(image, state="shut off", kind="domain")
    job = ended(image, "interrupted", "interrupted", needs_recovery=True)
    waiting.look()
    assert started == []
    Job.objects.filter(pk=job.pk).update(needs_recovery=False)
    waiting.look()
    assert started == [guest.uid]


def test_a_guest_is_not_started_while_another_job_needs_one_of_its_images(image: Image, started: list[str]) -> None:
    guest = used_by(image, state="shut off", kind="domain")
    second = ImageFactory.create(pool=image.pool)
    base = ImageFactory.create(pool=image.pool)
    Image.every.filter(pk=second.pk).update(backing=base)
    ImageUseFactory.create(image=second, disk__guest=guest)
    other = submit(base)
    ended(image)
    waiting.look()
    assert started == []
    services.cancel(OPERATOR, other)
    waiting.look()
    assert started == [guest.uid]


def test_a_job_that_itself_waits_for_a_guest_keeps_no_other_guest_off(image: Image, started: list[str]) -> None:
    base = ImageFactory.create(pool=image.pool)
    Image.every.filter(pk=image.pk).update(backing=base)
    guest = used_by(image, state="shut off", kind="domain")
    clone = ImageFactory.create(backing=base)
    used_by(clone, "clone")
    Image.every.filter(pk=base.pk).update(in_use=True)
    job = ended(image)
    parked(base)
    waiting.look()
    assert started == [guest.uid], said(job)


def test_of_several_guests_with_the_same_disk_none_is_started_unasked(image: Image, started: list[str]) -> None:
    for name in ("one", "two"):
        used_by(image, name, "shut off", "domain")
    job = ended(image)
    waiting.look()
    assert started == []
    assert any("2 guests of libvirt have the image as their disk" in line for line in said(job))


def test_a_start_that_fails_is_a_warning_and_the_job_has_succeeded(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(uid: str) -> str:
        raise HostError("libvirt said: no memory left")

    monkeypatch.setattr(libvirt_control, "start", fails)
    used_by(image, state="shut off", kind="domain")
    job = ended(image)
    waiting.look()
    job.refresh_from_db()
    assert job.state == "succeeded"
    (line,) = job.log_lines.filter(level="warning")
    assert line.text == "guest web could not be started: libvirt said: no memory left"
    entry = AuditEntry.objects.get(what="guest start failed")
    assert entry.after == {"job": job.pk, "error": "libvirt said: no memory left"}


def test_without_start_after_nothing_is_started(image: Image, started: list[str]) -> None:
    used_by(image, state="shut off", kind="domain")
    job = claims.claim(services.submit(ADMIN, "reclaim", image.pk, {"when_running": "wait"}).pk, "w")
    assert job is not None
    claims.finish(job, Job.State.SUCCEEDED)
    waiting.look()
    assert started == []


@pytest.mark.django_db(transaction=True)
def test_of_many_rounds_at_once_one_starts_the_guest(image: Image, started: list[str]) -> None:
    guest = used_by(image, state="shut off", kind="domain")
    ended(image)
    answers = at_once(8, lambda number: waiting.look())
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert started == [guest.uid]
