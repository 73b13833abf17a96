"""``setup/prepare``: what it says without root, and that it believes nothing half-done.

Python and npm are stand-ins that note what they are asked for: the real ones take minutes and a network.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.filesystems import new_program

ROOT = Path(__file__).resolve().parents[1]
TOOLS = (
    *("bash", "sh", "env", "cat", "cp", "cut", "find", "flock", "grep", "head", "id", "mkdir", "mv", "rm", "sha256sum"),
    *("touch", "sleep", "ldd", "dirname"),
)
PROVIDED = ("gcc", "pkg-config", "qemu-img", "redis-server", "setpriv", "node")
PROVIDED_FOR_TESTS = (
    *("libvirtd", "virsh", "qemu-system-x86_64", "busybox", "chromium", "sshd", "setfacl", "setfattr", "guestfish"),
    *("mkfs.ext4", "mkfs.xfs", "mkfs.vfat", "mkfs.btrfs", "mkntfs", "virt-df", "sfdisk", "zstd", "systemd-analyze"),
    *("strace", "visudo", "sshfs", "fio", "bonnie++", "curl", "xgettext", "jq"),
)

PYTHON = """#!/bin/sh
case "$*" in
"-m venv"*)
    echo venv >> "$CALLS"
    mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip install"*)
    echo "pip ${*##*--requirement }" >> "$CALLS"
    [ ! -e fail-pip ] || exit 1 ;;
"-c import sys; print"*) echo "3 11" ;;
esac
exit 0
"""
NPM = '#!/bin/sh\necho "npm $1" >> "$CALLS"\nmkdir -p node_modules\n[ ! -e fail-npm ] || exit 1\n'


class Machine:
    """A checkout of the project with a PATH of its own, as a user without root."""

    def __init__(self, folder: Path) -> None:
        self.project, self.bin, self.calls = folder / "project", folder / "bin", folder / "calls"
        (self.project / "setup").mkdir(parents=True)
        (self.project / "requirements").mkdir()
        self.bin.mkdir()
        for name in ("setup/prepare", "requirements/run.lock", "requirements/dev.lock", "package-lock.json"):
            shutil.copy(ROOT / name, self.project / name)
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None, name
            (self.bin / name).symlink_to(found)
        self.tool("python", PYTHON)
        self.tool("npm", NPM)
        for name in PROVIDED:
            self.tool(name, "#!/bin/sh\n")

    def tool(self, name: str, script: str) -> None:
        new_program(self.bin / name, script)

    def prepare(self, purpose: str = "run") -> subprocess.CompletedProcess[str]:
        become: list[str] = []
        if os.geteuid() == 0:
            subprocess.run(["chown", "-R", "65534:65534", self.project.parent], check=True)
            become = [shutil.which("setpriv") or "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
        env = {"PATH": str(self.bin), "PYTHON": str(self.bin / "python"), "CALLS": str(self.calls)}
        argv = [*become, "/bin/bash", str(self.project / "setup" / "prepare"), purpose]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, cwd=self.project)

    def asked_for(self) -> list[str]:
        """What was asked of Python and npm since the last look."""
        if not self.calls.exists():
            return []
        calls = self.calls.read_text().splitlines()
        self.calls.unlink()
        return calls


@pytest.fixture
def machine() -> Iterator[Machine]:
    folder = Path(tempfile.mkdtemp(prefix="sa-setup-"))
    folder.chmod(0o755)  # pytest's own folders are closed to other users
    yield Machine(folder)
    shutil.rmtree(folder)


def test_without_root_it_prints_the_command_and_leaves_nothing_half_done(machine: Machine) -> None:
    (machine.bin / "qemu-img").unlink()
    (machine.bin / "redis-server").unlink()
    machine.tool("apt-get", '#!/bin/sh\necho "apt-get $*" >> "$CALLS"\n')
    done = machine.prepare()
    assert done.returncode == 1
    assert "qemu-utils                 qemu-img reads and rewrites disk images" in done.stdout
    assert "redis-server               carries messages" in done.stdout
    command = "sudo apt-get update && sudo apt-get install --no-install-recommends qemu-utils redis-server"
    assert done.stderr.rstrip().endswith(command)
    assert not (machine.project / ".venv").exists()
    assert not (machine.project / "node_modules").exists()
    assert machine.asked_for() == []


def test_with_sudo_it_installs_what_is_missing_and_only_that(machine: Machine) -> None:
    (machine.bin / "qemu-img").unlink()
    machine.tool("sudo", '#!/bin/sh\n[ "$1" != -n ] || shift\n[ "$1" = true ] || exec "$@"\n')
    machine.tool("apt-get", '#!/bin/sh\nfor word; do :; done\necho "apt-get $word" >> "$CALLS"\n')
    done = machine.prepare()
    assert done.returncode == 0, done.stderr
    asked = [call for call in machine.asked_for() if call != "apt-get update"]
    assert asked == ["apt-get qemu-utils", "venv", "pip requirements/run.lock", "npm ci"]


def test_the_second_time_it_installs_nothing_and_says_nothing(machine: Machine) -> None:
    assert machine.prepare().returncode == 0
    assert machine.asked_for() == ["venv", "pip requirements/run.lock", "npm ci"]
    done = machine.prepare()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert machine.asked_for() == []


def test_a_python_environment_that_was_interrupted_is_built_anew(machine: Machine) -> None:
    (machine.project / "fail-pip").touch()
    assert machine.prepare().returncode != 0
    assert machine.asked_for() == ["venv", "pip requirements/run.lock"]
    (machine.project / ".venv" / "half").touch()
    (machine.project / "fail-pip").unlink()
    assert machine.prepare().returncode == 0
    assert machine.asked_for() == ["venv", "pip requirements/run.lock", "npm ci"]
    assert not (machine.project / ".venv" / "half").exists()


def test_browser_libraries_that_were_interrupted_are_fetched_anew(machine: Machine) -> None:
    (machine.project / "fail-npm").touch()
    assert machine.prepare().returncode != 0
    machine.asked_for()
    (machine.project / "fail-npm").unlink()
    assert machine.prepare().returncode == 0
    assert machine.asked_for() == ["npm ci"]


def test_a_changed_lock_is_installed(machine: Machine) -> None:
    assert machine.prepare().returncode == 0
    machine.asked_for()
    for name, asked in (("requirements/run.lock", "pip requirements/run.lock"), ("package-lock.json", "npm ci")):
        with (machine.project / name).open("a") as lock:
            lock.write("\n")
        assert machine.prepare().returncode == 0
        assert machine.asked_for() == [asked]


def test_an_environment_of_another_python_is_installed_again(machine: Machine) -> None:
    assert machine.prepare().returncode == 0
    machine.asked_for()
    python = machine.project / ".venv" / "bin" / "python"
    python.write_text(python.read_text().replace("3 11", "3 12"))
    assert machine.prepare().returncode == 0
    assert machine.asked_for() == ["pip requirements/run.lock"]


def test_a_tree_made_for_tests_serves_for_running_too(machine: Machine) -> None:
    for name in PROVIDED_FOR_TESTS:
        machine.tool(name, "#!/bin/sh\n")
    done = machine.prepare("test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.asked_for() == ["venv", "pip requirements/dev.lock", "pip requirements/run.lock", "npm ci"]
    assert machine.prepare("run").stdout == ""
    assert machine.asked_for() == []


def test_a_worker_needs_no_redis_and_nothing_for_the_browser(machine: Machine) -> None:
    for name in ("redis-server", "node", "npm"):
        (machine.bin / name).unlink()
    done = machine.prepare("worker")
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.asked_for() == ["venv", "pip requirements/run.lock"]
    assert "redis-server" in machine.prepare("run").stdout


def test_knows_three_purposes_and_no_other(machine: Machine) -> None:
    assert machine.prepare("walk").returncode == 2
    assert machine.asked_for() == []
