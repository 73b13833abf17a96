"""Whether a guest runs on an image right now: asked of the hypervisor, not of the database."""

import contextlib
import os
from pathlib import Path

from images.kinds.targets import descendants
from images.models import Image
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.models import OFF_STATES
from storage_admin.hosts import libvirt_reader
from storage_admin.hosts.libvirt_reader import Domain


def check_guests_off(image: Image) -> None:
    """Lets a rewrite go on where no running guest needs the image.

    Raises:
        RefusedError: ``guest_running``; ``guests_unknown`` where libvirt has guests and does not answer.
    """
    known_to_have_guests = image.host.capabilities.get("libvirt") == "present"
    # A daemon that was started since the scan may have brought guests with it.
    if not known_to_have_guests and not libvirt_reader.listens():
        return
    try:
        domains = libvirt_reader.read().domains
    except HostError as error:
        if not known_to_have_guests:
            return  # a socket that nobody listens at, on a host without any guest's definition
        raise RefusedError(
            "guests_unknown", f"{error.detail} Until libvirt tells which guests run, no image is touched."
        ) from error
    needed = [image, *descendants(image)]
    paths = {bytes(one.path_bytes) for one in needed}
    files = {(one.dev, one.inode) for one in needed}
    names = set(
        Image.objects.filter(pk__in=[one.pk for one in needed]).values_list("uses__disk__guest__uid", flat=True)
    )
    for domain in domains:
        if domain.state in OFF_STATES:
            continue
        disks = _paths(domain)
        if domain.uid in names or disks & paths or _files(disks) & files:
            raise RefusedError(
                "guest_running", f"Guest {domain.name} is {domain.state} and uses {image.name}: shut it down first."
            )


def _paths(domain: Domain) -> set[bytes]:
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
