"""Images of a few kilobytes on disk that claim to be enormous: whoever believes them needs hours or all memory."""

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from storage_admin.agent.formats.vpc import checksum
from tests.agent.harness import qemu_img
from tests.agent.hostile import CLUSTER, L1, L2, REFCOUNT_TABLE, qcow2, vmdk_text

_TIB = 1 << 40
_USED = 1 << 63
#: Bits of a cluster's size, and how long a file is claimed to be: what is not written of it takes no room.
_SIZES = ((9, _TIB >> 3), (12, 8 * _TIB), (16, _TIB), (21, 8 * _TIB))


@dataclass(frozen=True)
class Bomb:
    """One image: ``write`` puts it at a path, declared as ``form``."""

    what: str
    form: str
    write: Callable[[Path], None]


class Sparse:
    """A qcow2 image of version 3, written in pieces into a file that is mostly holes.

    Args:
        bits: of the cluster size.
        size: virtual, in bytes.
        l1_size: entries.
    """

    def __init__(self, bits: int, size: int, l1_size: int, refcount_clusters: int = 1) -> None:
        self.cluster = 1 << bits
        self.refcounts = self.cluster
        self.l1 = (1 + refcount_clusters) * self.cluster
        self.end = self.l1 + -(-l1_size * 8 // self.cluster) * self.cluster
        self.head = bytearray(
            struct.pack(
                ">4sIQIIQIIQQIIQQQQII",
                b"QFI\xfb", 3, 0, 0, bits, size, 0, l1_size, self.l1, self.refcounts, refcount_clusters, 0, 0,
                0, 0, 0, 4, 104,
            )
        )  # fmt: skip
        self.parts: list[tuple[int, bytes]] = []

    def snapshots(self, count: int, table: bytes) -> None:
        """A snapshot table behind all else."""
        struct.pack_into(">IQ", self.head, 60, count, self.end)
        self.put(self.end, table)

    def bitmaps(self, count: int, directory: bytes) -> None:
        """A directory of persistent bitmaps behind all else."""
        struct.pack_into(">Q", self.head, 88, 1)
        self.head += struct.pack(">II", 0x23852875, 24) + struct.pack(">IIQQ", count, 0, len(directory), self.end)
        self.put(self.end, directory)

    def put(self, offset: int, content: bytes) -> None:
        """Write something there."""
        self.parts.append((offset, content))

    def write(self, path: Path, file_size: int = 0) -> None:
        """Make the file, as long as that."""
        with path.open("wb") as file:
            for offset, content in [(0, bytes(self.head)), *self.parts]:
                os.pwrite(file.fileno(), content, offset)
            file.truncate(max(file_size, os.fstat(file.fileno()).st_size, self.end))


def bombs(scratch: Path) -> list[Bomb]:
    """All of them."""
    qemu_img("create", "-q", "-f", "vmdk", scratch / "bomb.vmdk", "1M")
    qemu_img("create", "-q", "-f", "vdi", scratch / "bomb.vdi", "1M")
    qemu_img("create", "-q", "-f", "vpc", scratch / "bomb.vhd", "1M")
    qemu_img("create", "-q", "-f", "vhdx", scratch / "bomb.vhdx", "1M")
    made = [*_snapshots(), *_tables(), *_bitmaps(), *_virtual_sizes(), *_compressed(), *_extensions()]
    return [*made, *_vmdks(scratch), *_others(scratch)]


def _snapshots() -> Iterator[Bomb]:
    for count, name in ((65535, b"n"), (4096, b"n" * 200), (4096, b"\xff" * 200), (4097, b"n"), (64, b"\x1b" * 15_000)):
        entry = struct.pack(">QIHHIIQII", 0, 0, 1, len(name), 0, 0, 0, 0, 0) + b"1" + name
        table = (entry + bytes(-len(entry) % 8)) * count
        yield Bomb(f"{count} snapshots with names of {len(name)} bytes", "qcow2", _with_snapshots(count, table))
    for tables in (256, 4096):
        # Each has an L1 table of its own of 32 MiB, all in the same hole.
        entry = struct.pack(">QIHHIIQII", 1 << 20, 1 << 22, 1, 1, 0, 0, 0, 0, 0) + b"1n" + bytes(6)
        yield Bomb(
            f"{tables} snapshots with L1 tables of 32 MiB", "qcow2", _with_snapshots(tables, entry * tables, _TIB)
        )


def _with_snapshots(count: int, table: bytes, size: int = 0) -> Callable[[Path], None]:
    image = Sparse(16, 1 << 30, 2)
    image.snapshots(count, table)
    return lambda path: image.write(path, size)


def _tables() -> Iterator[Bomb]:
    for bits, size in _SIZES:
        sparse = Sparse(bits, 1 << 20, 1 << 12)
        yield Bomb(f"clusters of 2^{bits} in a file of {size} bytes", "qcow2", _writer(sparse, size))
    for bits, size in _SIZES:
        # As many L2 tables as an L1 table can name, each in a hole of the file.
        entries = min(1 << 22, (1 << 62) >> 2 * bits)
        sparse = Sparse(bits, 1 << 20, entries)
        tables = range(1 << 25 >> bits << bits, size - (1 << bits), 1 << bits)[:entries]
        sparse.put(sparse.l1, struct.pack(f">{len(tables)}Q", *(table | _USED for table in tables)))
        yield Bomb(f"{len(tables)} L2 tables of 2^{bits} bytes", "qcow2", _writer(sparse, size))
    for bits, size in _SIZES:
        clusters = (8 << 20) >> bits
        sparse = Sparse(bits, 1 << 20, 1 << 8, clusters)
        blocks = range(1 << 26, size - (1 << bits), 1 << bits)[: 1 << 20]
        sparse.put(sparse.refcounts, struct.pack(f">{len(blocks)}Q", *blocks))
        yield Bomb(f"{len(blocks)} refcount blocks of 2^{bits} bytes", "qcow2", _writer(sparse, size))


def _writer(sparse: Sparse, size: int) -> Callable[[Path], None]:
    return lambda path: sparse.write(path, size)


def _bitmaps() -> Iterator[Bomb]:
    for count, name, entries, size in (
        (4096, b"n" * 980, 0, 0), (4096, b"\xff" * 200, 0, 0), (65535, b"n", 0, 0), (4096, b"n", 1 << 28, 4 * _TIB),
        (4096, b"n", 0xFFFFFFFF, 8 * _TIB),
    ):  # fmt: skip
        for bits in (9, 16):
            sparse = Sparse(bits, 1 << 20, 1 << 8)
            entry = struct.pack(">QIIBBHI", 1 << 26, entries, 0, 1, 16, len(name), 0) + name
            sparse.bitmaps(count, (entry + bytes(-len(entry) % 8)) * count)
            yield Bomb(f"{count} bitmaps of {entries} entries, clusters of 2^{bits}", "qcow2", _writer(sparse, size))


def _virtual_sizes() -> Iterator[Bomb]:
    for bits, size in ((16, 1 << 46), (21, 1 << 50), (21, 1 << 60), (21, (1 << 61) - 512), (9, 1 << 37)):
        entry_bytes = bits * 2 - 3
        entries = -(-size >> entry_bytes)
        sparse = Sparse(bits, size, min(max(-(-size // (1 << entry_bytes)), entries), 1 << 22))
        yield Bomb(f"virtual size of {size} bytes", "qcow2", _writer(sparse, 0))
    yield Bomb("virtual size of 2^63 - 512 bytes", "qcow2", _content(qcow2(size=(1 << 63) - 512)))
    yield Bomb("a raw file of 8 TiB", "raw", _content(b"", 8 * _TIB))


def _content(content: bytes, size: int = 0) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)
        if size:
            os.truncate(path, size)

    return write


def _compressed() -> Iterator[Bomb]:
    """All clusters are the same compressed one: a few bytes become gigabytes."""
    for bits, what in ((16, bytes(1 << 16)), (21, b"\1" * (1 << 21)), (21, os.urandom(1 << 10) * (1 << 11))):
        stream = zlib.compressobj(9, zlib.DEFLATED, -12)
        packed = stream.compress(what) + stream.flush()
        entries = (1 << bits) // 8
        sparse = Sparse(bits, entries << bits, 1)
        table, data = sparse.end, sparse.end + (1 << bits)
        sparse.put(sparse.l1, struct.pack(">Q", table | _USED))
        sectors = (len(packed) - 1) // 512
        entry = 1 << 62 | sectors << (62 - (bits - 8)) | data
        sparse.put(table, struct.pack(">Q", entry) * entries)
        sparse.put(data, packed.ljust(-(-len(packed) // 512) * 512, b"\0"))
        yield Bomb(f"{entries} times {len(packed)} bytes that become 2^{bits}", "qcow2", _writer(sparse, 0))


def _extensions() -> Iterator[Bomb]:
    sparse = Sparse(21, 1 << 20, 1)
    sparse.head += struct.pack(">II", 0x11111111, 0) * 260_000
    yield Bomb("260,000 header extensions", "qcow2", _writer(sparse, 0))
    sparse = Sparse(21, 1 << 20, 1)
    sparse.head += struct.pack(">II", 0x6803F857, 2_000_000) + b"\xff" * 2_000_000
    struct.pack_into(">Q", sparse.head, 72, 1 << 60)
    yield Bomb("2 MB of feature names", "qcow2", _writer(sparse, 0))
    sound = bytearray(qcow2())
    struct.pack_into(">512Q", sound, L2 * CLUSTER, *[L1 * CLUSTER | _USED] * 512)
    struct.pack_into(">512Q", sound, REFCOUNT_TABLE * CLUSTER, *[REFCOUNT_TABLE * CLUSTER] * 512)
    yield Bomb("tables that lead to each other", "qcow2", _content(bytes(sound)))


def _vmdks(scratch: Path) -> Iterator[Bomb]:
    template = (scratch / "bomb.vmdk").read_bytes()
    for what, capacity, grain, entries in (
        ("a capacity of 2^54 sectors", 1 << 54, 128, 512),
        ("2^29 grain tables", 1 << 45, 128, 512),
        ("grains of 1 GiB", 1 << 50, 0x200000, 512),
        ("grains of a sector", 1 << 29, 1, 512),
        ("grain tables of one entry", 1 << 28, 1, 1),
    ):
        image = bytearray(template)
        struct.pack_into("<QQ", image, 12, capacity, grain)
        struct.pack_into("<I", image, 44, entries)
        yield Bomb(f"vmdk with {what}", "vmdk", _content(bytes(image), _TIB))
    lines = b"\n".join([b'RW 9 FLAT "x" 0'] * 1200)
    yield Bomb("vmdk of 1,200 extents", "vmdk", _content(vmdk_text(lines)))
    yield Bomb("vmdk with a line of 8 TiB", "vmdk", _content(vmdk_text(b"RW 9 " + b"9" * 15_000), 8 * _TIB))


def _others(scratch: Path) -> Iterator[Bomb]:
    vdi = bytearray((scratch / "bomb.vdi").read_bytes())
    struct.pack_into("<Q", vdi, 0x170, 0x0FFFFFFF << 20)
    struct.pack_into("<II", vdi, 0x180, 0x0FFFFFFF, 0x0FFFFFFF)
    yield Bomb("vdi of 2^28 blocks", "vdi", _content(bytes(vdi), 4 << 30))
    for block, entries in ((512, 0x1FFFFFFF), (1 << 31, 0x1FFFFFFF), (1 << 21, 0x10000)):
        vhd = bytearray((scratch / "bomb.vhd").read_bytes())
        struct.pack_into(">II", vhd, 512 + 28, entries, block)
        yield Bomb(f"vhd of {entries} blocks of {block} bytes", "vpc", _content(bytes(vhd), 8 * _TIB))
    footer = bytearray((scratch / "bomb.vhd").read_bytes()[:512])
    struct.pack_into(">Q", footer, 48, 0xFF000000 * 512)
    struct.pack_into(">I", footer, 60, 2)
    footer[64:68] = bytes(4)
    struct.pack_into(">I", footer, 64, checksum(bytes(footer)))
    yield Bomb("fixed vhd of 2 TiB", "vpc", lambda path: _with_footer(path, bytes(footer)))
    yield Bomb("vhdx of 8 TiB", "vhdx", _content((scratch / "bomb.vhdx").read_bytes(), 8 * _TIB))
    fields = (b"QED\0", 64 << 20, 16, 1, 0, 0, 0, 64 << 20, 1 << 62, 0, 0)
    yield Bomb("qed with tables of 1 GiB", "qed", _content(struct.pack("<4sIIIQQQQQII", *fields), 8 << 30))
    yield Bomb("luks with 8 TiB", "luks", _content(b"LUKS\xba\xbe\0\1" + b"\xff" * 600, 8 * _TIB))


def _with_footer(path: Path, footer: bytes) -> None:
    with path.open("wb") as file:
        os.pwrite(file.fileno(), footer, 0xFF000000 * 512)
