"""What the ledger comes to: in all, by host, pool and calendar month (UTC). The database adds up; groups are few."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from django.db.models import Max, QuerySet

from images.ledger.selectors import SUMS, Sums, added_up
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job


@dataclass(frozen=True)
class OfHost:
    """What came of the jobs on one host. ``id`` is null where the host was removed; its name is what it was then."""

    id: int | None
    name: str
    sums: Sums


@dataclass(frozen=True)
class OfPool:
    """What came of the jobs in one pool; ``id`` is null where it was removed or is not known."""

    id: int | None
    name: str
    host_id: int | None
    host: str
    sums: Sums


@dataclass(frozen=True)
class OfMonth:
    """What became free or was taken in one calendar month (``2026-11``, UTC)."""

    month: str
    sums: Sums


@dataclass(frozen=True)
class Summary:
    """The ledger, added up. What undo copies hold is in no month: it is not free yet."""

    total: Sums
    hosts: tuple[OfHost, ...]
    pools: tuple[OfPool, ...]
    months: tuple[OfMonth, ...]


def summary(rows: QuerySet[Job]) -> Summary:
    """Some lines, added up by host, pool and month: those that freed most first, months in their order.

    Args:
        rows: of :func:`images.ledger.selectors.lines`, filtered.
    """
    # The ledger's index is in this order: it is read once from end to end, and nothing is sorted.
    found = rows.order_by().values("host_id", "space_pool_id", "freed_month").annotate(**SUMS)
    groups = [(row["host_id"], row["space_pool_id"], row["freed_month"], added_up(row)) for row in found]
    hosts = _names(Host, rows, "host", {host for host, _pool, _month, _sums in groups})
    pools = _names(StoragePool, rows, "space_pool", {pool for _host, pool, _month, _sums in groups if pool})
    by_host = _most_first((host, sums) for host, _pool, _month, sums in groups)
    by_pool = _most_first(((host, pool), sums) for host, pool, _month, sums in groups)
    in_months = _added((month, sums) for _host, _pool, month, sums in groups if month)
    return Summary(
        total=sum((sums for _host, _pool, _month, sums in groups), Sums()),
        hosts=tuple(OfHost(*hosts[host], sums) for host, sums in by_host),
        pools=tuple(OfPool(*pools.get(pool, (None, "")), *hosts[host], sums) for (host, pool), sums in by_pool),
        months=tuple(OfMonth(month, in_months[month]) for month in sorted(in_months)),
    )


def _names(
    model: type[Host] | type[StoragePool], rows: QuerySet[Job], column: str, ids: set[int]
) -> dict[int | None, tuple[int | None, str]]:
    """Id and name of each; of those that were removed no id, and the name that the last line has of them."""
    there: dict[int, str] = dict(model._default_manager.filter(pk__in=ids).values_list("pk", "name"))
    found: dict[int | None, tuple[int | None, str]] = {pk: (pk, name) for pk, name in there.items()}
    if gone := ids - set(there):
        kept = "host_name" if model is Host else "pool_name"
        told = rows.order_by().filter(**{f"{column}__in": gone}).values_list(f"{column}_id").annotate(name=Max(kept))
        found |= {pk: (None, name) for pk, name in told}
    return found


Key = TypeVar("Key", bound=Hashable)


def _added(told: Iterable[tuple[Key, Sums]]) -> dict[Key, Sums]:
    added: dict[Key, Sums] = {}
    for key, sums in told:
        added[key] = added.get(key, Sums()) + sums
    return added


def _most_first(told: Iterable[tuple[Key, Sums]]) -> list[tuple[Key, Sums]]:
    return sorted(_added(told).items(), key=lambda one: (-one[1].freed_bytes, -one[1].held_bytes, str(one[0])))
