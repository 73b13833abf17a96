"""What a copy takes over beside the content."""

import os
import subprocess
from pathlib import Path

import pytest

from storage_admin.agent.host import attributes
from storage_admin.agent.protocol import HostError
from tests.agent.harness import held_open
from tests.harness.filesystems import immutable


@pytest.fixture
def pair(tmp_path: Path) -> tuple[int, int]:
    for name in ("old", "new"):
        (tmp_path / name).write_bytes(b"")
    return os.open(tmp_path / "old", os.O_RDONLY), os.open(tmp_path / "new", os.O_RDWR)


def test_copies_owner_mode_acl_and_extended_attributes(pair: tuple[int, int], tmp_path: Path) -> None:
    old, new = pair
    os.fchown(old, 12345, 23456)
    os.fchmod(old, 0o4640)
    subprocess.run(["setfacl", "-m", "u:1234:rw,g:4321:r", tmp_path / "old"], check=True)
    os.setxattr(old, "user.comment", b"\x00\xff")
    os.setxattr(new, "user.stale", b"x")
    attributes.copy(old, new)
    status = os.fstat(new)
    assert (status.st_uid, status.st_gid) == (12345, 23456)
    assert status.st_mode == os.fstat(old).st_mode
    acl = [
        subprocess.run(["getfacl", "-cn", tmp_path / n], capture_output=True, check=True).stdout for n in ("old", "new")
    ]
    assert b"user:1234:rw" in acl[0]
    assert acl[0] == acl[1]
    assert os.listxattr(new) == os.listxattr(old)
    assert os.getxattr(new, "user.comment") == b"\x00\xff"


def test_leaves_out_what_libvirt_remembers_of_a_running_guest(pair: tuple[int, int]) -> None:
    old, new = pair
    os.setxattr(old, "trusted.libvirt.security.dac", b"+0:+0")
    attributes.copy(old, new)
    assert "trusted.libvirt.security.dac" not in os.listxattr(new)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda fd: os.fchmod(fd, 0o777), "mode"),
        (lambda fd: os.fchown(fd, 7, 8), "owner"),
        (lambda fd: os.setxattr(fd, "user.x", b"y"), "extended attributes"),
    ],
)
def test_names_what_differs(pair: tuple[int, int], change: object, difference: str) -> None:
    assert callable(change)
    old, new = pair
    attributes.copy(old, new)
    assert attributes.differences(old, new) == ""
    change(old)
    assert attributes.differences(old, new) == difference


def test_fails_where_an_attribute_cannot_be_set(pair: tuple[int, int]) -> None:
    old, _ = pair
    os.fchown(old, 12345, 23456)
    with held_open("/proc/self/comm") as target, pytest.raises(HostError):
        attributes.copy(old, target)


def test_sees_that_a_file_is_immutable(pair: tuple[int, int], tmp_path: Path) -> None:
    old, _ = pair
    assert not attributes.flags(old) & attributes.IMMUTABLE
    with immutable(tmp_path / "old"):
        assert attributes.flags(old) & attributes.IMMUTABLE


def test_copies_the_flags_that_must_be_there_before_the_first_byte(pair: tuple[int, int], tmp_path: Path) -> None:
    old, new = pair
    subprocess.run(["chattr", "+dA", tmp_path / "old"], check=True)
    attributes.copy_flags(old, new)
    assert attributes.flags(new) & 0xC0 == 0xC0
