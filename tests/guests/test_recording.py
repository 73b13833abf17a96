"""What hypervisors of every kind tell of guests, as rows."""

from dataclasses import replace

import pytest
from django.utils import timezone

from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.guests.services import disk_paths, record_guests
from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts
from storage_admin.hosts.models import Host
from tests.factories import HostFactory

pytestmark = [pytest.mark.django_db, pytest.mark.sql]

VM = GuestFacts(
    "vm", "101", "web", "running", (DiskFacts("scsi0", "disk", "/images/101/vm-101-disk-0.qcow2", "qcow2", "none"),),
    lock="backup", io_limits={"scsi0": {"read_bytes_sec": 1_000_000}}, unread=("scsi9: what",),
)  # fmt: skip
CONTAINER = GuestFacts("container", "101", "dns", "stopped", io_priority=5)
DOMAIN = GuestFacts("domain", "a-uuid", "db", "shut off", io_weight=200)


@pytest.fixture
def host() -> Host:
    return HostFactory.create()


def record(host: Host, kinds: tuple[str, ...], *facts: GuestFacts) -> bool:
    return record_guests(host, kinds, facts, {b"/images/101/vm-101-disk-0.qcow2": ("64769", "12")}, timezone.now())


def names() -> list[str]:
    return sorted(Guest.objects.values_list("name", flat=True))


def test_what_is_told_is_there(host: Host) -> None:
    assert record(host, ("vm", "container"), VM, CONTAINER)
    vm = Guest.objects.get(kind="vm")
    assert (vm.uid, vm.state, vm.lock, vm.unread) == ("101", "running", "backup", ["scsi9: what"])
    assert (vm.io_limits, vm.io_priority) == ({"scsi0": {"read_bytes_sec": 1_000_000}}, None)
    disk = vm.disks.get()
    assert (disk.target, disk.format, disk.cache, disk.dev, disk.inode) == ("scsi0", "qcow2", "none", "64769", "12")
    container = Guest.objects.get(kind="container")
    assert (container.uid, container.io_priority, container.off) == ("101", 5, True)


def test_the_same_again_changes_nothing_but_the_time(host: Host) -> None:
    record(host, ("vm", "container"), VM, CONTAINER)
    before = Guest.objects.get(kind="vm").last_seen
    ids = list(GuestDisk.objects.values_list("pk", flat=True))
    assert not record(host, ("vm", "container"), VM, CONTAINER)
    assert Guest.objects.get(kind="vm").last_seen > before
    assert list(GuestDisk.objects.values_list("pk", flat=True)) == ids


@pytest.mark.parametrize(
    "changed",
    [
        {"state": "paused"}, {"name": "www"}, {"lock": ""}, {"io_weight": 7}, {"io_limits": {}}, {"unread": ()},
        {"io_priority": 0}, {"disks": ()}, {"disks": (replace(VM.disks[0], readonly=True),)},
        {"disks": (replace(VM.disks[0], volume="local:101/vm-101-disk-0.qcow2"),)},
        {"disks": (VM.disks[0], replace(VM.disks[0], only_in="before-update"))},
    ],
    ids=str,
)  # fmt: skip
def test_every_change_is_a_change(host: Host, changed: dict[str, object]) -> None:
    record(host, ("vm",), VM)
    new = replace(VM, **changed)  # type: ignore[arg-type]
    assert record(host, ("vm",), new)
    assert not record(host, ("vm",), new)


def test_guests_that_are_not_told_go_and_those_of_other_kinds_and_hosts_stay(host: Host) -> None:
    other = HostFactory.create()
    record(host, ("vm", "container"), VM, CONTAINER)
    record(host, ("domain",), DOMAIN)
    record(other, ("vm",), replace(VM, name="elsewhere"))
    assert record(host, ("domain",))
    assert names() == ["dns", "elsewhere", "web"]
    assert record(host, ("vm", "container"), CONTAINER)
    assert names() == ["dns", "elsewhere"]


def test_a_guest_of_a_kind_that_was_not_asked_for_is_a_mistake(host: Host) -> None:
    with pytest.raises(ValueError, match="vm"):
        record(host, ("domain",), VM)
    assert names() == []


def test_a_disk_may_stand_in_several_sections_and_no_line_is_lost(host: Host) -> None:
    disk = VM.disks[0]
    sections = (disk, replace(disk, only_in="snap"), replace(disk, only_in="pending"), replace(disk, path="/other"))
    record(host, ("vm",), replace(VM, disks=sections))
    found = set(GuestDisk.objects.values_list("target", "only_in", "path"))
    assert found == {
        ("scsi0", "", disk.path), ("scsi0", "snap", disk.path), ("scsi0", "pending", disk.path),
        ("scsi0 #2", "", "/other"),
    }  # fmt: skip
    assert not record(host, ("vm",), replace(VM, disks=sections))


def test_what_columns_cannot_take_is_shown_as_far_as_they_can(host: Host) -> None:
    long = DiskFacts("t" * 80, "d" * 80, "/" + "p" * 5000, "f" * 80, "c" * 80, "\x1b" * 80, only_in="s" * 300)
    hostile = replace(VM, name="n\x00\x1b[31m" + "n" * 300, lock="l" * 300, state="s" * 80, disks=(long, long))
    assert record(host, ("vm",), hostile)
    guest = Guest.objects.get()
    assert guest.name.startswith("n\\x00\\x1b[31mnnn")
    assert len(guest.name) == 255
    assert guest.disks.count() == 2
    assert not record(host, ("vm",), hostile)


def test_only_paths_of_files_are_asked_for() -> None:
    disks = (DiskFacts("a", "disk", "/b"), DiskFacts("b", "disk", ""), DiskFacts("c", "disk", "pool/rbd"))
    assert disk_paths([replace(VM, disks=disks), VM]) == [b"/b", b"/images/101/vm-101-disk-0.qcow2"]
