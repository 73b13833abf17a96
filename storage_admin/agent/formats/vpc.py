"""The footer of a Virtual PC image (VHD), dynamic or fixed.

Layout: Microsoft, Virtual Hard Disk Image Format Specification 1.0; all numbers big-endian. Which of its two sizes
holds is decided as qemu does (block/vpc.c), because the guest sees what qemu decides. Programs that go by the footer's
own size in all images, as VirtualBox does, may see a disk with a longer end.
"""

from __future__ import annotations

import struct

from storage_admin.agent.formats.facts import Facts, Reader, UnreadableError

COOKIE = b"conectix"
FOOTER_SIZE = 512

_FIXED, _DYNAMIC, _DIFFERENCING = 2, 3, 4
_FOOTER = struct.Struct(">8sIIQI4sIIQQHBBI")
_DYNAMIC_HEADER = struct.Struct(">8sQQIII")
_MAX_GEOMETRY = 65535 * 16 * 255
_MAX_SECTORS = 0xFF000000
#: Programs whose images are as large as the footer's size says; all others count cylinders, heads and sectors.
_BY_SIZE = (b"win ", b"qem2", b"d2v ", b"tap\0", b"CTXS")


def read(reader: Reader) -> Facts:
    """The facts of a VHD image.

    Raises:
        UnreadableError: what is wrong with the footer, or which bound it exceeds.
    """
    at_start = reader.head[:8] == COOKIE
    if reader.file_size < FOOTER_SIZE or (at_start and len(reader.head) < FOOTER_SIZE):
        raise UnreadableError("the VHD footer is cut off or missing")
    footer = reader.head[:FOOTER_SIZE] if at_start else reader.at(reader.file_size - FOOTER_SIZE, FOOTER_SIZE, "footer")
    (cookie, _, _, data_offset, _, creator, _, _, _, size, cylinders, heads, sectors, kind) = _FOOTER.unpack_from(
        footer
    )
    if cookie != COOKIE:
        raise UnreadableError("there is no VHD footer")
    if checksum(footer) != int.from_bytes(footer[64:68], "big"):
        raise UnreadableError("the VHD footer is damaged: its checksum is wrong")
    if kind == _DIFFERENCING:
        raise UnreadableError("this version does not read VHD images that build on another one (differencing)")
    if kind != (_DYNAMIC if at_start else _FIXED):
        raise UnreadableError(f"the VHD footer says disk type {kind}, which does not fit its place")
    total = cylinders * heads * sectors
    if creator in _BY_SIZE or total == _MAX_GEOMETRY:
        total, other_size = size // 512, None
    else:
        other_size = size if size != total * 512 else None
    if total > _MAX_SECTORS:
        raise UnreadableError(f"virtual size of {total * 512} bytes: VHD allows 2040 GiB")
    if not at_start:
        return Facts(format="vpc", virtual_size=total * 512, other_size=other_size, subformat="fixed")
    block_size = _block_size(reader, data_offset, total)
    return Facts(
        format="vpc", virtual_size=total * 512, other_size=other_size, cluster_size=block_size, subformat="dynamic"
    )


def checksum(footer: bytes) -> int:
    """The one's complement of the sum of a footer's bytes, its checksum field left out."""
    return ~(sum(footer) - sum(footer[64:68])) & 0xFFFFFFFF


def _block_size(reader: Reader, offset: int, total_sectors: int) -> int:
    header = reader.at(offset, _DYNAMIC_HEADER.size, "the VHD dynamic header")
    cookie, _, table_offset, _, entries, block_size = _DYNAMIC_HEADER.unpack(header)
    if cookie != b"cxsparse":
        raise UnreadableError("the VHD dynamic header is missing")
    if block_size < 512 or block_size & (block_size - 1):
        raise UnreadableError(f"VHD block size of {block_size} bytes")
    if entries > 0x7FFFFFFF // 4 or total_sectors * 512 > block_size * entries:
        raise UnreadableError(f"{entries} VHD blocks cannot hold a virtual size of {total_sectors * 512} bytes")
    if table_offset >= reader.file_size:
        raise UnreadableError("the file is cut off: its block table is missing")
    return int(block_size)
