"""libvirt's pools and domains on this machine, within a time limit."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings

from storage_admin.agent.protocol import HostError

TIMEOUT = 20.0

#: Where a libvirt daemon listens: the one of old, and the modular one.
SOCKETS = ("/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock")


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


def listens() -> bool:
    """Whether a libvirt daemon may be there to be asked."""
    return any(Path(socket).exists() for socket in SOCKETS)


def read() -> LibvirtFacts:
    """Asks libvirt on this machine (``qemu:///system``).

    Raises:
        HostError: it does not answer; the argument says why.
    """
    command = [sys.executable, "-m", "storage_admin.hosts.libvirt_query"]
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
