"""Reads of the ledger: its lines, and what they come to. Whoever says what jobs have won asks here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.db.models import BigIntegerField, Case, Count, F, OuterRef, Q, QuerySet, Subquery, Sum, Value, When
from django.db.models.functions import Coalesce
from django.db.models.lookups import Exact, In

from images.models import Image
from storage_admin.accounts.models import Actor
from storage_admin.given_filters import in_order
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job

#: How jobs of a policy are signed (``Job.created_by``).
POLICY = "policy "
HELD = Q(undo_state=Job.UndoState.AVAILABLE)

#: By what lines can be ordered, and the columns that this means.
ORDERINGS = {
    "id": "id",
    "at": "at",
    "kind": "kind",
    "by": "created_by",
    "before_bytes": "before_bytes",
    "after_bytes": "after_bytes",
    "predicted_bytes": "predicted_bytes",
    "freed_bytes": "freed_bytes",
    "held_bytes": "undo_bytes",
}
NULLABLE = frozenset({"before_bytes", "after_bytes", "predicted_bytes"})
#: The newest first.
DEFAULT_ORDERING = "-at"


@dataclass(frozen=True)
class Sums:
    """What some jobs come to, in bytes.

    Args:
        freed_bytes: by how much allocated space has become less: what was won, less what was taken.
        won_bytes: of the jobs that freed something.
        taken_bytes: of those that took something, such as a conversion beside its original.
        copies_bytes: of these, what new files took, which somebody asked for: no job's loss.
        held_bytes: what undo copies hold now, which nobody has won yet.
        pending_bytes: what will be freed when they go, negative where something will have been taken.
        predicted_bytes: what was expected, of those jobs whose plans said it.
        jobs_count: jobs that freed or took something for good.
        held_count: jobs whose undo copies wait.
    """

    freed_bytes: int = 0
    won_bytes: int = 0
    taken_bytes: int = 0
    copies_bytes: int = 0
    held_bytes: int = 0
    pending_bytes: int = 0
    predicted_bytes: int = 0
    jobs_count: int = 0
    held_count: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def lines(jobs: QuerySet[Job]) -> QuerySet[Job]:
    """Those of some jobs that are lines of the ledger, each with ``at``.

    ``at`` is when its space became free (or was taken); where an undo copy holds it or it was undone, when it ended.
    """
    return jobs.filter(freed_bytes__isnull=False).annotate(at=Coalesce("freed_at", "finished"))


def rows_for(actor: Actor) -> QuerySet[Job]:
    """The jobs whose lines exist for ``actor``."""
    if actor.hosts is None:
        return Job.objects.all()
    return Job.objects.filter(In(F("host_id") + 0, Host.objects.filter(slug__in=actor.hosts).values("pk")))


def lines_for(actor: Actor) -> QuerySet[Job]:
    """The lines that exist for ``actor``, the newest first, without the large columns of a job.

    Those of hosts that were removed are among them for everybody who is limited to no host. Each has

    - ``image_number``: the id of its image; null where that is not listed any more;
    - ``host_now``, ``pool_now``: what those are called by now; null where they were removed.
    """
    told = {
        "image_number": Subquery(Image.objects.filter(pk=_IMAGE).values("pk")[:1]),
        "host_now": Subquery(Host.objects.filter(pk=OuterRef("host_id")).values("name")[:1]),
        "pool_now": Subquery(StoragePool.objects.filter(pk=OuterRef("space_pool_id")).values("name")[:1]),
    }
    rows = lines(rows_for(actor)).annotate(**told)
    return ordered(rows.defer("options", "plan", "result", "commands", "kept"), DEFAULT_ORDERING)


#: The image of a line: what its job worked on, or the job that it undid.
_UNDONE = Job.objects.filter(pk=OuterRef(OuterRef("target_id")), target_kind="image")
_IMAGE = Case(
    When(Exact(OuterRef("target_kind"), Value("image")), then=OuterRef("target_id")),
    default=Subquery(_UNDONE.values("target_id")[:1]),
)


def with_image(image_id: int) -> Q:
    """Lines of jobs on an image, and of those that undid them."""
    jobs = Job.objects.filter(target_kind="image", target_id=image_id)
    return Q(target_kind="image", target_id=image_id) | Q(target_kind="job", target_id__in=jobs.values("pk"))


def with_number(column: str, value: int) -> Q:
    """Lines whose column is that number, read from the ledger's own index and not one by one by an index of it."""
    return Q(Exact(F(column) + 0, value))


def unindexed(column: str) -> Coalesce:
    """A column of text, read from the ledger's own index and not from one that begins with that column."""
    return Coalesce(F(column), Value(""))


def ordered(rows: QuerySet[Job], ordering: str) -> QuerySet[Job]:
    """The lines by one of :data:`ORDERINGS`; raises as :func:`storage_admin.given_filters.in_order`."""
    return in_order(rows, ORDERINGS, ordering, NULLABLE)


def freed_of(jobs: QuerySet[Job]) -> Sums:
    """What some jobs have freed for good, and what their undo copies hold; in one query."""
    return added_up(jobs.filter(freed_bytes__isnull=False).order_by().aggregate(**SUMS))


def added_up(row: Mapping[str, Any]) -> Sums:
    """The sums in a row of what the database has added up by :data:`SUMS`."""
    return Sums(**{name.removeprefix(_PREFIX): row[name] for name in SUMS})


def _sum(column: Any, only: Q | None = None) -> Coalesce:
    return Coalesce(Sum(column, filter=only), Value(0), output_field=BigIntegerField())


#: A sum must not be called as the column that it is of.
_PREFIX = "sum_of_"
_SUMS = {
    "freed_bytes": _sum("freed_bytes"),
    "won_bytes": _sum("freed_bytes", Q(freed_bytes__gt=0)),
    "taken_bytes": _sum(-F("freed_bytes"), Q(freed_bytes__lt=0)),
    "copies_bytes": _sum(-F("freed_bytes"), Q(freed_bytes__lt=0, before_bytes=0)),
    "held_bytes": _sum("undo_bytes", HELD),
    "pending_bytes": _sum(F("undo_bytes") - Coalesce("made_bytes", "after_bytes"), HELD),
    "predicted_bytes": _sum("predicted_bytes"),
    "jobs_count": Count("id", filter=~Q(freed_bytes=0)),
    "held_count": Count("id", filter=HELD),
}
#: What a database has to add up for :class:`Sums`.
SUMS = {_PREFIX + name: how for name, how in _SUMS.items()}
