"""Whether a guest names an image right now: asked of every hypervisor that could have one, not of the database."""

import os
from collections.abc import Iterator

from images import hypervisors
from images.models import Image
from images.orphans import sharing
from images.orphans.evidence import number_of
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import libvirt_reader
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.models import Host


def refuse_named(image: Image) -> None:
    """Lets an image be set aside, or deleted, where no definition of a guest names it.

    Raises:
        RefusedError: ``not_orphan``; ``guests_unknown`` where a hypervisor that could have guests does not answer, or
            tells what is not understood.
    """
    path = bytes(image.path_bytes)
    _refuse_on(image.host, path, image)
    for pair in sharing.shared(image.host):
        if pair.pool.pk == image.pool_id and path.startswith(pair.after):
            _refuse_on(pair.other.host, pair.before + path[len(pair.after) :], image)


def _refuse_on(host: Host, path: bytes, image: Image) -> None:
    number = number_of(image.name, image.path)
    for guest in _guests(host):
        if any(os.fsencode(disk.path) == path for disk in guest.disks if disk.path):
            raise RefusedError(
                "not_orphan", f"Guest {guest.name} on {host.name} names {image.name} by now: scan the host."
            )
        if guest.unread:
            raise RefusedError(
                "guests_unknown",
                f"The definition of {guest.name} on {host.name} has lines that are not understood, and may name it: "
                f"{guest.unread[0]}",
            )
        if guest.lock and guest.uid == number:
            raise RefusedError(
                "guest_locked",
                f"By its name it is a disk of {guest.name}, locked ({guest.lock}): wait until that ends.",
            )


def _guests(host: Host) -> Iterator[GuestFacts]:
    """Every guest of a host as its hypervisors tell now; raises RefusedError(``guests_unknown``)."""
    try:
        facts = libvirt_reader.read(host)
        if facts is None and host.capabilities.get("libvirt") == "present":
            raise HostError("No libvirt listens there any more.")
        yield from facts.domains if facts is not None else ()
    except HostError as error:
        if host.capabilities.get("libvirt") == "present":
            raise RefusedError(
                "guests_unknown", f"{error.detail} Until libvirt tells, no image is set aside."
            ) from error
    for told in hypervisors.ask(host):
        if told.unknown:
            raise RefusedError("guests_unknown", f"{told.unknown} Until that is known, no image is set aside.")
        yield from told.guests
        for one in told.proxmox.guests if told.proxmox is not None else ():
            # What other nodes' guests have on storages of the same name counts as well.
            if told.proxmox is not None and one.node != told.proxmox.node:
                yield one.facts
