"""Bounded reads of a header: what is not there is said, never guessed."""

from __future__ import annotations

import os

from storage_admin.agent.formats.facts import UnreadableError

#: Bytes read at once from the start of each file: the whole header of nearly every image.
HEAD_SIZE = 4096
#: The most bytes that one read of a header may ask for.
MAX_READ = 4 * 1024 * 1024


class Reader:
    """The bytes of an open file, with its first ones at hand.

    Args:
        fd: descriptor of a regular file, open for reading.
        file_size: the file's size in bytes, as ``fstat`` said.
        head: the file's first ``HEAD_SIZE`` bytes, where they have been read already.
    """

    __slots__ = ("fd", "file_size", "head")

    def __init__(self, fd: int, file_size: int, head: bytes | None = None) -> None:
        self.fd = fd
        self.file_size = file_size
        self.head = os.pread(fd, HEAD_SIZE, 0) if head is None else head

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
