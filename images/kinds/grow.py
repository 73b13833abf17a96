"""The job kind ``grow``: an image that no running guest uses is made larger."""

from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.rewrite import forecasts, neighbours, refusals
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting, beside, swap_commands, verify_commands
from images.rewrite.space import WRITTEN
from storage_admin.agent.measure.new_image import tables
from storage_admin.agent.protocol import INVALID
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal

SECTOR = 512
#: A virtual size as an option, but for its description.
SIZE: dict[str, Any] = {
    "type": ["integer", "null"], "minimum": SECTOR, "maximum": (1 << 63) - SECTOR, "multipleOf": SECTOR,
    "default": None,
}  # fmt: skip


class Grow(Rewriting):
    """Makes an image larger; partitions and filesystems are enlarged by its guest afterwards."""

    name = "grow"
    title = _("Enlarge")
    description = _(
        "Enlarges an image. A qcow2 is enlarged as a verified copy that replaces it; a raw image is lengthened in "
        "place. Enlarge the partitions and filesystems in the guest afterwards."
    )
    verb = "grow"
    stages = {"checking": (0, 2), "copying": (2, 60), "enlarging": (60, 70)} | WRITTEN
    properties = {
        "size_bytes": SIZE
        | {"description": _("The new virtual size in bytes. Required; must be larger than the present one.")},
        **REWRITE_OPTIONS,
    }
    methods = {"copy": _("Enlarge"), "in_place": _("Enlarge in place")}
    no_undo = _("nothing of the image is written")
    guarantee = _("The file only becomes longer, in one step. What it holds is not touched.")
    unchanged = _("keeps its content")

    def replaces(self, method: str, options: dict[str, Any]) -> bool:  # noqa: ARG002 (the method says it)
        return method != "in_place"

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:
        kept = {"has_internal_snapshots"} if image.from_header("compat") != "0.10" else set()
        kept |= {"hard_linked"} if image.declared_format == "raw" else set()
        found = [one for one in refusals.for_rewrite(image) if one.code not in kept]
        if image.declared_format not in {"", "qcow2", "raw"}:
            told = gettext("Images in the format {format} cannot be enlarged. Convert the image to qcow2 or raw first.")
            return [*found, Refusal("unsupported_subformat", told.format(format=image.declared_format))]
        size, now = options["size_bytes"], image.virtual_size or 0
        if size is None:
            return [*found, Refusal(INVALID, gettext("Enter the new size."))]
        if size <= now:
            told = gettext("The image has {now:,} bytes already. The new size must be larger.")
            return [*found, Refusal(INVALID, told.format(now=now))]
        return found

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:  # noqa: ARG002
        size, now = options["size_bytes"] or image.virtual_size or 0, image.virtual_size or 0
        raw = image.declared_format == "raw"
        told = gettext("{image} is copied, the copy is enlarged from {now:,} to {size:,} bytes, checked and compared.")
        if raw:
            told = gettext("{image} is lengthened from {now:,} to {size:,} bytes where it is. The end reads as zeros.")
        if options["size_bytes"] is None:
            told = str(self.description)
        # Of a raw one the last block is allocated; btrfs and ZFS have larger ones than others.
        more = 128 << 10 if raw else tables(image.cluster_size, size)
        warnings = [gettext("Only the disk is enlarged. Enlarge its partitions and filesystems in the guest.")]
        available = image.pool.available_bytes
        if available is not None and size - now > available:
            pool = gettext("The image can grow by {more:,} bytes. {pool} has {available:,} free.")
            warnings.append(pool.format(more=size - now, pool=image.pool.name, available=available))
        copy = beside(image)
        resize = ["qemu-img", "resize", "-f", image.declared_format or "raw", image.path if raw else copy, str(size)]
        work = [["cp", "--reflink=auto", image.path, copy], resize, *verify_commands(image), *swap_commands(image)]
        return Choice(
            "in_place" if raw else "copy",
            told.format(image=image.name, now=now, size=size),
            [] if options["size_bytes"] is None else [resize] if raw else work,
            after=image.allocated_size,
            low=image.allocated_size,
            high=image.occupied_bytes + more,
            took=forecasts.UNKNOWN if raw else forecasts.seconds(
                image, self.name, 2 * image.occupied_bytes, options["bandwidth_bytes_sec"]
            ),
            scratch=None if raw else image.occupied_bytes + more,
            refusals=[] if raw else neighbours.against_standing_alone(image),
            warnings=warnings,
        )  # fmt: skip

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        return {"size": job.options["size_bytes"]}

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        return super().record(job, result) | {"virtual_size": result["virtual_size"]}
