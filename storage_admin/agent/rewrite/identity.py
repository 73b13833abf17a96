"""What a disk is known by: VirtualBox and others name it by its UUID, and so do images that build on it.

Layouts: qemu, block/vdi.c, for VDI 1.1; Microsoft, Virtual Hard Disk Image Format Specification 1.0.
"""

from __future__ import annotations

import os

from storage_admin.agent.formats import vpc
from storage_admin.agent.protocol import HostError
from storage_admin.agent.rewrite import vmdk_descriptor

#: Offset and length in a VDI: its comment; its own UUID and that of its last change.
_VDI = ((0x54, 256), (0x188, 32))
#: Where in a VHD's footer it says how this very file is laid out: version and data offset, checksum, disk type.
_VHD_LAYOUT = ((0, 24), (60, 8))
_FIXED = bytes((0, 0, 0, 2))


def carry_over(image_format: str, source: int, target: int) -> None:
    """Make a copy that takes an image's place the same disk for who knows it; of other formats there is nothing to do.

    Args:
        image_format: of both.
        source: descriptor of the image.
        target: descriptor of the copy, open for reading and writing.

    Raises:
        HostError: the copy is not laid out as qemu lays it out.
    """
    if image_format == "vdi":
        for offset, length in _VDI:
            os.pwrite(target, os.pread(source, length, offset), offset)
    elif image_format == "vpc":
        _carry_footer_over(source, target)
    elif image_format == "vmdk":
        vmdk_descriptor.carry_identity(source, target)


def _carry_footer_over(source: int, target: int) -> None:
    """All that a footer says of the disk: unique id, time, size, geometry, and who made it (the size goes by that)."""
    head, end = _at(source, 0), _at(source, _end(source))
    footer = bytearray(head if head[:8] == vpc.COOKIE else end)
    made = _at(target, _end(target))
    # In a fixed one the first sector is the guest's, whatever it looks like.
    places = {_end(target)} if made[60:64] == _FIXED else {0, _end(target)}
    if any(_at(target, place)[:8] != vpc.COOKIE for place in places):
        raise HostError("the copy has no footer where a VHD has one")
    for offset, length in _VHD_LAYOUT:
        footer[offset : offset + length] = made[offset : offset + length]
    footer[64:68] = vpc.checksum(bytes(footer)).to_bytes(4, "big")
    for place in places:
        os.pwrite(target, footer, place)


def _end(fd: int) -> int:
    return os.fstat(fd).st_size - vpc.FOOTER_SIZE


def _at(fd: int, place: int) -> bytes:
    return os.pread(fd, vpc.FOOTER_SIZE, place)
