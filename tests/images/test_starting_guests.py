"""Guests that are started again when the job that they were shut down for has ended, by the rows alone."""

from typing import Any

import pytest

from images.models import Image
from images.rewrite import wait_for_guests
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import HostError
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.models import Host
from storage_admin.jobs import claims, services
from storage_admin.jobs.models import Job
from tests.factories import ImageFactory, ImageUseFactory
from tests.harness.patching import raising
from tests.images.parking import image, parked, rung, submit, used_by
from tests.jobs.test_claims import at_once
from tests.patient import patient
from tests.working import ADMIN, OPERATOR, reread, said

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet", "patient", "no_hypervisor")]

__all__ = ["image", "patient", "rung"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The uids that libvirt was asked to start; it says yes."""
    uids: list[str] = []

    def start(host: Host, uid: str) -> str:
        uids.append(uid)
        return "started"

    monkeypatch.setattr(control, "start", start)
    return uids


def ended(image: Image, state: str = "succeeded", code: str = "", **columns: Any) -> Job:
    """A job that was claimed with ``start_after`` and has ended."""
    job = claims.claim(submit(image, start_after=True).pk, "w")
    assert job is not None
    assert job.start_due
    assert claims.finish(job, state, error_code=code, **columns)
    return reread(job)


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
    wait_for_guests.look()
    wait_for_guests.look()
    assert (started, reread(job).start_due) == ([guest.uid] if starts else [], False)
    entries = AuditEntry.objects.filter(what="guest started", target="web")
    assert entries.count() == starts
    assert ("guest web was started" in said(job)) is starts
    assert any("no guest is started" in line for line in said(job)) is not starts


def test_nothing_is_started_before_a_recovery_has_told_what_stands_there(image: Image, started: list[str]) -> None:
    guest = used_by(image, state="shut off", kind="domain")
    job = ended(image, "interrupted", "interrupted", needs_recovery=True)
    wait_for_guests.look()
    assert started == []
    Job.objects.filter(pk=job.pk).update(needs_recovery=False)
    wait_for_guests.look()
    assert started == [guest.uid]


def test_a_guest_is_not_started_while_another_job_needs_one_of_its_images(image: Image, started: list[str]) -> None:
    guest = used_by(image, state="shut off", kind="domain")
    second = ImageFactory.create(pool=image.pool)
    base = ImageFactory.create(pool=image.pool)
    Image.every.filter(pk=second.pk).update(backing=base)
    ImageUseFactory.create(image=second, disk__guest=guest)
    other = submit(base)
    ended(image)
    wait_for_guests.look()
    assert started == []
    services.cancel(OPERATOR, other)
    wait_for_guests.look()
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
    wait_for_guests.look()
    assert started == [guest.uid], said(job)


def test_of_several_guests_with_the_same_disk_none_is_started_unasked(image: Image, started: list[str]) -> None:
    for name in ("one", "two"):
        used_by(image, name, "shut off", "domain")
    job = ended(image)
    wait_for_guests.look()
    assert started == []
    assert any("2 libvirt guests have the image as their disk" in line for line in said(job))


def test_a_start_that_fails_is_a_warning_and_the_job_has_succeeded(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "start", raising(HostError("libvirt said: no memory left")))
    used_by(image, state="shut off", kind="domain")
    job = ended(image)
    wait_for_guests.look()
    assert reread(job).state == "succeeded"
    (line,) = job.log_lines.filter(level="warning")
    assert line.text == "guest web could not be started: libvirt said: no memory left"
    entry = AuditEntry.objects.get(what="guest start failed")
    assert entry.after == {"job": job.pk, "error": "libvirt said: no memory left"}


def test_without_start_after_nothing_is_started(image: Image, started: list[str]) -> None:
    used_by(image, state="shut off", kind="domain")
    job = claims.claim(services.submit(ADMIN, "reclaim", image.pk, {"when_running": "wait"}).pk, "w")
    assert job is not None
    claims.finish(job, Job.State.SUCCEEDED)
    wait_for_guests.look()
    assert started == []


@pytest.mark.django_db(transaction=True)
def test_of_many_rounds_at_once_one_starts_the_guest(image: Image, started: list[str]) -> None:
    guest = used_by(image, state="shut off", kind="domain")
    ended(image)
    answers = at_once(8, lambda number: wait_for_guests.look())
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert started == [guest.uid]
