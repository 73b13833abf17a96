"""The job kind ``inside``: partitions, logical volumes and how full the filesystems on an image are."""

from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds.create import links_of
from images.models import Image
from images.rewrite import refusals
from images.rewrite.kind import ImageKind
from images.rewrite.neighbours import chain_of, find
from storage_admin.accounts.models import Actor
from storage_admin.agent.verbs.inside import HARMLESS
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal, refuse


class Inside(ImageKind):
    """Reads the partition table and the headers of filesystems of an image that no running guest uses."""

    name = "inside"
    title = _("Look inside")
    description = _(
        "Reads the partition table, LVM and the headers of filesystems of an image that no running guest uses. Reads "
        "no file and changes nothing. An admin allows it for each pool."
    )
    verb = "inside"
    stages = {"reading": (0, 100)}

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        return Plan(
            method="inside",
            reason=gettext("Reads the partition table and filesystem headers of {image}.").format(image=image.name),
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            refusals=tuple(against(image)),
        )

    def request(self, job: Job) -> dict[str, Any]:
        image = find(job.target_id)
        refuse(against(image))
        own, *below = links_of(chain_of(image))
        job.ours().update(kept={"fingerprint": bytes(image.fingerprint).hex()})
        return own | {"virtual_size": image.virtual_size, "chain": below, "children_known": True}

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        job.refresh_from_db(fields=["kept"])
        return result | {"fingerprint": job.kept.get("fingerprint", "")}


def off(image: Image) -> list[Refusal]:
    """That nobody has allowed to look inside the images of its pool."""
    if image.pool.look_inside:
        return []
    told = gettext("An admin has not allowed to look inside images of {pool}. The pool's settings have the switch.")
    return [Refusal("inside_off", told.format(pool=image.pool.name))]


def against(image: Image) -> list[Refusal]:
    """What stands against a look at what is on an image."""
    return off(image) or [one for one in refusals.for_rewrite(image) if one.code not in HARMLESS or image.unreadable]


def deleted_bytes(image: Image, parts: list[dict[str, Any]]) -> int | None:
    """About how much of an image's own data belongs to no file any more, so that a zero fill would free it.

    Args:
        parts: what the job found.

    Returns:
        ``None`` where a filesystem does not say how much of it is free, or the image's data was not looked at.
    """
    data = (image.estimate or {}).get("basis", {}).get("data_bytes")
    grouped = {part["number"] for part in parts if part["volume"]}
    leaves = [part for part in parts if part["volume"] or part["number"] not in grouped]
    if data is None or not leaves or any(part["free_bytes"] is None for part in leaves if part["name"] != "swap"):
        return None
    used = sum(_used(part) or 0 for part in leaves)
    return max(int(data) - used, 0)


def last_look(image: Image) -> dict[str, Any] | None:
    """What the last job found, with ``at``, whether the image is the same since (``current``), ``deleted_bytes``."""
    if not image.pool.look_inside:
        return None
    jobs = Job.objects.filter(target_kind="image", target_id=image.pk, kind="inside", state=Job.State.SUCCEEDED)
    job = jobs.order_by("-pk").first()
    if job is None or not job.result:
        return None
    current, parts = job.result["fingerprint"] == bytes(image.fingerprint).hex(), job.result["parts"]
    deleted = deleted_bytes(image, parts) if current else None
    parts = [part | {"used_bytes": _used(part)} for part in parts]
    return {**job.result, "parts": parts, "at": job.finished, "current": current, "deleted_bytes": deleted}


def _used(part: dict[str, Any]) -> int | None:
    return None if part["free_bytes"] is None else part["filesystem_bytes"] - part["free_bytes"]
