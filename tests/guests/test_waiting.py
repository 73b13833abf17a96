"""A job that waits for a real guest of a real libvirt to be shut down, and starts it again."""

import hashlib
import subprocess
import sys
from pathlib import Path

import libvirt
import pytest
from django.utils import timezone

from images.models import Image
from images.policies import runs
from images.policies import services as policies
from images.rewrite import wait_for_guests
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import HostError
from storage_admin.hosts.libvirt import control
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import HostFactory, PolicyFactory
from tests.harness.guests import Disk, Domains, Starts
from tests.patient import patient
from tests.working import (
    ON_LIBVIRT,
    OPERATOR,
    create,
    digests,
    image_at,
    reread,
    run,
    said,
    scan,
    scanned_machine,
    succeeded,
)

pytestmark = [pytest.mark.guest, pytest.mark.django_db, *ON_LIBVIRT, pytest.mark.usefixtures("patient", "no_reserve")]

__all__ = ["patient"]


@pytest.fixture
def disk(shared_folder: Path) -> Path:
    """An image in a folder that libvirt's user may enter."""
    return create(shared_folder / "disk.qcow2", "64M")


def scan_that_was_asked_for() -> None:
    succeeded(run(Job.objects.get(kind="scan", state="queued")))


def submit(image: Image, **options: object) -> Job:
    return services.submit(OPERATOR, "reclaim", image.pk, {"when_running": "wait", "start_after": True, **options})


def test_a_running_guest_is_waited_for_and_started_again_and_none_of_its_writes_is_lost(
    tcg_guest: Starts, disk: Path
) -> None:
    guest = tcg_guest(Disk(disk))
    scanned_machine(disk.parent)
    job = run(submit(image_at(disk)))
    assert job.state == "queued"
    assert job.waiting_for.startswith(f"guest {guest.name} to be shut down (until ")
    wait_for_guests.look()
    assert not Job.objects.filter(kind="scan", state="queued").exists()

    guest.write(3, 5, 0x61)
    written = guest.digest(3, 5)
    guest.stop()
    wait_for_guests.look()
    assert (reread(job).state, f"now that guest {guest.name} is off" in job.waiting_for) == ("queued", True)
    scan_that_was_asked_for()  # its end looks at what waits on the host
    job = succeeded(run(job))
    assert (job.result or {})["swapped"]
    assert not guest.domain.isActive()
    wait_for_guests.look()
    assert guest.domain.isActive()
    assert f"guest {guest.name} was started" in said(job)
    assert AuditEntry.objects.get(what="guest started").target == guest.name
    guest.stop()
    raw = disk.parent / "raw"
    subprocess.run(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", disk, raw], check=True)
    with raw.open("rb") as content:
        content.seek(3 << 20)
        assert hashlib.sha256(content.read(5 << 20)).hexdigest() == written


def test_a_policy_waits_for_a_guest_that_is_shut_down_while_its_window_is_open(domains: Domains, disk: Path) -> None:
    domain = domains.define([Disk(disk)])
    domain.create()
    scanned_machine(disk.parent)
    policy = PolicyFactory.create(kind="check", options={"repair": "leaks", "when_running": "wait"})
    policies.run_now(OPERATOR, policy)
    runs.work(timezone.now())
    job = run(Job.objects.get(kind="check"))
    assert (job.state, domain.name() in job.waiting_for) == ("queued", True)
    domain.destroy()
    wait_for_guests.look()
    scan_that_was_asked_for()
    job = succeeded(run(job))
    assert not domain.isActive()


def test_a_guest_that_was_started_after_the_scan_is_waited_for_and_the_image_read_again(
    domains: Domains, disk: Path
) -> None:
    domain = domains.define([Disk(disk)])
    scanned_machine(disk.parent)
    job = submit(image_at(disk))
    domain.create()
    before = digests(disk.parent)
    job = run(job)
    assert (job.state, domain.name() in job.waiting_for) == ("queued", True)
    wait_for_guests.look()
    domain.destroy()
    assert digests(disk.parent)["disk.qcow2"] == before["disk.qcow2"]
    wait_for_guests.look()
    scan_that_was_asked_for()
    succeeded(run(job))


def test_a_disk_that_is_taken_from_a_guests_definition_alone_is_waited_for(tcg_guest: Starts, disk: Path) -> None:
    other = create(disk.parent / "other.qcow2", "64M")
    guest = tcg_guest(Disk(disk), Disk(other))
    host = scanned_machine(disk.parent)
    job = run(submit(image_at(other), start_after=False))
    guest.domain.detachDeviceFlags(
        f"<disk type='file' device='disk'><source file='{other}'/><target dev='vdb' bus='virtio'/></disk>",
        libvirt.VIR_DOMAIN_AFFECT_CONFIG,
    )
    wait_for_guests.look()
    assert guest.name in reread(job).waiting_for  # it has the disk until its end
    scan(host)
    job = run(job)
    assert (job.state, job.parked_at is not None) == ("queued", True)


def test_while_libvirt_does_not_answer_a_job_waits(
    domains: Domains, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = domains.define([Disk(disk)])
    scanned_machine(disk.parent)
    job = submit(image_at(disk))
    monkeypatch.setattr("storage_admin.hosts.libvirt.reader.TIMEOUT", 0.001)
    monkeypatch.setattr(control, "STATES_TIMEOUT", 0.001)
    job = run(job)
    wait_for_guests.look()
    assert (reread(job).state, "libvirt on" in job.waiting_for) == ("queued", True)
    monkeypatch.setattr("storage_admin.hosts.libvirt.reader.TIMEOUT", 20.0)
    monkeypatch.setattr(control, "STATES_TIMEOUT", 20.0)
    wait_for_guests.look()
    scan_that_was_asked_for()
    job = succeeded(run(job))
    wait_for_guests.look()
    assert domain.isActive()


def test_a_guest_that_cannot_be_started_is_a_warning_of_a_job_that_has_succeeded(domains: Domains, disk: Path) -> None:
    lost = create(disk.parent / "lost.qcow2", "8M")
    domain = domains.define([Disk(disk), Disk(lost)])
    scanned_machine(disk.parent)
    job = succeeded(run(submit(image_at(disk))))
    lost.unlink()
    wait_for_guests.look()
    assert (reread(job).state, job.start_due, bool(domain.isActive())) == ("succeeded", False, False)
    (line,) = job.log_lines.filter(level="warning", text__contains="could not be started")
    assert "lost.qcow2" in line.text
    assert AuditEntry.objects.filter(what="guest start failed", target=domain.name()).count() == 1


def test_states_and_a_start_of_a_domain(domains: Domains, disk: Path) -> None:
    domain = domains.define([Disk(disk)])
    uid, here = domain.UUIDString(), HostFactory.build()
    assert control.states(here)[uid] == "shut off"
    assert control.start(here, uid) == "started"
    assert control.states(here)[uid] == "running"
    assert control.start(here, uid) == "running already"
    domain.suspend()
    assert control.states(here)[uid] == "paused"
    assert control.start(here, uid) == "running already"
    assert control.states(here)[uid] == "paused"
    domain.destroy()
    with pytest.raises(HostError, match=r"libvirt said: .*[Dd]omain not found"):
        control.start(here, "00000000-0000-4000-8000-000000000000")


def test_a_start_that_hangs_is_given_up(domains: Domains, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "START_TIMEOUT", 0.001)
    with pytest.raises(HostError, match="did not answer within"):
        control.start(HostFactory.build(), domains.define([Disk(disk)]).UUIDString())


def test_the_states_are_one_document_on_standard_output(libvirtd: str) -> None:
    command = [sys.executable, "-m", "storage_admin.hosts.libvirt.states", libvirtd]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stderr == b""
    assert done.stdout.startswith(b'{"states"')
