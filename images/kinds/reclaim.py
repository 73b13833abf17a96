"""The job kind ``reclaim``: the space that an image does not need comes back."""

from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds import volumes as volumes_
from images.models import Image
from images.rewrite import neighbours, refusals, space
from images.rewrite.kind import (
    REWRITE_OPTIONS,
    Choice,
    Rewriting,
    beside,
    format_below,
    swap_commands,
    verify_commands,
)
from storage_admin.agent.formats.facts import Facts
from storage_admin.agent.measure import prediction
from storage_admin.agent.rewrite.copying import creation_options
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal
from storage_admin.words import words


class Reclaim(Rewriting):
    """Makes an image smaller: by a verified copy that takes its place, or by digging holes where it holds zeros."""

    name = "reclaim"
    title = _("Reclaim")
    description = _("Frees physical space: replaces the image with a verified copy, or punches holes in place.")
    verb = "reclaim"
    volumes = frozenset({"lvmthin", "rbd"})
    volume_verbs = {"lvmthin": "reclaim_volume", "rbd": "sparsify_rbd"}
    no_volumes = {
        "lvm": _("{image} is a thick volume, which takes the same space whatever it holds."),
        "zfs": _(
            "ZFS stores nothing for zeros that are written while compression is on, which it is by default. Turn it on "
            "(zfs set compression=lz4), and have the guest trim its filesystems for what was written before."
        ),
    }
    volume_promises = volumes_.RECLAIMS
    stages = {"checking": (0, 2), "copying": (2, 70), "digging": (2, 99), "reading": (2, 60), "discarding": (60, 99)}
    stages |= space.WRITTEN
    properties = {
        "method": {
            "enum": ["auto", *space.METHODS],
            "default": "auto",
            "description": _(
                "auto chooses by the state of the image, the tools of the host, the free space and the expected "
                "savings."
            ),
        },
        "compression": {
            "enum": ["auto", "zlib", "zstd"],
            "default": "auto",
            "description": _(
                "With compress: auto uses zstd if the image and qemu-img on the host support it, else zlib."
            ),
        },
        **REWRITE_OPTIONS,
    }
    methods = {"in_place": _("Punch holes in place"), volumes_.DISCARD: _("Discard zeros")}
    policy_switches = {"include_decayed": _("Grown back"), "include_preallocated": _("Preallocated")}
    frees_space = True
    wants_zeros = True
    unsuccessful = Rewriting.unsuccessful | volumes_.UNSUCCESSFUL
    no_undo = _("the image's content stays the same")
    guarantee = _(
        "The file itself is changed: blocks of zeros become holes. What is read from it stays the same at all "
        "times. If a guest starts, the job stops."
    )

    def titled(self, options: dict[str, Any]) -> str:
        return f"{self.title}, {words(options.get('method', ''))}"

    def replaces(self, method: str, options: dict[str, Any]) -> bool:
        return method != "in_place" and super().replaces(method, options)

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:
        if image.is_volume:
            return self.against_volume(image)
        found = refusals.for_rewrite(image) + neighbours.against_rewriting(image)
        if chosen_method(image, options)[0] != "in_place":
            return found
        return [refusal for refusal in found if refusal.code not in refusals.DIGGING_KEEPS]

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        if image.is_volume:
            return volumes_.reclaim(image, options)
        method, why = chosen_method(image, options)
        compression = chosen_compression(image, options["compression"]) if method == "compress" else ""
        after, low, high = space.predicted(image, method, compression)
        won = space.won_bytes(image, method, after)
        undone = space.undone_preallocation(image, method)
        if method == "in_place":
            return Choice(
                method, _reason(image, why, after, won), _dig(image), after, low, high, won,
                scratch=0, refusals=_cannot(image, method, options),
                warnings=_warnings_in_place(image) + undone,
            )  # fmt: skip
        if compression and why == str(_SENTENCES["compress"]):
            why = gettext(
                "A copy without zeros and unused clusters, compressed with {compression}, replaces the image"
            ).format(compression=compression)
        return Choice(
            method, _reason(image, why, after, won), _copy(image, below, method, compression, options),
            after, low, high, won, scratch=high if high is not None else image.allocated_size,
            refusals=_cannot(image, method, options), warnings=_warnings(image, method, options) + undone,
        )  # fmt: skip

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        # What was planned is done: what auto would choose by now may need other space, and another confirmation.
        method = job.plan.get("method") or chosen_method(image, job.options)[0]
        asked: dict[str, Any] = {"method": method}
        if method == "compress":
            asked["compression"] = job.options["compression"]
        if method != "in_place" and space.is_bound(image):
            # With auto the agent has the last word on which compression: then the bound is one that holds for each.
            named = asked.get("compression", "auto")
            asked["predicted_high"] = space.predicted(image, method, "" if named == "auto" else named).high
        return asked


def chosen_method(image: Image, options: dict[str, Any]) -> tuple[str, str]:
    """The method that is asked for or that ``auto`` means, and why, in a sentence.

    ``auto`` takes what wins most among what can be done, or what is gentler and wins nearly as much
    (:func:`storage_admin.agent.measure.prediction.best`): in place where only that keeps internal snapshots or further
    names, and where a copy does not fit into the pool beside what jobs that are queued or at work may need; never on a
    network.
    """
    if options["method"] != "auto":
        return options["method"], str(_SENTENCES[options["method"]])
    possible = space.offered(image)
    if not possible:
        none = gettext("No reclaim method can work on this image")
        return "compress", none if image.declared_format else str(_SENTENCES["compress"])
    if "in_place" in possible and (image.snapshots or image.nlink > 1):
        only = gettext("Only punching holes in place keeps the hard links of the image. {what}")
        if image.snapshots:
            only = gettext("Only punching holes in place keeps the internal snapshots of the image. {what}")
        return "in_place", only.format(what=_SENTENCES["in_place"])
    fitting = [method for method in possible if method == "in_place" or _fits(image, method, options)]
    if fitting == ["in_place"]:
        full = gettext("A copy does not fit into the free space that jobs have not reserved. {what}")
        return "in_place", full.format(what=_SENTENCES["in_place"])
    best = prediction.best(space.estimated(image), fitting)
    best = best or next(iter(method for method in ("compress", "in_place", "copy") if method in fitting), possible[0])
    return best, str(_SENTENCES[best])


_SENTENCES = {
    "compress": _("A compressed copy without zeros and unused clusters replaces the image"),
    "copy": _("An uncompressed copy without zeros and unused clusters replaces the image"),
    "in_place": _("Blocks of zeros in the file are returned to the filesystem in place, without scratch space"),
}


def _fits(image: Image, method: str, options: dict[str, Any]) -> bool:
    compression = chosen_compression(image, options.get("compression", "auto")) if method == "compress" else ""
    high = space.predicted(image, method, compression).high
    scratch = high if high is not None else image.occupied_bytes
    lasting = space.lasting_bytes(scratch, image.occupied_bytes, goes=not options.get("undo_hours"))
    need = space.Need(image.host_id, scratch, lasting)
    return not neighbours.of(image).admitted.against(image.pool, image.host, need)


def chosen_compression(image: Image, asked: str) -> str:
    """What ``auto`` means for this image, as far as the database knows its host's qemu-img."""
    if asked != "auto":
        return asked
    old = image.from_header("compat") == "0.10"
    return "zstd" if image.host.capabilities.get("zstd") and not old else "zlib"


def _cannot(image: Image, method: str, options: dict[str, Any]) -> list[Refusal]:
    code = "unsupported_subformat"
    if method == "in_place" and image.from_header("capabilities"):
        told = gettext(
            "{image} has file capabilities (setcap), which punching holes would remove. Reclaim it with a copy "
            "instead (compress or copy)."
        )
    elif method == "in_place" and image.pool.network:
        code = "unsupported_pool"
        told = gettext(
            "{pool} is on a network filesystem. While holes are punched in {image}, other machines could not be "
            "kept from writing to it. Reclaim it with a copy instead (compress or copy)."
        )
    elif not image.declared_format or image.declared_format in space.FORMATS[method]:
        return []
    elif options["method"] == "auto":
        told = gettext(
            "No reclaim method supports {format} images. Convert the image instead: this leaves out zeros, and a "
            "qcow2 image can be compressed."
        )
    elif method == "compress":
        told = gettext("{format} images cannot hold compressed data; only qcow2 images can.")
    else:
        told = gettext("{format} images cannot be reclaimed by {method}; only {can} images can.")
    can, form = gettext(" and ").join(space.FORMATS[method]), image.declared_format
    sentence = told.format(image=image.name, pool=image.pool.name, format=form, method=method, can=can)
    return [Refusal(code, sentence)]


def _reason(image: Image, why: str, after: int | None, won: int | None) -> str:
    if after is None or won is None:
        if image.state != Image.State.OK:
            return gettext("{why}. The savings are unknown.").format(why=why)
        return gettext("{why}. The savings are unknown until the image is sampled.").format(why=why)
    if shared := image.shared_bytes:
        return gettext(
            "{why}. This frees {won:,} bytes. Another {shared:,} bytes of the image are shared with other files "
            "and stay allocated."
        ).format(why=why, won=max(won, 0), shared=shared)
    if after >= image.occupied_bytes:
        return gettext("{why}, but this would free nothing: the image is already that small.").format(why=why)
    return gettext("{why}. Expected savings, from a sample: {won:,} bytes.").format(why=why, won=won)


def _warnings(image: Image, method: str, options: dict[str, Any]) -> list[str]:
    warnings = []
    if image.reclaimable_bytes is None:
        warnings.append(
            gettext(
                "The savings are unknown. The space check therefore assumes that the copy is as large as the original."
            )
        )
    if method == "compress":
        if options["compression"] == "zstd" and image.from_header("compat") == "0.10":
            warnings.append(gettext("zstd requires an image of compat 1.1; this one is 0.10. Choose zlib."))
        warnings.append(
            gettext("What guests write later is stored uncompressed, so the image grows again as it is used.")
        )
    return warnings


def _warnings_in_place(image: Image) -> list[str]:
    warnings = [gettext("The file itself is changed, without an undo copy. What a guest reads stays the same.")]
    if neighbours.of(image).has_undo_copy:
        warnings.append(
            gettext(
                "An earlier job has an undo copy of this image. After this job, only an admin can undo that "
                "earlier job, by force."
            )
        )
    return warnings


def _dig(image: Image) -> list[list[str]]:
    """The agent does it by itself, with a lock on the image; this is the nearest command that there is."""
    return [["fallocate", "--dig-holes", image.path]]


def _copy(image: Image, below: list[Image], method: str, compression: str, options: dict[str, Any]) -> list[list[str]]:
    """The commands as an admin would type them; the agent names the files by descriptors instead."""
    form, header = image.declared_format, image.header
    if form not in space.FORMATS[method] or image.virtual_size is None or image.unreadable:
        return []
    if method == "copy":
        compression = image.compression or "zlib"
    known = Facts(
        format=form, virtual_size=image.virtual_size, cluster_size=image.cluster_size, compat=header.get("compat"),
        refcount_bits=header.get("refcount_bits"), lazy_refcounts=header.get("lazy_refcounts"),
        extended_l2=header.get("extended_l2"),
    )  # fmt: skip
    convert = ["qemu-img", "convert", "-p", "-m", "8", "-W", *(["-c"] if method == "compress" else [])]
    if options["bandwidth_bytes_sec"]:
        convert += ["-r", str(options["bandwidth_bytes_sec"])]
    convert += ["-f", form, "-O", form]
    convert += ["-o", creation_options(known, compression)] if form == "qcow2" else []
    if below:
        convert += ["-B", image.backing_file, "-F", format_below(image, below[0])]
    check = [["qemu-img", "check", "-f", form, image.path]] if form == "qcow2" else []
    return [*check, [*convert, image.path, beside(image)], *verify_commands(image), *swap_commands(image)]
