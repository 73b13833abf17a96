"""What stands against a job that takes an image's name or content away: who needs the image as it is."""

from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from images.kinds.aside import looked_through
from images.models import Image
from images.rewrite import neighbours
from storage_admin.jobs.plan_and_progress import Refusal

#: What becomes of those who need an image whose content a job changes.
CONTENT = gettext_lazy("They depend on the current content of the image. Flatten the overlays first.")


def refusals(image: Image, advice: str) -> list[Refusal]:
    """Who needs it as it is, as far as the database knows; the agent looks again, with :func:`pools`.

    Args:
        advice: what becomes of those who need it, or what to do instead, as a sentence.
    """
    near = neighbours.of(image)
    overlays = ngettext(
        "{count:,} overlay uses the image as backing file.",
        "{count:,} overlays use the image as backing file.",
        image.overlays_count,
    )
    standing = [overlays.format(count=image.overlays_count)] if image.overlays_count else []
    found = [Refusal("has_overlays", f"{why} {advice}") for why in [*standing, *near.needed_by]]
    if why := near.needs_unknown:
        found.append(
            Refusal("guests_unknown", _("{why} The image is not changed until its users are known.").format(why=why))
        )
    return found


def pools(image: Image) -> dict[str, Any]:
    """The agent's argument that says where it looks for what needs the image."""
    return {"pools": looked_through(image.host)}
