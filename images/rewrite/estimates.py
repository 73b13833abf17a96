"""What an analysis said an image could give back, on its row."""

from collections.abc import Collection
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import F, Q, QuerySet
from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import refusals
from storage_admin.agent.measure import preallocation
from storage_admin.agent.measure.prediction import best
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job

#: The formats that each method is offered for; an estimate for another one is a fact, but no offer.
FORMATS = {"compress": ("qcow2",), "copy": ("qcow2", "raw", "vdi", "vmdk", "vpc"), "in_place": ("qcow2", "raw")}
METHODS = tuple(FORMATS)
#: What a row offers.
OFFER = ("reclaimable_bytes", "reclaimable_low", "reclaimable_high", "reclaimable_method")
#: Preallocations that a rewrite undoes, and the kinds of jobs that do.
PREALLOCATED = ("metadata", "falloc", "full")
UNDOES_PREALLOCATION = ("reclaim", "flatten")
#: Formats that are sampled in the background: those that something is offered for.
SAMPLED_FORMATS = tuple(sorted({name for formats in FORMATS.values() for name in formats}))


def offered(image: Image) -> list[str]:
    """The methods that there are for an image's format, and for where it lies.

    Nobody on another machine can be kept from the file itself while it gets holes, and these drop file capabilities.
    """
    digs = not image.pool.network and not image.from_header("capabilities")
    return [name for name in METHODS if image.declared_format in FORMATS[name] and (name != "in_place" or digs)]


def due(host_id: int) -> QuerySet[Image]:
    """The images of a host that have no estimate for their present content, the largest first."""
    files = Image.objects.filter(host=host_id, pool__kind__in=refusals.FOLDERS)
    readable = files.filter(declared_format__in=SAMPLED_FORMATS).exclude(
        state__in=(*Image.NOT_THERE, Image.State.UNREADABLE, Image.State.FORMAT_MISMATCH)
    )
    changed = readable.filter(~Q(analyzed_fingerprint=F("fingerprint")), encrypted=False)
    return changed.select_related("host", "pool").order_by("-allocated_size", "pk")


def record(image: Image, fingerprint: bytes, estimate: dict[str, Any], at: datetime) -> None:
    """Writes an estimate; where the agent could not make one, it says why and the numbers stay unknown.

    All methods' numbers stay in ``estimate``. The row's own are those of the method that is offered and wins most, or
    of a gentler one that wins at least 98 % of that: ``in_place``, which needs no scratch space, before ``copy``,
    which leaves the image as quick as it was, before ``compress``
    (:func:`storage_admin.agent.measure.prediction.best`).

    Args:
        fingerprint: of the content that was looked at; an image that is another one by now is sampled again.
    """
    if bytes(image.fingerprint) != fingerprint:
        return
    image.estimate = estimate
    if "preallocation" in estimate:
        made = estimate["preallocation"]
        image.preallocation = _as_made(image) if made == preallocation.FILLED else made
    _offer(image)
    image.analyzed_at = at
    image.analyzed_fingerprint = image.fingerprint
    image.save(update_fields=["estimate", *OFFER, "analyzed_at", "analyzed_fingerprint", "preallocation"])


def _offer(image: Image) -> None:
    """Takes the numbers from the estimate; none in a state in which no job rewrites the image."""
    methods = (image.estimate or {}).get("methods") or {}
    method = best(methods, offered(image))
    numbers = methods[method] if method and image.state == Image.State.OK else {}
    image.reclaimable_bytes = numbers.get("reclaimable_bytes")
    image.reclaimable_low = numbers.get("reclaimable_low")
    image.reclaimable_high = numbers.get("reclaimable_high")
    image.reclaimable_method = method if method and numbers else ""


def settle_offers(host: Host, sound_again: Collection[int]) -> None:
    """What a job cannot rewrite now offers nothing, in no list and no sum; its estimate stays for when it can.

    Nor is a method offered that is none for where the image lies, as it may have been before that was known.

    Args:
        sound_again: images that are, by their ids.
    """
    away = Image.every.filter(host=host, reclaimable_bytes__isnull=False).exclude(state=Image.State.OK)
    away.update(reclaimable_bytes=None, reclaimable_low=None, reclaimable_high=None, reclaimable_method="")
    known = Image.every.filter(host=host, analyzed_fingerprint=F("fingerprint"), estimate__isnull=False)
    otherwise = Q(pk__in=sound_again) | Q(pool__network=True, reclaimable_method="in_place")
    for image in known.filter(otherwise).select_related("pool"):
        _offer(image)
        image.save(update_fields=OFFER)


def _as_made(image: Image) -> str:
    """``full`` where a conversion here has made this file so: of a full file nothing else tells."""
    made = Job.objects.filter(host=image.host_id, kind="convert", state=Job.State.SUCCEEDED, result__path=image.path)
    for job in made.order_by("-id")[:1]:
        if str((job.result or {}).get("inode")) == image.inode:
            return "full" if job.options.get("format_options", {}).get("preallocation") == "full" else ""
    return ""


def undone_preallocation(image: Image, method: str = "") -> list[str]:
    """What a plan says where a method undoes an image's preallocation, or may do so: sentences.

    Args:
        method: of a reclaim.
    """
    if image.declared_format not in FORMATS["in_place"]:
        return []
    if image.preallocation in PREALLOCATED:
        if (image.preallocation, method) == ("metadata", "in_place"):
            return []
        return [
            _("The image is preallocated ({preallocation}); afterwards it is not: writes allocate space again.").format(
                preallocation=image.preallocation
            )
        ]
    if (image.estimate or {}).get("preallocation") == preallocation.FILLED:
        return [
            _(
                "Nearly all of the image is allocated. If it was created with preallocation=full and should stay so, "
                "leave it as it is: that looks the same to a reclaim as an image filled with zeros."
            )
        ]
    return []


class Predicted(NamedTuple):
    """Allocated bytes after a method: best guess, lowest, highest; ``None`` where they are not known."""

    after: int | None
    low: int | None
    high: int | None


def predicted(image: Image, method: str, compression: str = "") -> Predicted:
    """What an image takes after a method, by the estimate on its row.

    Args:
        method: one of :data:`METHODS`.
        compression: ``zlib`` or ``zstd``, for ``compress``; without it, or where the host cannot measure it, the range
            holds for each.

    Returns:
        Nothing known where the image was not looked at since it changed, or the method cannot be used for it.
    """
    numbers = _numbers(image, method)
    each = numbers.get("compressions") or {}
    numbers = each.get(compression) or numbers
    return Predicted(*(numbers.get(f"predicted_{which}") for which in ("after_bytes", "low", "high")))


def shared_bytes(image: Image) -> int:
    """Bytes of the image that other files have as well, as reflinked copies do: they stay taken without it."""
    return int((image.estimate or {}).get("basis", {}).get("shared_bytes") or 0)


def won_bytes(image: Image, method: str, after: int | None) -> int | None:
    """What a method would free on the filesystem, negative where it would take more.

    Args:
        after: as :func:`predicted`.
    """
    if after is None or image.allocated_size is None:
        return None
    won: int | None = _numbers(image, method).get("reclaimable_bytes") if shared_bytes(image) else None
    return image.allocated_size - after if won is None else won


def is_bound(image: Image) -> bool:
    """Whether the highest numbers are sure ones: everything that is allocated was read, not a sample of it."""
    return (image.estimate or {}).get("mode") == "full"


def _numbers(image: Image, method: str) -> dict[str, Any]:
    found = ((image.estimate or {}).get("methods") or {}).get(method)
    return found if isinstance(found, dict) else {}
