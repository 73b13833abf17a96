"""What a file looks like, and what its header says: no process, no other file opened, bounded."""

from __future__ import annotations

import os
import struct

from storage_admin.agent.formats import luks, qcow2, qed, vdi, vhdx, vmdk, vpc
from storage_admin.agent.formats.facts import Facts, Reader, Snapshot, UnreadableError

__all__ = [
    "NAMING",
    "Facts",
    "Reader",
    "Snapshot",
    "UnreadableError",
    "guess",
    "probe",
    "read",
    "read_as",
    "stands_alone",
]


def _read_raw(reader: Reader) -> Facts:
    """The virtual size of a raw image is its file size, rounded up to whole sectors as qemu does."""
    return Facts(format="raw", virtual_size=(reader.file_size + 511) // 512 * 512)


_READERS = {
    "qcow2": qcow2.read, "vmdk": vmdk.read, "vdi": vdi.read, "vpc": vpc.read, "vhdx": vhdx.read, "qed": qed.read,
    "luks": luks.read, "raw": _read_raw, "iso": _read_raw,
}  # fmt: skip

#: Formats whose header may name another file that the image needs: one that cannot be read may stand on any.
NAMING = frozenset({"qcow2", "qcow", "vmdk", "vdi", "vpc", "vhdx", "qed"})

#: So many bytes of a qcow2 header tell whether there is a base, and which features one has to know.
_TOLD = 80

_MAGICS = (
    (vhdx.MAGIC, "vhdx"),
    (qed.MAGIC, "qed"),
    (luks.MAGIC, "luks"),
    (b"WithoutFreeSpace", "parallels"),
    (b"WithouFreSpacExt", "parallels"),
    (b"Bochs Virtual HD Image", "bochs"),
    (b"#!/bin/sh\n#V2.0 Format\n", "cloop"),
    (vpc.COOKIE, "vpc"),
    (vmdk.MAGIC, "vmdk"),
    (vmdk.MAGIC_ESX, "vmdk"),
)
_FIRST_BYTES = frozenset(magic[0] for magic, _ in _MAGICS)
_ISO_OFFSET, _ISO_MAGIC = 32769, b"CD001"


def probe(reader: Reader) -> str:
    """Which format a file looks like by its magic; never a reason to treat it as that format.

    Returns:
        A name as qemu's, ``iso`` for an ISO 9660 file system without one of the magics, else ``raw``.
    """
    head = reader.head
    if head[:4] == qcow2.MAGIC:
        return "qcow" if head[4:8] == b"\0\0\0\x01" else "qcow2"
    if head[:1] and head[0] in _FIRST_BYTES:
        for magic, name in _MAGICS:
            if head.startswith(magic):
                return name
    if head[vdi.SIGNATURE_OFFSET : vdi.SIGNATURE_OFFSET + 4] == vdi.SIGNATURE:
        return "vdi"
    if vmdk.is_descriptor(head):
        return "vmdk"
    if reader.file_size > _ISO_OFFSET + 5 and os.pread(reader.fd, 5, _ISO_OFFSET) == _ISO_MAGIC:
        return "iso"
    return "raw"


def read(fd: int, file_size: int, name: bytes, declared: str | None = None) -> Facts:
    """What the header of an open file says.

    Args:
        fd: descriptor of a regular file, open for reading.
        file_size: in bytes, as ``fstat`` said.
        name: the file's name; only its extension matters, and only to find the footer of a fixed VHD.
        declared: the format that the file is known to have; without it, the one that it looks like.

    Raises:
        UnreadableError: the header is damaged, cut off, beyond the bounds or of a format that is not read.
        OSError: the file could not be read.
    """
    reader = Reader(fd, file_size)
    return read_as(reader, declared or guess(reader, name))


def guess(reader: Reader, name: bytes) -> str:
    """As :func:`probe`, and a fixed VHD by its name together with its footer."""
    found = probe(reader)
    if found == "raw" and name.lower().endswith((b".vhd", b".vpc")) and reader.file_size >= vpc.FOOTER_SIZE:
        footer = os.pread(reader.fd, vpc.FOOTER_SIZE, reader.file_size - vpc.FOOTER_SIZE)
        return "vpc" if footer[:8] == vpc.COOKIE else "raw"
    return found


def read_as(reader: Reader, image_format: str) -> Facts:
    """The facts of a file that is taken for ``image_format``.

    Raises:
        UnreadableError: as :func:`read`.
    """
    reader_of_format = _READERS.get(image_format)
    if reader_of_format is None:
        raise UnreadableError(f"looks like {image_format}, a format that is not supported")
    return reader_of_format(reader)


def stands_alone(reader: Reader, looks_like: str) -> bool:
    """Whether a header that cannot be read as a whole says plainly that it names no other file.

    Args:
        reader: the file.
        looks_like: its format by its magic.

    Returns:
        ``False`` also where it cannot be told.
    """
    if looks_like not in NAMING:
        return True
    head = reader.head
    if looks_like not in {"qcow", "qcow2"} or len(head) < _TOLD:
        return False
    # The place of the base's name is the same in all versions (docs/interop/qcow2.txt).
    version, offset, size = struct.unpack_from(">IQI", head, 4)
    features = int.from_bytes(head[72:_TOLD], "big") if version == 3 else 0
    harmless = features & ~(qcow2.KNOWN_INCOMPATIBLE & ~qcow2.DATA_FILE) == 0
    return version in {1, 2, 3} and (offset, size) == (0, 0) and harmless
