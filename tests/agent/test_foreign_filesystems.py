"""Which filesystems other machines may have mounted, and which may make one wait."""

from pathlib import Path

import pytest

from storage_admin.agent.host.mounts import LOCAL, Mount, Mounts, is_quiet, parse

# Type and source as each writes them into mountinfo.
NETWORK = [
    ("beegfs", "beegfs_nodev"), ("ceph", "192.0.2.1:6789:/"), ("cifs", "//nas/vm"), ("cvfs", "snfs1"),
    ("fuse", "https://nas/dav"), ("fuse.cephfs", "ceph-fuse"), ("fuse.davfs", "https://nas/dav"),
    ("fuse.glusterfs", "g1:/vol"), ("fuse.juicefs", "JuiceFS:vm"), ("fuse.lizardfs", "mfsmaster:9421"),
    ("fuse.mergerfs", "/mnt/a:/mnt/b"), ("fuse.quobyte", "quobyte@nas/vm"), ("fuse.saunafs", "sfsmaster:9421"),
    ("fuse.seaweedfs", "nas:8888:/"), ("fuse.sshfs", "root@nas:/vm"), ("fuse.vmhgfs-fuse", "vmhgfs-fuse"),
    ("gpfs", "/dev/gpfs0"), ("nfs4", "nas:/vm"), ("orangefs", "tcp://nas:3334/orangefs"), ("prl_fs", "vm"),
    ("vboxsf", "vm"), ("virtiofs", "vm"),
]  # fmt: skip


def mount(filesystem: str, source: str = "none", point: str = "/srv/vm") -> Mount:
    return parse(f"30 22 0:40 / {point} rw - {filesystem} {source} rw".encode())[0]


def names(filesystem: str, source: str, machine: str) -> tuple[str, str]:
    one = mount(filesystem, source)
    return Mounts([one]).keys(one, b"/srv/vm/a", machine)


@pytest.mark.parametrize(("filesystem", "source"), NETWORK)
def test_a_filesystem_of_a_server_is_the_same_one_on_every_host_and_may_wait(filesystem: str, source: str) -> None:
    one = mount(filesystem, source)
    assert (one.is_network, one.may_wait) == (True, True)
    assert names(filesystem, source, "one") == names(filesystem, source, "two")
    assert Mounts([one]).waits
    assert Mounts([one]).may_wait(b"/srv/vm/a")
    assert Mounts([one]).shared_below([b"/srv"]) == [b"/srv/vm"]


@pytest.mark.parametrize("filesystem", ["aufs", "ecryptfs", "fuse.bindfs", "neverheardfs", "vmfs", "vxfs"])
def test_one_that_nobody_knows_may_be_anybodys(filesystem: str) -> None:
    assert mount(filesystem).is_network
    # What is in the kernel and unknown may just as well be made up by it: nothing is held back for it.
    assert mount(filesystem).may_wait == filesystem.startswith("fuse")


def test_an_unknown_one_on_a_disk_is_named_by_the_disk() -> None:
    first, second = names("neverheardfs", "/dev/sdb1", "one")[0], names("neverheardfs", "/dev/sdb1", "two")[0]
    assert first == second == "neverheardfs:0:40", "the numbers, as there is no UUID here"
    assert names("gfs2", "/dev/sdb1", "one")[0] == "gfs2:0:40"


@pytest.mark.parametrize(
    "filesystem",
    ["bcachefs", "btrfs", "exfat", "ext4", "f2fs", "fuseblk", "iso9660", "jfs", "ntfs3", "overlay", "reiserfs", "tmpfs",
     "xfs", "zfs"],
)  # fmt: skip
def test_one_on_a_disk_of_this_machine_is_its_own(filesystem: str) -> None:
    one = mount(filesystem, "/dev/sdb1")
    assert (one.is_network, one.may_wait) == (False, False)
    assert names(filesystem, "/dev/sdb1", "one") != names(filesystem, "/dev/sdb1", "two")
    assert not Mounts([one]).waits


def test_what_the_kernel_makes_up_is_no_storage_and_nothing_waits_for_it() -> None:
    mounts = Mounts.of_this_machine()
    kept = ("/proc", "/sys", "/dev", "/run")
    own = [one for one in parse(Path("/proc/self/mountinfo").read_bytes()) if one.point.decode().startswith(kept)]
    assert len(own) > 3
    strange = [one.filesystem for one in own if one.filesystem != "autofs" and (one.is_network or one.may_wait)]
    assert [name for name in strange if not name.startswith("fuse")] == []
    assert not mounts.may_wait(b"/proc/self/fd")


def test_every_filesystem_on_disks_that_this_kernel_has_is_known_as_local() -> None:
    listed = [line.split() for line in Path("/proc/filesystems").read_text().splitlines()]
    on_disks = {words[0] for words in listed if len(words) == 1} - {"gfs2", "ocfs2", "vxfs", "vmfs"}
    assert on_disks
    assert on_disks <= LOCAL


def test_automatic_mounts_wait_and_are_nobodys_storage() -> None:
    assert (mount("autofs").is_network, mount("autofs").may_wait) == (False, True)


def test_a_node_of_proxmox_waits_for_nothing_of_its_own() -> None:
    own = [mount("fuse", "/dev/fuse", "/etc/pve"), mount("fuse.lxcfs", "lxcfs", "/var/lib/lxcfs")]
    assert not Mounts(own).waits
    assert not Mounts(own).may_wait(b"/etc/pve/qemu-server")


def test_a_line_that_does_not_wait_is_told_without_parsing_it() -> None:
    for filesystem in ("nfs4", "autofs", "fuse.sshfs", "ext4", "proc", "neverheardfs"):
        line = f"30 22 0:40 / /srv/a rw shared:1 - {filesystem} none rw".encode()
        assert not (is_quiet(line) and mount(filesystem).may_wait)
    assert is_quiet(b"30 22 0:40 / /srv/a rw - ext4 /dev/sda rw")


def test_what_is_trusted_is_looked_at_also_below_an_automatic_mount() -> None:
    mounts = Mounts(
        parse(b"30 22 0:40 / /none/net rw - autofs auto rw\n31 30 0:41 / /none/net/nas rw - nfs4 nas:/vm rw")
    )
    assert mounts.may_wait_there(b"/none/net/nas/a")
    mounts.trust(mounts.of_path(b"/none/net/nas"))
    paths = (b"/none/net/nas/a", b"/none/net/other/a", b"/none/net/nas/../other/a", b"/none/a/../net/b", b"/none/netto")
    assert [mounts.may_wait_there(path) for path in paths] == [False, True, True, True, False]
