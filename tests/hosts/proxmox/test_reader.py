"""A node read by the API."""

import pytest

from storage_admin.agent.protocol import HostError
from storage_admin.hosts.guest_facts import DiskFacts
from storage_admin.hosts.proxmox import guests, reader
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.guests import ProxmoxGuest
from storage_admin.hosts.proxmox.permissions import Permissions
from storage_admin.hosts.proxmox.reader import HIDDEN_LINES, ProxmoxFacts
from storage_admin.hosts.proxmox.storages import StorageFacts
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import ALL, TOPS, ApiDeathError, recorded

STORE = "/mnt/pve/store/images"
MAY = Permissions({path: dict.fromkeys(ALL, 1) for path in TOPS})


def guest_of(facts: ProxmoxFacts, vmid: int) -> ProxmoxGuest:
    return next(guest for guest in facts.guests if guest.vmid == vmid)


def disk_of(guest: ProxmoxGuest, target: str, only_in: str = "") -> DiskFacts:
    return next(disk for disk in guest.facts.disks if (disk.target, disk.only_in) == (target, only_in))


def test_the_whole_node_is_read(client: Client) -> None:
    facts = reader.read(client)
    assert (facts.node, facts.cluster, facts.version) == ("pve1", "", "9.2.11")
    assert [(one.name, one.online, one.local) for one in facts.nodes] == [("pve1", True, True)]
    assert facts.nodes[0].fingerprint.startswith("E2:83:1D")
    assert facts.missing == ()
    assert facts.unknown == (HIDDEN_LINES,)
    assert [guest.vmid for guest in facts.guests] == [100, 101, 102, 105, 106, 107, 110, 300]
    assert {one.name for one in facts.storages if one.active} == {"local", "store", "s2"}
    store = next(one for one in facts.storages if one.name == "store")
    assert (store.total_bytes, store.used_bytes, store.available_bytes) == (270553174016, 43027087360, 54766206976)
    assert facts == reader.read(client, "pve1")


def test_a_vm_is_read_with_all_its_drives(client: Client) -> None:
    guest = guest_of(reader.read(client), 100)
    assert (guest.facts.name, guest.facts.kind, guest.facts.uid, guest.facts.state) == ("db1", "vm", "100", "shut off")
    assert disk_of(guest, "scsi0") == DiskFacts(
        "scsi0",
        "disk",
        f"{STORE}/100/vm-100-disk-0.qcow2",
        "qcow2",
        discard="on",
        volume="store:100/vm-100-disk-0.qcow2",
        in_backups=True,
    )
    assert disk_of(guest, "scsi2") == DiskFacts(
        "scsi2", "disk", "/dev/disk/by-id/ata-SAMSUNG_X", "raw", in_backups=True
    )
    assert disk_of(guest, "ide3") == DiskFacts("ide3", "cdrom", "", readonly=True, in_backups=False)
    assert disk_of(guest, "efidisk0").path == f"{STORE}/100/vm-100-disk-3.qcow2"
    assert disk_of(guest, "unused0").path == f"{STORE}/100/vm-100-disk-2.vmdk"
    assert disk_of(guest, "vmstate", "before-upgrade").path == f"{STORE}/100/vm-100-state-before-upgrade.raw"
    assert [one.name for one in guest.facts.snapshots] == ["after-upgrade", "before-upgrade"]
    # A snapshot's drive that is the present one's is told once.
    assert len([disk for disk in guest.facts.disks if disk.target == "scsi0"]) == 1


def test_a_template_and_its_linked_clone_are_told_by_path(client: Client) -> None:
    facts = reader.read(client)
    base, clone = guest_of(facts, 101), guest_of(facts, 102)
    assert disk_of(base, "scsi0").path == f"{STORE}/101/base-101-disk-0.qcow2"
    assert disk_of(clone, "scsi0").path == f"{STORE}/102/vm-102-disk-0.qcow2"
    assert disk_of(clone, "scsi0").volume == "store:101/base-101-disk-0.qcow2/102/vm-102-disk-0.qcow2"
    assert clone.facts.lock == "backup"
    assert disk_of(clone, "unused0") == DiskFacts(
        "unused0", "disk", "", volume="nosuchstore:vm-102-disk-5", in_backups=False
    )


def test_a_container_is_read_with_what_waits_and_what_a_snapshot_keeps(client: Client) -> None:
    guest = guest_of(reader.read(client), 300)
    assert (guest.facts.name, guest.facts.kind) == ("ct1", "container")
    assert disk_of(guest, "rootfs").format == "raw"
    assert disk_of(guest, "mp0").format == "subvol"
    assert disk_of(guest, "mp1") == DiskFacts("mp1", "bind", "/srv/shared", in_backups=False)
    assert disk_of(guest, "mp2", "pending").path == f"{STORE}/300/vm-300-disk-2.raw"
    assert disk_of(guest, "mp3", "monday").path == f"{STORE}/300/vm-300-disk-3.raw"
    assert guest.facts.unread == ("lxc.mount.entry: /srv/extra srv/extra none bind 0 0",)


def test_limits_and_devices_of_other_storages(client: Client) -> None:
    guest = guest_of(reader.read(client), 110)
    assert guest.facts.io_limits == {"scsi0": {"read_bytes_sec": 13107200, "write_iops_sec": 300}}
    assert [disk.path for disk in guest.facts.disks] == [
        "/dev/pve/vm-110-disk-0",
        "/dev/zvol/rpool/data/vm-110-disk-1",
        "",
    ]


def test_drives_that_will_not_be_what_they_are_are_told(server: ProxmoxServer, client: Client) -> None:
    known = guest_of(reader.read(client), 110).facts
    assert known.waiting == ()
    server.world.guests["vm", 110].text += "\n[PENDING]\ndelete: scsi1\nscsi0: store:110/vm-110-disk-9.qcow2\n"
    assert guest_of(reader.read(client), 110).facts.waiting == ("scsi0", "scsi1")


def test_a_drive_that_waits_is_told_as_waiting(server: ProxmoxServer, client: Client) -> None:
    guest = server.world.guests["vm", 101]
    guest.text += "\n[PENDING]\nscsi1: s2:101/vm-101-disk-4.raw,size=1G\ndelete: boot\n"
    assert (
        disk_of(guest_of(reader.read(client), 101), "scsi1", "pending").path
        == "/mnt/pve/s2/images/101/vm-101-disk-4.raw"
    )


def test_what_qemu_is_told_by_hand_may_name_any_file(server: ProxmoxServer, client: Client) -> None:
    server.world.guests["vm", 101].text += "args: -drive file=/srv/x.img\n"
    assert guest_of(reader.read(client), 101).facts.unread == ("args: -drive file=/srv/x.img",)


@pytest.mark.parametrize(
    ("status", "qmp", "state"),
    [
        ("stopped", "stopped", "shut off"), ("running", "running", "running"), ("running", "", "running"),
        ("running", "paused", "paused"), ("running", "prelaunch", "paused"), ("running", "io-error", "paused"),
        ("running", "shutdown", "shutting down"), ("running", "new-in-qemu", "running"), ("None", "", "unknown"),
        ("", "stopped", "unknown"),
    ],
)  # fmt: skip
def test_only_what_is_stopped_is_off(status: str, qmp: str, state: str) -> None:
    assert guests.state(status, qmp) == state


def test_a_paused_vm_is_told_from_a_running_one(server: ProxmoxServer, client: Client) -> None:
    server.world.guests["vm", 101].running = server.world.guests["vm", 110].running = True
    server.world.guests["vm", 110].qmp = "paused"
    facts = reader.read(client)
    assert [guest_of(facts, vmid).facts.state for vmid in (100, 101, 110)] == ["shut off", "running", "paused"]


def test_a_configuration_that_changes_while_it_is_read_is_read_again(server: ProxmoxServer, client: Client) -> None:
    left = [3]

    def change(kind: str, vmid: int) -> None:
        if vmid == 101 and left[0]:
            left[0] -= 1
            server.world.guests[kind, vmid].text += "onboot: 1\n"

    server.world.before_read = change
    assert guest_of(reader.read(client), 101).options["onboot"] == "1"
    left[0] = -1
    facts = reader.read(client)
    assert [why for why in facts.unknown if why.startswith("Guest 101 could not be read.")]
    assert 101 not in [one.vmid for one in facts.guests]


def test_a_guest_that_is_gone_since_it_was_listed_is_gone(server: ProxmoxServer, client: Client) -> None:
    def remove(kind: str, vmid: int) -> None:
        server.world.guests.pop(("vm", 101), None)

    server.world.before_read = remove
    facts = reader.read(client)
    assert 101 not in [guest.vmid for guest in facts.guests]
    assert facts.unknown == (HIDDEN_LINES,)


def test_a_guest_that_is_there_and_cannot_be_read_is_a_reason_not_to_know(
    server: ProxmoxServer, client: Client
) -> None:
    def hide(kind: str, vmid: int) -> None:
        if vmid == 101:
            raise ApiDeathError(500, "Configuration file 'nodes/pve1/qemu-server/101.conf' does not exist\n")

    server.world.before_read = hide
    assert "101.conf' does not exist" in reader.read(client).unknown[0]


def test_one_broken_image_hides_its_storage_and_nothing_else(server: ProxmoxServer, client: Client) -> None:
    store, s2 = (StorageFacts(name, "dir", "/mnt", content=("images",)) for name in ("store", "s2"))
    broken = recorded()["errors"]["broken header"]["body"]["message"]
    server.world.broken["store"] = broken
    listing = reader.list_volumes(client, "pve1", store, MAY)
    assert listing.volumes == ()
    assert "Unsupported qcow2 version 9" in listing.why_incomplete
    server.world.broken["store"] = "can't lock file '/var/lock/pve-manager/pve-storage-store' - got timeout\n"
    assert "Try again" in reader.list_volumes(client, "pve1", store, MAY).why_incomplete
    server.world.broken["store"] = ""
    assert "Use the agent to read the storage" in reader.list_volumes(client, "pve1", store, MAY).why_incomplete
    assert server.seen[-1].status == 596
    assert reader.list_volumes(client, "pve1", s2, MAY).why_incomplete == ""
    assert len(reader.read(client).guests) == 8


def test_a_server_that_goes_away_in_between_is_no_empty_storage(server: ProxmoxServer, client: Client) -> None:
    server.wire.append(b"")
    with pytest.raises(HostError):
        reader.list_volumes(client, "pve1", StorageFacts("store", "dir", "/mnt", content=("images",)), MAY)


def test_volumes_are_listed_as_they_are(server: ProxmoxServer, client: Client) -> None:
    server.world.volumes["store"] = [*recorded()["volumes"], *recorded()["invalid"], *recorded()["chain"]]
    store = StorageFacts("store", "dir", "/mnt/pve/store", content=("images",))
    found = {one.volume: one for one in reader.list_volumes(client, "pve1", store, MAY).volumes}
    linked = found["store:101/base-101-disk-0.qcow2/102/vm-102-disk-0.qcow2"]
    assert (linked.path, linked.parent) == (f"{STORE}/102/vm-102-disk-0.qcow2", "../101/base-101-disk-0.qcow2")
    assert (linked.size_bytes, linked.used_bytes, linked.vmid) == (10737418240, 200704, 102)
    invalid = next(one for one in found.values() if one.format == "invalid")
    assert (invalid.path, invalid.parent) == ("", "")  # of another storage than was asked for
    server.world.volumes["store"] = [
        {"volid": "store:1/vm-1-disk-0.raw", "content": "images", "format": "raw", "size": 1, "vmid": 1}
    ]
    assert reader.list_volumes(client, "pve1", store, MAY).volumes[0].used_bytes is None


def test_only_storages_without_a_folder_are_listed(server: ProxmoxServer, client: Client) -> None:
    for status in server.world.statuses:
        if status["storage"] in ("local-lvm", "ceph"):
            status |= {"active": 1, "total": 10, "used": 4, "avail": 6}
    server.world.volumes["local-lvm"] = [
        {"volid": "local-lvm:vm-110-disk-0", "content": "images", "format": "raw", "size": 8 << 30, "vmid": 110}
    ]
    listings = reader.read(client).listings
    assert [one.storage for one in listings] == ["ceph", "local-lvm"]
    assert [one.path for one in listings[1].volumes] == ["/dev/pve/vm-110-disk-0"]


def test_the_answering_node_is_found_in_a_cluster(server: ProxmoxServer, client: Client) -> None:
    server.world.nodes = [*server.world.nodes, {"node": "pve2", "status": "offline"}]
    server.world.cluster_status = [
        {"id": "cluster", "type": "cluster", "name": "lab", "nodes": 2, "quorate": 1, "version": 2},
        {"id": "node/pve1", "type": "node", "name": "pve1", "local": 1, "online": 1},
        {"id": "node/pve2", "type": "node", "name": "pve2", "local": 0, "online": 0},
    ]
    facts = reader.read(client)
    assert (facts.cluster, facts.node) == ("lab", "pve1")
    assert [(one.name, one.online, one.local) for one in facts.nodes] == [("pve1", True, True), ("pve2", False, False)]
    with pytest.raises(HostError, match="hostname lookup 'pve2' failed"):
        reader.read(client, "pve2")
    with pytest.raises(HostError, match=r"does not know a node 'pve3'. Its nodes are pve1, pve2"):
        reader.read(client, "pve3")
    server.world.allow(*(right for right in ALL if right != "Sys.Audit"))
    with pytest.raises(HostError, match=r"Choose one of pve1, pve2, or grant the token Sys.Audit"):
        reader.read(client)
    assert reader.read(client, "pve1").cluster == ""
