"""The header and descriptor of a VMware image: sparse, streamOptimized, flat.

Layout: VMware, Virtual Disk Format 5.0; all numbers little-endian. Which subformats hold and how extent lines are read
is as in qemu (block/vmdk.c).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from storage_admin.agent.formats.facts import Facts, Reader, UnreadableError, text

MAGIC = b"KDMV"
MAGIC_ESX = b"COWD"

_HEADER = struct.Struct("<4sIIQQQQIQQQBBBBBH")
_MARKER = struct.Struct("<QII")
_GD_AT_END = (1 << 64) - 1
#: qemu reads a descriptor of up to 20 KiB and refuses more.
_MAX_DESCRIPTOR = 20480
_MAX_EXTENTS = 4096
_MANY_FILES = frozenset(
    {"monolithicFlat", "vmfs", "vmfsSparse", "seSparse", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"}
)
_EXTENT = re.compile(
    rb'^[ \t]*(RW|RDONLY|NOACCESS)[ \t]+(\d{1,19})[ \t]+(\S{1,10})(?:[ \t]+"([^"\r\n]{1,511})"(?:[ \t]+(\d+))?)?'
)
_SETTING = re.compile(rb'^[ \t]*(createType|parentFileNameHint)[ \t]*=[ \t]*"([^"\r\n]*)"')


@dataclass(frozen=True)
class Descriptor:
    """The text that describes a VMDK; ``sectors`` is the sum over its extents, each of 512 bytes."""

    create_type: str
    parent: bytes | None
    extents: tuple[bytes, ...]
    sectors: int


def is_descriptor(head: bytes) -> bool:
    """Whether a file starts like a VMDK descriptor: comments and empty lines, then ``version=`` (as qemu probes)."""
    for line in head[:2048].split(b"\n"):
        if line.startswith(b"#") or not line.strip(b" \r"):
            continue
        return line.rstrip(b"\r") in (b"version=1", b"version=2", b"version=3")
    return False


def read(reader: Reader) -> Facts:
    """The facts of a VMDK image; no other file is opened, extents are only named.

    Raises:
        UnreadableError: what is wrong with the header or descriptor, or which bound it exceeds.
    """
    head = reader.head
    if head[:4] == MAGIC_ESX:
        raise UnreadableError("this version does not read ESX sparse extents (COWD); open the VMDK descriptor instead")
    if head[:4] == MAGIC:
        return _read_sparse(reader)
    if not is_descriptor(head):
        raise UnreadableError("there is neither a VMDK header nor a VMDK descriptor")
    return _from_descriptor(_parse(reader.at(0, min(reader.file_size, _MAX_DESCRIPTOR), "the VMDK descriptor")))


def _read_sparse(reader: Reader) -> Facts:
    if len(reader.head) < 512:
        raise UnreadableError("the VMDK header is cut off")
    _, version, _, capacity, grain, desc_offset, desc_size, entries, _, table, _, _, *_, compression = (
        _HEADER.unpack_from(reader.head)
    )
    if version > 3:
        raise UnreadableError(f"this version does not read VMDK version {version}")
    if compression > 1:
        raise UnreadableError(f"unknown VMDK compression {compression}")
    descriptor = None
    if desc_offset:
        if not 0 < desc_size * 512 <= _MAX_DESCRIPTOR:
            raise UnreadableError(f"a VMDK descriptor of {desc_size} sectors")
        descriptor = _parse(reader.at(desc_offset * 512, desc_size * 512, "the VMDK descriptor"))
    if capacity == 0 and descriptor is not None:
        return _from_descriptor(descriptor)
    if not 0 < grain <= 0x200000 or not 0 < entries <= 512 or capacity > (1 << 54):
        raise UnreadableError("the VMDK header's grain size, table size or capacity is beyond the bounds")
    if (capacity + grain * entries - 1) // (grain * entries) > 512 * 1024 * 1024:
        raise UnreadableError("the VMDK grain directory is beyond the bounds")
    if table == _GD_AT_END:
        _check_footer(reader, capacity)
    elif capacity and table * 512 >= reader.file_size:
        raise UnreadableError("the file is cut off: its grain directory is missing")
    return Facts(
        format="vmdk",
        virtual_size=capacity * 512,
        cluster_size=grain * 512,
        compression="zlib" if compression else None,
        subformat=descriptor.create_type if descriptor else None,
        backing_file=descriptor.parent if descriptor else None,
    )


def _check_footer(reader: Reader, capacity: int) -> None:
    """A stream ends with a footer: the same header, with the place of the grain directory."""
    end = reader.file_size // 512 * 512
    if end < 2048:
        raise UnreadableError("the file is cut off: its footer is missing")
    footer = reader.at(end - 1536, 1536, "the VMDK footer")
    _, size, kind = _MARKER.unpack_from(footer)
    _, last_size, last_kind = _MARKER.unpack_from(footer, 1024)
    if (size, kind, last_size, last_kind) != (0, 3, 0, 0) or footer[512:516] != MAGIC:
        raise UnreadableError("the file is cut off: its footer is missing")
    _, _, _, footer_capacity, *_ = _HEADER.unpack_from(footer, 512)
    if footer_capacity != capacity:
        raise UnreadableError("the VMDK footer contradicts its header")


def _from_descriptor(descriptor: Descriptor) -> Facts:
    if descriptor.create_type not in _MANY_FILES:
        raise UnreadableError(f"this version does not read VMDK of type {descriptor.create_type!r}")
    if not descriptor.extents:
        raise UnreadableError("the VMDK descriptor names no extents")
    return Facts(
        format="vmdk",
        virtual_size=descriptor.sectors * 512,
        subformat=descriptor.create_type,
        backing_file=descriptor.parent,
        extents=descriptor.extents,
    )


def _parse(raw: bytes) -> Descriptor:
    create_type, parent = "", None
    extents: list[bytes] = []
    sectors = 0
    for line in raw.split(b"\0", 1)[0].split(b"\n"):
        setting = _SETTING.match(line)
        if setting and setting[1] == b"createType":
            create_type = create_type or text(setting[2])
        elif setting:
            parent = parent or setting[2] or None
        elif extent := _EXTENT.match(line):
            if extent[1] != b"RW" or extent[4] is None:
                raise UnreadableError(f"this version does not read VMDK extents such as {text(line[:80])!r}")
            extents.append(extent[4])
            sectors += int(extent[2])
    if not create_type:
        raise UnreadableError("the VMDK descriptor names no createType")
    if len(extents) > _MAX_EXTENTS or sectors > 1 << 54:
        raise UnreadableError("the VMDK descriptor's extents are beyond the bounds")
    if parent is not None and len(parent) > 1023:
        raise UnreadableError(f"the parent's name takes {len(parent)} bytes")
    return Descriptor(create_type, parent, tuple(extents), sectors)
