"""Hosts that are reached by libvirt alone: no agent runs there. What libvirt tells is shown; nothing is changed."""

from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.hosts.models import Host


def why_not(host: Host) -> str:
    """Why no image there is changed, and what to do."""
    return _(
        "Images on {host} cannot be changed: the host is connected through libvirt only, without an agent. "
        "Register the host by SSH."
    ).format(host=host.name)


def nobody_looks(host: Host) -> str:
    """Why it is not known who uses an image that no guest names."""
    return _(
        "No agent runs on {host}. libvirt reports its guests, but other programs that have an image open cannot "
        "be detected."
    ).format(host=host.name)


def answered(host: Host, at: datetime, capabilities: dict[str, Any]) -> None:
    """A scan reached the host: what libvirt told about it. Its guests are known."""
    host.status, host.status_detail, host.owners_unknown = Host.Status.OK, "", ""
    host.last_seen, host.capabilities = at, capabilities
    host.save(update_fields=["status", "status_detail", "last_seen", "capabilities", "owners_unknown"])
