"""The priority of the agent's own work, for what it reads itself instead of by a tool."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

# ioprio_get and ioprio_set have no function in the C library: numbers from each machine's asm/unistd.h.
_SYSCALLS = {
    "x86_64": (252, 251),
    "aarch64": (31, 30),
    "riscv64": (31, 30),
    "loongarch64": (31, 30),
    "ppc64le": (274, 273),
    "s390x": (283, 282),
}
# linux/ioprio.h: who is one thread (0: the one that asks); the class stands above bit 13.
_ONE_THREAD, _IDLE = 1, 3 << 13
_LEAST = 19

_LIBC = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def idle(wanted: bool) -> Iterator[None]:
    """Run the calling thread only when nobody else wants disk or processor, then as before.

    Args:
        wanted: false changes nothing.
    """
    if not wanted:
        yield
        return
    nice, disk = os.getpriority(os.PRIO_PROCESS, 0), io_priority()
    os.setpriority(os.PRIO_PROCESS, 0, _LEAST)
    _set(_IDLE)
    try:
        yield
    finally:
        if disk is not None:
            _set(disk)
        # Only root may become more important again; an agent without root stays modest.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, nice)


def io_priority() -> int | None:
    """The calling thread's I/O priority, as the kernel keeps it; ``None`` where it is not known how to ask."""
    numbers = _SYSCALLS.get(os.uname().machine)
    if numbers is None:
        return None
    found = int(_LIBC.syscall(numbers[0], _ONE_THREAD, 0))
    return found if found >= 0 else None


def _set(value: int) -> None:
    numbers = _SYSCALLS.get(os.uname().machine)
    if numbers is not None:
        # A kernel without I/O priorities refuses: the processor's priority alone has to do then.
        _LIBC.syscall(numbers[1], _ONE_THREAD, 0, value)
