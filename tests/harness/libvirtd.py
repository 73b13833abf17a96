"""virtlogd and libvirtd, started by hand where nothing answers at ``qemu:///system``.

Several test processes may want them at once: each holds a shared lock as long as it does, and the one that leaves last
ends the daemons, by the numbers that stand in their pid files.
"""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import libvirt

from tests.harness.processes import wait_until

URI = "qemu:///system"
_FOLDER = Path("/run/storage-admin-tests")
_SOCKET = Path("/run/libvirt/libvirt-sock")
_LOG_SOCKET = Path("/run/libvirt/virtlogd-sock")

#: Runs a daemon and takes in the orphans below it. libvirtd waits for the end of every emulator that it asked for its
#: abilities, and where the machine's first process is slow to do that, defining one domain takes a minute.
REAPER = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
daemon = subprocess.Popen(sys.argv[1:])
while os.wait()[0] != daemon.pid:
    pass
"""
#: Starts a daemon that sees no /dev/kvm: guests of tests run under TCG, and a KVM that libvirt may use half makes
#: libvirt ask all emulators again for each domain. Where a variable names the tree of another Debian, the daemon and
#: QEMU are that one's, and see of this machine what guests need.
WITHOUT_KVM = """
mount --bind "$0"/qemu.conf /etc/libvirt/qemu.conf
test ! -e /dev/kvm || mount --bind "$0"/no-kvm /dev/kvm
if [ -n "${STORAGE_ADMIN_LIBVIRT_TREE:-}" ]; then
    tree=$STORAGE_ADMIN_LIBVIRT_TREE
    mount --bind "$tree" "$tree"
    for one in /proc /sys /dev /run /tmp /var/tmp /boot /lib/modules /etc/libvirt /var/lib/libvirt /var/log/libvirt; do
        mkdir -p "$tree$one"
        mount --rbind "$one" "$tree$one"
    done
    cd "$tree"
    pivot_root . .
    umount -l .
    cd /
fi
exec "$@"
"""


@contextlib.contextmanager
def libvirtd() -> Iterator[str]:
    """Yields the URI of a libvirtd that answers. Needs root."""
    libvirt.registerErrorHandler(lambda *_: None, None)  # its default prints every refused call
    _FOLDER.mkdir(mode=0o755, exist_ok=True)
    with (_FOLDER / "lock").open("w") as lock:
        _start_under(lock.fileno())
        try:
            yield URI
        finally:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # another test process still needs them
            else:
                _stop("libvirtd")
                _stop("virtlogd")


def _start_under(lock: int) -> None:
    """Sees to it that the daemons run, and leaves with the lock held shared."""
    with (_FOLDER / "starting").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not _answers(_LOG_SOCKET):
            _start("virtlogd", _LOG_SOCKET)
        if not _answers(_SOCKET):
            _start("libvirtd", _SOCKET)
        wait_until(_speaks, 30, "libvirtd answers")


def _start(name: str, path: Path) -> None:
    config = _FOLDER / f"{name}.conf"
    config.write_text('auth_unix_rw = "none"\nauth_unix_ro = "none"\n' if name == "libvirtd" else "")
    command = [f"/usr/sbin/{name}", "--pid-file", str(_pid_file(name)), "--config", str(config)]
    (_FOLDER / "no-kvm").touch(mode=0)
    (_FOLDER / "qemu.conf").write_text("namespaces = []\n")  # a guest's own /dev would want to carry such a mount along
    command = ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", WITHOUT_KVM, str(_FOLDER), *command]
    with (_FOLDER / f"{name}.log").open("ab") as log:
        reaper = subprocess.Popen(
            [sys.executable, "-c", REAPER, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    # It outlives this process where another one still needs the daemon.
    wait_until(lambda: _answers(path) or reaper.poll() is not None, 30, f"{name} listens")
    assert reaper.poll() is None, f"{name} did not start: {(_FOLDER / f'{name}.log').read_text()[-2000:]}"
    if tree := os.environ.get("STORAGE_ADMIN_LIBVIRT_TREE"):
        assert Path(f"/proc/{_pid_file(name).read_text().strip()}/root").samefile(tree)


def _stop(name: str) -> None:
    try:
        pid = int(_pid_file(name).read_text())
        ours = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ValueError):
        return  # it was running before the tests, so it keeps running
    if os.fsencode(_pid_file(name)) in ours:
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30, f"{name} ends")


def _pid_file(name: str) -> Path:
    return _FOLDER / f"{name}.pid"


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _speaks() -> bool:
    try:
        libvirt.open(URI).close()
    except libvirt.libvirtError:
        return False
    return True


def stop() -> None:
    """Ends libvirtd; guests go on running."""
    _stop("libvirtd")


def kill() -> None:
    """Ends the libvirtd of :func:`libvirtd` as a crash does; guests go on running."""
    pid = int(_pid_file("libvirtd").read_text())
    os.kill(pid, signal.SIGKILL)
    # Until then it holds its pid file, and its successor would end.
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30, "libvirtd is dead")


def restart() -> None:
    """Ends libvirtd, if it runs, and starts it again, as an update does; guests go on running."""
    _stop("libvirtd")
    _start("libvirtd", _SOCKET)
    wait_until(_speaks, 30, "libvirtd answers again")


@contextlib.contextmanager
def sees(place: Path) -> Iterator[None]:
    """What is mounted there is mounted in the daemon's own mount namespace as well, which is older."""
    found = subprocess.run(["findmnt", "-no", "SOURCE", place], capture_output=True, text=True, check=True)
    inside = ["nsenter", "--mount", "--target", _pid_file("libvirtd").read_text().strip()]
    subprocess.run([*inside, "mount", found.stdout.strip(), place], check=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "umount", "--lazy", place], check=True)
