"""What libvirt on a host knows: pools, volumes, domains. Within a time limit."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError
from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts, SnapshotFacts
from storage_admin.hosts.libvirt.process import ask, lines
from storage_admin.hosts.libvirt.uri import reached, uri_of
from storage_admin.hosts.models import Host

#: Seconds for pools and domains, and for the volumes of some pools.
TIMEOUT, VOLUMES_TIMEOUT = 20.0, 60.0
#: Domains of a boot storm, by its job (:mod:`storage_admin.agent.bench.storm`).
_STORMS = re.compile(r"sa-bench-([0-9a-zA-Z]{1,40})-[0-9]+")
#: Types of pools whose volumes are files in one folder.
FOLDERS = frozenset({"dir", "fs", "netfs"})


@dataclass(frozen=True)
class PoolFacts:
    """A pool of libvirt.

    Args:
        type: in libvirt's words: ``dir``, ``logical``, ``rbd``, ...
        path: where its volumes lie; empty where they lie in no folder.
        capacity_bytes, available_bytes: as of libvirt's last look; ``None`` of a pool that is not active.
        source_host, source_folder, source_format: what a ``netfs`` pool mounts.
        source_name: what its storage calls it, as Ceph a pool.
    """

    name: str
    type: str
    path: str
    active: bool
    capacity_bytes: int | None = None
    available_bytes: int | None = None
    source_host: str = ""
    source_folder: str = ""
    source_format: str = ""
    source_name: str = ""

    @property
    def is_folder(self) -> bool:
        """Whether its volumes are files, which an agent can look at."""
        return self.type in FOLDERS and self.path.startswith("/")


@dataclass(frozen=True)
class VolumeFacts:
    """A volume, as libvirt tells of it. Sizes are in bytes, ``None`` where it does not tell.

    Args:
        type: ``file``, ``block``, ``network``, ...
        format: of its content; empty where libvirt does not look.
        backing_path: what its header, or its storage, says that it stands on.
        mtime, ctime: seconds since the epoch, with nine digits behind the point.
        unreadable: why libvirt can say no more than where it is.
    """

    name: str
    path: str
    type: str = ""
    capacity: int | None = None
    allocation: int | None = None
    physical: int | None = None
    format: str = ""
    encrypted: bool = False
    compat: str = ""
    cluster_size: int | None = None
    backing_path: str = ""
    backing_format: str = ""
    mtime: str = ""
    ctime: str = ""
    unreadable: str = ""


@dataclass(frozen=True)
class LibvirtFacts:
    """All that libvirt told; ``about``: ``hostname``, ``driver``, ``hypervisor_version``, ``libvirt_version``."""

    pools: tuple[PoolFacts, ...] = ()
    domains: tuple[GuestFacts, ...] = ()
    about: dict[str, str] = field(default_factory=dict)


def read(host: Host) -> LibvirtFacts | None:
    """Asks libvirt on a host for its pools and domains.

    Returns:
        What it told; ``None`` where no libvirt listens.

    Raises:
        HostError: it does not answer; the argument says why.
    """
    with uri_of(host) as uri:
        return None if uri is None else _read(uri)


def _read(uri: str) -> LibvirtFacts:
    answer = ask(uri, "query", TIMEOUT, failed="libvirt does not answer")
    return LibvirtFacts(
        pools=tuple(PoolFacts(**pool) for pool in answer["pools"]),
        domains=tuple(guest for guest in map(_guest, answer["domains"]) if not _is_of_a_benchmark(guest)),
        about=answer["about"],
    )


def _guest(told: dict[str, Any]) -> GuestFacts:
    disks = tuple(_disk(disk) for disk in told["disks"])
    snapshots = tuple(SnapshotFacts(**one) for one in told["snapshots"])
    return GuestFacts(**(told | {"disks": disks, "unread": tuple(told["unread"]), "snapshots": snapshots}))


def _disk(told: dict[str, Any]) -> DiskFacts:
    """An image of Ceph is named as where it is, as Proxmox VE's are."""
    disk = DiskFacts(**told)
    return replace(disk, path=disk.volume) if disk.volume.startswith("rbd:") and not disk.path else disk


def _is_of_a_benchmark(guest: GuestFacts) -> bool:
    """Whether a boot storm started it, of whatever dashboard: all its disks lie in the folder of that run."""
    found = _STORMS.fullmatch(guest.name)
    folders = {disk.path.rpartition("/")[0].rpartition("/")[2] for disk in guest.disks}
    return found is not None and folders == {f".sa-{found[1]}.bench"}


def read_volumes(host: Host, pools: Iterable[str]) -> dict[str, tuple[VolumeFacts, ...] | str]:
    """The volumes of some pools, by the pools' names, or a sentence about why they are not known.

    Raises:
        HostError: libvirt does not answer at all.
    """
    names = list(pools)
    with reached(host) as uri:
        said, ended = lines(uri, "volumes", VOLUMES_TIMEOUT, names)
    if said and "pool" not in said[0]:
        raise HostError(_("libvirt does not answer: {error}").format(error=said[0]["error"]))
    found: dict[str, tuple[VolumeFacts, ...] | str] = {
        pool["pool"]: f"libvirt cannot list the pool's volumes: {pool['error']}"
        if "error" in pool
        else tuple(VolumeFacts(**volume) for volume in pool["volumes"])
        for pool in said
    }
    silent = [name for name in names if name not in found]
    if silent and not ended:
        why = f"libvirt did not list the pool's volumes within {VOLUMES_TIMEOUT:.0f} s"
        stuck = (
            f"{why}."
            if len(silent) == 1
            else _("{why}; it stopped responding at the pool {silent}.").format(why=why, silent=silent[0])
        )
        found |= dict.fromkeys(silent, stuck)
    return found
