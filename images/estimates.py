"""What an analysis said an image could give back, on its row."""

from datetime import datetime
from typing import Any

from images.models import Image


def record(image: Image, estimate: dict[str, Any], at: datetime) -> None:
    """Writes an estimate; where the agent could not make one, it says why and the numbers stay unknown."""
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
