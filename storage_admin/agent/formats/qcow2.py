"""The header of a qcow2 image, versions 2 and 3.

Layout and bounds: the qcow2 specification (qemu, docs/interop/qcow2.txt); where it leaves a bound open, qemu's own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from storage_admin.agent.formats import luks
from storage_admin.agent.formats.facts import Bitmap, Facts, Reader, Snapshot, UnreadableError, text

MAGIC = b"QFI\xfb"

DIRTY, CORRUPT, DATA_FILE, COMPRESSION, EXTENDED_L2 = (1 << bit for bit in range(5))
KNOWN_INCOMPATIBLE = DIRTY | CORRUPT | DATA_FILE | COMPRESSION | EXTENDED_L2
LAZY_REFCOUNTS = 1
AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_DATA_FILE = 1, 2

MAX_L1_BYTES = 32 * 1024 * 1024
MAX_REFCOUNT_TABLE_BYTES = 8 * 1024 * 1024
MAX_BACKING_NAME = 1023
MAX_BACKING_FORMAT = 15
#: Bounds of this reader, below those of qemu (65,536, 64 MiB): an image beyond them is hostile or broken.
MAX_SNAPSHOTS = 4096
MAX_BITMAPS = 4096
MAX_EXTENSIONS = 256

_V2 = struct.Struct(">4sIQIIQIIQQIIQ")
_V3 = struct.Struct(">4sIQIIQIIQQIIQQQQII")
_EXTENSION = struct.Struct(">II")
SNAPSHOT = struct.Struct(">QIHHIIQII")
BITMAPS = struct.Struct(">IIQQ")
_LUKS = struct.Struct(">QQ")
BITMAP = struct.Struct(">QIIBBHI")
_BITMAP_IN_USE, _BITMAP_AUTO = 1, 2

_EXT_BACKING_FORMAT, _EXT_FEATURES, EXT_BITMAPS = 0xE2792ACA, 0x6803F857, 0x23852875
EXT_LUKS, _EXT_DATA_FILE = 0x0537BE77, 0x44415441

_CRYPT = {0: None, 1: "aes", 2: "luks"}


class Header(NamedTuple):
    """The fixed part of the header; offsets and ``size`` in bytes, ``l1_size`` in entries."""

    magic: bytes
    version: int
    backing_offset: int
    backing_size: int
    cluster_bits: int
    size: int
    crypt_method: int
    l1_size: int
    l1_offset: int
    refcount_table_offset: int
    refcount_table_clusters: int
    snapshots_count: int
    snapshots_offset: int
    incompatible: int = 0
    compatible: int = 0
    autoclear: int = 0
    refcount_order: int = 4
    length: int = 72


@dataclass(frozen=True)
class Extensions:
    """What the header extensions say; ``bitmaps`` are the count, the directory's size and offset in bytes."""

    backing_format: str | None
    data_file: bytes | None
    bitmaps: tuple[int, int, int] | None
    #: Where the LUKS header is, and its length with the room for all keys.
    luks: tuple[int, int] | None


def read(reader: Reader) -> Facts:
    """The facts of a qcow2 image.

    Raises:
        UnreadableError: what is wrong with the header, or which bound it exceeds.
    """
    header = parse_header(reader)
    compression = _compression(reader, header)
    found = _extensions(reader, header)
    if header.crypt_method == 2 and not found.luks:
        raise UnreadableError("the header says LUKS and has no LUKS header extension")
    has_data_file = bool(header.incompatible & DATA_FILE)
    if has_data_file and not found.data_file:
        raise UnreadableError("the header says that the data is in another file and does not name it")
    version3 = header.version >= 3
    return Facts(
        format="qcow2",
        virtual_size=header.size // 512 * 512,
        cluster_size=1 << header.cluster_bits,
        compat="1.1" if version3 else "0.10",
        compression=compression,
        refcount_bits=1 << header.refcount_order,
        lazy_refcounts=bool(header.compatible & LAZY_REFCOUNTS) if version3 else None,
        extended_l2=bool(header.incompatible & EXTENDED_L2) if version3 else None,
        encrypted=header.crypt_method != 0,
        encryption=_CRYPT[header.crypt_method],
        key_slots=_key_slots(reader, found.luks) if found.luks else None,
        dirty=bool(header.incompatible & DIRTY),
        corrupt=bool(header.incompatible & CORRUPT),
        backing_file=_backing_name(reader, header),
        backing_format=found.backing_format,
        data_file=found.data_file if has_data_file else None,
        data_file_raw=bool(header.autoclear & AUTOCLEAR_RAW_DATA_FILE) if has_data_file else None,
        snapshots=_snapshots(reader, header) if header.snapshots_count else (),
        bitmaps=_bitmaps(reader, found.bitmaps) if found.bitmaps else (),
    )


def parse_header(reader: Reader) -> Header:
    """The fixed part, with every field within its bounds.

    Raises:
        UnreadableError: a field is beyond its bounds, or a feature is not known to this version.
    """
    head = reader.head
    if len(head) < 72 or head[:4] != MAGIC:
        raise UnreadableError("the qcow2 header is cut off or missing")
    header = Header(*_V2.unpack_from(head))
    if header.version == 3:
        if len(head) < 104:
            raise UnreadableError("the qcow2 header is cut off")
        header = Header(*_V3.unpack_from(head))
    elif header.version != 2:
        raise UnreadableError(f"this version does not read qcow2 version {header.version}")
    if not 9 <= header.cluster_bits <= 21:
        raise UnreadableError(f"cluster size of 2^{header.cluster_bits} bytes: qcow2 allows 512 bytes to 2 MiB")
    _check_features(reader, header)
    _check_layout(reader, header)
    return header


def _check_features(reader: Reader, header: Header) -> None:
    if header.incompatible & ~KNOWN_INCOMPATIBLE:
        raise UnreadableError("this version does not read qcow2 with " + _unknown_features(reader, header))
    if header.version == 3 and not 104 <= header.length <= 1 << header.cluster_bits:
        most = 1 << header.cluster_bits
        raise UnreadableError(f"header length of {header.length} bytes: qcow2 allows 104 to {most} here")
    if header.refcount_order > 6:
        raise UnreadableError(f"refcounts of 2^{header.refcount_order} bits: qcow2 allows at most 64 bits")
    if header.crypt_method not in _CRYPT:
        raise UnreadableError(f"unknown encryption method {header.crypt_method}")
    if header.incompatible & EXTENDED_L2 and header.cluster_bits < 14:
        raise UnreadableError("extended L2 entries need clusters of 16 KiB or more")


def _check_layout(reader: Reader, header: Header) -> None:
    cluster = 1 << header.cluster_bits
    if header.backing_offset > cluster:
        raise UnreadableError(f"the backing file's name is said to be at byte {header.backing_offset}")
    if not header.refcount_table_clusters:
        raise UnreadableError("there is no refcount table")
    _check_table("refcount table", header.refcount_table_offset, header.refcount_table_clusters << header.cluster_bits,
                 MAX_REFCOUNT_TABLE_BYTES, cluster)  # fmt: skip
    _check_table("L1 table", header.l1_offset, header.l1_size * 8, MAX_L1_BYTES, cluster)
    if header.size > (1 << 63) - 512 or l1_entries(header) > header.l1_size:
        raise UnreadableError(f"the L1 table is too small for a virtual size of {header.size} bytes")
    if header.l1_size and header.l1_offset >= reader.file_size:
        raise UnreadableError("the file is cut off: its L1 table is missing")
    if header.snapshots_count > MAX_SNAPSHOTS:
        raise UnreadableError(
            f"{header.snapshots_count} internal snapshots, more than the {MAX_SNAPSHOTS} that are read"
        )
    if header.snapshots_count and header.snapshots_offset % cluster:
        raise UnreadableError("the snapshot table does not start at a cluster")


def _check_table(what: str, offset: int, size: int, limit: int, cluster: int) -> None:
    if size > limit:
        raise UnreadableError(f"the {what} takes {size} bytes, qemu allows {limit}")
    if offset % cluster or offset + size >= 1 << 63:
        raise UnreadableError(f"the {what} is said to be at byte {offset}")


def l1_entries(header: Header) -> int:
    """How many L1 entries the virtual size needs."""
    entry_bits = 4 if header.incompatible & EXTENDED_L2 else 3
    shift = header.cluster_bits * 2 - entry_bits
    return (header.size + (1 << shift) - 1) >> shift


def _unknown_features(reader: Reader, header: Header) -> str:
    names: dict[int, str] = {}
    if header.version == 3 and 104 <= header.length <= 1 << header.cluster_bits:
        for magic, offset, length in walk_extensions(reader, header):
            if magic == _EXT_FEATURES:
                table = reader.at(offset, min(length, 48 * 128), "the table of feature names")
                for start in range(0, len(table) - 47, 48):
                    if table[start] == 0:
                        names[table[start + 1]] = text(table[start + 2 : start + 48].split(b"\0")[0])
    unknown = [bit for bit in range(64) if (header.incompatible & ~KNOWN_INCOMPATIBLE) >> bit & 1]
    return "incompatible features " + ", ".join(names.get(bit) or f"bit {bit}" for bit in unknown)


def _compression(reader: Reader, header: Header) -> str:
    kind = reader.at(104, 1, "the compression type")[0] if header.length > 104 else 0
    if kind > 1:
        raise UnreadableError(f"unknown compression type {kind}")
    if bool(kind) != bool(header.incompatible & COMPRESSION):
        raise UnreadableError("the compression type contradicts the feature bits")
    return "zstd" if kind else "zlib"


def _backing_name(reader: Reader, header: Header) -> bytes | None:
    if not header.backing_offset or not header.backing_size:
        return None
    if header.backing_size > min(MAX_BACKING_NAME, (1 << header.cluster_bits) - header.backing_offset):
        raise UnreadableError(f"the backing file's name takes {header.backing_size} bytes")
    name = reader.at(header.backing_offset, header.backing_size, "the backing file's name")
    if b"\0" in name:
        raise UnreadableError("the backing file's name has a NUL byte in it")
    return name


def walk_extensions(reader: Reader, header: Header) -> list[tuple[int, int, int]]:
    """Kind, offset and length of each header extension; raises UnreadableError."""
    found: list[tuple[int, int, int]] = []
    offset, end = header.length, header.backing_offset or 1 << header.cluster_bits
    while offset + 8 <= end:
        magic, length = _EXTENSION.unpack(reader.at(offset, 8, "the header extensions"))
        offset += 8
        if magic == 0:
            break
        if length > end - offset:
            raise UnreadableError(f"header extension {magic:#010x} of {length} bytes reaches beyond the header")
        if len(found) == MAX_EXTENSIONS:
            raise UnreadableError(f"more than {MAX_EXTENSIONS} header extensions")
        found.append((magic, offset, length))
        offset += (length + 7) & ~7
    return found


def _extensions(reader: Reader, header: Header) -> Extensions:
    backing_format: str | None = None
    data_file: bytes | None = None
    bitmaps: tuple[int, int, int] | None = None
    place: tuple[int, int] | None = None
    for magic, offset, length in walk_extensions(reader, header):
        if magic == _EXT_BACKING_FORMAT:
            if length > MAX_BACKING_FORMAT:
                raise UnreadableError(f"the backing format's name takes {length} bytes")
            backing_format = text(reader.at(offset, length, "the backing format").split(b"\0")[0]) or None
        elif magic == _EXT_DATA_FILE:
            if length > MAX_BACKING_NAME:
                raise UnreadableError(f"the data file's name takes {length} bytes")
            data_file = reader.at(offset, length, "the data file's name").split(b"\0")[0]
        elif magic == EXT_BITMAPS:
            bitmaps = _bitmaps_extension(reader, header, offset, length)
        elif magic == EXT_LUKS:
            if length != 16 or header.crypt_method != 2:
                raise UnreadableError("the LUKS header extension contradicts the header")
            place = _LUKS.unpack(reader.at(offset, length, "the LUKS header extension"))
    return Extensions(backing_format, data_file, bitmaps, place)


def luks_area(fd: int, file_size: int) -> tuple[int, int]:
    """Where in an encrypted image its LUKS header and keys are: offset and length in bytes.

    Raises:
        UnreadableError: it has none.
    """
    reader = Reader(fd, file_size)
    found = _extensions(reader, parse_header(reader)).luks
    if found is None:
        raise UnreadableError("the image has no LUKS header")
    return found


def _key_slots(reader: Reader, place: tuple[int, int]) -> tuple[int, ...] | None:
    if place[0] > reader.file_size - luks.HEADER_BYTES:
        return None
    return luks.slots_of(reader.at(place[0], luks.HEADER_BYTES, "the LUKS header"))


def _bitmaps_extension(reader: Reader, header: Header, offset: int, length: int) -> tuple[int, int, int] | None:
    if length != BITMAPS.size:
        raise UnreadableError(f"the bitmaps extension takes {length} bytes, not {BITMAPS.size}")
    if header.version == 3 and not header.autoclear & AUTOCLEAR_BITMAPS:
        return None  # a program that does not know bitmaps wrote to the image: they no longer hold
    count, reserved, size, at = BITMAPS.unpack(reader.at(offset, length, "the bitmaps extension"))
    if not count or reserved or at % (1 << header.cluster_bits) or size < count * BITMAP.size:
        raise UnreadableError("the bitmaps extension contradicts itself")
    if count > MAX_BITMAPS:
        raise UnreadableError(f"{count} bitmaps, more than the {MAX_BITMAPS} that are read")
    return count, size, at


def _snapshots(reader: Reader, header: Header) -> tuple[Snapshot, ...]:
    # Entries have no fixed size: one bounded read, and a cut that matters is found by its entry.
    limit = min(reader.file_size - header.snapshots_offset, header.snapshots_count * (40 + 1024 + 512), 1024 * 1024)
    table = reader.at(header.snapshots_offset, max(limit, 0), "the snapshot table")
    found, offset = [], 0
    for _ in range(header.snapshots_count):
        if offset + 40 > len(table):
            raise UnreadableError("the snapshot table is cut off or beyond the bounds")
        _, l1_size, id_size, name_size, created, _, _, state_size, extra = SNAPSHOT.unpack_from(table, offset)
        offset += 40
        if extra > 1024 or l1_size * 8 > MAX_L1_BYTES:
            raise UnreadableError("a snapshot's entry is beyond the bounds")
        if offset + extra + id_size + name_size > len(table):
            raise UnreadableError("the snapshot table is cut off or beyond the bounds")
        if extra >= 8:
            state_size = int.from_bytes(table[offset : offset + 8], "big")
        offset += extra
        name = offset + id_size
        found.append(
            Snapshot(text(table[offset:name]), text(table[name : name + name_size]), state_size, created),
        )
        offset = (name + name_size + 7) & ~7
    return tuple(found)


def _bitmaps(reader: Reader, extension: tuple[int, int, int]) -> tuple[Bitmap, ...]:
    count, size, at = extension
    table = reader.at(at, size, "the bitmap directory")
    found, offset = [], 0
    for _ in range(count):
        if offset + BITMAP.size > size:
            raise UnreadableError("the bitmap directory is cut off")
        _, _, flags, _, granularity_bits, name_size, extra = BITMAP.unpack_from(table, offset)
        offset += BITMAP.size + extra
        if not 1 <= name_size <= MAX_BACKING_NAME or offset + name_size > size:
            raise UnreadableError("a bitmap's entry is beyond the bounds")
        if granularity_bits > 63:
            raise UnreadableError(f"a bitmap's granularity of 2^{granularity_bits} bytes")
        name = text(table[offset : offset + name_size])
        found.append(Bitmap(name, 1 << granularity_bits, bool(flags & _BITMAP_IN_USE), bool(flags & _BITMAP_AUTO)))
        offset = (offset + name_size + 7) & ~7
    return tuple(found)
