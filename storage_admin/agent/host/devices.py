"""Block devices of this machine, as logical volumes are: opened by path, and only while nobody else uses them."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage_admin.agent.host.in_use import loop_devices, process_name
from storage_admin.agent.host.mounts import mounted
from storage_admin.agent.protocol import INVALID, RefusedError, display

#: Seconds that what only looks at all devices, as LVM's tools, blkid and udev do, has one open at most.
_PASSING = 2.0
#: CAP_SYS_PTRACE (linux/capability.h), by which one sees what processes of others have open.
_LOOKS = 19
#: Of sysfs, whatever the device's own sectors are.
_SECTOR = 512
#: Where those are that this machine gives to others (nvmet).
_NVME_TARGETS = "/sys/kernel/config/nvmet/subsystems"
#: All block devices by their names.
BLOCKS = "/sys/class/block"


@dataclass(frozen=True)
class Device:
    """A block device that is open, for nobody else to mount or to open alone. Close it in the end.

    Args:
        number: of the device, as ``st_rdev`` has it.
        size: in bytes.
        server: as of :meth:`open`.
    """

    fd: int
    path: bytes
    number: int
    size: int
    server: int | None = None

    @classmethod
    def open(cls, path: bytes, server: int | None = None, *, to_write: bool = False) -> Device:
        """The device of that path below ``/dev``, to read, or to write to as well.

        Args:
            server: the process that serves it, and has it open for that.

        Raises:
            RefusedError: ``invalid``: it is none; ``device_in_use``; ``stale_plan``: it does not exist; ``immutable``:
                it can only be read.
        """
        shown = display(path)
        if not path.startswith(b"/dev/") or b".." in path.split(b"/"):
            raise RefusedError(INVALID, f"{shown} is no path below /dev")
        try:
            if not stat.S_ISBLK(os.stat(path).st_mode):
                raise RefusedError(INVALID, f"{shown} is no block device")
            # Here O_EXCL means: nothing has it mounted, in an array or as swap, and nothing may from now on.
            fd = os.open(path, (os.O_RDWR if to_write else os.O_RDONLY) | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise RefusedError("stale_plan", f"{shown} does not exist; activate the volume first") from None
        except OSError as error:
            if error.errno in {errno.EROFS, errno.EACCES}:
                raise RefusedError("immutable", f"{shown} is read-only") from error
            if error.errno != errno.EBUSY:
                raise
            raise RefusedError("device_in_use", f"{shown} is {_use(os.stat(path).st_rdev)}; end that first") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISBLK(status.st_mode):
                raise RefusedError(INVALID, f"{shown} is no block device")
            device = cls(fd, path, status.st_rdev, os.lseek(fd, 0, os.SEEK_END), server)
            device.refuse_used()
        except BaseException:
            os.close(fd)
            raise
        return device

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)

    def refuse_used(self) -> None:
        """Refuse one that another process has open, as the QEMU of a guest, or that something stands on."""
        deadline = time.monotonic() + _PASSING
        while who := self._opener():
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            first = "shut the guest down" if self.server is None else "stop that program"
            raise RefusedError("device_in_use", f"{display(self.path)} is open in {who}; {first} first")

    def refuse_newer(self, seconds: float) -> None:
        """Refuse one whose path may have led to another device so many seconds ago, or that was written to since.

        The kernel gives names again: after a restart, or where a disk was exchanged or a volume activated anew.
        """
        with open("/proc/uptime", encoding="ascii") as file:
            running = float(file.read().split()[0])
        if min(running, time.time() - os.stat(self.path).st_ctime) < seconds:
            raise RefusedError(
                "stale_plan",
                f"{display(self.path)} appeared, changed hands or was written to after the job was submitted: it may "
                "be another device. Look at it, and submit the job again",
            )

    def _opener(self) -> str:
        numbers = _related(self.number)
        if attached := next(_attached(numbers), None):
            return f"{_name(attached[0])}, which is {attached[1]}"
        # It takes no part of the disk for itself alone, and no process has what is behind it open.
        if above := next((loop.name for loop in loop_devices() if loop.number in numbers), ""):
            return above
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if int(pid) in {os.getpid(), self.server} or _parent(pid) == os.getpid():
                    continue  # a tool of ours
                if any(_opened(pid, one) in numbers for one in os.listdir(f"/proc/{pid}/fd")):
                    return f"{process_name(pid)} ({pid})"
            except OSError as error:
                if _may_not_look(error):
                    raise RefusedError("guests_unknown", _unseen(pid)) from error
                continue  # it has ended
        return ""

    def partitions(self) -> list[tuple[str, int, int]]:
        """Its partitions that the kernel knows: the name of each below ``/dev``, its offset and its size in bytes."""
        found = []
        for part in _partitions(_place(self.number)):
            with contextlib.suppress(OSError):  # it was deleted
                start, size = (int(Path(part, name).read_text()) * _SECTOR for name in ("start", "size"))
                found.append((os.path.basename(part).replace("!", "/"), start, size))
        return found

    def refuse_owned(self, owners: Sequence[tuple[bytes, str]]) -> None:
        """Refuse one that is known to be somebody's, perhaps under another name.

        Args:
            owners: paths of devices below ``/dev``, and whose each is.

        Raises:
            RefusedError: ``device_in_use``.
        """
        numbers = _related(self.number)
        for path, whose in owners:
            try:
                is_this = path.startswith(b"/dev/") and _number(os.stat(path)) in numbers
            except (OSError, ValueError):
                continue  # it is not there, so it is not this one
            if is_this:
                raise RefusedError("device_in_use", f"{display(self.path)} belongs to {whose}; choose another device")


def below(number: int) -> frozenset[str]:
    """The names, as sysfs has them, of a device, of the disk that it is a partition of, and of what these stand on."""
    found, left = set[str](), {_name(number)}
    while left:
        found.add(name := left.pop())
        place = os.path.realpath(f"{BLOCKS}/{name}")
        above = {os.path.basename(os.path.dirname(place))} if os.path.exists(f"{place}/partition") else set()
        with contextlib.suppress(FileNotFoundError):
            above |= set(os.listdir(f"{place}/slaves"))
        left |= above - found
    return frozenset(found)


def node(path: str) -> tuple[int | None, int | None, int | None]:
    """Device and inode of a block device's own file, whatever link leads there, and its number; else nothing."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None, None, None
    return (status.st_dev, status.st_ino, status.st_rdev) if stat.S_ISBLK(status.st_mode) else (None, None, None)


def users(numbers: Collection[int]) -> dict[int, str]:
    """Why each of some block devices, by their numbers, is in use, or a part of it; those that nobody uses are left
    out.
    """
    whole = {part: number for number in numbers for part in _related(number)}
    found: dict[int, str] = {}
    behind = ((loop.number, f"behind {loop.name}") for loop in loop_devices() if loop.number in whole)
    for part, why in (*_attached(whole), *behind):
        found.setdefault(whole[part], f"The volume is {why}.")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                if (number := whole.get(_opened(pid, descriptor) or 0)) is not None:
                    found.setdefault(number, f"The volume is open in {process_name(pid)} ({pid}).")
        except OSError as error:
            if _may_not_look(error):
                return dict.fromkeys(numbers, _unseen(pid)) | found
            continue  # it has ended
    return found


def _may_not_look(error: OSError) -> bool:
    """Whether this process lacks the right to look; a few processes the kernel keeps even from who has it."""
    if not isinstance(error, PermissionError):
        return False
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        rights = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return not rights >> _LOOKS & 1


def _unseen(pid: str) -> str:
    return (
        f"The agent may not see what process {pid} ({process_name(pid)}) has open, so nobody knows whether that is the "
        "device. Run the agent as root, with the capability CAP_SYS_PTRACE."
    )


def _attached(numbers: Collection[int]) -> Iterator[tuple[int, str]]:
    """What of these is mounted, swap, or below another device."""
    points = {mount.device: mount.point for mount in mounted()}
    yield from ((one, f"mounted at {display(points[one])}") for one in numbers if one in points)
    yield from ((one, f"part of {held}") for one in numbers if (held := _holders(one)))
    with contextlib.suppress(FileNotFoundError), open("/proc/swaps", encoding="utf-8", errors="replace") as file:
        swaps = {node(line.split()[0])[2] for line in file if line.startswith("/dev/")}
    yield from ((one, "used as swap") for one in numbers if one in swaps)
    # It has them open for the kernel alone to know, and for nobody's exclusion.
    for path in map(_read, glob.iglob(f"{_NVME_TARGETS}/*/namespaces/*/device_path")):
        if path.startswith("/dev/") and (number := node(path)[2]) is not None and number in numbers:
            yield number, "exported by NVMe over fabrics"


def _opened(pid: str, descriptor: str) -> int | None:
    """The number of the block device that a process has open there.

    Only what lies below /dev is asked further: a file of a silent server would make one wait.

    Raises:
        PermissionError: this process may not look there.
    """
    link = f"/proc/{pid}/fd/{descriptor}"
    try:
        return _number(os.stat(link)) if os.readlink(link).startswith("/dev/") else None
    except PermissionError:
        raise
    except OSError:
        return None  # it was closed


def _number(status: os.stat_result) -> int | None:
    return status.st_rdev if stat.S_ISBLK(status.st_mode) else None


def _related(number: int) -> frozenset[int]:
    """The numbers of a device, of its partitions, of the disk that it is a partition of, and of these by any other path
    to that disk: they share their bytes.
    """
    place = _place(number)
    part = _read(f"{place}/partition")
    disk = os.path.realpath(f"{place}/..") if part else place
    found = {number}
    for one in (disk, *_other_paths(disk)):
        parts = [path for path in _partitions(one) if part in {"", _read(f"{path}/partition")}]
        for path in (one, *parts):
            with contextlib.suppress(ValueError):
                major, minor = map(int, _read(f"{path}/dev").split(":"))
                found.add(os.makedev(major, minor))
    return frozenset(found)


def _other_paths(disk: str) -> list[str]:
    """Where the kernel has a disk once more, as one that several ways lead to where nothing joins them."""
    wwid = _wwid(disk)
    return [path for path in glob.iglob("/sys/block/*") if _wwid(path) == wwid] if wwid else []


def _wwid(disk: str) -> str:
    """What the disk itself says that it is: of SCSI, or of NVMe."""
    return _read(f"{disk}/device/wwid") or _read(f"{disk}/wwid")


def _read(path: str) -> str:
    """A line of sysfs; empty where there is none."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""


def _name(number: int) -> str:
    """What sysfs calls a device."""
    return os.path.basename(os.path.realpath(_place(number)))


def _place(number: int) -> str:
    return f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"


def _partitions(place: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(f"{place}/{name}" for name in os.listdir(place) if os.path.exists(f"{place}/{name}/partition"))
    return []


def _parent(pid: str) -> int:
    """The process that has started one."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def _holders(number: int) -> str:
    """The devices that stand on one."""
    place = f"{_place(number)}/holders"
    return ", ".join(sorted(os.listdir(place))) if os.path.isdir(place) else ""


def _use(number: int) -> str:
    """What is done with a device that somebody has for himself alone."""
    return next((why for _, why in _attached([number])), "mounted elsewhere, or part of something that uses it")
