"""Debian trees: made of the packages that apt here knows, entered by chroot, and booted with their own systemd."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.harness.processes import Daemon, wait_until

#: In a mount namespace of its own: what programs expect beside the files of the tree, $1.
_MOUNTS = """
cd / && mount --bind "$1" "$1" && mount -t proc proc "$1/proc" && mount -t tmpfs -o mode=755 tmpfs "$1/dev"
for node in null zero full random urandom tty; do touch "$1/dev/$node"; mount --bind "/dev/$node" "$1/dev/$node"; done
mkdir "$1/dev/pts" "$1/dev/shm" && ln -s /proc/self/fd "$1/dev/fd"
mount -t devpts -o newinstance,ptmxmode=666 devpts "$1/dev/pts" && ln -s pts/ptmx "$1/dev/ptmx"
mount -t tmpfs tmpfs "$1/dev/shm"
"""
#: The kernel's settings are those of this machine, and may not be changed; the control group, $2, is its own. Not by
#: chroot, within which no unit may have users of its own.
_BOOT = """
mount --bind "$1/proc/sys" "$1/proc/sys" && mount -o remount,bind,ro "$1/proc/sys"
mount -t sysfs -o ro sysfs "$1/sys" && mount -t tmpfs tmpfs "$1/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$1/run" && mount -t cgroup2 cgroup2 "$1/mnt"
mkdir "$1/mnt/$2" && echo 1 >"$1/mnt/$2/cgroup.procs" && umount "$1/mnt"
exec unshare --cgroup sh -ec 'mount -t cgroup2 cgroup2 "$1/sys/fs/cgroup"
cd "$1" && pivot_root . . && umount -l .
exec env -i container=tests PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd' sh "$1"
"""
_CLEAR = 'mount -t cgroup2 cgroup2 /mnt && find "/mnt/$1" -depth -type d -exec rmdir {} +'
_FORBID = "#!/bin/sh\nexit 101\n"
#: Of this machine's environment what programs need to reach the package indexes that it is set up for.
_PASSED_ON = ("PIP_CERT", "PIP_INDEX_URL", "http_proxy", "https_proxy", "no_proxy")


def mirror() -> str:
    """Where apt here has its Debian from.

    Raises:
        AssertionError: it knows none.
    """
    argv = ["apt-get", "indextargets", "Identifier: Packages", "Origin: Debian", "--format", "$(REPO_URI)"]
    known = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert known, "apt here knows no Debian: add it to its sources, and run apt-get update"
    return known[0]


class Tree:
    """A Debian of the name ``suite`` in a new folder."""

    def __init__(self, folder: Path, suite: str, packages: Sequence[str]) -> None:
        if shutil.which("mmdebstrap") is None:
            # Another process of the tests may be at it.
            wait = ("-o", "DPkg::Lock::Timeout=600")
            subprocess.run(["apt-get", *wait, "install", "-y", "-q", "mmdebstrap"], check=True)
        self.folder = folder
        options = ["--quiet", "--variant=minbase", f"--include={','.join(packages)}"]
        options += ["--aptopt=Apt::Install-Recommends false", "--dpkgopt=path-exclude=/usr/share/man/*"]
        source = f"deb {mirror()} {suite} main"
        subprocess.run(["mmdebstrap", *options, suite, str(folder), source], check=True, stdin=subprocess.DEVNULL)
        shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")

    def run(self, line: str, **environment: str) -> str:
        """What a line of shell in it printed; no service is started by it.

        Raises:
            AssertionError: it failed.
        """
        certificates = 'test ! -d "$1/etc/ssl/certs" || mount --bind /etc/ssl/certs "$1/etc/ssl/certs"\n'
        argv = self._enter(certificates, f'exec chroot "$1" sh -ec {shlex.quote(line)}')
        own = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        forbid = self.folder / "usr/sbin/policy-rc.d"
        forbid.write_text(_FORBID)
        forbid.chmod(0o755)
        try:
            return _said(argv, own | passed_on | environment)
        finally:
            forbid.unlink()

    def command(self, line: str, shared: Path) -> list[str]:
        """An argument list that runs a command in it, which sees /sys and a folder of this machine.

        Not by chroot: the agent's tools find the files that they are given by the paths that the kernel tells.
        """
        there = shlex.quote(f"{self.folder}{shared}")
        mounts = f'mkdir -p {there} && mount --bind {shlex.quote(str(shared))} {there}\nmount --bind /sys "$1/sys"\n'
        return self._enter(mounts, f'cd "$1" && pivot_root . . && umount -l . && cd / && exec {line}')

    def _enter(self, mounts: str, into: str) -> list[str]:
        return ["unshare", "--mount", "sh", "-ec", _MOUNTS + mounts + into, "sh", str(self.folder)]

    def named(self, word: str) -> list[str]:
        """Every path in it whose last part has the word."""
        found = subprocess.run(["find", ".", "-name", f"*{word}*"], cwd=self.folder, capture_output=True, text=True)
        return sorted(line.removeprefix(".") for line in found.stdout.splitlines())


class Booted:
    """A tree with a systemd as its first process, and without a network but its own loopback; ``with`` ends it."""

    def __init__(self, tree: Tree, log: Path) -> None:
        self._group = f"storage-admin-tests-{os.getpid()}"
        spaces = ["--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child"]
        boot = ["sh", "-ec", _MOUNTS + _BOOT, "sh", str(tree.folder), self._group]
        self._daemon = Daemon(["unshare", *spaces, *boot], log)

    def __enter__(self) -> Self:
        try:
            # Degraded: some of a system's own services cannot do in a container what they are for.
            up = "systemctl is-system-running --wait | grep -Ex 'running|degraded'"
            self._daemon.wait_for(lambda: self._try(up), 300, "systemd has started what it starts")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._daemon.kill()  # nothing else ends it, and all in it end with it
        clear = ["unshare", "--mount", "sh", "-ec", _CLEAR, "sh", self._group]
        wait_until(lambda: subprocess.run(clear, stderr=subprocess.DEVNULL).returncode == 0, 60, "its groups are empty")

    def command(self, line: str) -> list[str]:
        """An argument list that runs a line of shell in it."""
        pid = self._daemon.pid
        first = Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()  # none yet in its first moment
        into = [
            "nsenter",
            "--target",
            first or "0",
            "--mount",
            "--pid",
            "--cgroup",
            "--ipc",
            "--uts",
            "--net",
            "--root",
        ]
        return [*into, "sh", "-ec", f"cd /; {line}"]

    def _try(self, line: str) -> bool:
        return (
            subprocess.run(self.command(line), cwd="/", capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
        )

    def run(self, line: str) -> str:
        """What a line of shell in it printed.

        Raises:
            AssertionError: it failed.
        """
        own = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
        return _said(self.command(line), own)

    def wait_until(self, line: str, seconds: float = 180) -> None:
        """Waits until a line of shell succeeds."""
        try:
            wait_until(lambda: self._try(line), seconds, line)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.run('journalctl --no-pager --lines=60')}") from None


def _said(argv: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        argv, env=environment, cwd="/", capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=1800
    )
    assert done.returncode == 0, f"{argv[-1]}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
    return done.stdout
