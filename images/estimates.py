"""What an analysis said an image could give back, on its row."""

from datetime import datetime
from typing import Any

from django.db.models import F, Q, QuerySet

from images.models import Image

#: Methods that images can be reclaimed by; an estimate for another one is a fact, but no offer.
METHODS = ("compress",)
#: Formats whose clusters can be sampled.
SAMPLED_FORMATS = ("qcow2", "raw")


def due(host_id: int) -> QuerySet[Image]:
    """The images of a host that have no estimate for their present content, the largest first."""
    readable = Image.objects.filter(host=host_id, declared_format__in=SAMPLED_FORMATS).exclude(
        state__in=(Image.State.MISSING, Image.State.UNREADABLE, Image.State.FORMAT_MISMATCH)
    )
    changed = readable.filter(~Q(analyzed_fingerprint=F("fingerprint")), encrypted=False)
    return changed.select_related("host", "pool").order_by("-allocated_size", "pk")


def record(image: Image, fingerprint: bytes, estimate: dict[str, Any], at: datetime) -> None:
    """Writes an estimate; where the agent could not make one, it says why and the numbers stay unknown.

    Args:
        fingerprint: of the content that was sampled; an image that is another one by now is sampled again.
    """
    if bytes(image.fingerprint) != fingerprint:
        return
    image.estimate = estimate
    image.reclaimable_bytes = estimate.get("reclaimable_bytes")
    image.reclaimable_low = estimate.get("reclaimable_low")
    image.reclaimable_high = estimate.get("reclaimable_high")
    image.reclaimable_method = estimate.get("method") or ""
    image.analyzed_at = at
    image.analyzed_fingerprint = image.fingerprint
    image.save(
        update_fields=[
            "estimate", "reclaimable_bytes", "reclaimable_low", "reclaimable_high", "reclaimable_method", "analyzed_at",
            "analyzed_fingerprint",
        ]
    )  # fmt: skip
