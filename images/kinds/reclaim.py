"""The job kind ``reclaim``: a smaller image takes the place of the one that is there."""

import shlex
from datetime import timedelta
from typing import Any

from django.utils import timezone

from images import liveness, refusals, rewriting
from images.kinds.targets import RewriteKind, ancestors, descendants, facts, find
from images.models import Image
from storage_admin.accounts.roles import Actor
from storage_admin.agent.copying import creation_options
from storage_admin.agent.formats.facts import Facts
from storage_admin.agent.protocol import RefusedError
from storage_admin.guests.models import Guest
from storage_admin.jobs.models import Job
from storage_admin.jobs.plans import Affected, Plan, Refusal

#: Options that every rewriting kind takes.
REWRITE_OPTIONS: dict[str, dict[str, Any]] = {
    "undo_hours": {
        "type": "number",
        "minimum": 0,
        "maximum": 8760,
        "default": 24,
        "description": "How long the original is kept beside the new image, in hours; 0 keeps none.",
    },
    "bandwidth_bytes_sec": {
        "type": ["integer", "null"],
        "minimum": 1_048_576,
        "default": None,
        "description": "At most so many bytes a second; null for no limit.",
    },
    "idle_io": {"type": "boolean", "default": True, "description": "Only use the disk when nobody else does."},
}


class Reclaim(RewriteKind):
    """Compresses an image: verified, swapped by protocol P, with an undo copy."""

    name = "reclaim"
    title = "Reclaim"
    description = "Gets physical space back: a compressed copy is made, compared, and put in the image's place."
    verb = "reclaim"
    stages = {
        "checking": (0, 2),
        "copying": (2, 70),
        "verifying": (70, 97),
        "attributes": (97, 98),
        "swapping": (98, 100),
    }
    properties = {
        "method": {"enum": ["auto", "compress"], "default": "auto", "description": "auto chooses what wins most."},
        "compression": {
            "enum": ["auto", "zlib", "zstd"],
            "default": "auto",
            "description": "auto takes zstd where the image and the host's qemu-img can, else zlib.",
        },
        **REWRITE_OPTIONS,
    }

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        image = find(target_id)
        against = refusals.for_rewrite(image)
        below: list[Image] = []
        try:
            below = ancestors(image)
        except RefusedError as error:
            against.append(Refusal(error.code, error.detail))
        against += [*refusals.for_bases(image, below), *_cannot_compress(image)]
        compression = chosen_compression(image, options["compression"])
        after, low, high = predicted(image)
        scratch = high if high is not None else image.allocated_size
        against += refusals.for_space(image, scratch)
        above = descendants(image)
        guests = Guest.objects.filter(disks__use__image__in=[image, *above]).distinct()
        return Plan(
            method="compress",
            reason=_reason(image, compression, after),
            commands=tuple(_commands(image, below, compression, options)),
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            predicted_after_bytes=after,
            predicted_low=low,
            predicted_high=high,
            scratch_bytes=scratch,
            undo_bytes=image.allocated_size if options["undo_hours"] else 0,
            refusals=tuple({(refusal.code, refusal.detail): refusal for refusal in against}.values()),
            warnings=tuple(_warnings(image, above, options)),
            affected_images=(
                Affected(image.pk, image.name, "rewritten"),
                *(Affected(base.pk, base.name, "read, not changed") for base in below),
                *(Affected(overlay.pk, overlay.name, "reads it as its base, and goes on to") for overlay in above),
            ),
            affected_guests=tuple(Affected(guest.pk, guest.name, guest.state) for guest in guests),
            options=options,
        )

    def prepare(self, job: Job) -> None:
        liveness.check_guests_off(find(job.target_id))

    def request(self, job: Job) -> dict[str, Any]:
        image = find(job.target_id)
        below = ancestors(image)
        if against := [*refusals.for_rewrite(image), *refusals.for_bases(image, below), *_cannot_compress(image)]:
            raise RefusedError(against[0].code, against[0].detail)
        options = job.options
        return facts(image) | {
            "virtual_size": image.virtual_size,
            "chain": [facts(base) | {"format": _format_below(image, base)} for base in below],
            "children_known": True,
            "method": "compress",
            "compression": options["compression"],
            "undo_hours": float(options["undo_hours"]),
            "bandwidth_bytes_sec": options["bandwidth_bytes_sec"],
            "idle_io": options["idle_io"],
            "reserve": {"percent": float(refusals.RESERVE_PERCENT), "bytes": refusals.RESERVE_BYTES},
            "reserved_elsewhere_bytes": rewriting.reserved_elsewhere(job, image),
        }

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        image = find(job.target_id)
        shown = {
            "before_bytes": result["before_bytes"],
            "predicted_after_bytes": job.plan.get("predicted_after_bytes"),
            "after_bytes": result["after_bytes"],
            "held_bytes": result["held_bytes"],
            "freed_bytes": result["freed_bytes"],
            "freed_at": timezone.now().isoformat() if result["swapped"] and not result["held_bytes"] else None,
            "method": "compress",
            "compression": result["compression"],
            "seconds": result["seconds"],
            "swapped": result["swapped"],
        }
        if result["swapped"]:
            rewriting.image_replaced(image, result)
            rewriting.keep_undo(job, result["held_bytes"], timedelta(hours=job.options["undo_hours"]))
        return shown

    def ended(self, job: Job) -> None:
        rewriting.rescan(job)


def chosen_compression(image: Image, asked: str) -> str:
    """What ``auto`` means for this image, as far as the database knows its host's qemu-img."""
    if asked != "auto":
        return asked
    old = image.from_header("compat") == "0.10"
    return "zstd" if image.host.capabilities.get("zstd") and not old else "zlib"


def predicted(image: Image) -> tuple[int | None, int | None, int | None]:
    """Allocated bytes after a compression: best guess, lowest, highest; ``None`` until the image was sampled."""
    if image.reclaimable_bytes is None or image.reclaimable_method != "compress":
        return None, None, None
    size, low, high = image.allocated_size, image.reclaimable_low, image.reclaimable_high
    estimate = image.estimate or {}
    return (
        estimate.get("predicted_after_bytes", size - image.reclaimable_bytes),
        estimate.get("predicted_low", None if high is None else size - high),
        estimate.get("predicted_high", None if low is None else size - low),
    )


def _cannot_compress(image: Image) -> list[Refusal]:
    if not image.declared_format or image.declared_format == "qcow2":
        return []
    return [
        Refusal(
            "unsupported_subformat",
            f"A {image.declared_format} image cannot hold compressed data: only qcow2 images can be compressed.",
        )
    ]


def _format_below(image: Image, base: Image) -> str:
    """A base's format as its overlay declares it, which is what qemu goes by."""
    return base.declared_format or image.backing_format


def _reason(image: Image, compression: str, after: int | None) -> str:
    why = f"A copy compressed with {compression}, without zeros and unused clusters, takes the image's place"
    if after is None:
        return f"{why}. What it wins is not known until the image is sampled."
    if after >= image.allocated_size:
        return f"{why}, but nothing would be won: it is as small as that already."
    return f"{why}. Sampling says that this wins {image.allocated_size - after:,} bytes."


def _warnings(image: Image, above: list[Image], options: dict[str, Any]) -> list[str]:
    warnings = refusals.age_warning(image)
    if image.reclaimable_bytes is None:
        warnings.append(
            "The image was not sampled yet: the space check assumes that the copy needs as much as the original."
        )
    if options["compression"] == "zstd" and image.from_header("compat") == "0.10":
        warnings.append("zstd needs an image of compat 1.1; this one is 0.10. Choose zlib.")
    if above:
        warnings.append(f"{len(above)} overlays read this image. What they read stays the same to the byte.")
    if not options["undo_hours"]:
        warnings.append("No undo copy: the original is removed as soon as the new image stands verified in its place.")
    else:
        warnings.append("Until its undo copy goes, the pool holds both: nothing is free before that.")
    warnings.append("A guest's later writes are stored uncompressed, so that the image grows again as it is used.")
    return warnings


def _commands(image: Image, below: list[Image], compression: str, options: dict[str, Any]) -> list[str]:
    """The commands as an admin would type them; the agent names the files by descriptors instead."""
    if image.declared_format != "qcow2" or image.virtual_size is None or image.unreadable:
        return []
    header = image.header
    wanted = creation_options(
        Facts(
            format="qcow2", virtual_size=image.virtual_size, cluster_size=image.cluster_size,
            compat=header.get("compat"), refcount_bits=header.get("refcount_bits"),
            lazy_refcounts=header.get("lazy_refcounts"), extended_l2=header.get("extended_l2"),
        ),
        compression,
    )  # fmt: skip
    copy = image.path.rpartition("/")[0] + "/.sa-JOB.new"
    convert = ["qemu-img", "convert", "-p", "-m", "8", "-W", "-c"]
    if options["bandwidth_bytes_sec"]:
        convert += ["-r", str(options["bandwidth_bytes_sec"])]
    convert += ["-f", "qcow2", "-O", "qcow2", "-o", wanted]
    if below:
        convert += ["-B", image.backing_file, "-F", _format_below(image, below[0])]
    return [
        shlex.join(command)
        for command in (
            ["qemu-img", "check", "-f", "qcow2", image.path],
            [*convert, image.path, copy],
            ["qemu-img", "check", "-f", "qcow2", copy],
            ["qemu-img", "compare", "-p", "-f", "qcow2", "-F", "qcow2", image.path, copy],
            ["ln", image.path, copy.removesuffix("new") + "orig"],
            ["mv", copy, image.path],
        )
    ]
