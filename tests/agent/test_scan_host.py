"""What a scan says about a host: Proxmox VE's storages, libvirt, filesystems and their keys."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from storage_admin.agent.host import facts
from storage_admin.agent.host.facts import Storage
from storage_admin.agent.host.mounts import Mounts, parse
from tests.agent.formats.test_against_qemu import qemu_img
from tests.agent.harness import held_open
from tests.agent.recording import RecordingIO
from tests.agent.test_scan import scanned
from tests.harness.filesystems import new_folder

STORAGE_CFG = """\
dir: local
\tpath /var/lib/vz
\tcontent iso,vztmpl,backup

lvmthin: local-lvm
\tthinpool data
\tvgname pve
\tcontent rootdir,images

nfs: nas
\tserver 192.0.2.9
\texport /export/vm
\tpath /mnt/pve/nas
\tcontent images
\tnodes pve1,pve2

cifs: share
\tserver 192.0.2.10
\tshare vm
\tdisable
"""


def test_reads_the_storages_of_proxmox(tmp_path: Path) -> None:
    (tmp_path / "storage.cfg").write_text(STORAGE_CFG)
    assert facts.proxmox_storages(str(tmp_path)) == [
        Storage("local", "dir", "/var/lib/vz", ("iso", "vztmpl", "backup"), disabled=False, nodes=()),
        Storage("local-lvm", "lvmthin", None, ("rootdir", "images"), disabled=False, nodes=()),
        Storage(
            "nas",
            "nfs",
            "/mnt/pve/nas",
            ("images",),
            disabled=False,
            nodes=("pve1", "pve2"),
            mount_point="/mnt/pve/nas",
        ),
        Storage("share", "cifs", "/mnt/pve/share", (), disabled=True, nodes=(), mount_point="/mnt/pve/share"),
    ]
    assert facts.proxmox_storages(str(tmp_path / "none")) == []


@pytest.mark.qemu
@pytest.mark.parametrize(
    ("kind", "line", "state"),
    [
        ("dir", "\tis_mountpoint 1", "missing"),
        ("dir", "\tis_mountpoint yes", "missing"),
        ("dir", "\tis_mountpoint", "missing"),
        ("dir", "\tis_mountpoint {path}", "missing"),
        ("btrfs", "\tis_mountpoint 1", "missing"),
        ("nfs", "\tserver 192.0.2.9", "missing"),
        ("cifs", "\tserver 192.0.2.9", "missing"),
        ("dir", "\tis_mountpoint /proc", "ok"),
        ("dir", "\tis_mountpoint 0", "ok"),
        ("dir", "\tis_mountpoint no", "ok"),
        ("dir", "\tshared 1", "ok"),
    ],
)
def test_a_folder_where_a_storage_was_never_mounted_is_not_the_storage(
    tmp_path: Path, kind: str, line: str, state: str
) -> None:
    (tmp_path / "pve").mkdir()
    pool = new_folder(tmp_path / "pool")
    qemu_img("create", "-f", "qcow2", pool / "under-the-mount.qcow2", "1M")
    (tmp_path / "pve/storage.cfg").write_text(f"{kind}: far\n\tpath {pool}\n{line.format(path=pool)}\n")
    io = scanned(pool, etc_pve=str(tmp_path / "pve"))
    (told,) = io.all("pool")
    assert (told["state"], len(io.images())) == (state, 1 if state == "ok" else 0)
    assert (told["capacity_bytes"] is None) == (state != "ok")


def host_of(io: RecordingIO) -> dict[str, object]:
    assert io.events[0]["event"] == "host"
    return io.events[0]


@pytest.mark.qemu
def test_the_first_event_tells_the_host(tmp_path: Path) -> None:
    (tmp_path / "pve").mkdir()
    (tmp_path / "pve" / "storage.cfg").write_text(STORAGE_CFG)
    host = host_of(scanned(tmp_path / "pool", etc_pve=str(tmp_path / "pve")))
    assert host["hostname"] == socket.gethostname()
    assert f"version {host['qemu_img']} " in qemu_img("--version")
    assert host["zstd"] is True
    assert host["proxmox"] is True
    storages = host["proxmox_storages"]
    assert isinstance(storages, list)
    assert [storage["name"] for storage in storages] == ["local", "local-lvm", "nas", "share"]
    assert host_of(scanned(tmp_path / "pool", etc_pve=str(tmp_path / "none")))["proxmox"] is False


def test_libvirt_without_daemon_and_guests_can_have_no_guests(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert facts.libvirt_state(root) == "absent"
    (tmp_path / "usr" / "sbin").mkdir(parents=True)
    (tmp_path / "usr" / "sbin" / "libvirtd").touch()
    (tmp_path / "etc" / "libvirt" / "qemu" / "networks").mkdir(parents=True)
    (tmp_path / "etc" / "libvirt" / "qemu" / "networks" / "default.xml").touch()
    assert facts.libvirt_state(root) == "idle"


@pytest.mark.parametrize("place", ["etc/libvirt/qemu", "run/libvirt/qemu", "etc/libvirt/lxc"])
def test_a_defined_or_running_guest_makes_libvirt_present(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "guest.xml").touch()
    assert facts.libvirt_state(str(tmp_path)) == "present"


def test_a_daemon_that_answers_makes_libvirt_present(tmp_path: Path) -> None:
    (tmp_path / "run" / "libvirt").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "run" / "libvirt" / "libvirt-sock"))
        assert facts.libvirt_state(str(tmp_path)) == "absent"  # a left-over socket that nobody listens on
        daemon.listen()
        assert facts.libvirt_state(str(tmp_path)) == "present"


# proc_pid_mountinfo(5); addresses are of the documentation range.
MOUNTINFO = b"""\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /mnt/pve/nas rw,relatime shared:2 - nfs4 192.0.2.9:/export/vm rw,vers=4.2
31 22 0:40 /guests /srv/with\\040space rw,relatime - nfs 192.0.2.9:/export/vm rw
32 22 254:0 /data/pool /bind rw,relatime shared:1 master:7 - ext4 /dev/vda rw
33 22 0:50 / /auto rw - autofs systemd-1 rw
34 22 0:51 / /zpool rw - zfs rpool/data rw
35 22 254:9 / /ocfs rw - ocfs2 /dev/nowhere rw
not a line of mountinfo
"""


def keys(path: bytes, machine: str = "machine") -> tuple[str, str]:
    mounts = Mounts(parse(MOUNTINFO))
    mount = mounts.of_path(path)
    assert mount is not None
    return mounts.keys(mount, path, machine)


def test_one_export_has_one_key_on_every_host_and_mount_point() -> None:
    assert keys(b"/mnt/pve/nas/guests/a", "one")[1] == keys(b"/srv/with space/a", "two")[1]
    assert keys(b"/mnt/pve/nas") == ("nfs:192.0.2.9:/export/vm", "nfs:192.0.2.9:/export/vm/")


def test_a_bind_mount_has_the_key_of_the_folder_it_shows() -> None:
    assert keys(b"/bind/x") == keys(b"/data/pool/x")
    assert keys(b"/bind/x", "one") != keys(b"/bind/x", "two")
    assert keys(b"/zpool/x")[0] == "fs:machine:zfs rpool/data"


def test_folders_next_to_each_other_differ() -> None:
    assert keys(b"/data/pool") != keys(b"/data/pool2")
    assert keys(b"/data/pool")[0] == keys(b"/data/pool2")[0]


def test_network_filesystems_are_known_and_merely_looking_is_avoided() -> None:
    mounts = Mounts(parse(MOUNTINFO))
    assert [mount.is_network for mount in parse(MOUNTINFO)] == [False, True, True, False, False, False, True]
    waits = [
        path for path in (b"/a", b"/mnt/pve/nas/a", b"/mnt/pve/nasty", b"/auto/b", b"/bind/c") if mounts.may_wait(path)
    ]
    assert waits == [b"/mnt/pve/nas/a", b"/auto/b"]
    mounts.trust(mounts.of_path(b"/mnt/pve/nas"))
    assert not mounts.may_wait(b"/mnt/pve/nas/a")
    assert not mounts.may_wait(b"/srv/with space/a"), "the same filesystem, read anyway"
    assert mounts.may_wait(b"/auto/b")
    assert mounts.shared_below([b"/mnt/pve/", b"/ocf"]) == [b"/mnt/pve/nas"]
    assert mounts.shared_below([b"/"]) == [b"/mnt/pve/nas", b"/ocfs", b"/srv/with space"]


def test_what_the_system_mounts_in_proc_is_no_storage_to_wait_for() -> None:
    lines = MOUNTINFO.splitlines()
    system = b"36 22 0:52 / /proc/sys/fs/binfmt_misc rw - autofs systemd-1 rw"
    assert not Mounts(parse(b"\n".join([lines[0], system]))).waits
    assert Mounts(parse(MOUNTINFO)).waits


def test_this_machines_folders_have_their_mounts(tmp_path: Path) -> None:
    mounts = Mounts.of_this_machine()
    for folder in ("/proc", str(tmp_path)):
        with held_open(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
            by_descriptor = mounts.of_descriptor(fd)
        assert by_descriptor is not None
        assert by_descriptor == mounts.of_path(os.fsencode(folder))


def test_what_runs_guests_is_told_with_the_revision_of_its_package() -> None:
    said = subprocess.run(["qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True).stdout
    told = facts.host_event()["qemu_system"]
    assert told
    assert said.startswith(f"QEMU emulator version {told}")
    assert "(" in told
