"""Jobs that wait for guests, by the rows alone: who waits, for how long, and what lets them go on."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from images.models import Image
from images.rewrite import in_use, wait_for_guests
from storage_admin.accounts.models import AuditEntry
from storage_admin.guests.models import Guest
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.libvirt import control
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.models import Job, ResourceLock
from tests.factories import GuestDiskFactory, GuestFactory, HostFactory, ImageFactory, ImageUseFactory, JobFactory
from tests.harness.patching import raising
from tests.images.parking import image, parked, rung, shut_down, submit, used_by
from tests.patient import patient
from tests.working import OPERATOR, against, invalid_fields, refused_as, reread, said

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet", "patient", "no_hypervisor")]

__all__ = ["image", "patient", "rung"]


def test_a_plan_is_refused_where_a_guest_runs_and_accepted_where_the_job_waits(image: Image) -> None:
    used_by(image, "web")
    assert refused_as(services.submit, OPERATOR, "reclaim", image.pk, {}) == "guest_running"
    plan = services.plan(OPERATOR, "reclaim", image.pk, {"when_running": "wait", "wait_hours": 1.5})
    assert plan.refusals == ()
    assert any("waits until guest web has been shut down, for at most 1.5 hours" in line for line in plan.warnings)


def test_a_base_waits_for_the_guests_of_its_overlays(image: Image) -> None:
    overlay = ImageFactory.create(backing=image)
    used_by(overlay, "clone")
    Image.every.filter(pk=image.pk).update(in_use=True, in_use_detail="guest clone is running")
    assert against("reclaim", image) == ["image_in_use"]
    assert "guest clone to be shut down" in parked(image).waiting_for


def test_what_no_guest_holds_is_not_waited_for(image: Image) -> None:
    Image.every.filter(pk=image.pk).update(in_use=True, in_use_detail="qemu-nbd has it open")
    assert refused_as(submit, image) == "image_in_use"


def test_other_refusals_stand(image: Image) -> None:
    used_by(image)
    Image.every.filter(pk=image.pk).update(encrypted=True)
    assert against("reclaim", image, when_running="wait") == ["encrypted"]


@pytest.mark.parametrize(
    "options", [{"when_running": "kill"}, {"wait_hours": 169}, {"wait_hours": -1}, {"start_after": "yes"}]
)
def test_options_out_of_range_are_named(image: Image, options: dict[str, Any]) -> None:
    assert set(invalid_fields(services.submit, OPERATOR, "reclaim", image.pk, options)) == set(options)


def test_a_job_waits_queued_with_its_lock_and_without_a_slot(image: Image) -> None:
    used_by(image, "web")
    job = parked(image)
    assert (job.state, job.worker, job.generation) == ("queued", "", 0)
    until = job.created + timedelta(hours=24)
    assert job.waiting_for == f"guest web to be shut down (until {until:%Y-%m-%d %H:%M} UTC)"
    assert said(job)[-1] == f"waits for {job.waiting_for}"
    assert ResourceLock.objects.filter(job=job, exclusive=True).exists()
    assert refused_as(submit, image) == "busy"
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
    wait_for_guests.look()
    assert rung == []


def test_it_goes_on_after_a_scan_that_found_the_guest_off(image: Image, rung: list[int]) -> None:
    guest = used_by(image)
    job = parked(image)
    wait_for_guests.look()
    Guest.objects.filter(pk=guest.pk).update(state="shut off")
    wait_for_guests.look()  # nobody has read since what the guest wrote last
    assert (reread(job).state, rung) == ("queued", [])
    assert job.waiting_for.startswith(f"a scan of {image.host.name}, now that guest web is off")
    assert Job.objects.filter(kind="scan", state="queued").count() == 1
    wait_for_guests.look()
    assert Job.objects.filter(kind="scan").count() == 1
    shut_down(guest)
    wait_for_guests.look()
    assert rung == [job.pk]
    taken = claims.claim(job.pk, "w")
    assert taken is not None
    assert (taken.waiting_for, taken.parked_at) == ("", None)
    assert taken.waited_guests == [{"kind": "vm", "uid": guest.uid, "name": "web"}]


@pytest.mark.parametrize("other", ["of this host", "of another host", "where libvirt had not told of any"])
def test_a_guest_that_nobody_knew_of_when_it_began_to_wait_is_waited_for_without_scan_after_scan(
    image: Image, rung: list[int], other: str
) -> None:
    first = used_by(image, "web")
    job = parked(image)
    if other == "where libvirt had not told of any":
        Job.objects.filter(pk=job.pk).update(waited_guests=[])
    second = used_by(image, "db") if other != "of another host" else GuestFactory.create(name="db", state="running")
    if other == "of another host":
        ImageUseFactory.create(image=image, disk__guest=second)
    for _ in range(5):
        shut_down(first)  # a scan that succeeds
        wait_for_guests.look(states={})
    assert (Job.objects.filter(kind="scan", state="queued").count(), rung) == (0, [])
    assert ("db" in reread(job).waiting_for, "to be shut down" in job.waiting_for) == (other != "of another host", True)
    shut_down(second)
    shut_down(first)
    wait_for_guests.look(states={})
    assert rung == [job.pk]


def test_a_guest_that_moves_to_another_host_and_back_is_waited_for(image: Image, rung: list[int]) -> None:
    guest, other = used_by(image, "web"), HostFactory.create()
    job = parked(image)
    for host, name in ((other, ""), (image.host, "web")):
        Guest.objects.filter(pk=guest.pk).update(host=host)
        now = timezone.now()
        JobFactory.create(kind="scan", target=image.host, state="succeeded", started=now, finished=now)
        for _ in range(3):
            wait_for_guests.look()
        assert Job.objects.filter(kind="scan", state="queued").count() == 0
        assert ("to be shut down" in reread(job).waiting_for, name in job.waiting_for) == (True, True)
    Guest.objects.filter(pk=guest.pk).update(name="web-new")
    wait_for_guests.look()
    assert (reread(job).waiting_for.startswith("guest web-new to be "), len(job.waited_guests)) == (True, 2)
    stranger = GuestFactory.create(uid=guest.uid, kind="vm", state="running", name="stranger")  # of another cluster
    assert stranger.host != image.host
    shut_down(guest)
    wait_for_guests.look()
    assert rung == [job.pk]


def test_a_look_asks_no_more_where_more_guests_are_waited_for(
    image: Image, django_assert_max_num_queries: Callable[..., Any]
) -> None:
    for number in range(12):
        elsewhere = GuestFactory.create(kind="vm", state="running", name=f"g{number}")
        ImageUseFactory.create(image=image, disk__guest=elsewhere)
    job = parked(image)
    assert len(job.waited_guests) == 12
    with django_assert_max_num_queries(9):
        wait_for_guests.look()
    assert "12 guests of other hosts" in reread(job).waiting_for


def test_of_many_looks_at_once_one_lets_it_go_on(image: Image, rung: list[int]) -> None:
    guest = used_by(image)
    job = parked(image)
    shut_down(guest)
    for same in [Job.objects.get(pk=job.pk) for _ in range(3)]:
        wait_for_guests._look_at(same, {})
    assert rung == [job.pk]
    assert len([line for line in said(job) if "the job continues" in line]) == 1


def test_it_waits_again_for_a_guest_that_was_started_meanwhile(image: Image) -> None:
    first = used_by(image, "web")
    job = parked(image)
    shut_down(first)
    wait_for_guests.look()
    used_by(image, "db")
    assert claims.claim(job.pk, "w") is None
    assert reread(job).waiting_for.startswith("guest db to be shut down")
    assert [guest["name"] for guest in job.waited_guests] == ["web", "db"]


def test_after_its_hours_it_is_given_up_and_nothing_was_touched(image: Image, rung: list[int]) -> None:
    used_by(image)
    job = parked(image, wait_hours=2)
    Job.objects.filter(pk=job.pk).update(wait_until=timezone.now() - timedelta(seconds=1))
    wait_for_guests.look()
    wait_for_guests.look()
    assert (reread(job).state, job.error_code, job.waiting_for, rung) == ("failed", "guest_running", "", [])
    assert "it waited 2 hours for guest web" in job.error_detail
    assert job.finished is not None
    assert not ResourceLock.objects.filter(job=job).exists()
    assert AuditEntry.objects.filter(what="reclaim given up").count() == 1
    assert claims.claim(job.pk, "w") is None


def test_a_guest_that_is_off_at_the_last_moment_is_in_time(image: Image, rung: list[int]) -> None:
    guest = used_by(image)
    job = parked(image)
    Job.objects.filter(pk=job.pk).update(wait_until=timezone.now() - timedelta(seconds=1))
    Guest.objects.filter(pk=guest.pk).update(state="shut off")
    wait_for_guests.look()
    shut_down(guest)
    wait_for_guests.look()
    assert rung == [job.pk]


def test_a_host_that_cannot_be_scanned_ends_the_waiting_as_well(image: Image) -> None:
    guest = used_by(image)
    job = parked(image)
    Guest.objects.filter(pk=guest.pk).update(state="shut off")
    Job.objects.filter(pk=job.pk).update(wait_until=timezone.now() - wait_for_guests.SCAN_WITHIN)
    wait_for_guests.look()
    assert (reread(job).state, job.error_code) == ("failed", "stale_plan")


def test_a_job_that_waits_can_be_cancelled(image: Image, rung: list[int]) -> None:
    guest = used_by(image)
    job = parked(image)
    services.cancel(OPERATOR, job)
    shut_down(guest)
    wait_for_guests.look()
    assert (reread(job).state, rung, ResourceLock.objects.count()) == ("cancelled", [], 0)


def test_a_scan_that_failed_just_now_is_not_asked_for_again_at_once(image: Image) -> None:
    guest = used_by(image)
    job = parked(image)
    Guest.objects.filter(pk=guest.pk).update(state="stopped")
    failed = JobFactory.create(kind="scan", target=image.host, state="failed", finished=timezone.now())
    wait_for_guests.look()
    assert not Job.objects.filter(kind="scan", state="queued").exists()
    Job.objects.filter(pk=failed.pk).update(finished=timezone.now() - wait_for_guests.SCAN_AGAIN)
    wait_for_guests.look()
    assert Job.objects.filter(kind="scan", state="queued").count() == 1
    assert reread(job).state == "queued"


def test_looking_at_one_host_leaves_the_others_alone(image: Image, rung: list[int]) -> None:
    guest = used_by(image)
    parked(image)
    shut_down(guest)
    wait_for_guests.look(HostFactory.create().pk)
    assert rung == []
    wait_for_guests.look(image.host_id)
    assert len(rung) == 1


def test_long_names_of_many_guests_fit_into_the_reason(image: Image) -> None:
    for number in range(4):
        used_by(image, f"{number}" * 255)
    reason = parked(image).waiting_for
    assert len(reason) <= 200
    assert " and 2 more to be shut down (until " in reason
    assert reason.endswith(" UTC)")


def test_a_guest_of_another_host_is_waited_for_without_its_name(image: Image) -> None:
    used_by(image, "web")
    elsewhere = GuestFactory.create(host=HostFactory.create(), name="payroll", state="running")
    ImageUseFactory.create(image=image, disk=GuestDiskFactory.create(guest=elsewhere))
    plan = services.plan(OPERATOR, "reclaim", image.pk, {"when_running": "wait"})
    assert (plan.refusals, [line for line in plan.warnings if "payroll" in line]) == ((), [])
    job = parked(image)
    assert {guest["name"]: guest["uid"] == elsewhere.uid for guest in job.waited_guests} == {"web": False, "": True}
    assert ("guest web" in job.waiting_for, "payroll" in job.waiting_for) == (True, False)
    wait_for_guests.look()
    assert "payroll" not in reread(job).waiting_for


def test_whoever_does_not_wait_is_not_asked_about_guests(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name in ((in_use, "guests_known_to_run"), (in_use, "running_domains"), (control, "states")):
        monkeypatch.setattr(where, name, raising(AssertionError()))
    job = services.submit(OPERATOR, "reclaim", image.pk, {})
    assert claims.claim(job.pk, "w") is not None
    wait_for_guests.look()


def test_nobody_asks_the_hypervisor_for_a_job_that_has_no_slot(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Image] = []

    def nothing_runs(image: Image) -> list[GuestFacts]:
        asked.append(image)
        return []

    monkeypatch.setattr(in_use, "running_domains", nothing_runs)
    JobFactory.create(kind="reclaim", target=ImageFactory.create(pool=image.pool), state="running")
    job = submit(image)
    assert claims.claim(job.pk, "w") is None
    assert ("free slot" in reread(job).waiting_for, asked) == (True, [])
    Job.objects.filter(state="running").update(state="succeeded")
    assert claims.claim(job.pk, "w") is not None
    assert asked == [image]
