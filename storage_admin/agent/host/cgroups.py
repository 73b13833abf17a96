"""A control group of its own for a job: this process and its tools get what the host's guests leave of the disk.

Control groups of version 2 (Linux, Documentation/admin-guide/cgroup-v2.rst, "IO Interface Files"), or the controller
``blkio`` of version 1 (Documentation/admin-guide/cgroup-v1/blkio-controller.rst). It stands at the top, as only
neighbours share by weight, and is taken away afterwards; what a killed agent left is taken away by the next one.

A weight is kept to where the disk's scheduler is BFQ or the kernel was told of the disk's costs (``io.cost.qos``). All
of this is an effort and no promise: where it cannot be done, the work goes on by its priority alone, as the log says.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from storage_admin.agent.host.mounts import Mounts, mounted
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import read_text

#: Of 1 to 10,000, where everybody else has 100.
WEIGHT = 10
#: The group's name, with the process that it was made for.
_PREFIX = "storage-admin-"
_NAME = re.compile(_PREFIX + r"([0-9]+)")
#: The group of those that outlive their agent.
_FREE = _PREFIX + "attached"
#: Seconds that processes which have just ended may take to leave the group.
_LEAVE_SECONDS = 0.5
OWN_GROUPS = "/proc/self/cgroup"


@dataclass(frozen=True)
class Hierarchy:
    """Where groups are made: the mounted folder, the version, and this process's own group in it."""

    root: str
    version: int
    own: str

    def files(self, device: str | None, bandwidth: int | None, *, idle: bool) -> Iterator[tuple[tuple[str, ...], str]]:
        """What is written into a new group: names of files, of which any one is enough, and the line.

        Args:
            device: numbers of the disk, such as ``8:0``; without it there is no limit.
            bandwidth: bytes a second.
            idle: whether the work is to give way.
        """
        limited = f"{device} {bandwidth}" if device and bandwidth else ""
        if self.version == 2:
            if idle:
                yield ("io.weight", "io.bfq.weight"), f"default {WEIGHT}"
                # At the top a group competes with all guests together, for the processor as well.
                yield ("cpu.weight",), str(WEIGHT)
            if limited:
                yield ("io.max",), f"{device} rbps={bandwidth} wbps={bandwidth}"
            return
        if idle:
            yield ("blkio.bfq.weight", "blkio.weight"), str(WEIGHT)
        if limited:
            yield ("blkio.throttle.read_bps_device",), limited
            yield ("blkio.throttle.write_bps_device",), limited


@dataclass
class _Group:
    """A group that this process is in."""

    hierarchy: Hierarchy
    path: str
    told: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Go back to where this process was, and take the group away."""
        with contextlib.suppress(OSError):
            _write(os.path.join(self.hierarchy.own, "cgroup.procs"), str(os.getpid()))
        deadline = time.monotonic() + _LEAVE_SECONDS
        while True:
            try:
                _remove(self.path)
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    return  # the next job finds it
                time.sleep(0.01)
            else:
                return


@contextlib.contextmanager
def limited(io: AgentIO, fd: int, *, idle: bool, bandwidth: int | None) -> Iterator[None]:
    """Do some work, and have its tools do theirs, in a control group of its own, where this host has them.

    Args:
        io: told what applies.
        fd: descriptor of the image, or of a folder on its filesystem: the limit is one of that disk.
        idle: whether the work is to give way to everybody else.
        bandwidth: bytes a second that may be read and that may be written, at most.
    """
    if not idle and bandwidth is None:
        yield
        return
    group = None
    try:
        group = _enter(fd, idle=idle, bandwidth=bandwidth)
        io.log(f"in its own control group (cgroup v{group.hierarchy.version}): " + ", ".join(group.told))
    except (OSError, ValueError, LookupError) as why:
        reason = why.strerror if isinstance(why, OSError) and why.strerror else str(why)
        io.log(f"no control group for this job ({reason}): only its I/O priority keeps it from slowing guests down")
    try:
        yield
    finally:
        if group is not None:
            group.close()


def _enter(fd: int, *, idle: bool, bandwidth: int | None) -> _Group:
    """Make a group and go there; OSError or LookupError where that cannot be done."""
    hierarchy = find()
    if hierarchy is None:
        raise LookupError("this host has none that limit disks")
    clear_stale(hierarchy)
    if hierarchy.version == 2:
        _switch_on(hierarchy)
    group = _Group(hierarchy, os.path.join(hierarchy.root, f"{_PREFIX}{os.getpid()}"))
    _make(group.path)
    try:
        device = disk(fd)
        kept = 0
        for names, line in hierarchy.files(device, bandwidth, idle=idle):
            name = next((name for name in names if _set(os.path.join(group.path, name), line)), None)
            group.told.append(f"{names[0]} is not supported here" if name is None else f"{name} {line}")
            kept += name is not None
        if bandwidth is not None and device is None:
            group.told.append("no limit, because the image is not on a single disk")
        if not kept:
            raise LookupError(", ".join(group.told) or "nothing to keep")
        _write(os.path.join(group.path, "cgroup.procs"), str(os.getpid()))
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(group.path)
        raise
    return group


def find() -> Hierarchy | None:
    """Where disks are limited on this machine; ``None`` where that is nowhere."""
    with open(OWN_GROUPS, encoding="utf-8", errors="surrogateescape") as file:
        own = dict(_own_group(line) for line in file.read().splitlines() if line.count(":") >= 2)
    for mount in mounted():
        if mount.root != b"/":
            continue  # of another place than the top, as in a container, it shows a part
        root = os.fsdecode(mount.point)
        if mount.filesystem == "cgroup2" and "io" in read_text(f"{root}/cgroup.controllers").split():
            return Hierarchy(root, 2, root + own.get("", "/"))
        if mount.filesystem == "cgroup" and b"blkio" in mount.options.split(b","):
            return Hierarchy(root, 1, root + own.get("blkio", "/"))
    return None


def _own_group(line: str) -> tuple[str, str]:
    """The controller that is asked for, or nothing for version 2, and this process's group (proc(5))."""
    _, controllers, path = line.split(":", 2)
    return "blkio" if "blkio" in controllers.split(",") else controllers, path


def clear_stale(hierarchy: Hierarchy) -> None:
    """Take away the groups whose agent is gone; one that still has a tool in it stays until that has ended."""
    for name in os.listdir(hierarchy.root):
        found = _NAME.fullmatch(name)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            with contextlib.suppress(OSError):
                _remove(os.path.join(hierarchy.root, name))


def _switch_on(hierarchy: Hierarchy) -> None:
    """Have the groups at the top share disks; most hypervisors do already."""
    switches = os.path.join(hierarchy.root, "cgroup.subtree_control")
    if "io" not in read_text(switches).split():
        _write(switches, "+io")


def disk(fd: int) -> str | None:
    """Numbers of the disk that holds an open file, ``major:minor``; ``None`` where there is no single one.

    Args:
        fd: descriptor of a file or a folder.
    """
    device = os.fstat(fd).st_dev
    if os.major(device) == 0:  # of btrfs and of what lies in no disk at all
        mount = Mounts.of_this_machine().of_descriptor(fd)
        if mount is None or not mount.source.startswith(b"/dev/"):
            return None
        device = os.stat(mount.source).st_rdev
    place = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if os.path.exists(os.path.join(place, "partition")):
        place = os.path.dirname(place)  # limits are those of whole disks
    return read_text(os.path.join(place, "dev")) or None


def _set(path: str, line: str) -> bool:
    """Write a line, where the kernel has the file and takes it."""
    try:
        _write(path, line)
    except OSError:
        return False
    return True


def _write(path: str, line: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def _make(path: str) -> None:
    with contextlib.suppress(FileExistsError):  # of a process that had the same number
        os.mkdir(path)


def _remove(path: str) -> None:
    os.rmdir(path)


def set_free(pid: int) -> bool:
    """Take a process out of the agent's control group, with whose service or session it would be ended.

    It comes into a group at the top, which nobody ends. Only the hierarchies by which systemd knows processes count.

    Returns:
        Whether it is free now.
    """
    free = True
    for mount in mounted():
        named = mount.filesystem == "cgroup" and b"name=systemd" in mount.options.split(b",")
        if mount.root == b"/" and (named or mount.filesystem == "cgroup2"):
            group = os.path.join(os.fsdecode(mount.point), _FREE)
            try:
                _make(group)
            except OSError:
                free = False
            else:
                free = _set(os.path.join(group, "cgroup.procs"), str(pid)) and free
    return free
