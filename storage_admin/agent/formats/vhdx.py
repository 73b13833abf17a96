"""The headers, regions and metadata of a Hyper-V image (VHDX), version 1, dynamic or fixed.

Layout: Microsoft, [MS-VHDX] Virtual Hard Disk v2 (VHDX) File Format, section 2; all numbers little-endian. Where the
specification and qemu (block/vhdx.c) differ, the stricter one holds: what qemu refuses cannot be worked with.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from storage_admin.agent.formats.crc32c import crc32c
from storage_admin.agent.formats.facts import Facts, Reader, UnreadableError

MAGIC = b"vhdxfile"

_KIB, _MIB, _TIB = 1 << 10, 1 << 20, 1 << 40
_HEADERS = (64 * _KIB, 128 * _KIB)
_HEADER_SIZE = 4 * _KIB
_REGION_TABLE, _REGION_TABLE_SIZE = 192 * _KIB, 64 * _KIB
_METADATA_TABLE_SIZE = 64 * _KIB
_MAX_ENTRIES = 2047
_MAX_SIZE = 64 * _TIB
#: A bitmap block describes that many sectors of payload, and has an entry of its own in the block allocation table.
_SECTORS_PER_BITMAP = 1 << 23
_SECTOR = 512

_HEADER = struct.Struct("<4sIQ16s16s16sHHIQ")
_REGIONS = struct.Struct("<4sIII")
_REGION = struct.Struct("<16sQII")
_METADATA = struct.Struct("<8sHH20s")
_ITEM = struct.Struct("<16sIIII")
_FILE_PARAMETERS = struct.Struct("<II")
_REGION_REQUIRED, _ITEM_REQUIRED = 1, 4
_LEAVE_BLOCKS_ALLOCATED, _HAS_PARENT = 1, 2
_NO_LOG = bytes(16)


def _guid(written: str) -> bytes:
    """A GUID as it stands in a file: its first three numbers are little-endian."""
    first, second, third, *rest = (bytes.fromhex(part) for part in written.split("-"))
    return first[::-1] + second[::-1] + third[::-1] + b"".join(rest)


def _shown(guid: bytes) -> str:
    parts = (guid[3::-1], guid[5:3:-1], guid[7:5:-1], guid[8:10], guid[10:])
    return "-".join(part.hex() for part in parts)


_BAT = _guid("2dc27766-f623-4200-9d64-115e9bfd4a08")
_METADATA_REGION = _guid("8b7ca206-4790-4b9a-b8fe-575f050f886e")
_PARAMETERS = _guid("caa16737-fa36-4d43-b3b6-33f0aa44e76b")
_DISK_SIZE = _guid("2fa54224-cd1b-4876-b211-5dbed83bf4b8")
_PAGE_83 = _guid("beca12ab-b2e6-4523-93ef-c309e000c746")
_LOGICAL_SECTOR = _guid("8141bf1d-a96f-4709-ba47-f233a8faab5f")
_PHYSICAL_SECTOR = _guid("cda348c7-445d-4471-9cc9-e9885251c556")
_PARENT = _guid("a8d35f2d-b30b-454d-abf7-d3d84834ab0c")
#: The items that every image has, with their sizes in bytes.
_ITEMS = {_PARAMETERS: 8, _DISK_SIZE: 8, _PAGE_83: 16, _LOGICAL_SECTOR: 4, _PHYSICAL_SECTOR: 4}


class Region(NamedTuple):
    """A part of the file; both in bytes."""

    offset: int
    length: int


class Header(NamedTuple):
    """The newer one of the two headers, as far as it matters here."""

    sequence: int
    dirty: bool
    log: Region
    log_version: int
    raw: bytes


def read(reader: Reader) -> Facts:
    """The facts of a VHDX image.

    An image whose log is not empty is ``dirty``: it was not closed, and whoever opens it for writing has to replay the
    log first. Its facts are those that stand in the file without it.

    Raises:
        UnreadableError: what is wrong with the headers, which bound they exceed, or that the image builds on another.
    """
    if reader.head[:8] != MAGIC:
        raise UnreadableError("there is no VHDX file identifier")
    header = _header(reader)
    regions = _regions(reader, header)
    items = _items(reader, regions[_METADATA_REGION])
    block_size, flags = _FILE_PARAMETERS.unpack(items[_PARAMETERS])
    if flags & _HAS_PARENT or _PARENT in items:
        raise UnreadableError("this version does not read VHDX images that build on another one (differencing)")
    if not _MIB <= block_size <= 256 * _MIB or block_size & (block_size - 1):
        raise UnreadableError(f"VHDX block size of {block_size} bytes")
    sector = int.from_bytes(items[_LOGICAL_SECTOR], "little")
    if sector != _SECTOR:
        raise UnreadableError(f"VHDX with logical sectors of {sector} bytes, of which qemu reads only those of 512")
    size = int.from_bytes(items[_DISK_SIZE], "little")
    if size > _MAX_SIZE:
        raise UnreadableError(f"virtual size of {size} bytes: VHDX allows 64 TiB")
    _check_table(size, block_size, regions[_BAT])
    return Facts(
        format="vhdx",
        virtual_size=size // _SECTOR * _SECTOR,
        cluster_size=block_size,
        subformat="fixed" if flags & _LEAVE_BLOCKS_ALLOCATED else "dynamic",
        dirty=header.dirty,
    )


def checksum(part: bytes) -> int:
    """The checksum of a header or table that has it in bytes 4 to 8, which count as zeros."""
    return crc32c(part[:4] + bytes(4) + part[8:])


def _header(reader: Reader) -> Header:
    """The header that holds: of two good ones the newer. One of them may be torn by a crash while it was written."""
    found = [one for one in (_one_header(reader, offset) for offset in _HEADERS) if one is not None]
    if not found:
        raise UnreadableError("both VHDX headers are damaged: their signatures, checksums or versions are wrong")
    newest = max(found, key=lambda one: one.sequence)
    if any(one.sequence == newest.sequence and one.raw != newest.raw for one in found):
        raise UnreadableError("the two VHDX headers have the same number and contradict each other")
    if newest.log_version:
        raise UnreadableError(f"this version does not read VHDX with a log of version {newest.log_version}")
    # qemu refuses a log's place that is no place even where the log has no length.
    if not newest.log.offset or newest.log.offset % _MIB or newest.log.length % _MIB:
        raise UnreadableError("the VHDX log does not start and end at a MiB")
    if newest.dirty:
        _check_inside(reader, newest.log, "the VHDX log")
    return newest


def _one_header(reader: Reader, offset: int) -> Header | None:
    raw = reader.at(offset, _HEADER_SIZE, "the VHDX header")
    mark, stored, sequence, _, _, log_guid, log_version, version, length, start = _HEADER.unpack_from(raw)
    if mark != b"head" or version != 1 or stored != checksum(raw):
        return None
    return Header(sequence, log_guid != _NO_LOG, Region(start, length), log_version, raw)


def _regions(reader: Reader, header: Header) -> dict[bytes, Region]:
    raw = reader.at(_REGION_TABLE, _REGION_TABLE_SIZE, "the VHDX region table")
    mark, stored, count, _ = _REGIONS.unpack_from(raw)
    if mark != b"regi" or stored != checksum(raw):
        raise UnreadableError("the VHDX region table is damaged: its mark or checksum is wrong")
    if count > _MAX_ENTRIES:
        raise UnreadableError(f"{count} VHDX regions, more than the {_MAX_ENTRIES} that are allowed")
    found: dict[bytes, Region] = {}
    taken = [Region(0, _MIB), *([header.log] if header.log.length else [])]
    for number in range(count):
        name, offset, length, flags = _REGION.unpack_from(raw, _REGIONS.size + number * _REGION.size)
        if name not in {_BAT, _METADATA_REGION} and flags & _REGION_REQUIRED:
            raise UnreadableError(f"this version does not read VHDX with the region {_shown(name)}")
        if name in found:
            raise UnreadableError(f"the VHDX region {_shown(name)} is there twice")
        if offset % _MIB or length % _MIB or not length:
            raise UnreadableError("a VHDX region does not start and end at a MiB")
        found[name] = Region(offset, length)
        taken.append(found[name])
    if _BAT not in found or _METADATA_REGION not in found:
        raise UnreadableError("the VHDX region table names no block allocation table, or no metadata")
    taken.sort()
    if any(first.offset + first.length > second.offset for first, second in zip(taken, taken[1:])):
        raise UnreadableError("two VHDX regions overlap")
    _check_inside(reader, found[_BAT], "the VHDX block allocation table")
    return found


def _items(reader: Reader, region: Region) -> dict[bytes, bytes]:
    """The metadata items that are known, by their names; the size of each is checked before it is read."""
    head = reader.at(region.offset, _METADATA.size, "the VHDX metadata table")
    mark, _, count, _ = _METADATA.unpack(head)
    if mark != b"metadata":
        raise UnreadableError("the VHDX metadata table is missing")
    if count > _MAX_ENTRIES:
        raise UnreadableError(f"{count} VHDX metadata items, more than the {_MAX_ENTRIES} that are allowed")
    table = reader.at(region.offset + _METADATA.size, count * _ITEM.size, "the VHDX metadata table")
    found: dict[bytes, bytes] = {}
    for name, offset, length, flags, _ in _ITEM.iter_unpack(table):
        if name in found:
            raise UnreadableError("a VHDX metadata item is there twice")
        if name == _PARENT:
            found[name] = b""
        elif name in _ITEMS:
            found[name] = _item(reader, region, Region(offset, length), _ITEMS[name])
        elif flags & _ITEM_REQUIRED:
            raise UnreadableError(f"this version does not read VHDX with the metadata item {_shown(name)}")
    if missing := [name for name in _ITEMS if name not in found]:
        raise UnreadableError(f"the VHDX metadata item {_shown(missing[0])} is missing")
    return found


def _item(reader: Reader, region: Region, place: Region, size: int) -> bytes:
    if place.length != size:
        raise UnreadableError(f"a VHDX metadata item takes {place.length} bytes, not {size}")
    if place.offset < _METADATA_TABLE_SIZE or place.offset + place.length > region.length:
        raise UnreadableError(f"a VHDX metadata item is said to be at byte {place.offset} of the metadata")
    return reader.at(region.offset + place.offset, size, "a VHDX metadata item")


def _check_table(size: int, block_size: int, table: Region) -> None:
    """Whether the block allocation table has an entry for every block, and for the bitmap blocks between them."""
    blocks = (size + block_size - 1) // block_size
    per_bitmap = _SECTORS_PER_BITMAP * _SECTOR // block_size
    # Of no blocks qemu counts 2^32 - 1 to be described by bitmaps, and makes the table as large.
    entries = blocks + ((blocks - 1) & 0xFFFFFFFF) // per_bitmap
    if entries * 8 > table.length:
        raise UnreadableError(f"a VHDX block table of {table.length} bytes cannot hold a virtual size of {size} bytes")


def _check_inside(reader: Reader, region: Region, what: str) -> None:
    end = region.offset + region.length
    if end > reader.file_size:
        raise UnreadableError(f"the file is cut off: {what} ends at byte {end}, the file at byte {reader.file_size}")
