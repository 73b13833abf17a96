"""What a policy's rules ask of guests: whether there is anything to do on one, and on which of its disks."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Max, QuerySet

from images.models import ImageUse
from images.policies.shape import Rules
from storage_admin.guests.models import Guest


def _own_disks(rules: Rules) -> QuerySet[ImageUse]:
    """The images of guests' own disks in the policy's pools."""
    uses = ImageUse.objects.filter(disk__only_in="", disk__device="disk").order_by()
    return uses.filter(image__pool__in=rules.pools) if rules.pools else uses


def depths(rules: Rules) -> dict[int, int]:
    """How many images the longest chain of each guest has, by its id, where a policy is for chains of guests."""
    if rules.kind != "live_flatten":
        return {}
    return dict(_own_disks(rules).values_list("disk__guest").annotate(Max("image__chain_depth")))


def options_for(rules: Rules, target_id: int) -> dict[str, Any]:
    """The options of the job on a target: a flatten is of the guest's longest chain in the policy's pools."""
    if rules.kind != "live_flatten":
        return rules.options
    longest = _own_disks(rules).filter(disk__guest=target_id).order_by("-image__chain_depth", "disk__target").first()
    return rules.options | {"disk": longest.disk.target if longest is not None else ""}


def reason(rules: Rules, guest: Guest, now: datetime, depths: Mapping[int, int]) -> tuple[Any, ...] | None:
    """Why there is nothing to do on a guest: the code and the facts of a skip.

    Args:
        depths: as of :func:`depths`.
    """
    if rules.kind in {"trim", "live_flatten"} and guest.state != "running":
        return ("guest_off", guest.state)
    if rules.kind == "live_flatten":
        depth = depths.get(guest.pk, 0)
        return ("chain_too_short", depth, rules.least_depth) if depth < rules.least_depth else None
    if rules.kind == "trim":
        return None
    days, oldest = rules.options["older_than_days"], guest.oldest_snapshot
    return ("no_old_snapshot", days) if oldest is None or now - oldest < timedelta(days=days) else None
