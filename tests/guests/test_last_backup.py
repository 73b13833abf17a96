"""What is kept of backups, and what is said of a guest's last one."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from storage_admin.guests import backups
from storage_admin.guests.models import BackupListing, Guest, GuestBackup
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox.backups import Backup, Backups, Gap
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from storage_admin.jobs.plan_and_progress import LastBackup
from tests.factories import GuestDiskFactory, GuestFactory, HostFactory
from tests.working import at_most_queries

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
NOW = timezone.now().replace(microsecond=0)
AT = int(NOW.timestamp()) - 2 * 86400
ON_PBS = "pbs:backup/vm/100/2026-11-25T02:00:00Z"
TOLD = Backups((Backup(100, "vm", AT, ON_PBS),), ("local", "pbs"))


def recorded(host: Host, told: Backups | None = TOLD, **facts: Any) -> None:
    backups.record(host, ProxmoxFacts("pve1", backups=told, **facts), NOW)


def vm(host: Host, uid: str = "100", name: str = "web", **columns: Any) -> Guest:
    return GuestFactory.create(host=host, kind="vm", uid=uid, name=name, **columns)


def last_of(guest: Guest) -> LastBackup:
    with at_most_queries(4):
        (found,) = backups.of_one(guest.pk)
    return found


@pytest.fixture
def host() -> Host:
    return HostFactory.create()


def test_the_last_backup_of_a_guest_is_told(host: Host) -> None:
    recorded(host)
    last = last_of(vm(host))
    assert (last.guest, last.volume, last.storage, last.detail) == ("web (100)", ON_PBS, "pbs", "")
    assert last.at == datetime.fromtimestamp(AT, UTC)


def test_none_is_said_only_where_every_storage_told(host: Host) -> None:
    recorded(host, replace(TOLD, newest=()))
    none = last_of(vm(host))
    assert (none.at, none.volume, "local, pbs" in none.detail) == (None, "", True)
    recorded(host, replace(TOLD, newest=(), gaps=(Gap("pbs is away."),)))
    unknown = last_of(Guest.objects.get())
    assert (unknown.at, "pbs is away." in unknown.detail, "local, pbs" in unknown.detail) == (None, True, False)


def test_the_newest_that_is_known_comes_with_what_is_not_known(host: Host) -> None:
    recorded(host, replace(TOLD, gaps=(Gap("pbs is away."), Gap("100 is hidden.", 100), Gap("101 is hidden.", 101))))
    last = last_of(vm(host))
    assert last.at is not None
    assert ["pbs is away." in last.detail, "100 is" in last.detail, "101 is" in last.detail] == [True, True, False]


def test_failed_verifications_are_said(host: Host) -> None:
    recorded(host, replace(TOLD, newest=(replace(TOLD.newest[0], passed_over=3),)))
    last = last_of(vm(host))
    assert "3" in last.detail


def test_a_guest_of_another_kind_with_that_number_has_none(host: Host) -> None:
    recorded(host)
    other = last_of(GuestFactory.create(host=host, kind="container", uid="100"))
    assert other.at is None


def test_of_guests_of_libvirt_nobody_tells_anything(host: Host) -> None:
    recorded(host)
    for guest in (GuestFactory.create(host=host, kind="domain", uid="100"), vm(HostFactory.create(), "100")):
        with at_most_queries(4):
            assert backups.of_one(guest.pk) == ()


def test_without_a_token_it_is_not_known(host: Host) -> None:
    recorded(host, None)
    unknown = last_of(vm(host))
    assert (unknown.at, BackupListing.objects.get().at) == (None, None)
    assert unknown.detail.count(".") >= 2


def test_while_the_api_is_away_what_was_known_stays_and_says_so(host: Host) -> None:
    recorded(host)
    recorded(host, None, api_away="The API is away.")
    last = last_of(vm(host))
    assert (last.volume, "The API is away." in last.detail) == (ON_PBS, True)


def test_each_scan_replaces_what_was_known_and_writes_what_changed_alone() -> None:
    host, other = HostFactory.create(), HostFactory.create()
    recorded(other)
    recorded(host, replace(TOLD, newest=(*TOLD.newest, Backup(101, "vm", AT, "pbs:b"), Backup(102, "", AT, "pbs:c"))))
    kept = dict(GuestBackup.objects.filter(host=host).values_list("uid", "pk"))
    recorded(host, replace(TOLD, newest=(*TOLD.newest, Backup(101, "vm", AT + 5, "pbs:d"))))
    rows = {row.uid: row for row in GuestBackup.objects.filter(host=host)}
    assert {uid: row.volume for uid, row in rows.items()} == {"100": ON_PBS, "101": "pbs:d"}
    assert rows["100"].pk == kept["100"]
    assert GuestBackup.objects.filter(host=other).count() == 1


def test_names_that_strangers_chose_are_kept_as_text(host: Host) -> None:
    hostile = Backups((Backup(100, "vm", AT, "pbs:<script>\x1b[2J\x00" + "x" * 5000),), ("p\x07bs",), (Gap("a\x00b"),))
    recorded(host, hostile)
    row = GuestBackup.objects.get()
    assert (row.volume.isprintable(), len(row.volume)) == (True, 1000)
    assert "\x00" not in str(BackupListing.objects.get().gaps)
    assert "\x07" not in str(BackupListing.objects.get().storages)


def test_a_backup_from_before_a_move_to_another_node_counts() -> None:
    first, second, stranger = (HostFactory.create(cluster=name) for name in ("lab", "lab", "shop"))
    recorded(first)
    recorded(second, Backups((), ("local",)))
    recorded(stranger, Backups((), ("local",)))
    moved, other = last_of(vm(second)), last_of(vm(stranger))
    assert (moved.volume, other.at) == (ON_PBS, None)


@pytest.mark.parametrize(
    ("disks", "included"),
    [
        ({"scsi0": True}, True), ({"scsi0": True, "scsi1": False}, False), ({"scsi0": True, "scsi1": None}, None),
        ({"scsi0": True, "unused0": False}, True),
    ],
)  # fmt: skip
def test_disks_that_no_backup_has_are_named(host: Host, disks: dict[str, bool | None], included: bool | None) -> None:
    recorded(host)
    guest = vm(host)
    for target, is_in in disks.items():
        GuestDiskFactory.create(guest=guest, target=target, in_backups=is_in)
    GuestDiskFactory.create(guest=guest, target="ide2", device="cdrom", in_backups=False)
    last = last_of(guest)
    assert (last.included, "scsi1" in last.detail) == (included, included is False)


def test_more_guests_cost_no_more_queries() -> None:
    host = HostFactory.create(cluster="lab")
    recorded(host, Backups(tuple(Backup(number, "vm", AT, f"pbs:{number}") for number in range(100, 140)), ("pbs",)))
    for number in range(100, 140):
        vm(host, str(number))
    with at_most_queries(4):
        found = backups.of_guests(Guest.objects.prefetch_related("disks"))
    assert len({last.volume for last in found.values()}) == 40
    assert all(NOW - last.at < timedelta(days=3) for last in found.values() if last.at)
