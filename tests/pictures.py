"""Makes a screenshot smaller without changing a pixel of it.

Chromium filters each line of a PNG for speed. Of a page of flat colours, the unfiltered lines compress better
(PNG specification, 4.5.2: filtering, and 5: the filters).
"""

import struct
import zlib
from pathlib import Path

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def shrink(path: Path) -> None:
    """Rewrites a PNG of 8 bits per channel, without interlacing, if that makes it smaller; only pixels are kept.

    Raises:
        ValueError: it is another kind of PNG.
    """
    data = path.read_bytes()
    chunks = _chunks(data)
    header = next(body for kind, body in chunks if kind == b"IHDR")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    if depth != 8 or interlaced or colour not in (2, 6):
        raise ValueError(f"{path} is a PNG of a kind that Chromium does not write")
    pixel = 3 if colour == 2 else 4
    raw = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    lines = _unfiltered(raw, width * pixel, height, pixel)
    packed = zlib.compress(b"".join(b"\0" + line for line in lines), 9)
    new = _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")
    if len(new) < len(data):
        path.write_bytes(new)


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], len(_SIGNATURE)
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _unfiltered(raw: bytes, length: int, height: int, pixel: int) -> list[bytes]:
    lines: list[bytes] = []
    above = bytearray(length)
    for row in range(height):
        start = row * (length + 1)
        line = bytearray(raw[start + 1 : start + 1 + length])
        _undo(raw[start], line, above, pixel)
        lines.append(bytes(line))
        above = line
    return lines


def _undo(kind: int, line: bytearray, above: bytearray, pixel: int) -> None:
    for at in range(len(line)) if kind else ():
        left = line[at - pixel] if at >= pixel else 0
        corner = above[at - pixel] if at >= pixel else 0
        predicted = (0, left, above[at], (left + above[at]) >> 1, _paeth(left, above[at], corner))[kind]
        line[at] = (line[at] + predicted) & 0xFF


def _paeth(left: int, above: int, corner: int) -> int:
    guess = left + above - corner
    distances = (abs(guess - left), abs(guess - above), abs(guess - corner))
    return (left, above, corner)[distances.index(min(distances))]
