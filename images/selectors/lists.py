"""Images in lists: few columns, few queries, quick at 100,000 rows."""

from functools import cached_property
from typing import Generic, TypeVar

from django.db.models import F, Model, Prefetch, Q, QuerySet
from django.db.models.lookups import Exact, GreaterThanOrEqual, LessThanOrEqual

from images.models import Image, ImageSample, ImageUse
from storage_admin.accounts.models import Actor
from storage_admin.given_filters import in_order
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.selectors import in_scope

M = TypeVar("M", bound=Model)

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
NULLABLE = frozenset({"virtual_size", "allocated_size", "file_size", "reclaimable_bytes", "analyzed_at"})


#: So few matches are sorted; of more, the first ones are found soon by walking along an index.
FEW = 500


def with_text(text: str) -> Q:
    """Images with this in their path, whose end is the name; small and capital letters are the same."""
    return Q(path__icontains=text)


def at_least(column: str, value: int) -> Q:
    """Images whose column is this number or more.

    Written so that no index of that column alone answers it: all its entries would be looked up in the table one by
    one, while the index of all filters is read from end to end.
    """
    return Q(GreaterThanOrEqual(F(column) + 0, value))


def of_host(host_id: int) -> Q:
    """Images of this host; see :func:`at_least`."""
    return Q(Exact(F("host_id") + 0, host_id))


def at_most(column: str, value: int) -> Q:
    """Images whose column is this number or less; see :func:`at_least`."""
    return Q(LessThanOrEqual(F(column) + 0, value))


def images_for(actor: Actor) -> QuerySet[Image]:
    """The images that exist for ``actor``, also those that vanished, each with host, pool and guests.

    Three queries for any number of rows: the rows, their uses, and those uses' disks and guests joined.
    """
    uses = ImageUse.objects.select_related("disk__guest").order_by("disk__guest__name", "id")
    # On a storage that hosts share, guests of another host may use an image.
    uses = in_scope(uses, actor, "disk__guest__host")
    rows = (
        Image.objects.select_related("host", "pool")
        .defer(*DEFERRED)
        .prefetch_related(Prefetch("uses", uses, to_attr="read_uses"))
    )
    return in_scope(rows, actor)


def ordered(rows: QuerySet[Image], ordering: str) -> QuerySet[Image]:
    """The rows by one of :data:`ORDERINGS`; raises as :func:`storage_admin.given_filters.in_order`."""
    return in_order(rows, ORDERINGS, ordering, NULLABLE)


class Matches(Generic[M]):
    """The rows of a list, filtered and ordered, of which a page is read at a time.

    Ids are picked first: that reads an index, while sorting whole rows of 100,000 images reads all of them.

    Args:
        rows: as of :func:`images_for`, filtered and :func:`ordered`, the id last.
    """

    def __init__(self, rows: QuerySet[M]) -> None:
        self.rows = rows

    def _read(self, rows: QuerySet[M]) -> list[M]:
        """Whole rows of a page."""
        return list(rows)

    @cached_property
    def _few(self) -> list[int] | None:
        """The ids of all matches, in no order, where they are few."""
        ids = list(self.rows.order_by().values_list("pk", flat=True)[: FEW + 1])
        return ids if len(ids) <= FEW else None

    @cached_property
    def _count(self) -> int:
        return self.rows.count() if self._few is None else len(self._few)

    def count(self) -> int:
        """How many there are."""
        return self._count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> list[M]:
        """The matches from ``part.start`` up to ``part.stop``, in order."""
        start, stop = part.start or 0, min(self._count, self._count if part.stop is None else part.stop)
        if start >= stop:
            return []
        if self._few is not None:
            # Along the index of their order, nearly all other rows would be looked at before the last match is found.
            return self._read(self.rows.filter(pk__in=self._few)[start:stop])
        ids = self._pick(start, stop)
        found = {row.pk: row for row in self._read(self.rows.order_by().filter(pk__in=ids))}
        return [found[pk] for pk in ids if pk in found]

    def _pick(self, start: int, stop: int) -> list[int]:
        """Ids in order; those in the second half are counted from the end."""
        picked = self.rows.values_list("pk", flat=True)
        if start > self._count // 2:
            return list(picked.reverse()[self._count - stop : self._count - start])[::-1]
        return list(picked[start:stop])


class MatchingImages(Matches[Image]):
    """Images of which a page is read at a time. Few pools have many of them: pool and host are read once for a page."""

    def _read(self, rows: QuerySet[Image]) -> list[Image]:
        images = list(rows.select_related(None))
        pools = StoragePool.objects.filter(pk__in={image.pool_id for image in images}).select_related("host").order_by()
        known = pools.defer("path_bytes", "host__capabilities").in_bulk()
        # Whose pool was removed in this moment is not there any more either.
        there = [image for image in images if image.pool_id in known]
        for image in there:
            image.pool = known[image.pool_id]
            image.host = image.pool.host
        return there


def history_of(image: Image) -> QuerySet[ImageSample]:
    """How large an image was, oldest first; one sample whenever a scan found another size than before."""
    return image.samples.order_by("at", "id")
