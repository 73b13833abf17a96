"""Hosts that are reached by libvirt alone: no agent runs there. What libvirt tells is shown; nothing is changed."""

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
