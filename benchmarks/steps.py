"""The steps of each kind of benchmark, as the agent takes them: sizes in bytes, tool options as typed fields."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_noop as _

from benchmarks.boot import KIND as BOOT
from benchmarks.boot import Boots
from storage_admin.agent.bench import boot as agent_boot
from storage_admin.agent.bench.storm import Machine

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: What is assumed of a pool on which nothing was measured yet, in bytes a second and operations a second.
ASSUMED_RATE = 200 * MIB
ASSUMED_IOPS = 10_000
#: Writes a second of which each is on the disk before the next one is begun.
ASSUMED_SYNCS = 500

_PREALLOCATIONS = ("off", "metadata", "falloc", "full")
_LAYOUTS = ("raw", "qcow2", "raw+qcow2", "qcow2+qcow2")
#: Bytes of tables for a cluster of data: an extended L2 entry of 16 and a reference count of 2, with room for the
#: tables of those (qcow2 specification).
_TABLE_BYTES = 24


@dataclass(frozen=True)
class Sizing:
    """What a profile's sizes are made of.

    Args:
        quick: the quick variant.
        data_bytes: what a step writes or reads.
        seconds: how long each of fio's steps lasts.
        memory_bytes: the host's memory; ``None`` where it is not known.
        rate: what the pool is assumed to write, in bytes a second.
        boots: what a boot storm boots; its guests may write ``data_bytes`` each, and take ``seconds`` at most.
    """

    quick: bool
    data_bytes: int
    seconds: int
    memory_bytes: int | None
    rate: int
    boots: Boots | None = None


@dataclass(frozen=True)
class Step:
    """One step and what it costs.

    Args:
        fields: as the agent takes them; ``setting`` names the step and is unlike any other's.
        scratch: what it takes of the pool at most, in bytes.
        written: about what it writes, in bytes.
        seconds: about how long it takes.
    """

    fields: dict[str, Any]
    scratch: int
    written: int
    seconds: float


def short(size: int) -> str:
    """A size in the way of qemu-img: ``512``, ``64K``, ``2M``."""
    for unit, letter in ((GIB, "G"), (MIB, "M"), (KIB, "K")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)


def _dd(size: Sizing) -> Iterator[Step]:
    for sync in ("direct", "fdatasync"):
        # 4K through the cache is what articles published.
        blocks = (MIB,) if size.quick else (64 * KIB, MIB, 4 * MIB)
        blocks = (4 * KIB, *blocks) if sync == "fdatasync" else blocks
        # What is not read past the caches is larger than they are, where that is thorough.
        data = size.data_bytes
        if sync == "fdatasync" and not size.quick and size.memory_bytes:
            data = max(data, 2 * size.memory_bytes)
        for block in blocks:
            for mode in ("write", "read"):
                fields = {
                    "mode": mode, "block_bytes": block, "count": max(data // block, 1), "sync": sync, "data": "random",
                    "setting": {"mode": mode, "sync": sync, "block": short(block)},
                }  # fmt: skip
                yield Step(fields, data, data if mode == "write" else 0, data / size.rate)


def _bonnie(size: Sizing) -> Iterator[Step]:
    memory = size.memory_bytes or 0
    data = max(size.data_bytes if size.quick else max(size.data_bytes, 2 * memory), 2 * MIB)
    data += -data % (2 * MIB)
    # bonnie++ wants a file of twice the memory that it is told of, both in whole MiB.
    told = min(max(memory, MIB) if memory else data // 2, data // 2)
    files = 0 if size.quick else 16
    fields = {
        "size_bytes": data, "memory_bytes": told, "files": files, "fast": size.quick, "unbuffered": False,
        "setting": {"size": short(data)},
    }  # fmt: skip
    # Written, rewritten, and a tenth of the seeks write.
    yield Step(fields, data + (files * MIB if files else 0), 2 * data, 4 * data / size.rate)
    if not size.quick:
        # As databases write: each block, and each file that is made, is on the disk before the next one is begun.
        data = min(data, 64 * MIB)
        fields = {
            "size_bytes": data, "memory_bytes": data // 2, "files": 1, "fast": True, "unbuffered": True,
            "setting": {"size": short(data), "unbuffered": "on"},
        }  # fmt: skip
        syncs = 2 * data // (8 * KIB) + 2 * 1024
        yield Step(fields, data + MIB, 2 * data, 4 * data / size.rate + syncs / ASSUMED_SYNCS)


def _fio(size: Sizing) -> Iterator[Step]:
    depths = (1, 32) if size.quick else (1, 4, 16, 64)
    asked = [(rw, MIB, 8) for rw in ("write", "read")]
    asked += [(rw, 4 * KIB, depth) for rw in ("randread", "randwrite") for depth in depths]
    if not size.quick:
        asked += [("randrw", 4 * KIB, 16)]
    for rw, block, depth in asked:
        fields = {
            "rw": rw, "block_bytes": block, "size_bytes": size.data_bytes, "seconds": size.seconds, "iodepth": depth,
            "jobs": 1, "direct": True, "setting": {"rw": rw, "block": short(block), "depth": depth},
        }  # fmt: skip
        rate = size.rate if block >= MIB else ASSUMED_IOPS * block
        written = size.data_bytes + (rate * size.seconds if rw != "read" and rw != "randread" else 0)
        yield Step(fields, size.data_bytes, written, size.seconds + size.data_bytes / size.rate)


def _preallocation(size: Sizing) -> Iterator[Step]:
    virtual = 4 * size.data_bytes
    for preallocation in _PREALLOCATIONS:
        fields = {
            "preallocation": preallocation, "virtual_bytes": virtual, "write_bytes": size.data_bytes,
            "block_bytes": 64 * KIB, "cluster_bytes": 64 * KIB, "setting": {"preallocation": preallocation},
        }  # fmt: skip
        full = preallocation == "full"
        taken = virtual if preallocation in {"falloc", "full"} else size.data_bytes
        written = size.data_bytes + (virtual if full else 0)
        yield Step(fields, taken + virtual // 64 + 4 * MIB, written, written / size.rate + 1)


def _cluster_size(size: Sizing) -> Iterator[Step]:
    clusters = (512, 4 * KIB, 64 * KIB, 2 * MIB) if size.quick else tuple(512 << power for power in range(13))
    extended = (128 * KIB,) if size.quick else (64 * KIB, 128 * KIB, 2 * MIB)
    for cluster, sub in [*((cluster, False) for cluster in clusters), *((cluster, True) for cluster in extended)]:
        setting = {"cluster_size": short(cluster)} | ({"extended_l2": "on"} if sub else {})
        fields = {
            "cluster_bytes": cluster, "extended_l2": sub, "virtual_bytes": 4 * size.data_bytes,
            "write_bytes": size.data_bytes, "block_bytes": 64 * KIB, "setting": setting,
        }  # fmt: skip
        # The L1 table has 8 bytes for each cluster of L2 entries, which are 8 bytes each, and may be there twice.
        first = 128 * 4 * size.data_bytes // cluster**2
        tables = size.data_bytes * _TABLE_BYTES // cluster + first + 18 * cluster + 4 * MIB
        # A cluster that is written first costs an entry in two tables: small ones are slow.
        seconds = size.data_bytes / size.rate + size.data_bytes / cluster / 20_000 + 1
        yield Step(fields, size.data_bytes + tables, size.data_bytes, seconds)


def _formats(size: Sizing) -> Iterator[Step]:
    depths = (5,) if size.quick else tuple(range(3, 11))
    layouts = [*((layout, 1 + ("+" in layout)) for layout in _LAYOUTS), *(("chain", depth) for depth in depths)]
    layouts += [("zlib", 1), ("zstd", 1)]
    for block in (64 * KIB,) if size.quick else (4 * KIB, 64 * KIB):
        for layout, depth in layouts:
            setting: dict[str, str | int] = {"layout": layout}
            if layout == "chain":
                setting["depth"] = depth
            if not size.quick:
                setting["block"] = short(block)
            fields = {
                "layout": layout, "depth": depth, "virtual_bytes": 2 * size.data_bytes, "data_bytes": size.data_bytes,
                "block_bytes": block, "direct": True, "setting": setting,
            }  # fmt: skip
            # The filled base, what it was made from, what is written into it or its overlay; each file has its tables.
            tables = depth * (5 * MIB + size.data_bytes // 512)
            yield Step(fields, 3 * size.data_bytes + tables, 3 * size.data_bytes, 6 * size.data_bytes / size.rate + 2)


def _modes(size: Sizing) -> Iterator[Step]:
    pairs = [("none", io) for io in ("native", "io_uring", "threads")]
    pairs += [("writeback", io) for io in ("io_uring", "threads")]
    pairs += [] if size.quick else [("directsync", "native"), ("directsync", "threads"), ("writethrough", "threads")]
    for cache, io in pairs:
        fields = {
            "cache": cache, "io": io, "data_bytes": size.data_bytes, "block_bytes": 4 * KIB,
            "setting": {"cache": cache, "io": io},
        }  # fmt: skip
        # Written from end to end, and at random for two seconds; the file is made once.
        written = 2 * size.data_bytes + 2 * ASSUMED_IOPS * 4 * KIB
        yield Step(fields, size.data_bytes, written, 3 * size.data_bytes / size.rate + 5)


def _boot(size: Sizing) -> Iterator[Step]:
    assert size.boots is not None  # noqa: S101 - worked out for this kind alone
    boots, options, growth = size.boots, size.boots.options, size.data_bytes
    image = boots.image_bytes
    common = {
        "image_id": options["image"], "image_bytes": image, "growth_bytes": growth,
        "virtual_bytes": (boots.image.virtual_size if boots.image else 0) or growth, "seconds": size.seconds,
        **{name: options[name] for name in ("memory_bytes", "up", "pattern", "kernel", "initrd", "append")},
    }  # fmt: skip
    machine = Machine(boots.memory_bytes, size.seconds)
    disks = agent_boot.Boots(
        machine, None, (), image, common["virtual_bytes"], growth, options["kernel"], options["initrd"]
    )
    for guests in boots.counts(quick=size.quick):
        for layout in options["layouts"]:
            setting = {"layout": layout, "guests": guests}
            copied = {"raw": guests, "qcow2+qcow2": 1}.get(layout, 0) * image
            # How much a guest writes while it boots is not known: an eighth of what it may.
            written = copied + guests * growth // 8
            scratch = agent_boot.BootStep({}, layout, guests, disks).needed_bytes
            yield Step(
                common | {"layout": layout, "guests": guests, "setting": setting}, scratch, written,
                written / size.rate + 20 + 2 * guests,
            )  # fmt: skip


@dataclass(frozen=True)
class Made:
    """How the steps of a kind are made, and the sizes that they have unless told otherwise.

    Args:
        title: what it measures, as a heading.
        question: what it answers, as a sentence.
        quick_bytes: what a step of the quick variant writes; ``thorough_bytes`` of the thorough one.
        needs: the program that it needs, if any, by its name in a host's capabilities, and the Debian package.
    """

    title: str
    question: str
    make: Callable[[Sizing], Iterator[Step]]
    quick_bytes: int
    thorough_bytes: int
    needs: tuple[tuple[str, str], ...] = ()


_QEMU_IMG = (("qemu-img", "qemu-utils"),)
MADE: dict[str, Made] = {
    "dd": Made(_("Sequential, with dd"), _("How fast are large files written and read?"), _dd, GIB, 4 * GIB),
    "bonnie": Made(
        "bonnie++", _("How fast are blocks written, rewritten and read, and how many seeks per second?"), _bonnie,
        2 * GIB, 4 * GIB, (("bonnie++", "bonnie++"),),
    ),
    "fio": Made(
        "fio", _("How many operations per second, at which latency, at which queue depth?"), _fio,
        GIB, 4 * GIB, (("fio", "fio"),),
    ),
    "preallocation": Made(
        _("Preallocation"), _("What does each preallocation cost when an image is created, and save when it is "
            "written?"),
        _preallocation, 256 * MIB, 2 * GIB, _QEMU_IMG,
    ),
    "cluster_size": Made(
        _("Cluster size"), _("Which cluster size is written fastest here?"),
        _cluster_size, 128 * MIB, GIB, _QEMU_IMG,
    ),
    "formats": Made(
        _("Formats and chains"), _("What do raw, qcow2, overlays, long chains and compression cost?"),
        _formats, 256 * MIB, 2 * GIB, _QEMU_IMG,
    ),
    "modes": Made(
        _("Cache and AIO modes"), _("Which cache and io of a guest's disk are fastest here?"),
        _modes, 256 * MIB, 2 * GIB, _QEMU_IMG,
    ),
    BOOT: Made(
        _("Boot storm"), _("How long do guests with raw disks or overlays take to come up if they start at once? "
                           "Choose what boots. An image adds its size to the cost."),
        _boot, 256 * MIB, 256 * MIB, (("virsh", "libvirt-clients"),),
    ),
}  # fmt: skip
#: What can be run on a schedule: what needs nothing to be chosen.
WATCHABLE = tuple(kind for kind in MADE if kind != BOOT)
