"""Images as a stranger would write them: each one names what is not its own, lies in its header, or is another format.

They are written byte by byte: qemu-img would refuse to make most of them.
"""

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.agent.formats.test_hostile import BOMBS, mutate
from tests.agent.harness import qemu_img

CLUSTER = 4096
VIRTUAL_SIZE = 1 << 20
_EXT_FORMAT, _EXT_DATA_FILE = 0xE2792ACA, 0x44415441
#: Where :func:`qcow2` puts what, in clusters.
REFCOUNT_TABLE, REFCOUNTS, L1, L2, DATA, ZEROS = 1, 2, 3, 4, 5, 6
_ALL_CLUSTERS = 7


@dataclass(frozen=True)
class Hostile:
    """One image.

    Args:
        what: it does, for a failing test.
        form: that it is declared to have.
        content: of the file.
        beside: other files of its folder, by name.
    """

    what: str
    form: str
    content: bytes
    beside: dict[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the file."""
        return f"vm.{self.form}"


def qcow2(
    backing: bytes = b"",
    backing_format: bytes = b"",
    data_file: bytes = b"",
    *,
    version: int = 3,
    size: int = VIRTUAL_SIZE,
    raw_data: bool = False,
) -> bytes:
    """A sound qcow2 image in clusters of 4 KiB with a cluster of text and one of zeros, naming these files."""
    extensions = b""
    for magic, name in ((_EXT_FORMAT, backing_format), (_EXT_DATA_FILE, data_file)):
        if name:
            extensions += struct.pack(">II", magic, len(name)) + name + bytes(-len(name) % 8)
    length = 112 if version == 3 else 72
    at = length + len(extensions) + 8
    header = struct.pack(
        ">4sIQIIQIIQQIIQ",
        b"QFI\xfb", version, at if backing else 0, len(backing), 12, size, 0, 1, L1 * CLUSTER,
        REFCOUNT_TABLE * CLUSTER, 1, 0, 0,
    )  # fmt: skip
    if version == 3:
        # With an external data file the data clusters stand there at the guest's offsets, so that none is used here.
        header += struct.pack(">QQQIIQ", 4 if data_file else 0, 0, 2 if raw_data else 0, 4, length, 0)
    head = header + extensions + bytes(8) + backing
    used = 1 << 63
    entries = [] if data_file else [DATA * CLUSTER | used, ZEROS * CLUSTER | used]
    clusters = [
        head,
        struct.pack(">Q", REFCOUNTS * CLUSTER),
        struct.pack(">H", 1) * (_ALL_CLUSTERS - (2 if data_file else 0)),
        struct.pack(">Q", L2 * CLUSTER | used),
        struct.pack(f">{len(entries)}Q", *entries),
        *([] if data_file else [b"text of a guest " * (CLUSTER // 16), bytes(CLUSTER)]),
    ]
    assert len(head) <= CLUSTER
    return b"".join(cluster.ljust(CLUSTER, b"\0") for cluster in clusters)


def vmdk_text(extents: bytes, kind: bytes = b"monolithicFlat", parent: bytes = b"") -> bytes:
    """A VMDK descriptor with these extent lines."""
    hint = b'parentFileNameHint="' + parent + b'"\n' if parent else b""
    cid = b"parentCID=00000001\n" if parent else b"parentCID=ffffffff\n"
    start = b"# Disk DescriptorFile\nversion=1\nCID=00000001\n" + cid + b'createType="' + kind + b'"\n' + hint
    return start + b"# Extent description\n" + extents + b'\nddb.adapterType = "ide"\n'


def vmdk_sparse(template: bytes, descriptor: bytes, capacity: int | None = None) -> bytes:
    """A VMDK of one file with another descriptor; a capacity of 0 sectors makes qemu go by the descriptor alone."""
    image = bytearray(template)
    offset, size = struct.unpack_from("<QQ", image, 28)
    image[offset * 512 : (offset + size) * 512] = descriptor.ljust(size * 512, b"\0")
    if capacity is not None:
        struct.pack_into("<Q", image, 12, capacity)
    return bytes(image)


def qed(backing: bytes, *, raw: bool) -> bytes:
    """An empty QED image on that base."""
    features = 1 | (4 if raw else 0)
    fields = (b"QED\0", 4096, 2, 1, features, 0, 0, 4096, VIRTUAL_SIZE, 64, len(backing))
    return (struct.pack("<4sIIIQQQQQII", *fields) + backing).ljust(4096, b"\0") + bytes(8192)


def elsewhere(outside: Path) -> list[bytes]:
    """Names of what no image of a pool may lead to; some lead through links that stand beside the image."""
    secret, folder = bytes(outside / "shadow"), bytes(outside)
    return [
        secret, folder + b"/secret.qcow2", b"../../outside/shadow", b"../../outside/secret.qcow2",
        b"link-to-shadow", b"link-to-secret.qcow2", b"linked-folder/shadow", b"linked-folder/secret.qcow2",
        b"./././../../outside/./shadow", b"fifo", b"device", b"socket", b".", b"..", b"/", b"a-folder",
        b"/dev/zero", b"/dev/mem", b"/dev/stdin", b"/dev/fd/0", b"/proc/self/environ", b"/proc/1/environ",
        b"/etc/passwd",
        b"file:" + secret, b"file://" + secret, b"host_device:/dev/zero", b"raw:" + secret, b"fat:" + folder,
        b"fat:rw:" + folder, b"blkdebug::" + secret, b"blkverify:" + secret + b":" + secret, b"null-co://",
        b"nbd:127.0.0.1:9:exportname=x", b"nbd:unix:/tmp/x.sock", b"nbd://127.0.0.1:9/x", b"nbd+unix:///x?socket=/x.sock",
        b"ssh://root@127.0.0.1/etc/shadow", b"http://127.0.0.1:9/x", b"https://127.0.0.1:9/x", b"ftp://127.0.0.1:9/x",
        b"iscsi://127.0.0.1/x/1", b"rbd:pool/x", b"gluster://127.0.0.1/x/y", b"nfs://127.0.0.1/x/y", b"vxhs://127.0.0.1/x",
        b'json:{"driver":"raw","file":{"driver":"file","filename":"' + secret + b'"}}',
        b'json:{"driver":"nbd","server":{"type":"inet","host":"127.0.0.1","port":"9"}}',
        b'json:{"driver":"vvfat","dir":"' + folder + b'"}', b'json:{"file.filename":"' + secret + b'"}',
        b"file.filename=" + secret, b"driver=raw,file.filename=" + secret, b"-f", b"--object", b"a,b.qcow2", b"a\nb",
        b"\x1b[31mred\x1b[0m", b"\xff\xfe\xfd", b"a\0b", b"x" * 1023, b"x/" * 400, b"vm.qcow2", b"vm.vmdk", b"vm.qed",
    ]  # fmt: skip


def all_images(chance: random.Random, outside: Path, scratch: Path, count: int) -> list[Hostile]:
    """That many hostile images: one of each kind that is known, and sound ones with random damage."""
    qemu_img("create", "-q", "-f", "vmdk", scratch / "sparse.vmdk", "1M")
    sparse = (scratch / "sparse.vmdk").read_bytes()
    names = elsewhere(outside)
    made = [
        *_bases(names),
        *_data_files(chance, names),
        *_vmdks(chance, names, sparse),
        *_qeds(chance, names),
        *_chains(outside, sparse),
        *_beyond_bounds(),
    ]
    damaged = _damaged(chance, scratch, sparse)
    while len(made) < count:
        made.append(next(damaged))
    return made


def _bases(names: list[bytes]) -> Iterator[Hostile]:
    for number, name in enumerate(names):
        form = (b"raw", b"qcow2", b"")[number % 3]
        yield Hostile(f"base {name[:60]!r} as {form!r}", "qcow2", qcow2(name, form, version=2 + number % 2))
    for form in (b"host_device", b"vvfat", b"nbd", b"blkdebug", b"null-co", b"file", b"x" * 15, b"\xff"):
        beside = {"base.raw": b"base" * 4096}
        yield Hostile(f"base declared as {form!r}", "qcow2", qcow2(b"base.raw", form), beside)


def _data_files(chance: random.Random, names: list[bytes]) -> Iterator[Hostile]:
    for number, name in enumerate([*names[:20], *chance.sample(names[20:53], 12)]):
        content = qcow2(data_file=name, raw_data=bool(number % 2))
        yield Hostile(f"data file {name[:60]!r}", "qcow2", content)


def _vmdks(chance: random.Random, names: list[bytes], sparse: bytes) -> Iterator[Hostile]:
    kinds = ["monolithicFlat", "twoGbMaxExtentFlat", "twoGbMaxExtentSparse", "vmfs", "vmfsSparse", "seSparse"]
    for number, name in enumerate([*names[:8], *chance.sample(names[8:52], 10)]):
        kind = kinds[number % len(kinds)]
        word = b"FLAT" if "lat" in kind else b"SPARSE"
        line = b'RW 2048 %s "%s" 0' % (word, name.replace(b'"', b"'").replace(b"\n", b" "))
        yield Hostile(f"extent {name[:60]!r} of {kind}", "vmdk", vmdk_text(line, kind.encode()))
    for line in (
        b'RDONLY 2048 FLAT "%s" 0',
        b'RW 2048 FLAT "vm.vmdk" 0\nRW 2048 FLAT "%s" 0',
        b'RW 0 ZERO\nRW 1 FLAT "%s" 0',
    ):
        yield Hostile(f"extents {line!r}", "vmdk", vmdk_text(line % names[0]))
    for name in (*names[:8], *chance.sample(names[23:45], 4)):
        plain = name.replace(b'"', b"'")
        text = vmdk_text(b'RW 2048 SPARSE "vm.vmdk"', b"monolithicSparse", plain)
        yield Hostile(f"parent {name[:60]!r}", "vmdk", vmdk_sparse(sparse, text))
        text = vmdk_text(b'RW 2048 FLAT "%s" 0' % plain)
        yield Hostile(f"no capacity, extent {name[:60]!r}", "vmdk", vmdk_sparse(sparse, text, 0))


def _qeds(chance: random.Random, names: list[bytes]) -> Iterator[Hostile]:
    for number, name in enumerate([*names[:8], *chance.sample(names[8:], 10)]):
        yield Hostile(f"QED base {name[:60]!r}", "qed", qed(name, raw=bool(number % 2)))


def _chains(outside: Path, sparse: bytes) -> Iterator[Hostile]:
    """A sound overlay on a base beside it, which is what it should not be."""
    secret = bytes(outside / "shadow")
    flat = vmdk_text(b'RW 2048 FLAT "%s" 0' % secret)
    bases: dict[str, tuple[bytes, bytes]] = {
        "an external data file": (b"qcow2", qcow2(data_file=secret)),
        "a raw external data file": (b"qcow2", qcow2(data_file=secret, raw_data=True)),
        "a base outside": (b"qcow2", qcow2(secret, b"raw")),
        "a base by json": (b"qcow2", qcow2(b'json:{"driver":"file","filename":"%s"}' % secret, b"raw")),
        "an extent outside": (b"vmdk", flat),
        "no capacity and an extent outside": (b"vmdk", vmdk_sparse(sparse, flat, 0)),
        "a parent outside": (b"vmdk", vmdk_sparse(sparse, vmdk_text(b"", b"monolithicSparse", secret))),
        "a QED base outside": (b"qed", qed(secret, raw=True)),
        "itself": (b"qcow2", qcow2(b"base", b"qcow2")),
        "its overlay": (b"qcow2", qcow2(b"vm.qcow2", b"qcow2")),
        "the mark of qcow2, but declared raw": (b"raw", qcow2(secret, b"raw")),
        "nothing": (b"raw", b""),
    }
    for what, (form, content) in bases.items():
        yield Hostile(f"overlay of a base with {what}", "qcow2", qcow2(b"base", form), {"base": content})
    deep = {f"base{number}": qcow2(b"base%d" % (number + 1), b"qcow2") for number in range(70)}
    yield Hostile("a chain of 71 images", "qcow2", qcow2(b"base0", b"qcow2"), {**deep, "base70": qcow2()})
    yield Hostile("a base larger than it", "qcow2", qcow2(b"base", b"qcow2"), {"base": qcow2(size=2 * VIRTUAL_SIZE)})


def _patched(content: bytes, cluster: int, layout: str, *values: int) -> bytes:
    image = bytearray(content)
    struct.pack_into(layout, image, cluster * CLUSTER, *values)
    return bytes(image)


def _beyond_bounds() -> Iterator[Hostile]:
    """Tables that lead to nothing, to themselves, to each other, or to what is not a table."""
    used, sound = 1 << 63, qcow2()
    places: dict[str, Callable[[int], int]] = {
        "itself": lambda own: own * CLUSTER, "the header": lambda own: 0,
        "the refcounts": lambda own: REFCOUNTS * CLUSTER,
        "the end of the world": lambda own: 0x00FFFFFFFFFFF000, "behind the file": lambda own: 1 << 40,
        "between two clusters": lambda own: DATA * CLUSTER + 512,
    }  # fmt: skip
    tables: dict[str, tuple[int, int]] = {"L1": (L1, used), "L2": (L2, used), "refcount table": (REFCOUNT_TABLE, 0)}
    for table, (cluster, bit) in tables.items():
        for place, offset in places.items():
            content = _patched(sound, cluster, ">Q", offset(cluster) | bit)
            yield Hostile(f"the {table} leads to {place}", "qcow2", content)
    entries = [DATA * CLUSTER | used] * 200
    yield Hostile("one cluster 200 times", "qcow2", _patched(sound, L2, ">200Q", *entries))
    yield Hostile("compressed nonsense", "qcow2", _patched(sound, L2, ">2Q", 1 << 62 | 0x3FFFFFFFFFFFFFFF, 1 << 62))
    for value in (0, 2, 0xFFFF):
        yield Hostile(f"refcounts of {value}", "qcow2", _patched(sound, REFCOUNTS, ">7H", *[value] * 7))
    for bomb, write, _ in BOMBS:
        image = bytearray(sound)
        write(image)
        yield Hostile(bomb, "qcow2", bytes(image))
    for length in (0, 1, 71, 103, 104, CLUSTER, L1 * CLUSTER, L2 * CLUSTER + 8, DATA * CLUSTER):
        yield Hostile(f"cut off at {length}", "qcow2", sound[:length])


def _damaged(chance: random.Random, scratch: Path, sparse: bytes) -> Iterator[Hostile]:
    """Sound images of every format with random damage, for ever."""
    sound: dict[str, bytes] = {"qcow2": qcow2(), "vmdk": sparse}
    for form in ("vdi", "vpc", "vhdx", "qed"):
        qemu_img("create", "-q", "-f", form, scratch / f"sound.{form}", "1M")
        sound[form] = (scratch / f"sound.{form}").read_bytes()
    damages: list[Callable[[random.Random, bytearray], None]] = [mutate, mutate, mutate, _cut]
    while True:
        form = chance.choice(["qcow2", "qcow2", "qcow2", *sound])
        image = bytearray(sound[form])
        chance.choice(damages)(chance, image)
        yield Hostile("random damage", form, bytes(image))


def _cut(chance: random.Random, image: bytearray) -> None:
    del image[chance.randrange(len(image)) :]
