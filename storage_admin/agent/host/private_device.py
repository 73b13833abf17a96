"""A thin volume as a device of our own that nobody finds by any name (the kernel's linux/dm-ioctl.h).

By that interface and not by dmsetup(8): udev is told in the same call to make no links to the device, and to have
nobody look at what is on it, as what assembles arrays and volume groups. The kernel lets several devices stand on one
thin volume; nobody is kept away by this one alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator

from storage_admin.agent.protocol import HostError, RefusedError, read_text

#: What the device of a job is called, before the job's id.
NAME = "storage-admin-"
#: How the id of such a device ends, which LVM gives to none of its own.
_OWN = "-private"
BLOCKS = "/sys/block"
#: struct dm_ioctl: version, data_size, data_start, target_count, open_count, flags, event_nr, padding, dev, name, uuid.
_HEAD = struct.Struct("=3IIIIiIIIQ128s129s7x")
#: struct dm_target_spec: sector_start, length, status, next, target_type.
_TARGET = struct.Struct("=QQiI16s")
_CREATE, _REMOVE, _SUSPEND, _STATUS, _LOAD = 3, 4, 6, 7, 9
_READ_ONLY = 1
#: Flags of libdevmapper for udev's rules, above bit 16 of a cookie (libdevmapper.h): no rules of the device mapper, of
#: subsystems, of disks and of others; this event is the one that counts.
_NO_UDEV = (0x01 | 0x02 | 0x04 | 0x08 | 0x40) << 16
_SECTOR = 512
#: Seconds for which somebody who only passes by, as udev, may have it open still.
_PASSING = 10.0


@contextlib.contextmanager
def opened(pool: str, thin_id: int, size: int, uuid: str, job: str, *, to_write: bool = False) -> Iterator[int]:
    """A thin volume as a device that is there for as long as this lasts.

    Args:
        pool: what the device mapper calls the pool itself, ``GROUP-NAME-tpool``.
        thin_id: number of the volume in its pool.
        size: of the volume, in bytes.
        uuid: LVM's ids of group and volume. A device with these is an LV to LVM, so that it looks for no physical
            volume on it, where a guest may have made one.
        job: whose device it is.
        to_write: also for writing, and then for nobody else to mount or to open alone.

    Yields:
        A descriptor of it.

    Raises:
        RefusedError: ``busy``: the pool is not active, or the job has such a device already.
        HostError: the kernel refuses.
    """
    name, mode = NAME + job, 0 if to_write else _READ_ONLY
    base = _ask(_STATUS, pool)
    table = f"{os.major(base)}:{os.minor(base)} {thin_id}"
    number = _ask(_CREATE, name, uuid=f"LVM-{uuid.replace('-', '')}{_OWN}")
    try:
        _ask(_LOAD, name, mode, table=(size // _SECTOR, b"thin", table.encode()))
        _ask(_SUSPEND, name, event=_NO_UDEV)  # without a flag of its own, this is what resumes
        fd = os.open(f"/dev/dm-{os.minor(number)}", (os.O_RDWR | os.O_EXCL if to_write else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_rdev != number:
                raise HostError(f"/dev/dm-{os.minor(number)} is another device")
            yield fd
        finally:
            os.close(fd)
    finally:
        remove(name)


def left() -> list[str]:
    """The names of such devices that are there; other names begin alike (``admin-x`` in ``storage``)."""
    found = []
    for entry in os.listdir(BLOCKS):
        name, uuid = (read_text(f"{BLOCKS}/{entry}/dm/{what}") for what in ("name", "uuid"))
        if name.startswith(NAME) and uuid.startswith("LVM-") and uuid.endswith(_OWN):
            found.append(name)
    return found


def remove(name: str, patience: float = _PASSING) -> None:
    """Take such a device away; who passes by is waited for, for so many seconds.

    Raises:
        HostError: somebody has it open.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            _ask(_REMOVE, name, event=_NO_UDEV)
            return
        except RefusedError:
            if time.monotonic() > deadline:
                raise HostError(f"the device {name} is open in a program of the host") from None
            time.sleep(0.1)


def _ask(
    number: int,
    name: str,
    flags: int = 0,
    *,
    event: int = 0,
    uuid: str = "",
    table: tuple[int, bytes, bytes] | None = None,
) -> int:
    """One question to the device mapper; gives the device's number, 0 of one that is gone.

    Raises:
        RefusedError: ``busy``.
        HostError: it says anything else.
    """
    rest = b""
    if table is not None:
        sectors, kind, words = table
        words += bytes(8 - len(words) % 8)
        rest = _TARGET.pack(0, sectors, 0, _TARGET.size + len(words), kind) + words
    size = _HEAD.size + len(rest)
    head = _HEAD.pack(4, 0, 0, size, _HEAD.size, int(bool(rest)), 0, flags, event, 0, 0, name.encode(), uuid.encode())
    asked = bytearray(head + rest)
    try:
        with open("/dev/mapper/control", "rb") as control:
            fcntl.ioctl(control, 3 << 30 | _HEAD.size << 16 | 0xFD << 8 | number, asked)
    except OSError as error:
        if error.errno == errno.ENXIO and number == _REMOVE:
            return 0
        if error.errno in {errno.EBUSY, errno.ENXIO}:
            raise RefusedError("busy", f"the device mapper's {name} is busy, or not active") from error
        raise HostError(f"the device mapper refuses {name}: {error.strerror}") from error
    return int(_HEAD.unpack_from(asked)[10])
