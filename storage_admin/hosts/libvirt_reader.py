"""libvirt's pools and domains on a host, within a time limit."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from django.conf import settings

from storage_admin.agent.protocol import HostError
from storage_admin.hosts.libvirt_uri import uri_of
from storage_admin.hosts.models import Host

TIMEOUT = 20.0


@dataclass(frozen=True)
class FolderPool:
    """A libvirt pool whose volumes are files in one folder."""

    name: str
    kind: str
    path: str
    active: bool


@dataclass(frozen=True)
class DomainDisk:
    """A disk as the domain's definition says; ``path`` is empty for an empty drive or a network disk."""

    target: str
    device: str
    path: str
    format: str
    cache: str
    discard: str
    readonly: bool
    #: Its definition names the images that its own stands on.
    records_chain: bool = False


@dataclass(frozen=True)
class Domain:
    """A libvirt domain, running or not."""

    uid: str
    name: str
    state: str
    disks: tuple[DomainDisk, ...]


@dataclass(frozen=True)
class LibvirtFacts:
    """All that libvirt told."""

    pools: tuple[FolderPool, ...] = ()
    domains: tuple[Domain, ...] = ()


def read(host: Host) -> LibvirtFacts | None:
    """Asks libvirt on a host.

    Returns:
        What it told; ``None`` where no libvirt listens.

    Raises:
        HostError: it does not answer; the argument says why.
    """
    with uri_of(host) as uri:
        return None if uri is None else _read(uri)


def _read(uri: str) -> LibvirtFacts:
    command = [sys.executable, "-m", "storage_admin.hosts.libvirt_query", uri]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False, cwd=settings.BASE_DIR)
    except subprocess.TimeoutExpired:
        raise HostError(f"libvirt did not answer within {TIMEOUT:.0f} s.") from None
    if done.returncode != 0:
        raise HostError(f"libvirt could not be asked: {done.stderr.decode('utf-8', 'replace').strip()[-300:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise HostError(f"libvirt does not answer: {answer['error']}")
    return LibvirtFacts(
        pools=tuple(FolderPool(**pool) for pool in answer["pools"]),
        domains=tuple(
            Domain(
                uid=domain["uid"], name=domain["name"], state=domain["state"],
                disks=tuple(DomainDisk(**disk) for disk in domain["disks"]),
            )
            for domain in answer["domains"]
        ),
    )  # fmt: skip
