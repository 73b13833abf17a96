"""The job kind ``sparsify``: an image's filesystems are trimmed in an appliance, and deleted data is let go."""

from dataclasses import replace
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds import inside
from images.models import Image
from images.rewrite import needed_as_it_is, neighbours, refusals
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting, beside, of_a_copy
from images.rewrite.space import WRITTEN
from storage_admin.agent.appliance.sparsify import FORMATS
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal


class Sparsify(Rewriting):
    """Does on a copy what the guide to zero-filling asks of the guest."""

    name = "sparsify"
    title = _("Trim filesystems")
    description = _(
        "Trims the filesystems on a copy of the image in a small virtual machine, so that deleted data takes no space. "
        "All files are compared by their checksums before the copy replaces the image. The guest must be off and must "
        "have been shut down properly."
    )
    verb = "sparsify"
    frees_space = True
    stages = {
        "checking": (0, 2), "starting": (2, 4), "reading files": (4, 25), "copying": (25, 60), "trimming": (60, 70)
    } | WRITTEN  # fmt: skip
    properties = dict(REWRITE_OPTIONS)
    methods = {"sparsify": _("Trim filesystems")}

    def changes_content(self, options: dict[str, Any]) -> bool:  # noqa: ARG002 (the same for all)
        return True

    def promise(self, method: str, options: dict[str, Any]) -> str:  # noqa: ARG002 (the same for all)
        return gettext("Every file has the same content as before. What was deleted is gone.")

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:  # noqa: ARG002 (the same for all)
        found = inside.off(image) or [
            *refusals.for_rewrite(image), *needed_as_it_is.refusals(image, str(needed_as_it_is.CONTENT))
        ]  # fmt: skip
        if not found and image.declared_format not in FORMATS:
            told = gettext("{image} has the format {format}, which keeps what a guest discards. Convert it first.")
            found = [
                Refusal("unsupported_subformat", told.format(image=image.name, format=image.declared_format or "?"))
            ]
        return found

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:  # noqa: ARG002
        reason = gettext(
            "The filesystems of a copy of {image} are trimmed, all files are compared, and the copy replaces the image."
        ).format(image=image.name)
        command = ["virt-sparsify", "--in-place", beside(image)]
        choice = of_a_copy(self.name, image, options, "sparsify", reason, [command])
        found = inside.last_look(image)
        deleted = found["deleted_bytes"] if found and found["current"] else None
        warnings = [gettext("NTFS, swap and unused space of LVM are left as they are.")]
        if deleted is None:
            warnings.append(gettext("How much becomes free is not known. Look inside the image first to find out."))
        return replace(
            choice,
            after=None if deleted is None else max(image.occupied_bytes - deleted, 0),
            refusals=[*neighbours.against_rewriting(image)],
            warnings=warnings,
        )

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        return needed_as_it_is.pools(image)
