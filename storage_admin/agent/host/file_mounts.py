"""Where a file is mounted by itself: a further name of it, which no folder and no count of links tells of.

``mount --bind`` makes one, and docker, podman and LXC do for each single file that a container gets. Whoever uses it
goes on with the file that was mounted, whatever takes the file's own name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from storage_admin.agent.host.mounts import Mount, Mounts, is_quiet, mount_id, parse
from storage_admin.agent.protocol import RefusedError, display

#: The mark of a name that is gone (fs/proc_namespace.c).
_GONE = b"//deleted"


@dataclass(frozen=True)
class _Sought:
    """The file: ``device`` of its filesystem as mountinfo has it (on btrfs not ``st_dev``), ``root`` its path there."""

    device: int
    identity: tuple[int, int]
    root: bytes

    @property
    def name(self) -> bytes:
        return os.path.basename(self.root)


def refuse_mounted(fd: int, shown: str) -> None:
    """Refuse a file that is mounted by itself, here or in a container.

    Args:
        fd: descriptor of the file.
        shown: its path for a sentence.

    Raises:
        RefusedError: ``hard_linked``.
    """
    if (where := mounted_at(fd)) is not None:
        raise RefusedError(
            "hard_linked", f"{shown} is mounted as a file {where}, where the old content would stay in use; unmount it"
        )


def mounted_at(fd: int) -> str | None:
    """Where a file is mounted by itself, as far as this process may see the mounts of others.

    Args:
        fd: descriptor of the file.

    Returns:
        A phrase such as ``at /srv/disk.img of process 4711 (nginx)``, or ``None``.
    """
    sought = _sought(fd)
    for pid in _views():
        try:
            with open(f"/proc/{pid}/mountinfo", "rb") as file:
                lines = file.read().splitlines()
        except OSError:
            continue  # it has ended
        for mount in _of_this_file(pid, lines, sought):
            return f"at {display(mount.point)}" + ("" if pid == "self" else f" of process {pid} ({_command(pid)})")
    return None


def _sought(fd: int) -> _Sought:
    status, path = os.fstat(fd), os.readlink(b"/proc/self/fd/%d" % fd)
    mount = Mounts.of_this_machine().of_descriptor(fd)
    if mount is None:
        return _Sought(status.st_dev, (status.st_dev, status.st_ino), path)
    below = path if mount.point == b"/" else path[len(mount.point) :]
    root = mount.root.rstrip(b"/") + below
    return _Sought(mount.device, (status.st_dev, status.st_ino), root)


def _views() -> Iterator[str]:
    """A process for each set of mounts, this one first: who has another root sees other mounts of a namespace."""
    seen = set()
    for pid in ("self", *filter(str.isdigit, os.listdir("/proc"))):
        try:
            view = os.readlink(f"/proc/{pid}/ns/mnt"), os.readlink(f"/proc/{pid}/root")
        except OSError:
            continue  # ended, or another user's
        if view not in seen:
            seen.add(view)
            yield pid


def _of_this_file(pid: str, lines: list[bytes], sought: _Sought) -> Iterator[Mount]:
    """The mounts of the file; nothing is looked at that could make one wait."""
    device = b" %d:%d " % (os.major(sought.device), os.minor(sought.device))
    whole = device + b"/ "  # the filesystem itself, whose root is no file
    mounts = _parse(line for line in lines if device in line and whole not in line)
    if not mounts:
        return
    # The file's own filesystem has just been looked at, and answers.
    waits = [mount for mount in _parse(line for line in lines if not is_quiet(line)) if mount.device != sought.device]
    waiting = tuple(mount.point.rstrip(b"/") + b"/" for mount in waits if mount.may_wait)
    for mount in mounts:
        if mount.device == sought.device and _is_the_file(pid, mount, sought, waiting):
            yield mount


def _parse(lines: Iterable[bytes]) -> list[Mount]:
    return parse(b"\n".join(lines))


def _is_the_file(pid: str, mount: Mount, sought: _Sought, waiting: tuple[bytes, ...]) -> bool:
    if mount.root == sought.root:
        return True
    # The name that was mounted may be another one than the file has now.
    path, can_look = b"/proc/%s/root%s" % (pid.encode(), mount.point), not (mount.point + b"/").startswith(waiting)
    if can_look and _identity(path) == sought.identity:
        return True
    if os.path.basename(mount.root.removesuffix(_GONE)) != sought.name:
        return False
    return not (can_look and _is_on_top(path, mount))


def _identity(path: bytes) -> tuple[int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_on_top(path: bytes, mount: Mount) -> bool:
    """Whether what is seen there is this mount, and not another one that was laid over it."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return mount_id("self", fd) == mount.id
        finally:
            os.close(fd)
    except OSError:
        return False


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return display(file.read().rstrip(b"\n"))
    except OSError:
        return "it has just ended"
