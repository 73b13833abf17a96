"""The job kind ``shrink``: the end of an image is taken away where it is proven to be unused."""

from dataclasses import replace
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds.grow import SIZE
from images.models import Image
from images.rewrite import needed_as_it_is, neighbours
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting, beside, of_a_copy
from images.rewrite.space import WRITTEN
from storage_admin.agent.protocol import INVALID
from storage_admin.agent.rewrite.shrinking import FORMATS
from storage_admin.guests.models import Guest
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal


class Shrink(Rewriting):
    """Makes an image smaller, down to where its last partition or its filesystem ends."""

    name = "shrink"
    title = _("Shrink")
    description = _(
        "Removes the unused end of an image. The partition table and the filesystems are read first: nothing that they "
        "use is removed. A verified copy replaces the image."
    )
    verb = "shrink"
    stages = {"checking": (0, 2), "copying": (2, 60), "shrinking": (60, 70)} | WRITTEN
    properties = {
        "size_bytes": SIZE
        | {"description": _("The new virtual size in bytes; null for the smallest that holds all partitions.")},
        **REWRITE_OPTIONS,
    }
    methods = {"shrink": _("Shrink")}

    def changes_content(self, options: dict[str, Any]) -> bool:  # noqa: ARG002 (the same for all)
        return True

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:
        found = super().against(image, options)
        if not image.backing_file:  # else that stands against it
            found += needed_as_it_is.refusals(image, str(needed_as_it_is.CONTENT))
        return found

    def promise(self, method: str, options: dict[str, Any]) -> str:  # noqa: ARG002 (the same for all)
        return gettext(
            "The original is replaced only after the shortened copy is checked and verified to have identical content "
            "up to its new end. If a guest starts, the job stops and keeps the original."
        )

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        against, size, now = list[Refusal](), options["size_bytes"], image.virtual_size or 0
        if image.declared_format not in {"", *FORMATS}:
            told = gettext("Images in the format {format} cannot be shrunk. Convert the image to qcow2 or raw first.")
            against.append(Refusal("unsupported_subformat", told.format(format=image.declared_format)))
        elif below:
            told = gettext("{image} has a backing file. Flatten it first.")
            against.append(Refusal("unsupported_subformat", told.format(image=image.name)))
        if size is not None and size >= now:
            told = gettext("The image has {now:,} bytes. The new size must be smaller.")
            against.append(Refusal(INVALID, told.format(now=now)))
        told = gettext(
            "The partition table of {image} is read. A copy is shortened to {size:,} bytes if everything in use ends "
            "before, compared, and then replaces the image."
        )
        if size is None:
            told = gettext(
                "The partition table of {image} is read. A copy is shortened to where the last partition or filesystem "
                "ends, compared, and then replaces the image."
            )
        form = image.declared_format or "qcow2"
        work = ["qemu-img", "resize", "-f", form, "--shrink", beside(image), "SIZE" if size is None else str(size)]
        warnings = [gettext("To make it smaller still, shrink filesystems and partitions in the guest first.")]
        if any(disk.guest.kind == Guest.Kind.VM for disk in image.disks):
            warnings.append(gettext("Proxmox VE notes the size in its configuration. Run “qm rescan” afterwards."))
        return replace(
            of_a_copy(self.name, image, options, "shrink", told.format(image=image.name, size=size), [work]),
            refusals=[*against, *neighbours.against_standing_alone(image)],
            warnings=warnings,
        )

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        return {"size": job.options["size_bytes"], **needed_as_it_is.pools(image)}

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        told = {name: result[name] for name in ("virtual_size", "needed_bytes")}
        return super().record(job, result) | told
