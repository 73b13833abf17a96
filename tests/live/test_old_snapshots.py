"""Snapshots from an age on are deleted, the oldest first; younger ones and what the guest has written stay."""

import re
import threading
from datetime import timedelta
from pathlib import Path
from unittest import mock

import libvirt
import pytest
from django.utils import timezone

from images.policies import runs
from images.policies import services as policies
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import snapshots
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import PolicyFactory
from tests.harness import libvirtd as daemons
from tests.harness.guests import Disk, Domains, Starts, write_pattern
from tests.harness.patching import do_after
from tests.live.chains import chain_of, done
from tests.live.conftest import seen
from tests.live.test_faults import KilledError, dies_in
from tests.live.writer import acknowledged, check, wait_for_writes, writing
from tests.working import ON_LIBVIRT, OPERATOR, against, client_as, create, run, said, succeeded

pytestmark = [pytest.mark.guest, pytest.mark.django_db(transaction=True), *ON_LIBVIRT]

#: Builds of QEMU, and what keeps policies from a deletion there, for which libvirt mirrors the disk.
BUGS: tuple[tuple[str, list[str]], ...] = (
    ("10.0.8 (Debian 1:10.0.8+ds-0+deb13u1)", ["qemu_bug"]),
    ("7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)", []),
)


def snapshot(domain: "libvirt.virDomain", name: str, days: int, *, external: bool) -> None:
    """Makes one that says it is so old."""
    disk = "<disks><disk name='vda' snapshot='external'/></disks>" if external else ""
    flags = libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY if external else 0
    made = domain.snapshotCreateXML(f"<domainsnapshot><name>{name}</name>{disk}</domainsnapshot>", flags)
    created = int((timezone.now() - timedelta(days=days)).timestamp())
    xml = re.sub(r"<creationTime>\d+<", f"<creationTime>{created}<", made.getXMLDesc())
    again = libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_REDEFINE | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_CURRENT
    domain.snapshotCreateXML(xml, again)


def names(row: Guest) -> list[str]:
    """The newest first."""
    return [one.name for one in snapshots.of(row.host, row.uid).found]


def submit(row: Guest, days: int) -> Job:
    return services.submit(OPERATOR, "delete_old_snapshots", row.pk, {"older_than_days": days})


def with_snapshots(domains: Domains, folder: Path, **days: int) -> Guest:
    """A guest that is off, with snapshots in its image that are so old."""
    guest = domains.define([Disk(create(folder / "disk.qcow2", "96M"))])
    for name, old in days.items():
        snapshot(guest, name, old, external=False)
    return seen(folder, guest)


def test_old_ones_are_merged_under_a_guest_that_writes_and_a_young_one_stays(
    tcg_guest: Starts, shared_folder: Path
) -> None:
    guest = tcg_guest(Disk(create(shared_folder / "disk.qcow2", "96M")))
    with writing(guest):
        for name, days in (("a", 40), ("b", 35), ("c", 2)):
            snapshot(guest.domain, name, days, external=True)
            wait_for_writes(guest, 3)
        row = seen(shared_folder, guest.domain)
        assert against("delete_old_snapshots", row, older_than_days=50) == ["nothing_to_free"]
        for said_version, codes_of_bugs in BUGS:
            Host.objects.update(capabilities=row.host.capabilities | {"qemu_system": said_version})
            plan = services.plan(OPERATOR, "delete_old_snapshots", row.pk, {"older_than_days": 30})
            assert [one.code for one in plan.by_hand] == codes_of_bugs, said_version
        assert [command.split()[-1] for command in plan.commands] == ["a", "b"]
        job = done(submit(row, 30))
        wait_for_writes(guest, 3)
    assert (job.result or {})["names"] == ["a", "b"]
    assert names(row) == ["c"]
    assert chain_of(guest) == ["disk.c", "disk.qcow2"]
    last = acknowledged(guest)
    guest.stop()
    check(shared_folder / "disk.c", last)


def test_of_a_guest_that_is_off_they_leave_its_images_and_the_ledger_says_what_that_freed(
    domains: Domains, shared_folder: Path
) -> None:
    image = create(shared_folder / "disk.qcow2", "96M")
    guest = domains.define([Disk(image)])
    for name, days in (("a", 40), ("b", 35), ("c", 2)):
        write_pattern(image, "qcow2", (0, 8, ord(name)))
        snapshot(guest, name, days, external=False)
    write_pattern(image, "qcow2", (0, 8, 0x20))
    row = seen(shared_folder, guest)
    before = image.stat().st_blocks * 512
    job = done(submit(row, 30))
    freed = before - image.stat().st_blocks * 512
    assert names(row) == ["c"]
    assert freed > 15 << 20
    assert (job.result or {})["freed_bytes"] == freed
    assert against("delete_old_snapshots", row, older_than_days=30) == ["nothing_to_free"]


def test_a_worker_that_dies_in_the_second_is_followed_by_the_next_one(domains: Domains, shared_folder: Path) -> None:
    row = with_snapshots(domains, shared_folder, a=40, b=35, c=33)
    job, deletes = submit(row, 30), snapshots.delete

    def dies(host: object, uid: str, name: str, *more: object) -> object:
        if name == "b":
            raise KilledError
        return deletes(host, uid, name, *more)  # type: ignore[arg-type]

    dies_in(job, mock.patch.object(snapshots, "delete", dies))
    succeeded(run(job))
    assert (job.result or {})["names"] == ["a", "b", "c"]
    assert names(row) == []


def test_a_libvirtd_that_ends_between_two_is_waited_for(
    domains: Domains, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = with_snapshots(domains, shared_folder, a=40, b=35)
    job, later, ended = submit(row, 30), threading.Timer(3, daemons.restart), list[int]()

    def libvirtd_ends(*_: object) -> None:
        if not ended:
            ended.append(1)
            daemons.kill()
            later.start()

    do_after(monkeypatch, snapshots, "delete", libvirtd_ends)
    run(job)
    later.join()
    domains.reconnect()
    assert (succeeded(job).result or {})["names"] == ["a", "b"]
    assert names(row) == []


def test_a_cancel_between_two_leaves_the_others(
    domains: Domains, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = with_snapshots(domains, shared_folder, a=40, b=35, c=33)
    job = submit(row, 30)
    at_work = Job.objects.filter(pk=job.pk)
    do_after(monkeypatch, snapshots, "delete", lambda *_: at_work.update(cancel_requested=True))
    run(job)
    assert job.state == "cancelled", said(job)
    assert names(row) == ["c", "b"]
    job.refresh_from_db()
    taken = (shared_folder / "disk.qcow2").stat().st_blocks * 512
    assert job.before_bytes is not None
    assert (job.after_bytes, job.freed_bytes) == (taken, job.before_bytes - taken)


def test_none_becomes_old_enough_while_the_job_waits(domains: Domains, shared_folder: Path) -> None:
    row = with_snapshots(domains, shared_folder, a=40, b=32)  # b was 29 days old when the job was made
    job = submit(row, 30)
    Job.objects.filter(pk=job.pk).update(created=timezone.now() - timedelta(days=3))
    done(job)
    assert names(row) == ["b"]


def test_a_policy_deletes_them_at_night_and_says_why_not_on_the_others(domains: Domains, shared_folder: Path) -> None:
    old, young = (domains.define([Disk(create(shared_folder / f"{name}.qcow2", "96M"))]) for name in ("old", "young"))
    snapshot(old, "a", 40, external=False)
    snapshot(young, "a", 3, external=False)
    row = seen(shared_folder, old)
    policy = PolicyFactory.create(kind="delete_old_snapshots", options={"older_than_days": 30})
    found = client_as(role="operator").get(f"/api/v1/policies/{policy.pk}/preview/").json()
    assert [one["guest"] for one in found["chosen"]] == [row.pk]
    assert [one["code"] for one in found["skipped"]] == ["no_old_snapshot"]
    policies.run_now(OPERATOR, policy)
    runs.work(timezone.now())
    succeeded(run(Job.objects.get(kind="delete_old_snapshots")))
    assert names(row) == []
    assert names(Guest.objects.get(uid=young.UUIDString())) == ["a"]
