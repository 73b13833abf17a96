"""What a host offers and lacks, and for which feature: tools, rights of an API token, or why there is no list."""

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from storage_admin.hosts import transport
from storage_admin.hosts.libvirt import alone
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import by_api_alone


@dataclass(frozen=True)
class Tool:
    """A program on the host and what cannot be done without it; or a feature of the API, and what is lacking for it."""

    name: str
    purpose: str
    package: str
    #: ``True`` or a version: there; ``False``: missing; ``None``: nobody has looked yet.
    found: str | bool | None


#: Name in the capabilities, what it is called, what it is for, the Debian package that brings it.
TOOLS = (
    ("qemu_img", "qemu-img", _("every job on an image: analyze, reclaim, flatten, convert, check"), "qemu-utils"),
    ("zstd", _("zstd in qemu-img"), _("faster and better compression than zlib"), _("qemu-utils 5.1 or newer")),
    ("setpriv", "setpriv", _("every rewriting job: tools end together with the agent"), "util-linux"),
    (
        "confinement",
        _("Landlock or namespaces"),
        _("qemu-img can open only the images of its job"),
        _("kernel 5.13 or newer"),
    ),
    ("ionice", "ionice", _("jobs with idle I/O priority"), "util-linux"),
)


@dataclass(frozen=True)
class Abilities:
    """What a host offers, or lacks, and for which feature.

    Args:
        heading: what the list is of.
        rights: what is done by the API of Proxmox VE, and what its token lacks for that.
        sentence: why there is no list, or what holds for all of it; may be empty.
    """

    heading: str
    tools: tuple[Tool, ...] = ()
    rights: tuple[Tool, ...] = ()
    sentence: str = ""


def abilities_of(host: Host) -> Abilities:
    """What the last scan found, by the way that the host is reached."""
    if host.by_api_alone:
        return Abilities(gettext("API token privileges"), rights=_rights(host), sentence=by_api_alone.why_not(host))
    if transport.by_libvirt_alone(host):
        return Abilities(gettext("Capabilities"), sentence=alone.why_not(host))
    if host.transport == Host.Transport.PLAIN:
        return Abilities(gettext("Capabilities"), sentence=str(_PLAIN))
    unconfined = host.capabilities.get("confinement", "unknown") is None
    rights = _rights(host) if host.token_id else ()
    return Abilities(gettext("Tools"), tuple(tools_of(host)), rights, str(_UNCONFINED) if unconfined else "")


_UNCONFINED = _(
    "This host cannot restrict qemu-img to the images of its job: the kernel has no Landlock, and the agent "
    "cannot create namespaces. A changed image header could make qemu-img open other files. Images that users "
    "other than root can write are refused."
)


_PLAIN = _(
    "This host has no Python 3, so no agent can run there. Containers are listed and their I/O priority is set "
    "with plain commands. Images are not scanned."
)


def _rights(host: Host) -> tuple[Tool, ...]:
    """What is done by the API of Proxmox VE, and whether the token may."""
    looked = "missing_rights" in host.capabilities
    return tuple(
        Tool(one.title, one.lacking, "", not one.lacking if looked else None) for one in by_api_alone.features(host)
    )


def tools_of(host: Host) -> list[Tool]:
    """What the last scan found of each tool."""
    known: dict[str, Any] = (host.capabilities.get("tools") or {}) | host.capabilities
    return [
        Tool(str(name), str(purpose), str(package), known[key] or False if key in known else None)
        for key, name, purpose, package in TOOLS
    ]
