"""Pools whose volumes only libvirt tells of, as the events of a scan: logical volumes and the like, which are no files,
and every pool of a host on which no agent runs. Nothing in such pools is rewritten.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from django.utils.translation import gettext as _

from images.models import Image
from images.scan.events import Places, image_event, is_new, pool_event
from images.scan.rows import LARGEST
from storage_admin.agent.folders.pools import is_ours
from storage_admin.agent.protocol import HostError, b64
from storage_admin.agent.scan.pool_scan import EXTENSIONS
from storage_admin.agent.scan.records import backing_unsafe
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.libvirt import alone as libvirt_alone
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.libvirt.reader import LibvirtFacts, PoolFacts, VolumeFacts
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key, raw

#: Formats that say nothing of a file's being a disk.
NO_FORMAT = frozenset({"", "raw", "none", "unknown", "auto", "iso", "dir"})
#: A volume without an extension is one from this size on, in bytes, as with an agent.
LEAST_BARE = 1 << 20
#: What mounts of a ``netfs`` pool's format are called there, where it is not the format's own name.
_MOUNTED = {"": "nfs", "auto": "nfs", "glusterfs": "fuse.glusterfs"}
_AS_OF = (
    "These facts are from libvirt's last refresh of the pool. To list new files, backing files and free space, "
    "run: virsh pool-refresh {name}."
)


class Seen(Places):
    """What all pools of one scan share.

    Args:
        domains: by what they declare of a path, a volume's format is known where libvirt does not look at it.
    """

    def __init__(self, host: Host, domains: Iterable[GuestFacts], *, alone: bool = False) -> None:
        super().__init__(host)
        self.alone = alone
        #: What guests name, and as what.
        self.declared = {disk.path: disk.format for domain in domains for disk in domain.disks if disk.path}


def facts_of(host: Host) -> LibvirtFacts:
    """What libvirt tells of a host that nobody else can be asked about.

    Raises:
        HostError: ``host_unreachable``, with why.
    """
    try:
        facts = reader.read(host)
    except HostError as error:
        raise HostError(error.detail, "host_unreachable") from error
    if facts is None:
        raise HostError(_("No libvirt answers on {host}. Start it there.").format(host=host.name), "host_unreachable")
    return facts


def without_an_agent(host: Host, facts: LibvirtFacts, rows: Mapping[str, StoragePool]) -> Iterator[dict[str, Any]]:
    """All events of the scan of a host on which no agent runs.

    Args:
        rows: of the pools, by their names in libvirt.
    """
    yield {"event": "host", "agent": False, "libvirt": "present", **facts.about}
    pools = [(rows[pool.name], pool) for pool in facts.pools]
    yield from _events(Seen(host, facts.domains, alone=True), pools, _volumes(host, facts.pools))
    yield {"event": "seen", "probe": [], "busy": []}


def beside_an_agent(host: Host, facts: LibvirtFacts, rows: Mapping[str, StoragePool]) -> Iterator[dict[str, Any]]:
    """The events of the pools that an agent cannot walk."""
    others = [pool for pool in facts.pools if not pool.is_folder]
    if others:
        pools = [(rows[pool.name], pool) for pool in others]
        yield from _events(Seen(host, facts.domains), pools, _volumes(host, others))


def _volumes(host: Host, pools: Iterable[PoolFacts]) -> dict[str, tuple[VolumeFacts, ...] | str]:
    """The volumes of pools; where libvirt falls silent in between, a sentence for each that they are not known."""
    names = [pool.name for pool in pools if pool.active]
    try:
        return reader.read_volumes(host, names) if names else {}
    except HostError as error:
        return dict.fromkeys(names, error.detail)


def _events(
    seen: Seen,
    pools: Collection[tuple[StoragePool, PoolFacts]],
    volumes: Mapping[str, tuple[VolumeFacts, ...] | str],
) -> Iterator[dict[str, Any]]:
    """The ``image`` and ``pool`` events, as an agent would send them. A pool that is not active has no volumes."""
    for __, facts in pools:
        listed = volumes.get(facts.name, "")
        seen.paths |= {_key(_placed(facts, volume).path) for volume in listed if isinstance(volume, VolumeFacts)}
    for row, facts in pools:
        yield from _pool(seen, row, facts, volumes.get(facts.name, "libvirt does not list its volumes."))


def _pool(
    seen: Seen, row: StoragePool, facts: PoolFacts, volumes: tuple[VolumeFacts, ...] | str
) -> Iterator[dict[str, Any]]:
    event = _pool_event(seen, row, facts)
    if not facts.active:
        yield event | {
            "state": "missing",
            "detail": f"The pool is not active. Start it with: virsh pool-start {facts.name}.",
        }
        return
    if isinstance(volumes, str):
        yield event | {"state": "unreadable", "detail": volumes}
        return
    known = set(map(bytes, Image.every.filter(pool=row, missing_since=None).values_list("fingerprint", flat=True)))
    images = others = others_bytes = 0
    for volume in sorted((_placed(facts, one) for one in volumes), key=lambda volume: volume.path):
        if facts.is_folder and not _is_image(volume, named=volume.path in seen.declared):
            others, others_bytes = others + 1, others_bytes + (volume.allocation or 0)
            continue
        if not volume.path or not seen.is_first(volume.path):
            continue
        images += 1
        image = _image(seen, row, facts, volume)
        if is_new(image, known):
            yield image
    yield event | {
        "images": images, "others": {"count": others, "bytes": others_bytes},
        "vanished_b64": b64(b"".join(sorted(known))),
    }  # fmt: skip


def _placed(facts: PoolFacts, volume: VolumeFacts) -> VolumeFacts:
    """An image of Ceph is named as where it is, as Proxmox VE's are: libvirt calls it ``POOL/NAME``."""
    return replace(volume, path=f"rbd:{volume.path}") if facts.type == "rbd" and volume.path else volume


def _pool_event(seen: Seen, row: StoragePool, facts: PoolFacts) -> dict[str, Any]:
    capacity = min(facts.capacity_bytes or 0, LARGEST) or None  # some types know of none
    available = min(facts.available_bytes or 0, capacity) if capacity else None
    as_of = _AS_OF.format(name=facts.name)
    event = pool_event(row, detail=as_of, capacity_bytes=capacity, available_bytes=available)
    if not facts.is_folder:
        event["kind"] = str(row.kind)
    named_otherwise = (
        f"The volumes of this pool are not files (libvirt pool type {facts.type}), and a guest may use a volume under "
        "another name. So a volume may be in use even if no guest names it."
    )
    event["owners_unknown"] = libvirt_alone.nobody_looks(seen.host) if seen.alone else named_otherwise
    return event | _place(facts)


def _place(facts: PoolFacts) -> dict[str, Any]:
    """Which network filesystem a pool is on; with an agent's keys (:mod:`storage_admin.agent.host.mounts`).

    libvirt does not tell what an admin has mounted by other means.
    """
    if facts.type != "netfs" or not facts.source_host:
        return {}
    filesystem = _MOUNTED.get(facts.source_format, facts.source_format)
    folder = facts.source_folder
    if filesystem == "cifs":
        source = f"//{facts.source_host}/{folder.lstrip('/')}"
    else:
        source = f"{facts.source_host}:{folder if folder.startswith('/') else '/' + folder}"
    key = f"{filesystem}:{source.rstrip('/')}"
    return {"filesystem": filesystem, "network": True, "fs_key": key, "shared_key": key + "/"}


def _is_image(volume: VolumeFacts, *, named: bool) -> bool:
    """Whether a file of a folder is an image, by the rules that the agent goes by."""
    stem, __, extension = volume.name.rpartition(".")
    if named or (stem and extension.lower() in EXTENSIONS and not is_ours(volume.name)):
        return True
    if volume.format not in NO_FORMAT:
        return not is_ours(volume.name)
    size = volume.physical or volume.capacity or 0
    return "." not in volume.name and volume.format != "iso" and size >= LEAST_BARE and size % 512 == 0


def _image(seen: Seen, row: StoragePool, facts: PoolFacts, volume: VolumeFacts) -> dict[str, Any]:
    base = _base(seen, facts, volume)
    return image_event(
        row, volume.path, [row.pk, asdict(volume), base, seen.declared.get(volume.path)],
        mtime_ns=_nanoseconds(volume.mtime), ctime_ns=_nanoseconds(volume.ctime),
        file_size=_size(volume.physical, volume.capacity), allocated_size=_size(volume.allocation),
        virtual_size=volume.capacity, format=_format(seen, facts, volume),
        cluster_size=volume.cluster_size or None, compat=volume.compat or None,
        encrypted=volume.encrypted if facts.is_folder else None,
        state="unreadable" if volume.unreadable else "ok", detail=volume.unreadable,
        backing_format=volume.backing_format if base else "", **base,
    )  # fmt: skip


def _size(*told: int | None) -> int | None:
    return next((min(size, LARGEST) for size in told if size is not None), None)


def _format(seen: Seen, facts: PoolFacts, volume: VolumeFacts) -> str:
    """What the content looks like. Where libvirt has not looked, what a guest declares of it is not contradicted."""
    if volume.unreadable:
        return ""
    if facts.is_folder:
        return "raw" if volume.format in NO_FORMAT else volume.format[:20]
    return (volume.format or seen.declared.get(volume.path) or "raw")[:20]


def _base(seen: Seen, facts: PoolFacts, volume: VolumeFacts) -> dict[str, Any]:
    """What an image stands on, as far as libvirt tells."""
    path = volume.backing_path
    if not path:
        return {}
    named = raw(path)
    written = {"backing_b64": b64(named)}
    if not path.startswith("/"):
        return written | {"backing_unsafe": backing_unsafe(named) or "it is not the name of a plain file"}
    if _key(path) in seen.paths:
        return written | {"backing_path_b64": b64(named)}
    if not facts.is_folder:
        return {}  # a thin pool, or an origin that libvirt does not list: no image of ours
    why = f"The backing file {path} is in no libvirt pool of this host, so nothing more is known about it."
    return written | {"backing_path_b64": b64(named), "backing_unsafe": why}


def _key(path: str) -> str:
    return path_key(raw(path))


def _nanoseconds(seconds: str) -> int:
    """libvirt writes times as seconds, a point, and nine digits."""
    whole, __, part = seconds.partition(".")
    return int(whole) * 10**9 + int(part[:9].ljust(9, "0")) if whole.isdecimal() and part.isdecimal() else 0
