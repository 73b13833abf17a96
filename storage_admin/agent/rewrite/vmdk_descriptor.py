"""The descriptor inside a VMDK of one file: it names that file, and holds what qemu-img would make up anew.

Layout: VMware, Virtual Disk Format 5.0, "Hosted Sparse Extent Header": the descriptor's place and size, in sectors of
512 bytes; it is text, filled up with zeros.
"""

from __future__ import annotations

import os
import re
import struct

from storage_admin.agent.protocol import HostError, RefusedError

_HEADER = struct.Struct("<4sIIQQQQ")
_SECTOR = 512
#: Largest descriptor that is read or written (qemu, block/vmdk.c).
_LARGEST = 20480
_EXTENT = re.compile(rb'(?m)^([ \t]*RW[ \t]+[0-9]+[ \t]+SPARSE[ \t]+")([^"\r\n]*)(")')
#: By what others know the disk and its content; of a parent, a copy that stands alone has none.
_IDENTITY = re.compile(
    rb"(?m)^(CID|ddb\.longContentID|ddb\.uuid(?:\.image|\.modification)?)[ \t]*=[^\r\n]{0,200}(?=\r?$)"
)


def name_extent(fd: int, name: bytes) -> None:
    """Put a VMDK's real name where its descriptor names its only extent.

    Args:
        fd: descriptor of the VMDK, open for reading and writing.
        name: of the file.

    Raises:
        HostError: the descriptor is not as it is in a file of its own.
    """
    _write(fd, _named(_read(fd), name))


def carry_over(source: int, target: int, name: bytes) -> None:
    """Give a copy the descriptor of the image that it was made from: content id, adapter, hardware version, UUIDs.

    Args:
        source: descriptor of the image.
        target: descriptor of the copy, open for reading and writing.
        name: of the file.

    Raises:
        HostError: one of the descriptors is not as it is in a file of its own, or there is no room for the image's.
    """
    _read(target)
    _write(target, _named(_read(source), name))


def carry_identity(source: int, target: int) -> None:
    """Give a copy with other options the content id and the UUIDs of the image; all else that it says is its own.

    Args:
        source: descriptor of the image; one without a descriptor of its own gives nothing.
        target: descriptor of the copy, open for reading and writing.

    Raises:
        HostError: the copy's descriptor is not as it is in a file of its own, or has no room.
    """
    try:
        lines = {found[1]: found[0] for found in _IDENTITY.finditer(_read(source))}
    except HostError:
        return
    text = _IDENTITY.sub(lambda found: lines.pop(found[1], found[0]), _read(target))
    _write(target, b"\n".join([text.rstrip(b"\n"), *lines.values(), b""]))


def refuse_unnamed(fd: int, shown: str) -> None:
    """Refuse a VMDK whose descriptor could not be carried over; raises RefusedError(``unsupported_subformat``)."""
    try:
        _named(_read(fd), b"x")
    except HostError as error:
        raise RefusedError("unsupported_subformat", f"{shown}: {error.detail}; convert it to qcow2") from error


def _place(fd: int) -> tuple[int, int]:
    head = os.pread(fd, _HEADER.size, 0)
    if len(head) < _HEADER.size:
        raise HostError("the VMDK's header is cut off")
    magic, _, _, _, _, offset, size = _HEADER.unpack(head)
    if magic != b"KDMV" or not offset or not 0 < size * _SECTOR <= _LARGEST:
        raise HostError("the VMDK has no descriptor in its own file")
    return offset * _SECTOR, size * _SECTOR


def _read(fd: int) -> bytes:
    offset, room = _place(fd)
    # qemu leaves bytes of a longer text behind the zero that ends a shorter one.
    return os.pread(fd, room, offset).split(b"\0", 1)[0]


def _named(text: bytes, name: bytes) -> bytes:
    if len(_EXTENT.findall(text)) != 1:
        raise HostError("the VMDK's descriptor does not name one sparse extent")
    return _EXTENT.sub(lambda found: found[1] + name + found[3], text)


def _write(fd: int, text: bytes) -> None:
    offset, room = _place(fd)
    if len(text) > room:
        raise HostError("the VMDK's descriptor has no room for that name; choose a shorter one")
    os.pwrite(fd, text.ljust(room, b"\0"), offset)
