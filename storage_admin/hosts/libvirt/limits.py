"""A disk's limits in libvirt's words, with some of them changed. Pure: no libvirt, no host.

libvirt knows, for bytes and for operations a second, a limit of reading, one of writing, and one of both together
(``total``), which cannot stand beside the others. Each may have a burst (``_max``), which must not be lower than its
limit and needs one, and the burst a length in seconds. Setting one of a family sets all its others to nothing, so that
the whole family has to be given.
"""

from collections.abc import Mapping

#: What can be set.
SETTABLE = ("read_bytes_sec", "write_bytes_sec", "read_iops_sec", "write_iops_sec")
#: What is shown as a disk's limits.
SHOWN = (*SETTABLE, "total_bytes_sec", "total_iops_sec")
#: The highest limit that libvirt takes (``QEMU_BLOCK_IOTUNE_MAX``).
HIGHEST = 10**15
_WAYS = ("read", "write")


def merged(known: Mapping[str, int | str], asked: Mapping[str, int]) -> dict[str, int]:
    """What libvirt is to be given so that the limits asked for hold, and nothing else changes that need not.

    A direction that is not asked for keeps its limit; where both together were limited, that limit becomes its own, so
    that neither becomes quicker than it was. A burst stays as long as it is not lower than its limit.

    Args:
        known: what libvirt tells of the disk.
        asked: of :data:`SETTABLE`; 0 for no limit.

    Returns:
        Only the families that something was asked of.
    """
    changed: dict[str, int] = {}
    for unit in ("bytes", "iops"):
        if any(f"{way}_{unit}_sec" in asked for way in _WAYS):
            changed |= _family(known, asked, unit)
    return changed


def _family(known: Mapping[str, int | str], asked: Mapping[str, int], unit: str) -> dict[str, int]:
    def before(way: str, suffix: str) -> int:
        own = int(known.get(f"{way}_{unit}_sec{suffix}", 0))
        return own or int(known.get(f"total_{unit}_sec{suffix}", 0))

    family: dict[str, int] = {}
    for way in _WAYS:
        name = f"{way}_{unit}_sec"
        limit = asked[name] if name in asked else before(way, "")
        burst = before(way, "_max")
        burst = burst if limit and burst >= limit else 0
        family |= {name: limit, f"{name}_max": burst, f"{name}_max_length": before(way, "_max_length") if burst else 0}
    family |= dict.fromkeys((f"total_{unit}_sec{suffix}" for suffix in ("", "_max", "_max_length")), 0)
    # An older libvirt knows no lengths, and bursts that nobody has set need no answer.
    for suffix in ("_max_length", "_max"):
        names = [f"{way}_{unit}_sec{suffix}" for way in ("total", *_WAYS)]
        if not any(known.get(name) for name in names):
            for name in names:
                family.pop(name)
    return family
