"""The job kind ``to_device``: an image is written onto a block device of its host, as a logical volume."""

import os
import re
from typing import Any

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images import backups
from images.models import Image, ImageUse
from images.rewrite import forecasts, readers, refusals, volumes
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting
from images.rewrite.neighbours import find, locks_on_chain
from images.rewrite.space import WRITTEN
from storage_admin.accounts.models import Role
from storage_admin.agent.protocol import INVALID, b64
from storage_admin.guests.models import GuestDisk
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.jobs.kinds import Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import LastBackup, Plan, Refusal

_DEVICE = re.compile(r"/dev/[A-Za-z0-9_.:+=@,-]+(/[A-Za-z0-9_.:+=@,-]+)*")
#: What cannot be seen from a host.
ELSEWHERE = _("A device that only another node of a cluster uses looks unused here. Make sure that none does.")


class ToDevice(Rewriting):
    """Overwrites a device that nobody uses; for admins, since a device may be anybody's."""

    name = "to_device"
    title = _("Write to device")
    description = _(
        "Writes the image, with its backing chain, onto a block device of the host, for example a logical volume, and "
        "compares both. What was on the device is lost."
    )
    verb = "to_device"
    role = Role.ADMIN
    no_way_back = True
    stages = {"checking": (0, 2), "copying": (2, 70)} | WRITTEN
    properties = {
        "device": {
            "type": "string",
            "default": "",
            "description": _("Path of the device on the host, such as /dev/vg/volume. Required."),
        },
        "overwrite": {
            "type": "boolean",
            "default": False,
            "description": _("Also where the device holds a filesystem, a partition table or the like, which is lost."),
        },
        **{name: REWRITE_OPTIONS[name] for name in REWRITE_OPTIONS if name != "undo_hours"},
    }
    methods = {"to_device": _("Write to device")}
    no_undo = _("what was on the device is lost")
    guarantee = _("The image is only read. If a guest starts, the job stops, and the device holds a part of it.")
    unchanged = _("is only read")
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The image is unchanged. The device may hold a part of it: write it again."),
            gettext_noop("The image is unchanged. The device may hold a part of it, if writing had started."),
        )
    }

    def wrong(self, options: dict[str, Any]) -> dict[str, str]:
        return {"device": wrong_device(options["device"]) if options["device"] else ""}

    def replaces(self, method: str, options: dict[str, Any]) -> bool:  # noqa: ARG002 (never)
        return False

    def to_type(self, label: str, options: dict[str, Any]) -> str:  # noqa: ARG002 (it is the device that is lost)
        return str(options["device"])

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        image = find(target.id)
        return [
            *locks_on_chain(image, exclusive=False),
            Lock(f"path:{image.host_id}:{path_key(os.fsencode(options['device']))}", exclusive=True),
        ]

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:
        # It is only read, and what a copy does not carry stays in it.
        kept = {"has_internal_snapshots", "hard_linked", "immutable"}
        found = [one for one in refusals.for_rewrite(image) if one.code not in kept]
        if not options["device"]:
            return found
        for path, whose in _owners(image.host):
            if path == os.fsencode(options["device"]):
                told = gettext("{device} belongs to {whose}. Choose another device.")
                found.append(Refusal("device_in_use", told.format(device=options["device"], whose=whose)))
        if there := _listed(image.host, options["device"]):
            found += [*volumes.elsewhere(there.pool, there.name), *_against_filling(there, image.virtual_size or 0)]
        return found

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        device, form = options["device"], image.declared_format
        if not device:
            return Choice("to_device", str(self.description), refusals=[Refusal(INVALID, wrong_device(device))])
        foreign, allowed = readers.for_taken(image, below)
        told = gettext("What a guest reads of {image}, {size:,} bytes, is written onto {device} and compared with it.")
        return Choice(
            "to_device",
            told.format(image=image.name, size=image.virtual_size or 0, device=device),
            [
                ["blkid", "-p", device],
                ["qemu-img", "convert", "-p", "-m", "8", "-n", "-W", "-f", form, "-O", "raw", image.path, device],
                ["qemu-img", "compare", "-p", "-f", form, "-F", "raw", image.path, device],
            ],
            took=forecasts.seconds(image, self.name, 2 * (image.virtual_size or 0), options["bandwidth_bytes_sec"]),
            scratch=0,
            refusals=foreign,
            by_hand=allowed,
            warnings=[
                gettext("What was on {device} is lost. There is no undo.").format(device=device),
                str(ELSEWHERE),
            ],
            below={image.pk: gettext("read, not changed")},
        )

    def last_backups(self, target: Target, plan: Plan) -> tuple[LastBackup, ...]:
        # Of what is overwritten, if that is an image; the one that is read is not at stake.
        there = _listed(target.host, plan.options["device"])
        return backups.of_image(there) if there is not None else ()

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        return {
            "device_b64": b64(os.fsencode(job.options["device"])),
            "overwrite": job.options["overwrite"],
            "owners": [[b64(path), whose] for path, whose in _owners(image.host)],
            "age": max((timezone.now() - job.created).total_seconds(), 0.0),
        }

    def before_swap(self, job: Job) -> None:
        """Nothing: the image is only read, and no name changes hands."""

    def note_ready(self, job: Job, ready: dict[str, Any]) -> None:
        """Nothing: no file is made."""

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        told = {name: result[name] for name in ("virtual_size", "device_bytes", "seconds")}
        return told | {"method": "to_device", "device": job.options["device"], "swapped": False}


def _listed(host: Host, device: str) -> Image | None:
    """The volume of a host that has that path, as the last scan listed it."""
    return (
        Image.objects.select_related("host", "pool").filter(host=host, path_key=path_key(os.fsencode(device))).first()
    )


def _against_filling(there: Image, size: int) -> list[Refusal]:
    """Whether its pool has room for what is written, above its reserve: all guests of a full one stop."""
    pool, needed = there.pool, size - (there.allocated_size or 0) - (there.reservation_bytes or 0)
    if pool.kind not in {StoragePool.Kind.LVMTHIN, StoragePool.Kind.ZFS} or pool.available_bytes is None:
        return []
    free = max(pool.available_bytes - refusals.reserve_of(pool.capacity_bytes or 0), 0)
    if needed <= free:
        return []
    told = gettext(
        "{pool} has {free:,} bytes free above its reserve, and up to {needed:,} would be written. "
        "Extend the pool first."
    )
    return [Refusal("not_enough_space", told.format(pool=pool.name, free=free, needed=needed))]


def _owners(host: Host) -> list[tuple[bytes, str]]:
    """Block devices of a host that are known to be a guest's disk, on any node of its cluster, or what an image stands
    on; and whose.

    A thin snapshot keeps what was on its origin, whatever is written there; a thick one only until it is full.
    """
    mine = Q(guest__host=host) | (Q(guest__host__cluster=host.cluster) if host.cluster else Q())
    disks = GuestDisk.objects.filter(mine, path__startswith="/dev/").select_related("guest")
    found = [(bytes(disk.path_bytes), gettext("guest {name}").format(name=disk.guest.name)) for disk in disks]
    uses = ImageUse.objects.filter(image__host=host, image__path__startswith="/dev/").exclude(disk__guest__host=host)
    found += [
        (bytes(use.image.path_bytes), gettext("guest {name}").format(name=use.disk.guest.name))
        for use in uses.select_related("image", "disk__guest")
    ]
    thin = (StoragePool.Kind.LVMTHIN, StoragePool.Kind.ZFS, StoragePool.Kind.RBD)
    below = Image.objects.filter(host=host, backing_path__startswith="/dev/")
    below = below.exclude(path__startswith="/dev/", format="raw", pool__kind__in=thin)
    for path, name in below.values_list("backing_path_bytes", "name"):
        found += [(bytes(path), gettext("image {name}").format(name=name))]
    return found


def wrong_device(path: str) -> str:
    """What is wrong with the path of a device, as a sentence; empty where nothing is."""
    if not _DEVICE.fullmatch(path) or ".." in path.split("/"):
        return gettext("Enter the path of a device, which begins with /dev/.")
    return ""
