"""Whether a guest runs on an image right now: asked of the hypervisor, not of the database."""

import os

from images.kinds.targets import descendants
from images.models import Image
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import libvirt_reader
from storage_admin.hosts.libvirt_reader import Domain

OFF = frozenset({"shut off", "crashed"})


def check_guests_off(image: Image) -> None:
    """Lets a rewrite go on where no running guest needs the image.

    Raises:
        RefusedError: ``guest_running``; ``guests_unknown`` where libvirt has guests and does not answer.
    """
    if image.host.capabilities.get("libvirt") != "present":
        return
    try:
        domains = libvirt_reader.read().domains
    except HostError as error:
        raise RefusedError(
            "guests_unknown", f"{error.detail} Until libvirt tells which guests run, no image is touched."
        ) from error
    needed = [image, *descendants(image)]
    paths = {bytes(one.path_bytes) for one in needed}
    names = set(
        Image.objects.filter(pk__in=[one.pk for one in needed]).values_list("uses__disk__guest__uid", flat=True)
    )
    for domain in domains:
        if domain.state not in OFF and (domain.uid in names or _paths(domain) & paths):
            raise RefusedError(
                "guest_running", f"Guest {domain.name} is {domain.state} and uses {image.name}: shut it down first."
            )


def _paths(domain: Domain) -> set[bytes]:
    return {os.fsencode(disk.path) for disk in domain.disks if disk.path}
