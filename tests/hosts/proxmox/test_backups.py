"""The last backup of each guest, as storages list them: what counts, and what is said where it may not be all."""

import time
from typing import Any, cast

import pytest

from storage_admin.hosts.proxmox import backups, permissions, reader
from storage_admin.hosts.proxmox.backups import Backup, Backups
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from tests.harness.proxmox.recordings import Recorder
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import ALL, AUDITOR, World, lab

NOVEMBER = 1793498405
#: As Proxmox VE answered for a folder (``content?content=backup``), and as PBSPlugin.pm makes its rows.
DUMP = {
    "content": "backup", "ctime": NOVEMBER, "format": "vma.zst", "notes": "pve-one, weekly", "protected": 1,
    "size": 3145728, "subtype": "qemu", "vmid": 100,
    "volid": "store:backup/vzdump-qemu-100-2026_11_01-02_00_05.vma.zst",
}  # fmt: skip
WEIRD = {
    "content": "backup", "ctime": NOVEMBER, "format": "vma", "size": 2, "subtype": "unknown",
    "volid": "store:backup/vzdump-weird-name.vma",
}  # fmt: skip


def snapshot(vmid: int, at: int, **more: Any) -> dict[str, Any]:
    """A backup on Proxmox Backup Server."""
    volume = f"pbs:backup/vm/{vmid}/{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(at))}"
    return {
        "content": "backup", "ctime": at, "format": "pbs-vm", "size": 34359738368, "vmid": vmid, "volid": volume,
        "encrypted": "1",
    } | more  # fmt: skip


def node(*, pbs: list[dict[str, Any]] | None = None, store: list[dict[str, Any]] | None = None) -> World:
    """The node of the tests' data with a Proxmox Backup Server, and without the storage that is down."""
    world = lab()
    world.storages = [one for one in world.storages if one["storage"] != "nfs-dead"]
    world.statuses = [one for one in world.statuses if one["storage"] != "nfs-dead"]
    world.storages.append({"storage": "pbs", "type": "pbs", "content": "backup", "digest": "0" * 40})
    world.statuses.append({**world.statuses[0], "storage": "pbs", "type": "pbs", "content": "backup"})
    world.volumes |= {"pbs": pbs or [], "store": [*world.volumes["store"], *(store or [])]}
    return world


def read(world: World) -> Backups:
    client = Recorder(world)
    told = backups.read(client, "pve1", reader.read_storages(cast("Client", client), "pve1"), permissions.read(client))
    assert [one.given for one in client.made if "content" in one.given] == [{"content": "backup"}] * len(
        [one for one in world.statuses if "backup" in one["content"] and one["active"]]
    )
    return told


def newest(told: Backups) -> dict[int, tuple[int, str]]:
    return {one.vmid: (one.at, one.volume) for one in told.newest}


def test_of_each_guest_the_newest_of_all_storages_counts() -> None:
    old, new = snapshot(100, NOVEMBER - 86400), snapshot(100, NOVEMBER + 86400)
    container = DUMP | {"vmid": 300, "subtype": "lxc", "volid": "store:backup/vzdump-lxc-300-2026_11_01-02_10_00.tar"}
    told = read(node(pbs=[old, new, snapshot(101, NOVEMBER)], store=[DUMP, container, WEIRD]))
    assert newest(told) == {
        100: (NOVEMBER + 86400, new["volid"]),
        101: (NOVEMBER, snapshot(101, NOVEMBER)["volid"]),
        300: (NOVEMBER, container["volid"]),
    }
    assert {one.vmid: one.kind for one in told.newest} == {100: "vm", 101: "vm", 300: "container"}
    assert (told.storages, told.gaps) == (("local", "pbs", "store"), ())


def test_a_failed_verification_is_passed_over_and_counted() -> None:
    failed = {"verification": {"state": "failed", "upid": "UPID:x"}}
    good = snapshot(100, NOVEMBER, verification={"state": "ok", "upid": "UPID:x"})
    rows = [good, snapshot(100, NOVEMBER + 5, **failed), snapshot(100, NOVEMBER - 5, **failed)]
    told = read(node(pbs=[*rows, snapshot(101, NOVEMBER, **failed)]))
    assert told.newest == (Backup(100, "vm", NOVEMBER, good["volid"], passed_over=1),)


def test_what_is_not_finished_is_no_backup() -> None:
    assert read(node(pbs=[snapshot(100, NOVEMBER, size=1)])) == Backups((), ("local", "pbs", "store"), ())


@pytest.mark.parametrize("at", [None, "yesterday", -5, 0, 1 << 35, 1 << 80])  # 1 << 35 is in the year 3058
def test_one_without_a_time_that_makes_sense_is_said_and_not_counted(at: object) -> None:
    told = read(node(pbs=[snapshot(100, NOVEMBER), snapshot(100, NOVEMBER + 9, ctime=at)]))
    assert newest(told) == {100: (NOVEMBER, snapshot(100, NOVEMBER)["volid"])}
    assert len(told.gaps) == 1


def test_rows_of_another_shape_hide_no_other() -> None:
    odd: list[dict[str, Any]] = [
        {}, {"volid": 5, "vmid": []}, {"vmid": "x", "volid": "a"}, {"vmid": 100, "content": "iso", "volid": "a"},
        snapshot(104, NOVEMBER, verification="failed"), snapshot(105, NOVEMBER, verification=["failed"]),
        snapshot(106, NOVEMBER, format=None, size=None, notes={"a": 1}),
    ]  # fmt: skip
    told = backups.Backups(*_sorted([*odd, snapshot(100, NOVEMBER) | {"vmid": "100", "ctime": str(NOVEMBER)}]))
    assert set(newest(told)) == {100, 105, 106}


def _sorted(rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Past the double, which is held to the schema."""

    class Odd(Recorder):
        def rows(self, *path: Any, **_params: Any) -> list[dict[str, Any]]:
            return rows

    client = Odd(lab())
    pbs = next(one for one in reader.read_storages(cast("Client", Recorder(node())), "pve1") if one.name == "pbs")
    told = backups.read(client, "pve1", [pbs], permissions.read(client))
    return told.newest, told.storages, told.gaps


def test_of_fifty_thousand_backups_each_guests_newest_is_told() -> None:
    rows = [snapshot(100 + i % 500, NOVEMBER + i) for i in range(50_000)]
    told = backups.Backups(*_sorted(rows))
    assert (len(told.newest), told.newest[-1].at) == (500, NOVEMBER + 49_999)


@pytest.mark.parametrize("lacks", ["VM.Backup", "Datastore.AllocateSpace"])
def test_an_empty_list_without_the_rights_behind_it_is_no_proof(lacks: str) -> None:
    world = node(pbs=[snapshot(100, NOVEMBER)])
    world.allow(*(right for right in ALL if right != lacks))
    told = read(world)
    assert told.newest == ()
    assert [lacks in gap.detail for gap in told.gaps] == [True]


def test_who_may_allocate_on_all_storages_needs_no_right_on_guests() -> None:
    world = node(pbs=[snapshot(100, NOVEMBER)])
    world.allow(*AUDITOR, "Datastore.Allocate")
    told = read(world)
    assert (set(newest(told)), told.gaps) == ({100}, ())


def test_a_right_that_is_missing_on_one_guest_is_a_gap_of_that_guest_alone() -> None:
    world = node(pbs=[snapshot(100, NOVEMBER), snapshot(101, NOVEMBER)])
    world.rights["/vms/100"] = {"VM.Audit": 1}
    told = read(world)
    assert (set(newest(told)), [gap.vmid for gap in told.gaps]) == ({101}, [100])


@pytest.mark.parametrize("words", ["", "could not read the datastore\n"])
def test_a_storage_that_gives_no_answer_is_a_gap_and_the_others_count(words: str) -> None:
    world = node(pbs=[snapshot(100, NOVEMBER + 9)], store=[DUMP])
    world.broken["pbs"] = words
    told = read(world)
    assert newest(told) == {100: (NOVEMBER, DUMP["volid"])}
    assert (told.storages, len(told.gaps), "pbs" in told.gaps[0].detail) == (("local", "store"), 1, True)


def test_a_storage_that_is_away_is_not_asked() -> None:
    world = node()
    world.statuses = [one | {"active": 0} if one["storage"] == "pbs" else one for one in world.statuses]
    told = read(world)
    assert (told.storages, len(told.gaps), "pbs" in told.gaps[0].detail) == (("local", "store"), 1, True)


def test_storages_that_take_too_long_keep_no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "TOGETHER", -1.0)
    told = backups.read(
        Recorder(node()), "pve1", reader.read_storages(cast("Client", Recorder(node())), "pve1"), _all()
    )
    assert (told.storages, len(told.gaps)) == ((), 3)


def _all() -> permissions.Permissions:
    return permissions.read(Recorder(node()))


def test_they_are_among_a_nodes_facts_and_the_answers_are_as_the_schema_has_them(
    server: ProxmoxServer, client: Client
) -> None:
    world = node(pbs=[snapshot(100, NOVEMBER, notes="<script>\x1b[2J", verification={"state": "ok", "upid": "U"})])
    server.world.storages, server.world.statuses, server.world.volumes = world.storages, world.statuses, world.volumes
    told = reader.read(client).backups
    assert told is not None
    assert newest(told) == {100: (NOVEMBER, snapshot(100, NOVEMBER)["volid"])}


def test_a_guest_that_the_token_sees_no_more_is_a_gap(server: ProxmoxServer, client: Client) -> None:
    facts = reader.read(client)
    server.world.rights["/vms/110"] = {}
    hidden = reader.with_hidden(client, facts, [], ["110"]).backups
    assert hidden is not None
    assert {gap.vmid for gap in hidden.gaps} == {110, None}  # nfs-dead is away


def included(facts: ProxmoxFacts, vmid: int) -> dict[str, bool | None]:
    guest = next(guest for guest in facts.guests if guest.vmid == vmid)
    return {disk.target: disk.in_backups for disk in guest.facts.disks}


def test_disks_of_a_vm_that_vzdump_leaves_out_are_told(server: ProxmoxServer, client: Client) -> None:
    text = (
        "name: one\nscsi0: store:101/a.qcow2\nscsi1: store:101/b.qcow2,backup=0\nscsi2: store:101/c.qcow2,backup=1\n"
        "ide2: none,media=cdrom\nide3: store:101/vm-101-cloudinit.qcow2,media=cdrom\nunused0: store:101/d.qcow2\n"
        "efidisk0: store:101/e.qcow2\ntpmstate0: store:101/f.raw\n[PENDING]\nscsi3: store:101/g.qcow2\n"
    )
    server.world.guests["vm", 101].text = text
    told = {
        "scsi0": True, "scsi1": False, "scsi2": True, "ide2": False, "ide3": False, "unused0": False, "efidisk0": False,
        "tpmstate0": True, "scsi3": False,
    }  # fmt: skip
    assert included(reader.read(client), 101) == told
    server.world.guests["vm", 101].text = text.replace("name: one", "name: one\nbios: ovmf")
    assert included(reader.read(client), 101) == told | {"efidisk0": True}


def test_mount_points_of_a_container_are_left_out_unless_it_says_otherwise(
    server: ProxmoxServer, client: Client
) -> None:
    server.world.guests["container", 300].text = (
        "hostname: ct\nrootfs: store:300/a.raw,backup=0\nmp0: store:300/b.raw,mp=/b\n"
        "mp1: store:300/c.raw,mp=/c,backup=1\nmp2: /srv/shared,mp=/d,backup=1\n"
    )
    told = {"rootfs": True, "mp0": False, "mp1": True, "mp2": False}
    assert included(reader.read(client), 300) == told
