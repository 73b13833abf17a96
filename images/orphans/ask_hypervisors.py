"""Whether a guest names an image right now: asked of every hypervisor that could have one, not of the database.

A refusal is read by everybody who sees the image's host. What is on other hosts, and on other nodes of its cluster, may
not exist for them: of that it says no more than that it is there.
"""

import os
from collections.abc import Iterator

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.orphans.evidence import number_of
from images.scan import hypervisors, shared_storages
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.models import Host

#: Why nothing is known of another host's guests.
_UNTOLD = _("Another host with this storage does not report which images its guests use.")


def refuse_named(image: Image) -> None:
    """Lets an image be set aside, or deleted, where no definition of a guest names it.

    Raises:
        RefusedError: ``not_orphan``; ``guests_unknown`` where a hypervisor that could have guests does not answer, or
            tells what is not understood.
    """
    path = bytes(image.path_bytes)
    _refuse_on(image.host, path, image)
    for pair, there in shared_storages.elsewhere(image):
        _refuse_on(pair.other.host, there, image)


def _refuse_on(host: Host, path: bytes, image: Image) -> None:
    number = number_of(image.name, image.path)
    names = {path, os.fsencode(image.volume.get("alias", ""))} - {b""}
    for guest, is_there in _guests(host, tells=host.pk == image.host_id):
        is_told = is_there and host.pk == image.host_id
        if any(os.fsencode(disk.path) in names for disk in guest.disks if disk.path):
            who = gettext("A guest of another host that shares this storage")
            if is_told:
                who = gettext("Guest {guest} on {host}").format(guest=guest.name, host=host.name)
            told = gettext("{who} uses {image} now. Scan the host.")
            raise RefusedError("not_orphan", told.format(who=who, image=image.name))
        if guest.unread:
            whose, line = gettext("a guest of another host that shares this storage"), "."
            if is_told:
                whose = gettext("{guest} on {host}").format(guest=guest.name, host=host.name)
                line = f": {guest.unread[0]}"
            told = gettext("The definition of {whose} has lines that cannot be interpreted and may use the image{line}")
            raise RefusedError("guests_unknown", told.format(whose=whose, line=line))
        if guest.lock and guest.uid == number:
            whose = gettext("a guest of another host, which is locked")
            if is_told:
                whose = gettext("{guest}, which is locked ({lock})").format(guest=guest.name, lock=guest.lock)
            told = gettext("The name of the image says that it is a disk of {whose}. Wait until the guest is unlocked.")
            raise RefusedError("guest_locked", told.format(whose=whose))


def _guests(host: Host, *, tells: bool) -> Iterator[tuple[GuestFacts, bool]]:
    """Every guest of a host as its hypervisors tell now, and whether it is there, not on another node of its cluster.

    Args:
        tells: whether a refusal may say why the host's guests are not known.

    Raises:
        RefusedError: ``guests_unknown``.
    """
    try:
        facts = reader.read(host)
        if facts is None and host.capabilities.get("libvirt") == "present":
            raise HostError(gettext("libvirt no longer answers there."))
        for guest in facts.domains if facts is not None else ():
            yield guest, True
    except HostError as error:
        if host.capabilities.get("libvirt") == "present":
            told = gettext("{why} No image is set aside until libvirt reports its guests.")
            raise RefusedError("guests_unknown", told.format(why=error.detail if tells else _UNTOLD)) from error
    for answer in hypervisors.ask(host):
        if answer.unknown:
            told = gettext("{why} No image is set aside until this is known.")
            raise RefusedError("guests_unknown", told.format(why=answer.unknown if tells else _UNTOLD))
        # What other nodes' guests have on storages of the same name counts as well.
        node = answer.proxmox
        away = [one.facts for one in node.guests if one.node != node.node] if node is not None else []
        others = {(guest.kind, guest.uid) for guest in away}
        for guest in (*answer.guests, *away):
            yield guest, (guest.kind, guest.uid) not in others
