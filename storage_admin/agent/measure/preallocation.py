"""How an image was preallocated, as far as its file still tells.

Recognised is what differs from an image that was merely filled:

- ``falloc``: nearly all of it has blocks, and a part of these was never written;
- ``metadata``: nearly every cluster of a qcow2 has a place in the file, in the order in which ``qemu-img create`` gives
  them out, and a part of these places are holes.

``full`` writes zeros everywhere. So does a guest that fills its free space for a reclaim: the two look alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable

from storage_admin.agent.host.space import Extents, extents_of
from storage_admin.agent.measure.qcow2_map import Counts, Map

OFF, METADATA, FALLOC = "off", "metadata", "falloc"
#: ``full``, or filled by what was written into it.
FILLED = "filled"

#: Of the virtual size, what has to have a place; a guest may have given some of it back.
_NEARLY_ALL = 0.9
#: Of the same, what was never written at least. Less is what a file system's log leaves that a guest zeroed at once.
_A_PART = 1 / 32
#: Reserved blocks in a row that count, in bytes.
_RUN_BYTES = 64 * 1024
# linux/fs.h, FS_IOC_FSGETXATTR: fsx_xflags, fsx_extsize, three more numbers, padding
_GET_ATTRIBUTES, _ATTRIBUTES = 0x801C581F, struct.Struct("=LLLLL8x")


def blocks(fd: int, check: Callable[[], None]) -> Extents | None:
    """What the filesystem says of an image's blocks; ``None`` where it does not.

    qemu-img has XFS allocate a MiB wherever a byte is written: what is reserved by that is no preallocation.

    Args:
        fd: descriptor of the image, open for reading.
        check: called now and then; raises to stop.
    """
    room = bytearray(_ATTRIBUTES.size)
    with contextlib.suppress(OSError):  # a filesystem without such attributes reserves nothing by itself
        fcntl.ioctl(fd, _GET_ATTRIBUTES, room)
    hint: int = _ATTRIBUTES.unpack(room)[1]
    return extents_of(fd, check, max(2 * hint, _RUN_BYTES))


def of_raw(fd: int, data_bytes: int, found: Extents | None) -> str:
    """The preallocation of a raw image.

    Args:
        fd: descriptor of the image.
        data_bytes: of the file that are no hole to a reader.
        found: as :func:`blocks`.
    """
    size = os.fstat(fd).st_size
    mapped, reserved = _told(fd, data_bytes, found)
    if not size or mapped < _NEARLY_ALL * size:
        return OFF
    return FALLOC if reserved >= _A_PART * size else FILLED


def of_qcow2(fd: int, tables: Map, counts: Counts, virtual_size: int, data_bytes: int, found: Extents | None) -> str:
    """The preallocation of a qcow2 image.

    Args:
        fd: descriptor of the image.
        tables: of the image, counted.
        counts: what they say.
        virtual_size: in bytes.
        data_bytes, found: as for :func:`of_raw`.
    """
    placed = (counts.data + counts.zero_allocated) * tables.cluster_size
    if not virtual_size or placed < _NEARLY_ALL * virtual_size:
        return OFF
    mapped, reserved = _told(fd, data_bytes, found)
    if mapped >= _NEARLY_ALL * placed and reserved >= _A_PART * placed:
        return FALLOC
    if mapped > (1 - _A_PART) * placed:
        return FILLED
    return METADATA if tables.in_order_of_creation() else OFF


def _told(fd: int, data_bytes: int, found: Extents | None) -> tuple[int, int]:
    """Bytes that have blocks, and those of them that were never written."""
    if found is not None:
        return found.mapped, found.reserved
    taken = os.fstat(fd).st_blocks * 512
    return taken, max(taken - data_bytes, 0)
