"""What a running guest's disk stands on: as its hypervisor has it now, and as the last scan saw it."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from django.utils.translation import gettext

from images.models import Image
from storage_admin.guests.models import Guest
from storage_admin.hosts.live_facts import DiskNow, GuestNow
from storage_admin.hosts.names import path_key
from storage_admin.jobs.plan_and_progress import Refusal


@dataclass(frozen=True)
class Layers:
    """A disk's chain, from above.

    Args:
        chain: the paths.
        rows: the images that these are, by place; not of those that no scan has seen.
        allocated: what the topmost one occupies now, in bytes.
        refusals: what stands against changing the chain.
    """

    guest_id: int
    disk: str
    chain: list[str]
    rows: dict[int, Image]
    allocated: int | None
    refusals: tuple[Refusal, ...]

    @property
    def names(self) -> list[str]:
        """What is said of each."""
        return [path.rpartition("/")[2] or path for path in self.chain]

    @property
    def images(self) -> list[Image]:
        """Those that a scan has seen, from above."""
        return [self.rows[place] for place in sorted(self.rows)]

    def images_at(self, places: Iterable[int]) -> list[Image]:
        """Those of these places that a scan has seen."""
        return [self.rows[place] for place in places if place in self.rows]

    def found(self, places: Iterable[int]) -> Iterator[tuple[int, Image]]:
        """The same with their places."""
        return ((place, self.rows[place]) for place in places if place in self.rows)


def layers_of(guest: Guest, now: GuestNow, disk: DiskNow) -> Layers:
    """A disk's chain, with what stands against changing it."""
    keys = {path_key(os.fsencode(path)): place for place, path in enumerate(disk.chain) if path}
    images = Image.objects.filter(host=guest.host_id, path_key__in=list(keys)).select_related("host", "pool")
    found: list[Refusal] = []
    if "" in disk.chain or disk.kind not in {"file", "block", "volume"}:
        sentence = gettext("The chain of {disk} has something that is neither a file nor a device.").format(
            disk=disk.target
        )
        found.append(Refusal("unsupported_pool", sentence))
    if disk.format != "qcow2":
        sentence = gettext("{disk} is {format}: only qcow2 images have backing files.")
        found.append(Refusal("unsupported_subformat", sentence.format(disk=disk.target, format=disk.format or "?")))
    if now.snapshots:
        sentence = gettext(
            "libvirt keeps snapshots of {guest} ({snapshots}), which name these images: delete them first."
        ).format(guest=guest.name, snapshots=", ".join(now.snapshots[:5]))
        found.append(Refusal("in_snapshot_chain", sentence))
    return Layers(
        guest.pk, disk.target, list(disk.chain), {keys[image.path_key]: image for image in images},
        disk.allocated_bytes, tuple(found),
    )  # fmt: skip
