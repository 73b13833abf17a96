"""Whether an image is in use right now: asked of hypervisors and of other hosts' agents, not of the database.

A guest may run on it. And another registered host that shares its storage may have it open: what another client of a
network filesystem has not written to the server yet, nobody else can see, and over NFSv3 not even that it has the file
open. So each of them is asked: before the work, before the swap, and right after the files were exchanged, when both
are still there.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import refusals
from images.rewrite.neighbours import descendants
from images.scan import hypervisors, shared_storages
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.models import OFF_STATES, Guest, GuestDisk
from storage_admin.hosts import asking, transport
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import refuse


def check_guests_off(image: Image) -> None:
    """Lets a rewrite go on where no running guest needs the image.

    Raises:
        RefusedError: ``guest_running``; ``guests_unknown`` where libvirt has guests and does not answer.
    """
    if image.host.has_proxmox:
        _check_proxmox(image)
    for domain in running_domains(image):
        raise _runs(domain, image)


def _check_proxmox(image: Image) -> None:
    """The same for guests of Proxmox VE, by its files as they are now."""
    for told in hypervisors.ask(image.host):
        if told.unknown:
            raise RefusedError(
                "guests_unknown", _("{unknown} No image is changed until this is known.").format(unknown=told.unknown)
            )
        needed = {bytes(one.path_bytes) for one in (image, *descendants(image))}
        for guest in told.guests:
            if not needed & _paths(guest):
                continue
            if guest.lock:
                sentence = _("Guest {guest} is locked ({lock}). Wait until the lock is released.")
                raise RefusedError("guest_locked", sentence.format(guest=guest.name, lock=guest.lock))
            if guest.state not in OFF_STATES:
                raise _runs(guest, image)


def _runs(guest: GuestFacts, image: Image) -> RefusedError:
    told = _("Guest {guest} is {state} and uses {image}. Shut it down first.")
    return RefusedError("guest_running", told.format(guest=guest.name, state=guest.state, image=image.name))


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
            raise HostError(_("libvirt no longer answers there."))
        return facts.domains if facts is not None else ()
    except HostError as error:
        if not known_to_have_guests:
            return ()  # a socket that nobody listens at, on a host without any guest's definition
        told = _("{detail} No image is changed until libvirt reports which guests are running.")
        raise RefusedError("guests_unknown", told.format(detail=error.detail)) from error


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


def asked_elsewhere(image: Image) -> dict[str, bool]:
    """What the agent is told of it."""
    return {"shared": any(others(image))}


def refuse_used_elsewhere(image: Image, *, named: bool = True) -> None:
    """Lets a job go on where nobody has the image open on another host that shares its storage.

    Args:
        named: whether its file has its name; that of one that is set aside has another, and is asked for by its inode.

    Raises:
        RefusedError: ``image_in_use``; ``stale_plan``; ``guests_unknown``, where one of these hosts cannot be asked. No
            host is named: it may not exist for whoever reads that.
    """
    for pair, path in others(image):
        told = _ask(pair, path, image, [int(image.inode)])
        if not pair.is_proven and told["inode"] != int(image.inode):
            continue  # it is another storage, or has another file there
        if told["used"]:
            raise _used(image, _("Stop the program that uses it there, then try again."))
        if named and told["inode"] != int(image.inode):
            sentence = _(
                "Another host that shares the storage of {image} has a different file under this name. Scan "
                "both hosts, then try again."
            )
            raise RefusedError("stale_plan", sentence.format(image=image.name))


def look_again_elsewhere(job: Job, image: Image) -> None:
    """Lets a job end where nobody there has found the file that goes, after it was exchanged for the one that comes.

    Raises:
        RefusedError: ``image_in_use``, where somebody has it open: it has to get its name back. ``guests_unknown``,
            where a host cannot be asked, still finds that file by its name, or has both files open.
    """
    went, came = int(image.inode), int(job.kept["ready"]["made_inode"])
    used: set[int] = set()
    for pair, path in others(image):
        told = _ask(pair, path, image, [went, came])
        if not pair.is_proven and told["inode"] not in {went, came}:
            continue
        used.update(told["used"])
        if told["inode"] == went:
            sentence = _("Another host that shares the storage still has the old file of {image} under this name.")
            raise RefusedError("guests_unknown", sentence.format(image=image.name))
    if used >= {went, came}:
        sentence = _("Hosts that share the storage of {image} have both the old and the new file open.")
        raise RefusedError("guests_unknown", sentence.format(image=image.name))
    if went in used:
        raise _used(image, _("It was opened during the swap."))


def others(image: Image) -> Iterator[tuple[shared_storages.Shared, bytes]]:
    """Each other mount that shows the image, once, and the path that it has there."""
    found = set()
    for pair, path in shared_storages.elsewhere(image):
        where = (pair.other.host_id, pair.other.mount.get("dev"))
        if where not in found:
            found.add(where)
            yield pair, path


def _ask(pair: shared_storages.Shared, path: bytes, image: Image, inodes: list[int]) -> dict[str, Any]:
    pool = pair.other
    try:
        refuse(refusals.without_agent(pool.host))
        return asking.ask(pool.host, "users", pool.place_of(path) | {"inodes": inodes})
    except (HostError, RefusedError) as error:
        if not pair.is_proven and error.code == "stale_plan":
            return {"used": [], "inode": None}  # there is no such folder
        told = _(
            "Another registered host shares the storage of {image} and did not report who uses the image ({code}). "
            "Scan that host and try again."
        )
        raise RefusedError("guests_unknown", told.format(image=image.name, code=error.code)) from error


def _used(image: Image, what: str) -> RefusedError:
    return RefusedError("image_in_use", f"{image.name} is open on another host that shares its storage. {what}")
