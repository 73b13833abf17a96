"""Images in lists: few columns, few queries, quick at 100,000 rows."""

from django.db.models import F, OrderBy, Prefetch, QuerySet

from images.models import Image, ImageSample, ImageUse
from storage_admin.accounts.roles import Actor
from storage_admin.hosts.selectors import in_scope

#: Large columns that no list shows.
DEFERRED = (
    "path_bytes", "backing_path_bytes", "fingerprint", "analyzed_fingerprint", "header", "estimate", "pool__path_bytes",
    "host__capabilities",
)  # fmt: skip

#: By what a list can be ordered, and the columns that this means.
ORDERINGS = {
    "id": "id",
    "name": "name",
    "path": "path",
    "host": "host__name",
    "pool": "pool__name",
    "format": "format",
    "state": "state",
    "virtual_size": "virtual_size",
    "allocated_size": "allocated_size",
    "file_size": "file_size",
    "chain_depth": "chain_depth",
    "overlays_count": "overlays_count",
    "reclaimable_bytes": "reclaimable_bytes",
    "analyzed_at": "analyzed_at",
    "last_scanned": "seen",
}
NULLABLE = frozenset({"virtual_size", "reclaimable_bytes", "analyzed_at"})


def images_for(actor: Actor) -> QuerySet[Image]:
    """The images that exist for ``actor``, also those that vanished, each with host, pool and guests.

    Three queries for any number of rows: the rows, their uses, and those uses' disks and guests joined.
    """
    uses = ImageUse.objects.select_related("disk__guest").defer("disk__path_bytes").order_by("disk__guest__name", "id")
    rows = Image.objects.select_related("host", "pool").defer(*DEFERRED).prefetch_related(Prefetch("uses", uses))
    return in_scope(rows, actor)


def ordered(rows: QuerySet[Image], ordering: str) -> QuerySet[Image]:
    """The rows by one of :data:`ORDERINGS`, downwards with a ``-`` before it; what is unknown comes last.

    Raises:
        KeyError: the list cannot be ordered by that.
    """
    column = ORDERINGS[ordering.removeprefix("-")]
    down = ordering.startswith("-")
    tie = "-id" if down else "id"
    if column == "id":
        return rows.order_by(tie)
    if column not in NULLABLE:
        return rows.order_by(f"-{column}" if down else column, tie)
    return rows.order_by(OrderBy(F(column), descending=down, nulls_last=True), tie)


def page_of(rows: QuerySet[Image], start: int, stop: int, count: int | None = None) -> list[Image]:
    """The rows from ``start`` up to ``stop``, in order.

    Their ids are picked first: that reads an index, while sorting whole rows of 100,000 images reads all of them.

    Args:
        count: of all rows, where it is known: pages in the second half are then counted from the end.
    """
    picked = rows.values_list("pk", flat=True)
    if count is not None and start > count // 2:
        ids = list(picked.reverse()[max(0, count - stop) : count - start])[::-1]
    else:
        ids = list(picked[start:stop])
    found = {image.pk: image for image in rows.order_by().filter(pk__in=ids)}
    return [found[pk] for pk in ids if pk in found]


def history_of(image: Image) -> QuerySet[ImageSample]:
    """How large an image was, oldest first; one sample whenever a scan found another size than before."""
    return image.samples.order_by("at", "id")
