"""What the kernel tells of mounts of NFS and of exports: files of two machines with Debian 12 (Linux 6.1), shortened.

The server exports ``/srv`` with ``fsid=0`` and, on a filesystem of its own without extents, ``/srv/three``.
"""

import os
from pathlib import Path

import pytest

from storage_admin.agent.host import mounts, nfs
from storage_admin.agent.host.mounts import Mount, Mounts, parse
from tests.agent.harness import held_open

DATA = Path(__file__).parents[1] / "data" / "nfs"


def read(name: str) -> bytes:
    return (DATA / name).read_bytes()


def mount(point: str, name: str = "mountinfo") -> Mount:
    return next(one for one in parse(read(name)) if one.point == point.encode())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nfs, "_read", lambda path: read(Path(path).name))


def facts(point: str, folder: Path) -> dict[str, object]:
    with held_open(folder) as fd:
        return nfs.facts(mount(point), fd) or {}


@pytest.mark.parametrize(
    ("point", "version", "fsid", "soft", "locks", "holes", "reserves"),
    [
        ("/mnt/a", "4.2", "0", False, True, True, True),  # both were done there
        ("/mnt/c", "3", "0", False, True, False, False),
        ("/mnt/d", "4.2", "b4e88f8e55655aab", False, True, True, False),  # its server had refused to reserve
        ("/mnt/e", "3", "b4e88f8e55655aab", False, True, False, False),  # the same filesystem by the other version
        ("/mnt/f", "3", "6a8b6f1f46ca5a98", True, False, False, False),  # nolock,soft
        ("/mnt/h", "4.0", "0", False, True, False, False),
    ],
)
def test_a_mount_says_what_it_can_do(
    recorded: None, tmp_path: Path, point: str, version: str, fsid: str, soft: bool, locks: bool, holes: bool,
    reserves: bool,
) -> None:  # fmt: skip
    told = facts(point, tmp_path)
    names = ("version", "fsid", "soft", "locks", "holes", "reserves", "addresses")
    assert [told[name] for name in names] == [version, fsid, soft, locks, holes, reserves, ["10.9.0.1"]]
    assert (told["inode"], told["writable"], told["root_writes"]) == (tmp_path.stat().st_ino, True, True)


def test_what_nobody_has_tried_on_a_mount_is_not_known() -> None:
    untried = read("mountstats").replace(b"ALLOCATE: 3 3", b"ALLOCATE: 0 0")
    assert nfs.abilities(untried, b"/mnt/a", "4.2") == (None, None)
    assert nfs.abilities(untried, b"/mnt/nowhere", "4.2") == (None, None)


def test_the_server_itself_is_known_by_its_own_addresses(recorded: None, tmp_path: Path) -> None:
    loopback = mount("/mnt/l", "server_mountinfo")
    assert b"addr=127.0.0.1" in loopback.options
    with held_open(tmp_path) as fd:
        told = nfs.facts(loopback, fd)
    assert told is not None
    assert told["addresses"] == ["10.0.2.15", "10.9.0.1", "10.9.0.11", "fd00::1"]


def test_a_mount_from_the_machine_itself_has_another_key_on_each_machine() -> None:
    loopback = mount("/mnt/l", "server_mountinfo")
    keys = [Mounts([loopback]).keys(loopback, b"/mnt/l", machine)[0] for machine in ("one", "two")]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("path", "is_exported"),
    [("images/a", True), ("images", True), ("", True), ("shown", True), ("shown/a", True), ("images2", False)],
)
def test_a_folder_that_is_exported_is_on_a_network_however_it_is_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, is_exported: bool
) -> None:
    for folder in ("images", "images2", "shown"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").touch()
    here = mounts.Mounts.of_this_machine().of_path(os.fsencode(tmp_path))
    assert here is not None
    assert not here.is_network
    inside = b"/" + here.inside(os.fsencode(tmp_path))
    shown = Mount(-1, here.device, inside + b"/shown", b"/nowhere/else", here.filesystem, here.source)
    etab = tmp_path / "etab"
    etab.write_bytes(os.fsencode(tmp_path) + b"/images\t10.9.0.0/24(rw,sync)\n/nowhere/else\t*(ro)\n")
    folders = mounts.exported(str(etab))
    monkeypatch.setattr(mounts, "exported", lambda: folders)
    parsed = mounts.parse
    monkeypatch.setattr(mounts, "parse", lambda told: [*parsed(told), shown])
    with held_open(tmp_path / path) as fd:
        found = Mounts.of_this_machine().of_descriptor(fd)
    assert found is not None
    assert (found.exported, found.is_network) == (is_exported, is_exported)
    whole = os.fsencode(tmp_path / path)
    assert Mounts([found]).keys(found, whole, "m") == Mounts([here]).keys(here, whole, "m")
