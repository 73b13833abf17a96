"""The job kind ``bitmaps``: persistent dirty bitmaps are removed from an image."""

from dataclasses import replace
from typing import Any

from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.rewrite import neighbours, refusals
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting, beside, of_a_copy, verify_commands
from images.rewrite.space import WRITTEN
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal


class RemoveBitmaps(Rewriting):
    """Removes bitmaps that were not closed, or all."""

    name = "bitmaps"
    title = _("Remove bitmaps")
    description = _(
        "Removes persistent dirty bitmaps from a verified copy of the image, which replaces the image. Backup tools "
        "keep them to copy only what has changed since the last backup."
    )
    verb = "bitmaps"
    stages = {"checking": (0, 2), "copying": (2, 65), "removing": (65, 70)} | WRITTEN
    properties = {
        "which": {
            "enum": ["stale", "all"],
            "default": "stale",
            "description": _(
                "stale: those that no tool can use any more, as they were not closed properly, or as their checkpoint "
                "in libvirt is gone. all: also those that a backup tool may need."
            ),
        },
        "accept_checkpoints": {
            "type": "boolean",
            "default": False,
            "description": _("Remove also bitmaps of checkpoints that libvirt keeps, which are of no use then."),
        },
        **REWRITE_OPTIONS,
    }
    methods = {"copy": _("Remove bitmaps")}

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:  # noqa: ARG002 (the same for all)
        return [one for one in refusals.for_rewrite(image) if one.code != "has_internal_snapshots"]

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:  # noqa: ARG002
        names, against, warnings = _chosen(image, options), list[Refusal](), list[str]()
        if not names:
            told = (
                gettext("{image} has no bitmaps that are stale.")
                if image.bitmaps
                else gettext("{image} has no bitmaps.")
            )
            against.append(Refusal("stale_plan", told.format(image=image.name)))
        chosen = [one for one in image.bitmaps if one["name"] in names]
        if kept := [one for one in chosen if one["checkpoint_of"]]:
            told = gettext(
                "{names} belongs to a checkpoint that libvirt keeps of {guest}. Delete the checkpoint first."
            )
            told = told.format(names=", ".join(one["name"] for one in kept), guest=kept[0]["checkpoint_of"])
            if options["accept_checkpoints"]:
                warnings.append(told)
            else:
                against.append(Refusal("checkpoint_kept", told))
        needed = [one["name"] for one in chosen if not one["stale"]]
        if needed:
            told = gettext("The backup tool that keeps {names} makes a full backup the next time.")
            warnings.append(told.format(names=", ".join(needed)))
        work = [["qemu-img", "bitmap", "--remove", "-f", "qcow2", beside(image), name] for name in names]
        reason = ngettext(
            "{count} bitmap is removed from a copy of {image}, which is checked and then replaces it.",
            "{count} bitmaps are removed from a copy of {image}, which is checked and then replaces it.",
            len(names),
        ).format(count=len(names), image=image.name)
        return replace(
            of_a_copy(self.name, image, options, "copy", reason, [*work, *verify_commands(image)]),
            after=image.allocated_size,
            refusals=[*against, *neighbours.against_rewriting(image)],
            warnings=warnings,
        )

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        return {"names": _chosen(image, job.options)}


def _chosen(image: Image, options: dict[str, Any]) -> list[str]:
    return [one["name"] for one in image.bitmaps if options["which"] == "all" or one["stale"]]
