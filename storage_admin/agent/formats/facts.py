"""What a header says about an image, in one shape for every format.

Bounded reads of a header: what is not there is said, never guessed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


class UnreadableError(Exception):
    """The header cannot be believed: damaged, cut off, beyond the bounds, or of a format that is not read.

    Its only argument is a sentence for the admin.
    """


@dataclass(frozen=True)
class Snapshot:
    """An internal snapshot: ``size`` is that of the saved machine state in bytes, ``created`` seconds since 1970."""

    id: str
    name: str
    size: int
    created: int


@dataclass(frozen=True)
class Bitmap:
    """A persistent dirty bitmap of a qcow2 image.

    Args:
        granularity: bytes that one bit of it stands for.
        in_use: it was not closed cleanly, so that what it says is not to be relied on.
        enabled: writes are marked in it; else it stays as it is.
    """

    name: str
    granularity: int
    in_use: bool
    enabled: bool


@dataclass(frozen=True)
class Facts:
    """An image's header. ``None`` means that the format does not say; sizes are in bytes.

    ``backing_file`` and ``data_file`` stand as they were written: relative to the image, or with a protocol.
    ``encryption`` is ``aes`` or ``luks`` for what a qcow2 holds, ``luks (CIPHER)`` or ``luks2`` for a LUKS volume.
    ``key_slots`` are the numbers of the LUKS key slots that hold a key.
    ``other_size`` is what programs other than qemu take for the virtual size, where the header leaves that open (VHD).
    ``extents`` are the names of further files that hold the image's data (VMDK), relative to the image.
    """

    format: str
    virtual_size: int
    cluster_size: int | None = None
    compat: str | None = None
    compression: str | None = None
    refcount_bits: int | None = None
    lazy_refcounts: bool | None = None
    extended_l2: bool | None = None
    preallocation: str | None = None
    subformat: str | None = None
    encrypted: bool = False
    encryption: str | None = None
    key_slots: tuple[int, ...] | None = None
    dirty: bool = False
    corrupt: bool = False
    backing_file: bytes | None = None
    backing_format: str | None = None
    data_file: bytes | None = None
    data_file_raw: bool | None = None
    extents: tuple[bytes, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    bitmaps: tuple[Bitmap, ...] = ()
    other_size: int | None = None


#: Bytes read at once from the start of each file: the whole header of nearly every image.
HEAD_SIZE = 4096
#: The most bytes that one read of a header may ask for.
MAX_READ = 4 * 1024 * 1024


class Reader:
    """The bytes of an open file, with its first ones at hand.

    Args:
        fd: descriptor of a regular file, open for reading.
        file_size: the file's size in bytes, as ``fstat`` said.
    """

    __slots__ = ("fd", "file_size", "head")

    def __init__(self, fd: int, file_size: int) -> None:
        self.fd = fd
        self.file_size = file_size
        self.head = os.pread(fd, HEAD_SIZE, 0)

    def at(self, offset: int, length: int, what: str) -> bytes:
        """Exactly ``length`` bytes from ``offset``.

        Args:
            offset: in bytes from the start of the file.
            length: in bytes, at most ``MAX_READ``.
            what: what is read, for the sentence.

        Raises:
            UnreadableError: the file ends before, or the read is beyond the bounds.
        """
        end = offset + length
        if end <= len(self.head):
            return self.head[offset:end]
        if length > MAX_READ:
            raise UnreadableError(f"{what} takes {length} bytes, more than the {MAX_READ} that are read of a header")
        if end > self.file_size:
            raise UnreadableError(f"the file is cut off: {what} ends at byte {end}, the file at byte {self.file_size}")
        got = os.pread(self.fd, length, offset)
        if len(got) != length:
            raise UnreadableError(f"the file is cut off: {what} could not be read in full")
        return got


def text(raw: bytes) -> str:
    """Bytes of a header as text that can be shown, stored and sent: what is not UTF-8 stands as ``\\x..``."""
    return raw.decode("utf-8", "backslashreplace")
