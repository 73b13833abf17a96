"""Storages from storage.cfg and from the API."""

from storage_admin.hosts.proxmox import storages
from storage_admin.hosts.proxmox.storages import StorageFacts, integer, of_definition, parse_file, with_status
from storage_admin.hosts.proxmox.volumes import place
from tests.harness.proxmox.world import files, lab


def test_the_file_and_the_api_define_the_same() -> None:
    found, unread = parse_file(files()["storage.cfg"].decode())
    assert unread == ()
    assert {one.name: one for one in found} == {one["storage"]: of_definition(one) for one in lab().storages}


def test_each_kind_is_read_for_what_it_is() -> None:
    found = {one.name: one for one in parse_file(files()["storage.cfg"].decode())[0]}
    assert found["store"] == StorageFacts(
        "store", "dir", "/mnt/pve/store",
        content=("backup", "images", "import", "iso", "rootdir", "snippets", "vztmpl"),
    )  # fmt: skip
    assert found["local-lvm"].place == "pve/data"
    assert (found["local-lvm"].group, found["local-lvm"].kind, found["local-lvm"].is_folder) == (
        "pve",
        "lvmthin",
        False,
    )
    assert (found["tank"].group, found["tank"].path, found["tank"].kind) == ("rpool/data", "/rpool/data", "zfs")
    nfs = found["nfs-dead"]
    assert (nfs.path, nfs.server, nfs.export) == ("/mnt/pve/nfs-dead", "192.0.2.99", "/export/pve")
    assert (nfs.shared, nfs.kind, nfs.is_folder) == (True, "nfs", True)
    assert (found["ceph"].kind, found["ceph"].shared) == ("rbd", True)
    tenant = of_definition({"type": "rbd", "storage": "far", "namespace": "tenant"})
    assert (found["ceph"].place, tenant.place) == ("rbd", "rbd/tenant")
    assert place("far:vm-1-disk-0", {"far": tenant}) == "rbd:rbd/tenant/vm-1-disk-0"
    assert (found["other-node"].nodes, found["other-node"].on("pve1"), found["other-node"].on("pve2")) == (
        ("pve2", "pve3"), False, True,
    )  # fmt: skip
    assert not found["disabled"].enabled
    assert found["store"].holds_images


def test_what_is_not_active_has_no_sizes() -> None:
    one = StorageFacts("store", "dir", "/mnt/pve/store")
    status = {"active": 0, "enabled": 1, "shared": 0, "total": 0, "used": 0, "avail": 0}
    dead = with_status(one, status)
    assert (dead.active, dead.total_bytes, dead.used_bytes, dead.available_bytes) == (False, None, None, None)
    huge = with_status(one, status | {"active": 1, "total": 1 << 60, "used": "7", "avail": 2.0})
    assert (huge.total_bytes, huge.used_bytes, huge.available_bytes) == (1 << 60, 7, 2)
    assert with_status(one, {"active": 1}).total_bytes is None


def test_odd_lines_of_the_file_are_told() -> None:
    found, unread = parse_file(
        "  path /nowhere\n# said\n\ncifs: share\n  server nas\n  share vm\n  content-dirs images=x,iso=../etc iso\n"
        "odd line\n"
        "btrfs: b\n\tpath /mnt/b/\n\tis_mountpoint yes\n"
    )
    assert unread == ("  path /nowhere", "odd line")
    assert [one.path for one in found] == ["/mnt/pve/share", "/mnt/b", "/var/lib/vz"]
    assert found[0].subfolders == {"images": "x"}
    assert (found[0].export, found[0].shared) == ("vm", True)
    assert found[1].is_mountpoint


def test_local_is_there_whatever_the_file_says() -> None:
    for text in ("", "dir: local\n\tpath /elsewhere\n", "lvm: local\n\tvgname x\n"):
        assert parse_file(text) == ((storages.LOCAL,), ())
    (kept,), _ = parse_file("dir: local\n\tcontent iso\n\tnodes pve2\n")
    assert (kept.path, kept.content, kept.nodes) == ("/var/lib/vz", ("iso",), ())


def test_content_that_is_not_said_is_what_proxmox_takes_it_for() -> None:
    found = {one.name: one.content for one in parse_file("dir: d\n\tpath /d\n\nnfs: n\n\npbs: p\n\nlvm: l\n")[0]}
    assert found == {"d": ("images", "rootdir"), "n": ("images",), "p": (), "l": ("images",), "local": found["local"]}


def test_numbers_come_in_many_ways() -> None:
    assert [integer(value) for value in (5, "5", 5.0, 0)] == [5, 5, 5, 0]
    odd: tuple[object, ...] = (True, None, "x", "", "-1", -1.5, float("inf"), float("nan"), [], "\u0661")
    assert [value for value in odd if integer(value) is not None] == []


def test_all_folders_of_the_agent_are_folders_here() -> None:
    assert {"btrfs", "cephfs", "cifs", "dir", "glusterfs", "nfs"} == storages.FOLDERS
