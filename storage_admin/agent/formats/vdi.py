"""The header of a VirtualBox image, version 1.1.

Layout: qemu, block/vdi.c, which follows VirtualBox's VDICore.h; all numbers little-endian.
"""

from __future__ import annotations

import struct

from storage_admin.agent.formats.facts import Facts, Reader, UnreadableError

SIGNATURE = b"\x7f\x10\xda\xbe"
SIGNATURE_OFFSET = 0x40

_BLOCK_SIZE = 1 << 20
_MAX_BLOCKS = 0x3FFFFFFF // 4
_START = struct.Struct("<IIIII")
_SIZES = struct.Struct("<IIIIIIIQIIII16s16s16s16s")
_DYNAMIC, _STATIC = 1, 2
_NO_UUID = bytes(16)


def read(reader: Reader) -> Facts:
    """The facts of a VDI image.

    Raises:
        UnreadableError: what is wrong with the header, or which bound it exceeds.
    """
    head = reader.head
    if len(head) < 512 or head[SIGNATURE_OFFSET : SIGNATURE_OFFSET + 4] != SIGNATURE:
        raise UnreadableError("the VDI header is cut off or missing")
    _, version, _, image_type, _ = _START.unpack_from(head, SIGNATURE_OFFSET)
    if version != 0x00010001:
        raise UnreadableError(f"this version does not read VDI version {version >> 16}.{version & 0xFFFF}")
    if image_type not in (_DYNAMIC, _STATIC):
        raise UnreadableError(f"this version does not read VDI images of type {image_type} (undo or differencing)")
    (map_offset, data_offset, _, _, _, sector_size, _, disk_size, block_size, _, blocks, allocated,
     _, _, link, parent) = _SIZES.unpack_from(head, 0x154)  # fmt: skip
    if map_offset % 512 or data_offset % 512 or sector_size != 512 or block_size != _BLOCK_SIZE:
        raise UnreadableError("the VDI header's offsets, sector size or block size are not those of VDI 1.1")
    if blocks > _MAX_BLOCKS or disk_size > blocks * block_size or allocated > blocks:
        raise UnreadableError(f"{blocks} blocks cannot hold a virtual size of {disk_size} bytes")
    if link != _NO_UUID or parent != _NO_UUID:
        raise UnreadableError("this version does not read VDI images that build on another one")
    if blocks and map_offset >= reader.file_size:
        raise UnreadableError("the file is cut off: its block map is missing")
    return Facts(
        format="vdi",
        virtual_size=(disk_size + 511) // 512 * 512,
        cluster_size=block_size,
        preallocation="metadata" if image_type == _STATIC else "off",
        subformat="static" if image_type == _STATIC else "dynamic",
    )
