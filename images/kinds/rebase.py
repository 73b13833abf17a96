"""The job kind ``rebase``: an image gets another backing file, and reads as before."""

from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds.commit import half_merged
from images.kinds.create import could_write, links_of
from images.kinds.flatten import contradicted
from images.models import Image
from images.rewrite import forecasts, linked_clones, neighbours, readers, refusals
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting, beside, swap_commands, verify_commands
from images.rewrite.neighbours import base_of, chain_of
from images.rewrite.space import WRITTEN
from storage_admin.agent.protocol import INVALID, RefusedError
from storage_admin.jobs.kinds import Lock, Target
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal


class Rebase(Rewriting):
    """Makes an image stand on another base; what the new base lacks is written into the image."""

    name = "rebase"
    title = _("Change backing file")
    description = _(
        "Gives an image another backing file. What the guest reads stays the same: data that the new backing file does "
        "not hold is written into a verified copy of the image, which then replaces the image."
    )
    verb = "flatten"
    stages = {"checking": (0, 2), "copying": (2, 40), "flattening": (40, 70)} | WRITTEN
    properties = {
        "base": {
            "type": ["integer", "string", "null"],
            "default": None,
            "description": _("The new backing file: id or full path of an image on the same host. Required."),
        },
        **REWRITE_OPTIONS,
    }
    methods = {"rebase": _("Change backing file")}

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        return lock_base(super().locks(target, options), base_of(target.host.pk, options))

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        against, base = not_qcow2(image), base_of(image.host_id, options)
        if base is None:
            against.append(Refusal(INVALID, gettext("Enter the new backing file.")))
            return Choice("rebase", str(self.description), refusals=against)
        against += on_another_base(image, base)
        if below[:1] == [base]:
            told = gettext("{base} is already the backing file of {image}.")
            against.append(Refusal(INVALID, told.format(base=base.name, image=image.name)))
        new = [] if against else chain_of(base)
        taken = [one for one in below if one not in new]
        foreign, allowed = readers.for_taken(image, taken)
        held = sum(one.occupied_bytes for one in below)
        reason = gettext(
            "A copy of {image} takes over what {base} does not hold, and then has {base} as its backing file. The "
            "chain depth becomes {depth} (now {now})."
        )
        warnings = could_write(base)
        if base.pool_id != image.pool_id:
            warnings.append(gettext("The backing file is in another pool, so the image names it by its full path."))
        copy = beside(image)
        work = ["qemu-img", "rebase", "-p", "-f", "qcow2", "-b", base.path, "-F", base.declared_format, copy]
        return Choice(
            "rebase",
            reason.format(image=image.name, base=base.name, depth=1 + (base.chain_depth or 1), now=image.chain_depth),
            [["cp", "--sparse=always", image.path, copy], work, *verify_commands(image), *swap_commands(image)],
            low=image.allocated_size,
            took=forecasts.seconds(
                image, self.name, 2 * image.occupied_bytes + held, options["bandwidth_bytes_sec"]
            ),
            scratch=image.occupied_bytes + held,
            refusals=[*against, *foreign, *neighbours.against_standing_alone(image), *contradicted(image)],
            by_hand=allowed,
            warnings=warnings,
            below={one.pk: gettext("is no longer its backing file") for one in taken},
        )  # fmt: skip

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        return {"method": "rebase", "onto": links_of(chain_of(base_of(image.host_id, job.options)))}


def lock_base(own: list[Lock], base: Image | None) -> list[Lock]:
    """Those locks, and one with others on each image of a new base's chain that is not locked by them."""
    new = [] if base is None else neighbours.locks_on_chain(base, exclusive=False)
    return [*own, *(lock for lock in new if lock.key not in {one.key for one in own})]


def not_qcow2(image: Image) -> list[Refusal]:
    """What stands against an image that is known to have no backing file, whatever its file says."""
    if image.declared_format in {"", "qcow2"}:
        return []
    told = gettext("Only qcow2 images have a backing file here. This image is {format}.")
    return [Refusal("unsupported_subformat", told.format(format=image.declared_format))]


def on_another_base(image: Image, base: Image) -> list[Refusal]:
    """What stands against an image's standing on another base."""
    found, new = [*not_qcow2(image), *refusals.for_base(base)], list[Image]()
    try:
        new = chain_of(base)
    except RefusedError as error:
        found.append(Refusal(error.code, error.detail))
    found += [*refusals.for_bases(base, new[1:]), *half_merged(new)]
    if image in new:
        told = gettext("{base} is this image or an overlay on it.")
        found.append(Refusal("chain_cycle", told.format(base=base.name)))
    if not base.declared_format:
        told = gettext("The format of the backing file {base} is not declared. Declare it first.")
        found.append(Refusal("format_undeclared", told.format(base=base.name)))
    linked = [
        disk.guest.name_for(image.host_id) for disk in neighbours.of(image).disks if linked_clones.is_linked(disk)
    ]
    if linked:
        told = gettext(
            "{guest} is a linked clone of Proxmox VE, which names the backing file by itself. Flatten the image."
        )
        found.append(Refusal("guest_records_chain", told.format(guest=linked[0])))
    return found
