"""Proxmox VE's own files, and the same facts as by the API."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_admin.agent.protocol import HostError, b64
from storage_admin.hosts.guest_facts import DiskFacts
from storage_admin.hosts.proxmox import conffiles, reader
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.guests import ProxmoxGuest
from storage_admin.hosts.proxmox.merging import merged
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from tests.harness.proxmox.confs import parse_vm
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import ALL, AUDITOR, Guest, files

LONG = "9" * 5000
RUNNING: dict[str, dict[str, bool | None]] = {
    "vm": {"100": True, "101": False, "102": None},
    "container": {"300": False},
}


def read(changed: Mapping[str, str] | None = None, node: str = "pve1") -> ProxmoxFacts:
    known = files() | {name: text.encode() for name, text in (changed or {}).items()}
    return conffiles.of_files(known, node=node, running=RUNNING)


def vm(text: str, kind: str = "vm") -> ProxmoxGuest:
    folder = "qemu-server" if kind == "vm" else "lxc"
    known = {"storage.cfg": files()["storage.cfg"], f"nodes/pve1/{folder}/100.conf": text.encode()}
    return conffiles.of_files(known, node="pve1").guests[0]


def paths(guest: ProxmoxGuest) -> set[str]:
    return {disk.path.removeprefix("/mnt/pve/store/images/") for disk in guest.facts.disks if disk.path}


def test_the_same_facts_as_by_the_api(server: ProxmoxServer, client: Client) -> None:
    """But for what the API hides; the digests are the same as well."""
    api = {guest.vmid: guest for guest in reader.read(client).guests}
    file = {guest.vmid: guest for guest in read().guests}
    assert api.keys() == file.keys()
    for vmid, told in api.items():
        found = file[vmid]
        assert (found.facts.digest, found.node) == (told.facts.digest, told.node)
        assert {one.name for one in found.facts.snapshots} == {one.name for one in told.facts.snapshots}
        assert (found.facts.name, found.facts.lock, found.facts.io_limits) == (
            told.facts.name, told.facts.lock, told.facts.io_limits,
        )  # fmt: skip
        shown = {disk for disk in found.facts.disks if disk.only_in not in ("hidden", "fleecing")}
        assert shown == set(told.facts.disks), vmid


def test_no_disk_of_a_line_that_the_api_hides_looks_like_an_orphan(client: Client) -> None:
    api = next(guest for guest in reader.read(client).guests if guest.vmid == 107)
    file = next(guest for guest in read().guests if guest.vmid == 107)
    hidden = {disk.target: disk.path for disk in file.facts.disks if disk.only_in == "hidden"}
    names = {"scsi0": "a", "scsi1": "m", "scsi5": "n", "scsi31": "e", "ide9": "f", "unused300": "g", "lvmthing0": "i"}
    assert hidden == {target: f"/mnt/pve/store/images/106/{name}.qcow2" for target, name in names.items()}
    assert not hidden.keys() & {disk.target for disk in api.facts.disks}
    assert {line.partition(":")[0] for line in file.facts.unread} == hidden.keys()


def test_a_note_that_is_no_option_is_told(client: Client) -> None:
    guest = next(guest for guest in read().guests if guest.vmid == 100)
    assert guest.facts.unread == ("description-note-not-a-key: see the wiki",)


def test_images_of_a_backup_under_way_belong_to_their_guest() -> None:
    guest = next(guest for guest in read().guests if guest.vmid == 100)
    found = [disk for disk in guest.facts.disks if disk.only_in == "fleecing"]
    assert found == [
        DiskFacts(
            "fleecing", "disk", "/mnt/pve/store/images/100/vm-100-fleece-0.qcow2", "qcow2",
            volume="store:100/vm-100-fleece-0.qcow2", only_in="fleecing", in_backups=False,
        )
    ]  # fmt: skip


def test_states_are_known_of_the_own_node_alone() -> None:
    states = {guest.vmid: guest.facts.state for guest in read().guests}
    assert (states[100], states[101], states[102], states[110], states[300]) == (
        "running", "shut off", "unknown", "unknown", "shut off",
    )  # fmt: skip
    assert {guest.facts.state for guest in read(node="pve2").guests} == {"unknown"}


def test_storages_and_the_cluster() -> None:
    facts = read()
    assert (facts.cluster, facts.node, facts.unknown) == ("lab", "pve1", ())
    assert not next(one for one in facts.storages if one.name == "other-node").enabled
    assert next(one for one in read(node="pve2").storages if one.name == "other-node").enabled


def test_an_image_of_a_section_that_is_not_known_is_in_use() -> None:
    guest = vm("name: x\n[odd section!]\nscsi7: store:100/seven.raw\n[snap]\nscsi8: store:100/eight.raw\n")
    assert paths(guest) == {"100/seven.raw", "100/eight.raw"}
    assert guest.facts.unread == ("[odd section!]", "scsi7: store:100/seven.raw")
    assert [one.name for one in guest.facts.snapshots] == ["snap"]


@pytest.mark.parametrize(
    "line",
    [
        f"scsi0: store:{LONG}/vm.raw", f"scsi0: store:100/base.qcow2/{LONG}/vm.qcow2", f"scsi99: store:{LONG}/vm.raw",
        f"scsi0: thin:vm-{LONG}-disk-0", f"scsi0: thin:base-{LONG}-disk-0/vm-100-disk-0",
        f"[snap]\nscsi0: thin:vm-{LONG}-disk-0", f"[special:fleecing]\nfleecing-images: store:{LONG}/vm.raw",
        f"scsi0: store:100/vm.raw,size={LONG}G", f"scsi0: store:100/vm.raw,size=1.{LONG}G",
    ],
    ids=lambda line: line.replace(LONG, "9..."),
)  # fmt: skip
def test_a_number_that_is_too_long_does_not_end_the_reading_of_all_guests(line: str) -> None:
    """Python reads no number of more than 4300 digits."""
    storages = files()["storage.cfg"].decode() + "\nlvmthin: thin\n\tthinpool data\n\tvgname pve\n\tcontent images\n"
    changed = {"storage.cfg": storages, "nodes/pve1/qemu-server/100.conf": f"name: x\n{line}\n"}
    found = {guest.vmid: guest for guest in read(changed).guests}
    assert found.keys() == {guest.vmid for guest in read().guests}
    assert found[100].facts.disks or found[100].facts.unread


def test_an_image_that_a_later_line_pushes_aside_is_in_use() -> None:
    guest = vm(
        "scsi0: store:100/old.raw\nscsi0: store:100/new.raw\n"
        "[s1]\nscsi0: store:100/a.raw\n[s1]\nscsi0: store:100/b.raw\n"
    )
    assert paths(guest) == {"100/old.raw", "100/new.raw", "100/a.raw", "100/b.raw"}
    now = [disk.path for disk in guest.facts.disks if not disk.only_in]
    assert now == ["/mnt/pve/store/images/100/new.raw"]
    assert guest.facts.unread == ("scsi0: store:100/old.raw",)


@pytest.mark.parametrize(
    "line",
    [
        "scsi0: store:100/x.qcow2,size=10P", "scsi0: store:100/x.qcow2,new=1", "SCSI0: store:100/x.qcow2",
        " scsi0: store:100/x.qcow2", "scsi0:store:100/x.qcow2,cache=new", "nvme0: store:100/x.qcow2,ro=1",
        "scsi0: size=10P,file=store:100/x.qcow2", "cdrom9: store:100/x.qcow2", "x-y1: file=store:100/x.qcow2",
        "scsi99: store:100/x.qcow2", "efidisk7: store:100/x.qcow2", "store:100/x.qcow2",
    ],
)  # fmt: skip
def test_a_volume_is_found_in_lines_that_proxmox_passes_over(line: str) -> None:
    guest = vm(f"name: x\n{line}\n")
    assert parse_vm(f"name: x\n{line}\n").now == {"name": "x"}
    assert guest.facts.unread == (line,)
    if not line.startswith("store:"):
        assert paths(guest) == {"100/x.qcow2"}


@pytest.mark.parametrize(
    "line",
    [
        "scsi0: ",
        "scsi0: size=1G",
        "scsi0 store:100/x.qcow2",
        "scsi0: store:100/x.qcow2,ro=1,ro=1",
        "\x00\x01",
        "=",
        ":",
    ],
)
def test_a_line_that_says_nothing_clear_is_kept_as_it_is(line: str) -> None:
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)
    assert vm(f"name: x\n{line}\n").facts.unread == (shown,)


def test_bytes_that_are_no_text_stay_what_they_are() -> None:
    known = {
        "storage.cfg": files()["storage.cfg"],
        "nodes/pve1/qemu-server/100.conf": b"scsi0: store:100/x\xff.raw\nno\xfe\n",
    }
    guest = conffiles.of_files(known, node="pve1").guests[0]
    assert guest.facts.disks[0].path == "/mnt/pve/store/images/100/x\udcff.raw"
    assert guest.facts.unread == ("no\\xfe",)


def test_a_containers_lines_are_read_by_its_own_rules() -> None:
    guest = vm(
        "rootfs: store:100/r.raw,new=1\nmp0: /srv/x,mp=/x\nmp1: volume=store:100/m.raw,mp=/m\n"
        "lxc.mount.entry = /y y none\nlxc.apparmor.profile: unconfined\nmp300: store:100/z.raw\n"
        "[pve:pending]\nunused0: store:100/u.raw\n[pending]\n"
        "mp4: store:100/s.raw\n",
        "container",
    )
    assert paths(guest) == {"100/r.raw", "/srv/x", "100/m.raw", "100/z.raw", "100/u.raw", "100/s.raw"}
    assert guest.facts.unread == ("lxc.mount.entry = /y y none", "mp300: store:100/z.raw")
    assert [one.name for one in guest.facts.snapshots] == ["pending"]
    assert guest.facts.name == "CT 100"


LINES = st.one_of(
    st.from_regex(
        r"(scsi|ide|unused|x)[0-9]{0,3}: ?(file=)?(store:100/[a-c]\.raw|none)?(,(size|ro|new)=[0-9]{1,2}G?)*",
        fullmatch=True,
    ),
    st.from_regex(r"\[[A-Za-z: !-]{0,12}\]", fullmatch=True),
    st.text(max_size=30),
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(LINES, max_size=12), st.sampled_from(["vm", "container"]))
def test_no_volume_of_any_file_is_lost(lines: list[str], kind: str) -> None:
    """Whatever stands there: an image that the text names is a disk's, or stands in a line that was not read."""
    text = "\n".join(lines)
    guest = vm(text, kind)
    told = "\n".join([*(disk.volume for disk in guest.facts.disks), *guest.facts.unread])
    for line in text.split("\n"):
        for name in ("store:100/a.raw", "store:100/b.raw", "store:100/c.raw"):
            if name in line and not line.startswith("#"):
                assert name in told
    assert guest.facts.digest == hashlib.sha1(text.encode()).hexdigest()


@settings(max_examples=60)
@given(st.lists(LINES, max_size=12))
def test_what_proxmox_reads_is_read_the_same(lines: list[str]) -> None:
    text = "\n".join(lines)
    known = parse_vm(text)
    guest = vm(text)
    shown = {disk.target: disk.volume for disk in guest.facts.disks if not disk.only_in}
    for key, value in known.now.items():
        if key.startswith(("scsi", "ide", "unused")) and "store:" in value:
            assert shown[key] in value


def test_what_the_agent_could_not_read_is_a_reason_not_to_know() -> None:
    answer = {
        "node": "pve1", "running": {}, "files": [{"name": "storage.cfg", "content_b64": b64(b"what\n")}],
        "failed": [{"name": "nodes/pve1/qemu-server/7.conf", "why": "it is a symbolic link"}],
    }  # fmt: skip
    assert conffiles.read(answer).unknown == (
        "/etc/pve/nodes/pve1/qemu-server/7.conf could not be read: it is a symbolic link.",
        "/etc/pve/storage.cfg has a line that could not be parsed: what",
    )
    for broken in ({}, {**answer, "files": [{}]}, {**answer, "files": [{"name": "x", "content_b64": "?"}]}):
        with pytest.raises(HostError):
            conffiles.read(broken)


# Both together


def test_both_together_know_what_the_api_hides_and_what_is_true_now(server: ProxmoxServer, client: Client) -> None:
    server.world.guests["vm", 110].running = True
    facts = merged(reader.read(client), read())
    assert facts.unknown == ()
    assert facts.cluster == "lab"
    by_id = {guest.vmid: guest for guest in facts.guests}
    assert by_id[110].facts.state == "running"
    assert next(one for one in facts.storages if one.name == "store").total_bytes == 270553174016
    hidden = {disk.target for disk in by_id[107].facts.disks if disk.only_in == "hidden"}
    assert hidden == {"scsi0", "scsi1", "scsi5", "scsi31", "ide9", "unused300", "lvmthing0"}
    assert {line.partition(":")[0] for line in by_id[107].facts.unread} == hidden
    assert by_id[100].facts.unread == ("description-note-not-a-key: see the wiki",)


def test_proxmox_itself_decides_what_it_understands(server: ProxmoxServer, client: Client) -> None:
    """A newer version may know an option that is not known here, and an older one may not know one that is."""
    api = reader.read(client)
    scsi1 = DiskFacts("scsi1", "disk", "/mnt/pve/store/images/106/m.qcow2", "qcow2", volume="store:106/m.qcow2")

    def told(guest: ProxmoxGuest) -> ProxmoxGuest:
        if guest.vmid != 107:
            return guest
        kept = [disk for disk in guest.facts.disks if disk.target != "virtio0"]
        return replace(guest, facts=replace(guest.facts, disks=(*kept, scsi1)))

    odd = next(
        guest for guest in merged(replace(api, guests=tuple(map(told, api.guests))), read()).guests if guest.vmid == 107
    )
    only_in = {disk.target: disk.only_in for disk in odd.facts.disks}
    assert (only_in["scsi1"], only_in["virtio0"]) == ("", "hidden")
    lines = {line.partition(":")[0] for line in odd.facts.unread}
    assert "scsi1" not in lines
    assert "virtio0" in lines


def test_what_the_token_may_not_see_the_files_tell(server: ProxmoxServer, client: Client) -> None:
    server.world.allow(*(right for right in AUDITOR if right != "VM.Audit"))
    api = reader.read(client)
    assert api.guests == ()
    facts = merged(api, read())
    assert facts.unknown == ()
    assert len(facts.guests) == 8
    assert next(guest for guest in facts.guests if guest.vmid == 100).facts.state == "running"
    assert "guests" in {right.feature for right in facts.missing}


def test_a_guest_that_changed_in_between_uses_what_either_names(server: ProxmoxServer, client: Client) -> None:
    server.world.allow(*ALL)
    api = reader.read(client)
    changed = {"nodes/pve1/qemu-server/101.conf": "name: tmpl-deb12\nscsi5: store:101/new.raw\n"}
    guest = next(guest for guest in merged(api, read(changed)).guests if guest.vmid == 101)
    assert paths(guest) == {"101/base-101-disk-0.qcow2", "101/new.raw"}
    assert guest.facts.digest == next(one for one in api.guests if one.vmid == 101).facts.digest


def test_a_file_that_could_not_be_read_stays_a_reason(client: Client) -> None:
    files_told = replace(read(), unknown=("/etc/pve/x could not be read.",))
    assert merged(reader.read(client), files_told).unknown == ("/etc/pve/x could not be read.",)


def test_the_files_and_a_list_of_states_are_enough(server: ProxmoxServer, client: Client) -> None:
    server.world.guests["vm", 101].running = True
    api = reader.read(client, configs=False)
    assert not [one for one in server.seen if one.path.endswith("/config")]
    assert {guest.vmid: guest.facts.name for guest in api.guests}[300] == "ct1"
    facts = merged(api, read())
    assert facts.unknown == ()
    by_id = {guest.vmid: guest for guest in facts.guests}
    assert by_id[101].facts.state == "running"
    assert by_id[102].facts.lock == "backup"
    assert replace(by_id[107], facts=replace(by_id[107].facts, state="unknown")) == next(
        guest for guest in read().guests if guest.vmid == 107
    )
    server.world.guests["vm", 900] = Guest("vm", 900, "name: new\nscsi0: store:900/x.raw\n")
    facts = merged(reader.read(client, configs=False), read())
    assert facts.unknown == ("Guest 900 was created after its node's files were read. Scan the host again.",)
    assert merged(reader.read(client), read()).unknown == ()


def test_guests_of_other_nodes_stay_known_and_one_that_has_just_moved_is_where_the_api_has_it(
    server: ProxmoxServer, client: Client
) -> None:
    away = {
        "nodes/pve2/qemu-server/501.conf": "name: away\nscsi0: store:501/vm-501-disk-0.qcow2\n",
        "nodes/pve2/qemu-server/900.conf": "name: moved\nscsi0: store:900/x.raw\n",
    }
    server.world.guests["vm", 900] = Guest("vm", 900, away["nodes/pve2/qemu-server/900.conf"], running=True)
    for configs in (True, False):
        facts = merged(reader.read(client, configs=configs), read(away))
        found = {guest.vmid: (guest.node, guest.facts.state, paths(guest)) for guest in facts.guests}
        assert found[501] == ("pve2", "unknown", {"501/vm-501-disk-0.qcow2"})
        assert found[900] == ("pve1", "running", {"900/x.raw"})
        assert len(facts.guests) == len(found)
        assert facts.unknown == ()


def test_drives_that_will_not_be_what_they_are_are_told() -> None:
    text = (
        "scsi0: store:1/vm-1-disk-0.qcow2\nscsi1: store:1/vm-1-disk-1.qcow2\nsata0: store:1/vm-1-disk-2.raw\n"
        "sata1: store:1/vm-1-disk-3.raw\nsata2: store:1/vm-1-disk-4.raw\n\n[PENDING]\ndelete: !sata0,net1,sata1\n"
        "memory: 4096\nscsi0: store:1/vm-1-disk-0.qcow2,cache=writeback\nscsi1: store:1/vm-1-disk-9.qcow2\n"
        "scsi5: store:1/vm-1-disk-8.qcow2\n\n[old]\nsata2: store:1/vm-1-disk-7.raw\n"
    )
    guest = vm(text)
    assert guest.facts.waiting == ("sata0", "sata1", "scsi1")
    assert "delete" not in guest.options
    assert guest.facts.unread == ()
