"""Guests of libvirt whose QEMU an update has replaced since they were started: named with what their logs tell."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent.host import facts
from tests.harness.filesystems import new_program

#: As libvirt 9.0 of Debian 12 and 10.10 of CentOS Stream 9 write it.
DEBIAN = (
    "2026-11-28 17:00:00.000+0000: starting up libvirt version: 9.0.0, package: 9.0.0-4+deb12u2 (Debian), "
    "qemu version: 7.2.22Debian 1:7.2+dfsg-7+deb12u18, kernel: 6.1.0-56-cloud-amd64, hostname: one\n"
)
STREAM = (
    "2026-11-28 17:00:00.000+0000: starting up libvirt version: 10.10.0, package: 7.el9 (builder@centos.org), "
    "qemu version: 9.1.0qemu-kvm-9.1.0-15.el9, kernel: 5.14.0, hostname: one\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("run/libvirt/qemu", "var/log/libvirt/qemu"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc").symlink_to("/proc")
    return tmp_path


@pytest.fixture
def program(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A program that runs, and its process."""
    path = new_program(tmp_path / "qemu", Path("/bin/sleep").read_bytes())
    process = subprocess.Popen([path, "60"])
    yield path, process.pid
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("log", "version"),
    [
        (STREAM + DEBIAN, "7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)"),
        (DEBIAN + STREAM + "terminating on signal 15\n", "9.1.0 (qemu-kvm-9.1.0-15.el9)"),
        ("char device redirected to /dev/pts/0\n", facts.UNKNOWN_QEMU),
        (None, facts.UNKNOWN_QEMU),
    ],
)
def test_a_guest_whose_qemu_was_replaced_is_told_with_what_it_was_started_with(
    root: Path, program: tuple[Path, int], log: str | None, version: str
) -> None:
    path, pid = program
    (root / "run/libvirt/qemu/one.pid").write_text(str(pid))
    if log is not None:
        (root / "var/log/libvirt/qemu/one.log").write_text(log)
    assert facts.older_qemus(str(root)) == {}
    path.unlink()
    assert facts.older_qemus(str(root)) == {"one": version}


@pytest.mark.parametrize("said", ["4194305", "", "rubbish"])
def test_one_that_has_ended_is_none(root: Path, said: str) -> None:
    (root / "run/libvirt/qemu/one.pid").write_text(said)
    assert facts.older_qemus(str(root)) == {}
