"""The job kind ``flatten``: a chain is made shorter, by what its bases hold moving up into the image."""

from dataclasses import replace
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds import volumes as volumes_
from images.models import Image
from images.rewrite import forecasts, guest_locks, linked_clones, neighbours, readers, repointing, space
from images.rewrite.kind import (
    REWRITE_OPTIONS,
    Choice,
    Rewriting,
    beside,
    format_below,
    swap_commands,
    verify_commands,
)
from images.rewrite.neighbours import find
from storage_admin.guests.models import GuestDisk
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal
from storage_admin.words import plural


class Flatten(Rewriting):
    """Makes an overlay stand on a lower image, or on none."""

    name = "flatten"
    title = _("Flatten")
    description = _(
        "Shortens a backing chain. Data of the backing files moves into a verified copy of the image, which then "
        "replaces the image."
    )
    verb = "flatten"
    volumes = frozenset({"rbd", "zfs"})
    volume_verbs = {"rbd": "flatten_rbd", "zfs": "promote"}
    volume_promises = volumes_.FLATTENS
    unsuccessful = Rewriting.unsuccessful | volumes_.UNSUCCESSFUL
    no_undo = _("the image's content stays the same")
    stages = {"checking": (0, 2), "copying": (2, 40), "flattening": (40, 70)} | space.WRITTEN
    properties = {
        "method": {
            "enum": ["auto", "rebase", "convert"],
            "default": "auto",
            "description": _(
                "rebase: keeps the clusters of the image and adds the data of the backing files. convert: rewrites "
                "everything, without zeros and without a backing file. auto: rebase."
            ),
        },
        "down_to": {
            "type": ["integer", "null"],
            "default": None,
            "description": _(
                "Id of the image further down the chain that becomes the backing file (rebase only); "
                "null for no backing file."
            ),
        },
        **REWRITE_OPTIONS,
    }
    methods = {
        "rebase": _("Flatten"),
        "convert": _("Flatten into a new copy"),
        volumes_.PROMOTE: _("Exchange with its origin"),
    }
    policy_switches = {"include_preallocated": _("Preallocated")}
    forecasts = True

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:
        return self.against_volume(image) if image.is_volume else super().against(image, options)

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        if image.is_volume:
            return self._choose_for_volume(image, below, options)
        method = "rebase" if options["method"] == "auto" else options["method"]
        keep, against = _keep(image, below, options)
        taken = below if keep is None else below[: keep - 1]
        base = None if keep is None else below[keep - 1]
        # Compressed clusters of a base are stored uncompressed: no bound, but the agent measures before it begins.
        held = sum(one.occupied_bytes for one in taken)
        foreign, allowed = readers.for_taken(image, taken)
        size = forecasts.flattened(image, taken, method, alone=base is None) if taken else forecasts.UNKNOWN
        reason = gettext(
            "A new copy of {image} takes in the data of {images} further down the chain. Its backing file will be "
            "{base}. The chain depth changes from {now} to {depth}."
        )
        if base is None:
            reason = gettext(
                "A new copy of {image} takes in the data of {images} further down the chain. It will have no backing "
                "file. The chain depth changes from {now} to {depth}."
            )
        return Choice(
            method,
            reason.format(
                images=plural(len(taken), gettext("image,images")),
                image=image.name,
                base=base and base.name,
                depth=1 + (base.chain_depth if base else 0),
                now=image.chain_depth,
            ),
            [*_commands(image, below, method, base), *linked_clones.commands(image)],
            after=size.guess,
            low=size.low,
            high=size.high,
            took=forecasts.seconds(
                image,
                self.name,
                image.occupied_bytes + (size.guess or image.occupied_bytes),
                options["bandwidth_bytes_sec"],
            ),
            scratch=image.occupied_bytes + held,
            refusals=[
                *against,
                *foreign,
                *neighbours.against_standing_alone(image),
                *_recorded(image, options),
            ],
            by_hand=allowed,
            warnings=[*_warnings(image, taken), *space.undone_preallocation(image), *linked_clones.warnings(image)],
            below={one.pk: _needed_by(one, image) for one in taken},
        )

    @staticmethod
    def _choose_for_volume(image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        choice = volumes_.flatten(image, below)
        against = [*choice.refusals, *linked_clones.refusals(image, down_to_base=options["down_to"] is not None)]
        if options["down_to"] is not None or options["method"] == "convert":
            told = gettext("A volume can only be flattened as a whole, by its own storage.")
            against.append(Refusal("unsupported_subformat", told))
        return replace(
            choice,
            commands=[*choice.commands, *linked_clones.commands(image)],
            refusals=against,
            warnings=[*choice.warnings, *linked_clones.warnings(image)],
        )

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        linked_clones.check(job, find(job.target_id))

    def before_swap(self, job: Job) -> None:
        linked_clones.lead_to_the_flat_one(job)
        super().before_swap(job)

    def ended(self, job: Job) -> None:
        guest_locks.give_back(job)
        repointing.agree(job)
        super().ended(job)

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:
        method = "rebase" if job.options["method"] == "auto" else job.options["method"]
        keep, __ = _keep(image, below, job.options)
        return {"method": method} | ({} if keep is None else {"keep": keep})


def _keep(image: Image, below: list[Image], options: dict[str, Any]) -> tuple[int | None, list[Refusal]]:
    """Number of the link that stays the base (the immediate base is 1), and what stands against flattening so."""
    wanted, ids, code = options["down_to"], [base.pk for base in below], "stale_plan"
    if image.declared_format not in {"", "qcow2"}:
        code = "unsupported_subformat"
        told = gettext("Only chains of qcow2 images can be flattened. This image is {format}.")
    elif not below and image.backing_file:
        code = "chain_broken"
        told = gettext("The backing file of {image} is missing. Repair the chain first.")
    elif not below:
        told = gettext("{image} has no backing file, so there is nothing to flatten.")
    elif wanted is None:
        return None, []
    elif options["method"] == "convert":
        told = gettext("convert leaves no backing file. Leave down_to out, or use rebase.")
    elif wanted not in ids:
        told = gettext("Image {wanted} is not in the backing chain of {image}.")
    elif wanted == ids[0]:
        told = gettext("{base} is already the direct backing file of {image}. Choose an image further down, or none.")
    else:
        return ids.index(wanted) + 1, []
    base = below[0].name if below else ""
    sentence = told.format(format=image.declared_format, image=image.name, wanted=wanted, base=base)
    return None, [Refusal(code, sentence)]


def _recorded(image: Image, options: dict[str, Any]) -> list[Refusal]:
    """Guests whose definitions name what their disks stand on, and would contradict a shorter chain."""
    return [*contradicted(image), *linked_clones.refusals(image, down_to_base=options["down_to"] is not None)]


def contradicted(image: Image) -> list[Refusal]:
    """Guests whose definitions name the image's base (``<backingStore>``), and would contradict another one."""
    disks = [disk for disk in neighbours.of(image).disks if disk.records_chain and not linked_clones.is_linked(disk)]
    return [Refusal("guest_records_chain", _contradiction(disk, image)) for disk in disks[:3]]


def _contradiction(disk: GuestDisk, image: Image) -> str:
    return gettext(
        "The definition of guest {guest} names the backing file of its disk {target} (<backingStore>) and would "
        "contradict the new chain. Remove that element (virsh edit), then scan the host."
    ).format(guest=disk.guest.name_for(image.host_id), target=disk.target)


def _needed_by(base: Image, image: Image) -> str:
    """What else needs a base whose data moves up."""
    others = base.overlays_count - (image.backing_id == base.pk)
    needed = [plural(others, gettext("other overlay,other overlays"))] if others > 0 else []
    needed += [gettext("guest {name}").format(name=name) for name in base.guest_names]
    needed += (
        [gettext("{snapshots} in it").format(snapshots=plural(len(base.snapshots), gettext("snapshot,snapshots")))]
        if base.snapshots
        else []
    )
    if not needed:
        return gettext("its data is copied; afterwards nothing else known here uses it")
    return gettext("its data is copied; still used by {needed}").format(needed=", ".join(needed))


def _warnings(image: Image, taken: list[Image]) -> list[str]:
    warnings = [
        gettext("Data of the backing files is stored a second time: the image grows by the amount that is copied.")
    ]
    if any(one.compression == "zstd" or one.reclaimable_bytes is None for one in taken):
        warnings.append(
            gettext(
                "Compressed clusters of the backing files are stored uncompressed. The copy may need more space "
                "than they occupy now."
            )
        )
    if image.disks:
        warnings.append(gettext("The backing files are kept. Delete them yourself once nothing uses them."))
    return warnings


def _commands(image: Image, below: list[Image], method: str, base: Image | None) -> list[list[str]]:
    if image.declared_format != "qcow2" or not below:
        return []
    copy = beside(image)
    check = ["qemu-img", "check", "-f", "qcow2", image.path]
    if method == "convert":
        work = [["qemu-img", "convert", "-p", "-m", "8", "-W", "-f", "qcow2", "-O", "qcow2", image.path, copy]]
    else:
        declared = ["-F", format_below(below[-1], base)] if base else []
        rebase = ["qemu-img", "rebase", "-p", "-f", "qcow2", "-b", base.path if base else "", *declared, copy]
        work = [["cp", "--sparse=always", image.path, copy], rebase]
    return [check, *work, *verify_commands(image), *swap_commands(image)]
