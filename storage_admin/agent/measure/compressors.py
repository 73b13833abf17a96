"""How small qemu makes a cluster, measured with the libraries that qemu itself uses.

qemu (block/qcow2-threads.c) writes raw deflate with a 4 KiB window, or one zstd frame at the default level. The
standard library brings the first. The second is asked of the host's ``libzstd.so.1``, which qemu-img is linked with
wherever it can compress so: a host without it gets no figure for zstd rather than a guess.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

#: Bits of the window of qemu's deflate, and how much memory it may use.
_WINDOW_BITS, _MEMORY_LEVEL = -12, 9
_ZSTD_LEVEL = 3

#: Bytes that a piece takes once it is compressed, by the name of the compression. At most all of it.
Sizers = dict[str, Callable[[bytes], int]]


def deflated_size(piece: bytes) -> int:
    """Bytes that qemu's zlib makes of a piece; at most all of it."""
    deflate = zlib.compressobj(
        zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL, zlib.Z_DEFAULT_STRATEGY
    )
    return min(len(deflate.compress(piece)) + len(deflate.flush()), len(piece))


@lru_cache(maxsize=1)
def _libzstd() -> Any:
    """The host's library, or ``None``."""
    try:
        library = ctypes.CDLL("libzstd.so.1")
        library.ZSTD_compressBound.restype = ctypes.c_size_t
        library.ZSTD_compressBound.argtypes = (ctypes.c_size_t,)
        library.ZSTD_compress.restype = ctypes.c_size_t
        library.ZSTD_compress.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int,
        )  # fmt: skip
        library.ZSTD_decompress.restype = ctypes.c_size_t
        library.ZSTD_decompress.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
        library.ZSTD_findFrameCompressedSize.restype = ctypes.c_size_t
        library.ZSTD_findFrameCompressedSize.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        library.ZSTD_isError.restype = ctypes.c_uint
        library.ZSTD_isError.argtypes = (ctypes.c_size_t,)
    except (OSError, AttributeError):
        return None
    return library


def zstd_size(piece: bytes) -> int:
    """Bytes that qemu's zstd makes of a piece, where :func:`sizers` names it; at most all of it."""
    library = _libzstd()
    room = library.ZSTD_compressBound(len(piece))
    taken = library.ZSTD_compress(ctypes.create_string_buffer(room), room, piece, len(piece), _ZSTD_LEVEL)
    return len(piece) if library.ZSTD_isError(taken) else min(int(taken), len(piece))


def sizers(compat: str | None) -> Sizers:
    """The compressions that can be measured here for an image, the one first that is taken unless another is asked for.

    Args:
        compat: of the image; ``0.10`` knows zlib only.
    """
    if compat == "0.10" or _libzstd() is None:
        return {"zlib": deflated_size}
    return {"zstd": zstd_size, "zlib": deflated_size}


def inflate(stored: bytes, size: int, compression: str) -> tuple[bytes, int] | None:
    """A compressed cluster's content, and how many of the bytes were its own.

    Args:
        stored: the sectors that hold it; others may follow in the last one.
        size: of a cluster in bytes: never more is unpacked, whatever was stored.
        compression: ``zlib`` or ``zstd``.

    Returns:
        ``None`` where it cannot be unpacked, here or at all.
    """
    if compression == "zlib":
        stream = zlib.decompressobj(_WINDOW_BITS)
        try:
            content = stream.decompress(stored, size)
        except zlib.error:
            return None
        return (content, len(stored) - len(stream.unused_data)) if len(content) == size else None
    library = _libzstd()
    if library is None:
        return None
    own = library.ZSTD_findFrameCompressedSize(stored, len(stored))
    if library.ZSTD_isError(own):
        return None
    room = ctypes.create_string_buffer(size)
    got = library.ZSTD_decompress(room, size, stored, own)
    return None if library.ZSTD_isError(got) or got != size else (room.raw, int(own))
