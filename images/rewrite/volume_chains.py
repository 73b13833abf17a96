"""Snapshots of Proxmox VE that are files of their own: whose they are, and what is not done with them.

Proxmox VE finds a snapshot by walking its disk's chain (:mod:`storage_admin.agent.rewrite.volume_chains`). So the chain
stays as it is: nothing is flattened or converted out of it, and of the files below the disk none is replaced.
"""

from dataclasses import dataclass

from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import neighbours
from storage_admin.agent.rewrite import volume_chains
from storage_admin.hosts.names import display
from storage_admin.jobs.plans import Refusal


@dataclass(frozen=True)
class Part:
    """What an image is in such a chain.

    Args:
        snapshot: that it is, or, of the disk itself, that it stands on.
        number: of the VM.
        is_disk: it is the disk itself, which the VM writes to.
    """

    snapshot: str
    number: str
    is_disk: bool

    @property
    def sentence(self) -> str:
        """For a page."""
        what = _("snapshot {snapshot} of VM {number}").format(snapshot=self.snapshot, number=self.number)
        return _("Disk on the {what}").format(what=what) if self.is_disk else _("The {what}").format(what=what)


def part_of(image: Image) -> Part | None:
    """What an image is in a chain of snapshots, by its name and its base's; ``None`` for what is in none."""
    path = bytes(image.path_bytes)
    number = volume_chains.guest_number(path)
    readings = volume_chains.readings(path)
    if readings:
        sections = {disk.only_in for disk in neighbours.of(image).own_disks}
        names = [display(snapshot) for snapshot, __ in readings]
        return Part(next((name for name in names if name in sections), names[0]), number, is_disk=False)
    below = bytes(image.backing_path_bytes) if image.backing_file else b""
    snapshot = volume_chains.snapshot_below(path, below) if below else b""
    return Part(display(snapshot), number, is_disk=True) if snapshot else None


def against_rewriting(image: Image) -> list[Refusal]:
    """What stands against putting another file in the image's place, be it one with the same content and base."""
    part = part_of(image)
    return [_refusal(image, part)] if part is not None and not part.is_disk else []


def against_standing_alone(image: Image) -> list[Refusal]:
    """What stands against taking an image from what it stands on."""
    part = part_of(image)
    return [_refusal(image, part)] if part is not None else []


def _refusal(image: Image, part: Part) -> Refusal:
    return Refusal(volume_chains.CODE, volume_chains.why_not(image.name, part.snapshot, part.number))
