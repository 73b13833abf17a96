"""What earlier jobs say of an image: when the last one was, and who has it now."""

from collections.abc import Collection
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import Max, Q

from storage_admin.jobs.models import Job, ResourceLock

#: No condition.
ANY = Q()


class Last(NamedTuple):
    """The last job of a kind on an image, or a pool, that ended well.

    Args:
        won_bytes: by how much the image got smaller.
        after_bytes: what it took then.
        undone: whether somebody put the original back.
    """

    job_id: int
    finished: datetime
    won_bytes: int
    after_bytes: int
    undone: bool


def last_jobs(kind: str, target_kind: str, among: Collection[int] | None = None, only: Q = ANY) -> dict[int, Last]:
    """The last job of a kind that ended well, by its target's id.

    Args:
        among: only those of these targets.
        only: a condition on the jobs, as :func:`as_thorough`.
    """
    ended = Job.objects.filter(only, kind=kind, target_kind=target_kind, state=Job.State.SUCCEEDED)
    ended = ended if among is None else ended.filter(target_id__in=among)
    latest = ended.order_by().values("target_id").annotate(last=Max("pk")).values("last")
    rows = Job.objects.filter(pk__in=latest).values_list(
        "target_id", "pk", "finished", "result__before_bytes", "result__after_bytes", "undo_state"
    )
    return {
        target: Last(pk, finished, (before or 0) - (after or 0), after or 0, undo == Job.UndoState.UNDONE)
        for target, pk, finished, before, after, undo in rows.iterator()
        if finished is not None
    }


def as_thorough(kind: str, options: dict[str, Any]) -> Q:
    """The jobs of a kind that make one with these options needless: those that measure the same, or look as closely."""
    if kind == "benchmark":
        return Q(options__kind=options.get("kind"))
    return Q(options__mode="full") if kind == "analyze" and options.get("mode") == "full" else ANY


def at_work(kind: str, target_kind: str, among: Collection[int] | None = None) -> dict[int, int]:
    """The job of a kind that is queued or at work on each target, by the target's id.

    Args:
        among: only those of these targets.
    """
    active = Job.objects.filter(state__in=Job.ACTIVE, kind=kind, target_kind=target_kind)
    active = active if among is None else active.filter(target_id__in=among)
    return dict(active.order_by("-pk").values_list("target_id", "pk"))


def held_images() -> frozenset[int]:
    """Ids of the images that jobs have now, or that stand below those: nobody else can have them for itself."""
    keys = ResourceLock.objects.filter(key__startswith="image:").values_list("key", flat=True)
    return frozenset(int(key.removeprefix("image:")) for key in keys if key.removeprefix("image:").isdigit())
