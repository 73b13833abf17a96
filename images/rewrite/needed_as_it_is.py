"""What stands against a job that takes an image's name or content away: who needs the image as it is."""

from collections.abc import Sequence
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from images.kinds.scan import layout
from images.models import Image
from images.rewrite import in_use, neighbours
from images.rewrite.refusals import FOLDERS, without_agent
from images.scan import known
from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host
from storage_admin.jobs.plan_and_progress import Refusal, refuse

#: What becomes of those who need an image whose content a job changes.
CONTENT = gettext_lazy("They depend on the current content of the image. Flatten the overlays first.")


def refusals(image: Image, advice: str) -> list[Refusal]:
    """Who needs it as it is, as far as the database knows; the agent looks again, with :func:`pools`.

    Args:
        advice: what becomes of those who need it, or what to do instead, as a sentence.
    """
    if image.overlays_count:  # who else needs it is known of the whole host alone, and matters no more
        overlays = ngettext(
            "{count:,} overlay uses the image as backing file.",
            "{count:,} overlays use the image as backing file.",
            image.overlays_count,
        ).format(count=image.overlays_count)
        return [Refusal("has_overlays", f"{overlays} {advice}")]
    near = neighbours.of(image)
    found = [Refusal("has_overlays", f"{why} {advice}") for why in near.needed_by]
    if why := near.needs_unknown:
        found.append(
            Refusal("guests_unknown", _("{why} The image is not changed until its users are known.").format(why=why))
        )
    return found


def pools(image: Image, *below: Image) -> dict[str, Any]:
    """The agent's argument that says where it looks for what needs the image.

    Args:
        below: what it stands on, if these are changed as well.

    Raises:
        RefusedError: as :func:`refuse_elsewhere`, which is asked now.
    """
    refuse_elsewhere([image, *below])
    return {"pools": looked_through(image.host)}


def looked_through(host: Host) -> list[dict[str, str]]:
    """The pools in which the agent looks for what needs an image, with the files that need not be opened again."""
    folders = host.pools.filter(kind__in=FOLDERS).exclude(path_bytes=b"")
    return [
        {
            "path_b64": b64(bytes(pool.path_bytes)),
            "kind": layout(pool),
            "known_b64": known.linked_fingerprints(pool),
        }
        for pool in folders
    ]


def refuse_elsewhere(chain: Sequence[Image], first: int = 0) -> None:
    """Has the agents of other hosts that share these images' storage look who needs them in all their pools, also what
    was made since their last scan.

    Args:
        chain: images from above, which may need each other.
        first: place of the first that nobody else may need.

    Raises:
        RefusedError: ``has_overlays``; ``guests_unknown``, where one of these hosts cannot be asked. No host is named:
            it may not exist for whoever reads that.
    """
    there: dict[Host, list[tuple[int, dict[str, str]]]] = {}
    for place, image in enumerate(chain):
        for pair, path in in_use.others(image):
            if pair.is_proven and pair.other.host_id != image.host_id:
                there.setdefault(pair.other.host, []).append((place, pair.other.place_of(path)))
    for host, asked in there.items():
        above = sum(place < first for place, _one in asked)
        if above < len(asked):  # else it sees none of those that nobody else may need
            _ask(host, {"images": [one for _place, one in asked], "first": above}, chain[first].name)


def _ask(host: Host, asked: dict[str, Any], name: str) -> None:
    try:
        refuse(without_agent(host))
        asking.ask(host, "needed", asked | {"pools": looked_through(host)})
    except (HostError, RefusedError) as error:
        if error.code == "has_overlays":
            sentence = _("On another host that shares the storage of {image}, an image was made on it. Scan both.")
            raise RefusedError("has_overlays", sentence.format(image=name)) from error
        sentence = _(
            "Another registered host shares the storage of {image} and did not report who needs it ({code}). Scan "
            "that host and try again."
        )
        raise RefusedError("guests_unknown", sentence.format(image=name, code=error.code)) from error
