import struct
import zlib
from pathlib import Path

import pytest

from tests.pictures import _chunk, _chunks, _unfiltered, shrink


def picture(path: Path, kinds: tuple[int, ...], width: int = 5) -> None:
    """A PNG whose lines carry these filters over bytes that are all different."""
    lines = b"".join(bytes([kind]) + bytes((kind * 31 + n * 7) % 256 for n in range(width * 3)) for kind in kinds)
    header = struct.pack(">IIBBBBB", width, len(kinds), 8, 2, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"tEXt", b"x" * 200) + _chunk(b"IDAT", zlib.compress(lines, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body + _chunk(b"IEND", b""))


def pixels(path: Path) -> list[bytes]:
    chunks = dict(_chunks(path.read_bytes()))
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    return _unfiltered(zlib.decompress(chunks[b"IDAT"]), width * 3, height, 3)


def test_a_smaller_picture_has_the_same_pixels(tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    picture(path, (0, 1, 2, 3, 4, 4, 1))
    before, size = pixels(path), path.stat().st_size
    shrink(path)
    assert path.stat().st_size < size
    assert pixels(path) == before


def test_lines_are_read_as_the_specification_says(tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    raw = bytes([0, 10, 20, 30, 1, 5, 6, 7, 2, 1, 1, 1, 3, 2, 2, 2, 4, 1, 1, 1])
    assert _unfiltered(raw, 3, 5, 3) == [b"\x0a\x14\x1e", b"\5\6\7", b"\6\7\x08", b"\5\5\6", b"\6\6\7"]
    picture(path, (0,))
    path.write_bytes(path.read_bytes().replace(struct.pack(">IIB", 5, 1, 8), struct.pack(">IIB", 5, 1, 1)))
    with pytest.raises(ValueError, match="does not write"):
        shrink(path)
