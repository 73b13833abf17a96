"""Block devices of this machine, as logical volumes are: opened by path, and only while nobody else uses them."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from storage_admin.agent.host.in_use import loop_devices, process_name
from storage_admin.agent.host.locking import file_id
from storage_admin.agent.host.mounts import parse
from storage_admin.agent.protocol import INVALID, RefusedError, display


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
        if who := self._opener():
            first = "shut the guest down" if self.server is None else "stop that program"
            raise RefusedError("device_in_use", f"{display(self.path)} is open in {who}; {first} first")

    def _opener(self) -> str:
        if held := _holders(self.number):
            return held
        own = file_id(self.fd)
        if above := next((name for name, file in loop_devices() if file == own), ""):
            return above
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if int(pid) in {os.getpid(), self.server}:
                continue
            try:
                for descriptor in os.listdir(f"/proc/{pid}/fd"):
                    link = f"/proc/{pid}/fd/{descriptor}"
                    # Only what lies below /dev is asked further: a file of a silent server would make one wait.
                    if os.readlink(link).startswith("/dev/") and self._is(os.stat(link)):
                        return f"{process_name(pid)} ({pid})"
            except OSError:
                continue  # it has ended, or closed that
        return ""

    def _is(self, status: os.stat_result) -> bool:
        return stat.S_ISBLK(status.st_mode) and status.st_rdev == self.number


def _holders(number: int) -> str:
    """The devices that stand on one."""
    place = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/holders"
    return ", ".join(sorted(os.listdir(place))) if os.path.isdir(place) else ""


def _use(number: int) -> str:
    """What is done with a device that somebody has for himself alone."""
    with open("/proc/self/mountinfo", "rb") as file:
        at = [display(mount.point) for mount in parse(file.read()) if mount.device == number]
    if at:
        return f"mounted at {at[0]}"
    held = _holders(number)
    return f"part of {held}" if held else "mounted elsewhere, or part of something that uses it"
