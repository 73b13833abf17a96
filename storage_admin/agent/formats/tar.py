"""The members of a tar archive by their headers alone (POSIX.1-2017, pax, "ustar Interchange Format").

Python's own reader takes headers of any size into memory, and follows chains of them by recursion: an archive is
somebody's, and this runs as root beside guests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable

_BLOCK, _MOST_MEMBERS, _MOST_PAX = 512, 1000, 64 << 10
_FILES, _PAX, _LONG_NAME = b"0\0", b"x", b"L"


class DamagedError(Exception):
    """It is no archive that can be read to its end; its argument says why."""


@dataclass(frozen=True)
class Member:
    """A regular file; ``offset`` and ``size`` are in bytes of the archive."""

    name: bytes
    offset: int
    size: int


def members(fd: int, end: int, check: Callable[[], None]) -> Iterator[Member]:
    """The regular files of an archive.

    Args:
        fd: descriptor of the archive.
        end: its size.
        check: called for each header; what it raises ends the reading.

    Raises:
        DamagedError: a header does not match its checksum, or the archive is too short.
    """
    at, told = 0, dict[bytes, bytes]()
    for _ in range(4 * _MOST_MEMBERS):
        check()
        header = os.pread(fd, _BLOCK, at)
        if not header.strip(b"\0"):
            return  # the end is marked by zeros, or it is just there
        if len(header) < _BLOCK or header[257:262] != b"ustar":
            raise DamagedError(f"there is no header at byte {at}")
        if _number(header[148:156]) != sum(header[:148]) + 8 * 32 + sum(header[156:]):
            raise DamagedError(f"the header at byte {at} does not match its checksum")
        size, kind, at = _number(header[124:136]), header[156:157], at + _BLOCK
        if kind in {_PAX, _LONG_NAME}:
            if size > _MOST_PAX:
                raise DamagedError("a name or an attribute is longer than any")
            content = os.pread(fd, size, at)
            told |= _records(content) if kind == _PAX else {b"path": content.rstrip(b"\0")}
        elif kind in _FILES:
            size = int(told[b"size"]) if told.get(b"size", b"").isdigit() else size
            prefix, name = header[345:500].rstrip(b"\0"), header[:100].split(b"\0")[0]
            name = told.get(b"path") or (prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name)
            if at + size > end:
                raise DamagedError("a member is longer than the archive")
            yield Member(name, at, size)
            told = {}
        else:
            told = {}
        at += -(-size // _BLOCK) * _BLOCK
    raise DamagedError("it has too many members")


def _number(field: bytes) -> int:
    if field[:1] and field[0] & 0x80:  # GNU: base 256
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits:
        return 0
    try:
        return int(digits, 8)
    except ValueError as error:
        raise DamagedError("a number in a header is none") from error


def _records(content: bytes) -> dict[bytes, bytes]:
    """The attributes of a pax header: ``LENGTH KEY=VALUE`` and a newline each."""
    found: dict[bytes, bytes] = {}
    while content:
        length, _, rest = content.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(content):
            return found
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        found[key] = value
        content = content[int(length) :]
    return found
