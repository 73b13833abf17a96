"""qemu-io: what a guest reads from an image, and a few bytes that are written into a copy of our own."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import HostError, display
from storage_admin.agent.qemu.node import Node

#: What is read at once of a disk, and how often: most of what is looked at is at the beginning of a filesystem.
_WINDOW, _MOST_WINDOWS = 128 << 10, 2000
#: Windows that one process reads: it prints about five bytes for each, and what a tool may print is bounded.
_AT_ONCE = 5

_LINE = re.compile(rb"^([0-9a-f]{8,16}):  ((?:[0-9a-f]{2} )+)", re.MULTILINE)


def read(io: AgentIO, node: Node, places: Sequence[tuple[int, int]]) -> list[bytes]:
    """Bytes as a guest reads them; fewer where a piece reaches past the image's end.

    Args:
        places: offset and length of each piece, multiples of 16 bytes.

    Raises:
        HostError: nothing could be read.
    """
    if not places:
        return []
    asked = [word for at, size in places for word in ("-c", f"read -v {at} {size}")]
    done = tools.run(
        ["qemu-io", "-r", "-U", *asked, node.argument()],
        io,
        files=node.files(),
        shown=["qemu-io", "-r", "-U", "-f", node.format, "-c", f"(read {len(places)} pieces)", display(node.path)],
    )
    lines = {int(line[1], 16): bytes.fromhex(line[2].decode("ascii")) for line in _LINE.finditer(done.stdout)}
    if not lines:
        raise HostError(f"qemu-io failed, {done.words()}")
    return [b"".join(lines.get(part, b"") for part in range(at, at + size, 16)) for at, size in places]


class Disk:
    """A disk as its guest reads it, in pieces that are kept: the same places are looked at again and again.

    Args:
        size: of the disk in bytes.
    """

    def __init__(self, io: AgentIO, node: Node, size: int) -> None:
        self._io, self._node, self._size = io, node, size
        self._kept: dict[int, bytes] = {}

    @property
    def read_bytes(self) -> int:
        """How much was read."""
        return sum(len(piece) for piece in self._kept.values())

    def read(self, at: int, length: int) -> bytes:
        """Bytes from that place on; fewer at the disk's end, and none once so much was read as no honest disk needs."""
        end = min(at + length, self._size)
        if at < 0 or end <= at:
            return b""
        places = range(at // _WINDOW * _WINDOW, end, _WINDOW)
        missing = [place for place in places if place not in self._kept]
        if len(self._kept) + len(missing) > _MOST_WINDOWS:
            return b""
        for first in range(0, len(missing), _AT_ONCE):
            some = missing[first : first + _AT_ONCE]
            pieces = [(place, min(_WINDOW, self._size - place) + 15 & ~15) for place in some]
            self._kept.update(zip(some, read(self._io, self._node, pieces)))
        whole = b"".join(self._kept[place] for place in places)
        return whole[at - places[0] : end - places[0]]


def write(io: AgentIO, node: Node, pieces: Sequence[tuple[int, bytes]]) -> None:
    """Write bytes into an image of our own, each piece at its offset; multiples of 512 bytes.

    Raises:
        HostError: they could not be written.
    """
    for at, piece in pieces:
        # A tool gets files by name, and this one is nobody else's.
        with tempfile.NamedTemporaryFile(prefix="storage-admin-") as file:
            file.write(piece)
            file.flush()
            asked = ["-c", f"write -q -s /proc/self/fd/{file.fileno()} {at} {len(piece)}"]
            given = node.files(written=True)
            done = tools.run(
                ["qemu-io", *asked, node.written()],
                io,
                files=Files([*given.read, file.fileno()], given.written),
                shown=["qemu-io", "-f", node.format, "-c", f"(write {len(piece)} bytes at {at})", display(node.path)],
            )
        if done.exit_code or done.stderr:
            raise HostError(f"qemu-io failed, {done.words()}")
