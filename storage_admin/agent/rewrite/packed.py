"""What an image is packed in: one file, or parts that follow one another, and how it is packed."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from storage_admin.agent.folders.pools import held, open_beneath, open_parent
from storage_admin.agent.host import locking
from storage_admin.agent.protocol import INVALID, RefusedError, display
from storage_admin.agent.swap.journal import Stamp
from storage_admin.agent.swap.outcome import same_content, stamp_now

GZIP, XZ, ZSTD, OVA, PLAIN = "gzip", "xz", "zstd", "ova", "plain"
_MAGIC = {b"\x1f\x8b": GZIP, b"\xfd7zXZ\0": XZ, b"\x28\xb5\x2f\xfd": ZSTD}
MOST_PARTS = 500
#: `disk.001`, `disk.aa`, `disk.part1`: what split(1) and archivers make. One digit alone is a version or a backup.
_NUMBERED = re.compile(rb"(.*?\.)(part[0-9]{1,4}|[0-9]{2,4}|[a-z]{2,3})")
_FIRST = re.compile(rb"part0*[01]|0+1?|a+")


@dataclass
class Source:
    """The file or files that are read, in their order. Close it in the end.

    Args:
        path: of the first one.
        fds: descriptors, open for reading.
    """

    path: bytes
    fds: list[int]
    stamps: list[Stamp] = field(default_factory=list)

    @classmethod
    def open(cls, pool_path: bytes, path: bytes) -> Source:
        """The file at that path, and the parts that follow it.

        Raises:
            RefusedError: ``stale_plan``, ``outside_pool``; ``image_in_use`` where somebody writes to one.
        """
        source = cls(path, [])
        try:
            for one in _parts(pool_path, path):
                try:
                    source.fds.append(open_beneath(pool_path, one))
                except FileNotFoundError:
                    raise RefusedError("stale_plan", f"{display(one)} does not exist") from None
            source.stamps = [Stamp.of(os.fstat(fd)) for fd in source.fds]
            source.refuse_changed()
        except BaseException:
            source.close()
            raise
        return source

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(stamp.file_size for stamp in self.stamps)

    @property
    def kind(self) -> str:
        """How it is packed, by its content."""
        head = os.pread(self.fds[0], 512, 0)
        if head[257:262] == b"ustar":
            return OVA
        return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), PLAIN)

    def refuse_changed(self) -> None:
        """Refuse what somebody writes to, or has written to since it was opened."""
        for fd, stamp in zip(self.fds, self.stamps):
            if locking.open_for_writing(fd) or locking.locked_bytes(fd, locking.CHANGES):
                raise RefusedError(
                    "image_in_use", f"{display(self.path)} is still written to; wait until it is complete"
                )
            if not same_content(stamp_now(fd), stamp):
                raise RefusedError("stale_plan", f"{display(self.path)} was changed while it was read; try again")

    def pieces(self, size: int) -> Iterator[bytes]:
        """All bytes, at most so many at once."""
        for fd in self.fds:
            at = 0
            while piece := os.pread(fd, size, at):
                yield piece
                at += len(piece)


@contextlib.contextmanager
def fed(pieces: Iterable[bytes]) -> Iterator[int]:
    """The standard input of a tool, which gets these bytes.

    Raises:
        Whatever reading them raises, once the tool has ended.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    failed: list[Exception] = []

    def feed() -> None:
        try:
            with os.fdopen(write, "wb") as pipe:
                for piece in pieces:
                    pipe.write(piece)
        except BrokenPipeError:
            return  # it has ended, and says why
        except Exception as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        yield read
    finally:
        os.close(read)
        feeder.join()
    if failed:
        raise failed[0]


def _parts(pool_path: bytes, path: bytes) -> list[bytes]:
    """The path, and those of the parts that follow it.

    Raises:
        RefusedError: ``invalid``: one between them is missing, or there are too many.
    """
    folder, name = os.path.split(path)
    match = _NUMBERED.fullmatch(name)
    if match is None or _FIRST.fullmatch(match[2]) is None:
        return [path]
    stem, last = match.groups()
    like = re.compile(re.escape(stem) + _as_wide(last))
    with held(open_parent(pool_path, path)[0]) as fd:
        found = {os.fsencode(one) for one in os.listdir(fd) if like.fullmatch(os.fsencode(one))}
    parts = [name]
    while found - set(parts):
        last = _next(last)
        if stem + last not in found or len(parts) >= MOST_PARTS:
            raise RefusedError(
                INVALID,
                f"{display(stem + last)} is missing among the {len(found)} parts of {display(path)}, or these are too "
                f"many; at most {MOST_PARTS} are read",
            )
        parts.append(stem + last)
    return [os.path.join(folder, one) for one in parts]


def _as_wide(first: bytes) -> bytes:
    """The pattern of all parts that belong to that one."""
    if first.startswith(b"part"):
        return rb"part[0-9]+"
    return (rb"[0-9]{%d}" if first.isdigit() else rb"[a-z]{%d}") % len(first)


def _next(part: bytes) -> bytes:
    """The name of the next part, as wide as that one."""
    if not part.isalpha():
        digits = part[4:] if part.startswith(b"part") else part
        return part[: len(part) - len(digits)] + str(int(digits) + 1).encode().rjust(len(digits), b"0")
    letters = bytearray(part)
    for place in reversed(range(len(letters))):
        if letters[place] < ord("z"):
            letters[place] += 1
            break
        letters[place] = ord("a")
    return bytes(letters)
