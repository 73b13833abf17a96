"""Nodes of Proxmox VE that are reached by their API alone: no agent runs there. What it tells is shown; of the images
nothing is changed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.hosts import silence
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import permissions
from storage_admin.hosts.proxmox.permissions import MissingRight
from storage_admin.hosts.proxmox.reader import ProxmoxFacts

#: Without these, what is shown of a node is not all of it.
LISTED = ("storages", "guests", "images")


def why_not(host: Host) -> str:
    """Why no image there is changed, and what to do."""
    return _(
        "Images on {host} cannot be changed: the host is connected through the Proxmox VE API only, without an "
        "agent. Add SSH to it (Hosts → Edit connection)."
    ).format(host=host.name)


def nobody_looks(host: Host) -> str:
    """Why it is not known who uses a volume that no guest names."""
    return _(
        "Nothing in this storage is changed. The API of {host} lists its volumes, but programs on the node that "
        "have one open cannot be detected."
    ).format(host=host.name)


def rights(missing: Iterable[MissingRight]) -> list[dict[str, str]]:
    """The rights that a token has not, as a host's row keeps them: the feature, and a sentence."""
    return [{"feature": one.feature, "detail": one.sentence} for one in missing]


def answered(host: Host, at: datetime, facts: ProxmoxFacts, owners_unknown: str) -> None:
    """A scan reached the host: what its API told about it."""
    lacking = [right.sentence for right in facts.missing if right.feature in LISTED]
    state = Host.Status.DEGRADED, f"Some of its data is missing here. {' '.join(lacking)}"
    capabilities: dict[str, Any] = {
        "agent": False, "libvirt": "absent", "proxmox_version": facts.version, "missing_rights": rights(facts.missing),
    }  # fmt: skip
    silence.host_answered(host, at, capabilities, owners_unknown, state if lacking else (Host.Status.OK, ""))


@dataclass(frozen=True)
class Ability:
    """Something that is done by the API, and what the token lacks for it, in sentences; empty where nothing."""

    title: str
    lacking: str


def features(host: Host) -> list[Ability]:
    """What is done by the API, as the last scan found the token's rights."""
    lacking: dict[str, list[str]] = {}
    for right in host.capabilities.get("missing_rights") or []:
        lacking.setdefault(str(right.get("feature")), []).append(str(right.get("detail")))
    return [Ability(str(one.title), " ".join(lacking.get(one.name, []))) for one in permissions.FEATURES.values()]
