"""How large what a conversion or a flatten writes will be, and how long that takes: intervals from what is known.

An analysis knows of each image which bytes a copy of it keeps, in units of its own clusters (of a raw image: 4 KiB).
Other formats write other units, and of a chain nobody knows how much the images in it have in common: the lower end
takes all that may be in common for common, and every unit for full; the upper end neither.
"""

from collections.abc import Sequence
from typing import NamedTuple

from images.models import Image
from images.rewrite import neighbours
from images.rewrite.space import predicted
from storage_admin.agent.measure import new_image

KIB, MIB = 1 << 10, 1 << 20
#: Bytes that a format writes at once; a filesystem keeps the others in blocks.
_UNITS = {"vmdk": 64 * KIB, "vdi": MIB}
BLOCK = 4 * KIB
#: What the filesystem's own list of a file's pieces and half-filled blocks may add.
_EDGES = 128 * KIB
#: A compression makes of data no less than this part of it.
_PACKED_AT_BEST = 1 / 1000
#: Jobs that a rate rests on: so many at least, which worked on at least this part of the bytes.
_FEWEST, _AS_LARGE = 3, 1 / 8
#: How much quicker or slower than any of them the next one may be.
_SPREAD = 1.5


class Range(NamedTuple):
    """Bytes or seconds: at least, the best guess, at most. ``None`` where it is not known."""

    low: int | None = None
    guess: int | None = None
    high: int | None = None


UNKNOWN = Range()


class _Data(NamedTuple):
    """Bytes that a guest reads as data from a layer, in its own units and in blocks; ``covers`` hides what is below."""

    low: float
    guess: float
    high: float
    blocks: float
    covers: float


def converted(image: Image, below: Sequence[Image], form: str, options: dict[str, str]) -> Range:
    """The allocated size of a conversion's new file.

    Args:
        below: the image's ancestors, the immediate base first.
        form: the format of the new file.
        options: its creation options, as qemu-img takes them.
    """
    size = image.virtual_size
    if size is None or (data := _chain([image, *below])) is None:
        return UNKNOWN
    unit = _UNITS.get(form, BLOCK)
    if form == "qcow2":
        unit = new_image.size_of(options.get("cluster_size", "64k")) or 64 * KIB
    least, most = _tables(form, size, unit, options)
    if options.get("preallocation") in {"full", "falloc"}:
        return Range(size, size + least, size + most)
    if options.get("preallocation") == "metadata":
        unit = BLOCK  # every cluster has its place already, and is no more written as a whole
    packs = "compression_type" in options or options.get("subformat") == "streamOptimized"
    if packs:
        if form == "qcow2" and not below and unit == image.cluster_size and image.declared_format == "qcow2":
            told = predicted(image, "compress", options.get("compression_type", ""))
            if told.low is not None and told.high is not None:
                return Range(max(told.low - _EDGES, 0), told.after, told.high + _EDGES)
        # A grain of a VMDK that cannot be packed grows by its header.
        largest = data.high * 1.01 if form == "vmdk" else min(data.high * 1.01, size)
        return Range(round(data.low * _PACKED_AT_BEST), None, round(largest + most))
    if form == "qcow2" and options.get("extended_l2") in new_image.ON:
        unit = max(unit // 32, BLOCK)  # a part of a cluster is written alone
    written = _in_units(data, [image, *below], unit, size)
    return Range(max(round(written[0] + least - _EDGES), 0), round(written[1] + least), round(written[2] + most))


def flattened(image: Image, taken: Sequence[Image], method: str, *, alone: bool) -> Range:
    """The allocated size of an overlay that takes over what images below it hold.

    Args:
        taken: those images, the immediate base first.
        method: ``rebase`` or ``convert``.
        alone: whether nothing stays below.
    """
    unit = image.cluster_size
    if method == "convert":
        options = {"cluster_size": str(unit)} if unit else {}
        return converted(image, taken, "qcow2", options)
    own, size = (image.estimate or {}).get("basis", {}).get("data_bytes"), image.virtual_size
    layers = [_layer(one) for one in taken]
    if own is None or unit is None or size is None or any(layer is None for layer in layers):
        return UNKNOWN
    known = [layer for layer in layers if layer is not None]
    covers = _covers(image)
    low, _guess, high = _in_units(_added(known), taken, unit, size)
    # What an image that stays holds as well is not written.
    least = max(low - covers, 0) if alone else 0
    _, most = _tables("qcow2", size, unit, {})
    return Range(max(round(own + least - _EDGES), 0), round(own + (least + high) / 2), round(own + high + most))


def seconds(image: Image, kind: str, worked: int, bandwidth: int | None) -> Range:
    """How long a job of a kind takes, by how fast the last ones in this pool, or else on this host, were.

    Args:
        worked: bytes of what there is and of what is made.
        bandwidth: bytes that it may read in a second at most.
    """
    done = neighbours.of(image).done(kind)
    large = [one for one in done if one.worked >= worked * _AS_LARGE]
    for rows in ([one for one in large if one.pool == image.pool_id], large):
        if worked and len(rows) >= _FEWEST:
            rates = sorted(one.worked / one.seconds for one in rows)
            slowest, middle, fastest = rates[0] / _SPREAD, rates[len(rates) // 2], rates[-1] * _SPREAD
            if bandwidth:
                slowest, middle, fastest = (min(rate, bandwidth) for rate in (slowest, middle, fastest))
            return Range(int(worked / fastest), round(worked / middle), int(worked / slowest) + 1)
    return UNKNOWN


def _chain(layers: Sequence[Image]) -> _Data | None:
    """What is read of a chain, the topmost image first; ``None`` where one of them was not looked at."""
    known = [_layer(one) for one in layers]
    found = [one for one in known if one is not None]
    return _added(found) if len(found) == len(layers) else None


def _added(layers: Sequence[_Data]) -> _Data:
    low = blocks = high = covers = 0.0
    for layer in layers:
        low += max(layer.low - covers, 0)
        blocks += max(layer.blocks - covers, 0)
        high += layer.high
        covers += layer.covers
    guess = layers[0].guess if len(layers) == 1 else (low + high) / 2
    return _Data(low, guess, high, blocks, covers)


def _layer(image: Image) -> _Data | None:
    copy, place = predicted(image, "copy"), predicted(image, "in_place")
    if copy.low is None or copy.high is None or copy.after is None or image.virtual_size is None:
        return None
    unit = _unit(image)
    fixed, most = _tables(image.declared_format, image.virtual_size, image.cluster_size or BLOCK, {})
    low, high = max(copy.low - most, 0), copy.high
    blocks = least = low * BLOCK / unit
    if image.declared_format == "qcow2":
        # Blocks of zeros in clusters that are not: what the file holds without them, but for what is no cluster's.
        packed = bool((image.estimate or {}).get("basis", {}).get("clusters_compressed"))
        found = 0.0 if packed or place.low is None else max(place.low - most - _leaked(image), 0)
        blocks = max(min(found, low), least)
    return _Data(low, max(copy.after - fixed, low), high, blocks, _covers(image))


def _unit(image: Image) -> int:
    """In what an image's data is counted: clusters, their 32 parts where it knows such, and else blocks."""
    if image.declared_format != "qcow2" or not image.cluster_size:
        return _UNITS.get(image.declared_format, BLOCK)
    return image.cluster_size // 32 if image.from_header("extended_l2") else image.cluster_size


def _covers(image: Image) -> float:
    basis = (image.estimate or {}).get("basis", {})
    names = ("clusters_data", "clusters_zero_allocated", "clusters_zero_flagged", "clusters_compressed")
    return sum(basis.get(name) or 0 for name in names) * (image.cluster_size or 0)


def _leaked(image: Image) -> int:
    """Bytes of clusters that nothing refers to; all of the file where that is not known."""
    leaked = (image.estimate or {}).get("basis", {}).get("leaked_bytes")
    return image.occupied_bytes if leaked is None else int(leaked)


def _in_units(data: _Data, layers: Sequence[Image], unit: int, size: int) -> tuple[float, float, float]:
    """What is written of the data: units of which a part is data are written as a whole."""
    units = [_unit(one) for one in layers]
    finest, coarsest = min(units), max(units)
    low = min(data.low if unit >= coarsest else min(data.blocks, data.low), size)  # a last unit may be but begun
    high = min(data.high * max(unit / finest, 1), size + unit)
    if unit == finest == coarsest:
        return low, max(min(data.guess, high), low), high
    guess = data.guess * 1.25
    if unit < finest:  # of other formats nobody has counted the blocks of zeros in their units
        guess = data.blocks if all(one.declared_format == "qcow2" for one in layers) else data.guess
    return low, max(min(guess, high), low), high


def _tables(form: str, size: int, unit: int, options: dict[str, str]) -> tuple[int, int]:
    """Bytes that a format takes besides the data, at least and at most."""
    if form == "qcow2":
        l2_tables = -(-size * 8 // (unit * unit))
        refcounts = -(-(size // unit + l2_tables) * 2 // unit) + 1
        all_tables = (l2_tables * (2 if options.get("extended_l2") in new_image.ON else 1) + refcounts) * unit
        fixed = 3 * BLOCK
        given = all_tables if options.get("preallocation") == "metadata" else 0
        return fixed + given, 6 * unit + 2 * all_tables + _EDGES
    per_unit = {"vmdk": (64 * KIB, 8), "vdi": (MIB, 4), "vpc": (2 * MIB, BLOCK + 4), "vhdx": (MIB, 64)}
    if form not in per_unit:
        return 0, _EDGES
    each, entry = per_unit[form]
    return BLOCK, size // each * entry + (10 * MIB if form == "vhdx" else 0) + 2 * _EDGES
