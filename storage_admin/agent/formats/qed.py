"""The header of a QED image.

Layout: qemu, docs/interop/qed_spec.txt; all numbers little-endian. Bounds as in qemu (block/qed.c), which opens
less than the specification allows: no tables of one cluster, and none that could hold 2^64 bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from storage_admin.agent.formats.facts import Facts, Reader, UnreadableError

MAGIC = b"QED\0"

BACKING_FILE, NEED_CHECK, BACKING_FORMAT_NO_PROBE = 1, 2, 4
KNOWN_FEATURES = BACKING_FILE | NEED_CHECK | BACKING_FORMAT_NO_PROBE

_HEADER = struct.Struct("<4sIIIQQQQQII")
_MIN_CLUSTER, _MAX_CLUSTER = 4096, 64 * 1024 * 1024
_TABLE_CLUSTERS = (2, 4, 8, 16)
_MAX_BACKING_NAME = 4095


class Header(NamedTuple):
    """The fixed part; ``table_size`` and ``header_size`` in clusters, all other sizes and offsets in bytes."""

    magic: bytes
    cluster_size: int
    table_size: int
    header_size: int
    features: int
    compat_features: int
    autoclear_features: int
    l1_offset: int
    image_size: int
    backing_offset: int
    backing_size: int


def read(reader: Reader) -> Facts:
    """The facts of a QED image.

    It is ``dirty`` where its header says that it needs a check. A base whose format "must not be probed" is raw; QED
    knows no other way to declare it.

    Raises:
        UnreadableError: what is wrong with the header, or which bound it exceeds.
    """
    if len(reader.head) < _HEADER.size or reader.head[:4] != MAGIC:
        raise UnreadableError("the QED header is cut off or missing")
    header = Header(*_HEADER.unpack_from(reader.head))
    if unknown := header.features & ~KNOWN_FEATURES:
        raise UnreadableError(f"this version does not read QED with the features {unknown:#x}")
    if not _MIN_CLUSTER <= header.cluster_size <= _MAX_CLUSTER or header.cluster_size & (header.cluster_size - 1):
        raise UnreadableError(f"cluster size of {header.cluster_size} bytes: QED allows 4 KiB to 64 MiB")
    if header.table_size not in _TABLE_CLUSTERS:
        raise UnreadableError(f"QED tables of {header.table_size} clusters: QEMU opens only 2, 4, 8 or 16")
    _check_layout(reader, header)
    backing_file = _backing_name(reader, header)
    return Facts(
        format="qed",
        virtual_size=header.image_size,
        cluster_size=header.cluster_size,
        dirty=bool(header.features & NEED_CHECK),
        backing_file=backing_file,
        backing_format="raw" if backing_file and header.features & BACKING_FORMAT_NO_PROBE else None,
    )


def _check_layout(reader: Reader, header: Header) -> None:
    cluster = header.cluster_size
    entries = header.table_size * cluster // 8
    most = entries * entries * cluster
    if header.image_size % 512 or header.image_size > (most if most < 1 << 64 else 0):
        raise UnreadableError(f"virtual size of {header.image_size} bytes, which the QED tables cannot hold")
    header_end = header.header_size * cluster
    if not 0 < header_end < 1 << 32:
        raise UnreadableError(f"a QED header of {header.header_size} clusters")
    if header.l1_offset % cluster or header.l1_offset < header_end:
        raise UnreadableError(f"the QED L1 table is said to be at byte {header.l1_offset}")
    if header.l1_offset + header.table_size * cluster > reader.file_size:
        raise UnreadableError("the file is cut off: its L1 table is missing")


def _backing_name(reader: Reader, header: Header) -> bytes | None:
    if not header.features & BACKING_FILE:
        return None
    end = header.backing_offset + header.backing_size
    if header.backing_size > _MAX_BACKING_NAME:
        raise UnreadableError(f"the backing file's name takes {header.backing_size} bytes")
    if end > header.header_size * header.cluster_size or (header.backing_size and header.backing_offset < _HEADER.size):
        raise UnreadableError(f"the backing file's name is said to be at byte {header.backing_offset}")
    if not header.backing_size:
        return None
    name = reader.at(header.backing_offset, header.backing_size, "the backing file's name")
    if b"\0" in name:
        raise UnreadableError("the backing file's name has a NUL byte in it")
    return name
