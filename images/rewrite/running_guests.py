"""Whether a guest runs on an image right now: asked of the hypervisor, not of the database."""

import contextlib
import os
from pathlib import Path

from django.utils.translation import gettext as _

from images.kinds.targets import descendants
from images.models import Image
from images.scan import hypervisors
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.models import OFF_STATES, Guest, GuestDisk
from storage_admin.hosts import transport
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.models import Host


def check_guests_off(image: Image) -> None:
    """Lets a rewrite go on where no running guest needs the image.

    Raises:
        RefusedError: ``guest_running``; ``guests_unknown`` where libvirt has guests and does not answer.
    """
    if image.host.has_proxmox:
        _check_proxmox(image)
    for domain in running_domains(image):
        raise RefusedError(
            "guest_running",
            _("Guest {domain} is {state} and uses {image}: shut it down first.").format(
                domain=domain.name, state=domain.state, image=image.name
            ),
        )


def _check_proxmox(image: Image) -> None:
    """The same for guests of Proxmox VE, by its files as they are now."""
    for told in hypervisors.ask(image.host):
        if told.unknown:
            raise RefusedError(
                "guests_unknown", _("{unknown} Until that is known, no image is changed.").format(unknown=told.unknown)
            )
        needed = {bytes(one.path_bytes) for one in (image, *descendants(image))}
        for guest in told.guests:
            if not needed & _paths(guest):
                continue
            if guest.lock:
                raise RefusedError(
                    "guest_locked",
                    _("Guest {guest} is locked ({lock}): wait until the lock is released.").format(
                        guest=guest.name, lock=guest.lock
                    ),
                )
            if guest.state not in OFF_STATES:
                raise RefusedError(
                    "guest_running",
                    _("Guest {guest} is {state} and uses {image}: shut it down first.").format(
                        guest=guest.name, state=guest.state, image=image.name
                    ),
                )


def running_domains(image: Image) -> list[GuestFacts]:
    """The domains of libvirt that are not off and need the image, as libvirt tells now.

    Raises:
        RefusedError: ``guests_unknown`` where libvirt has guests and does not answer.
    """
    domains = _domains(image.host)
    needed = [image, *descendants(image)]
    paths = {bytes(one.path_bytes) for one in needed}
    # By another path than we know it: on this machine alone can that be looked at from here.
    files = {(one.dev, one.inode) for one in needed} if transport.is_here(image.host) else set()
    uids = set(Image.objects.filter(pk__in=[one.pk for one in needed]).values_list("uses__disk__guest__uid", flat=True))
    return [domain for domain in domains if domain.state not in OFF_STATES and _needs(domain, uids, paths, files)]


def _domains(host: Host) -> tuple[GuestFacts, ...]:
    """All domains, as libvirt tells now; raises RefusedError(``guests_unknown``)."""
    known_to_have_guests = host.capabilities.get("libvirt") == "present"
    try:
        # Also where none was at the scan: a daemon that was started since may have brought guests with it.
        facts = reader.read(host)
        if facts is None and known_to_have_guests:
            raise HostError(_("libvirt no longer listens there."))
        return facts.domains if facts is not None else ()
    except HostError as error:
        if not known_to_have_guests:
            return ()  # a socket that nobody listens at, on a host without any guest's definition
        raise RefusedError(
            "guests_unknown",
            _("{detail} No image is changed until libvirt reports which guests are running.").format(
                detail=error.detail
            ),
        ) from error


def domains_that_name(image: Image) -> list[tuple[GuestFacts, list[tuple[str, str]]]]:
    """The domains whose definitions name the image itself, running or not, as libvirt tells now.

    Returns:
        Each with the disks that are the image: target, and path as the definition has it.

    Raises:
        RefusedError: ``guests_unknown`` where libvirt has guests and does not answer.
    """
    found = []
    file = {(image.dev, image.inode)} if transport.is_here(image.host) else set()
    seen = GuestDisk.objects.filter(use__image=image.pk).values_list("path_bytes", flat=True)
    paths = {bytes(image.path_bytes), *map(bytes, seen)}  # also by a link, as the last scan found it
    for domain in _domains(image.host):
        named = {os.fsencode(disk.path): disk for disk in domain.disks if disk.path}
        disks = [
            (disk.target, disk.path) for raw, disk in named.items() if raw in paths or (file and _files({raw}) & file)
        ]
        if disks:
            found.append((domain, disks))
    return found


def guests_known_to_run(image: Image) -> list[Guest]:
    """The guests that are not off and need the image, as the last scan knew them."""
    needed = [image.pk, *(above.pk for above in descendants(image))]
    guests = Guest.objects.filter(disks__use__image__in=needed).exclude(state__in=OFF_STATES)
    return list(guests.distinct().order_by("name", "pk"))


def _needs(domain: GuestFacts, uids: set[str], paths: set[bytes], files: set[tuple[str, str]]) -> bool:
    disks = _paths(domain)
    return domain.uid in uids or bool(disks & paths) or bool(files and _files(disks) & files)


def _paths(domain: GuestFacts) -> set[bytes]:
    return {os.fsencode(disk.path) for disk in domain.disks if disk.path}


def _files(paths: set[bytes]) -> set[tuple[str, str]]:
    """Device and inode of the files there: a guest may name an image by another path than we do."""
    found = set()
    for path in paths:
        # What cannot be looked at from here is left to the agent, which sees who has the image open.
        with contextlib.suppress(OSError):
            status = Path(os.fsdecode(path)).stat()
            found.add((str(status.st_dev), str(status.st_ino)))
    return found
