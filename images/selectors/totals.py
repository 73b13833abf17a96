"""Sums that count everything once: each filesystem, each shared pool, each inode."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from django.db.models import Count, Max, Q, QuerySet, Sum

from images.models import Image
from images.rewrite.space import filesystem_of
from images.scan import shared_storages
from images.selectors.lists import images_for
from images.selectors.overview_shapes import Totals
from images.selectors.pools import freshest
from storage_admin.accounts.models import Actor
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.words import ratio

SUMS = ("allocated_size", "virtual_size", "reclaimable_bytes", "reclaimable_low", "reclaimable_high")


def totals_of(actor: Actor, hosts: list[Host], pools: list[StoragePool]) -> Totals:
    """The sums over these hosts and pools, which are all that exist for ``actor``."""
    doubtful = shared_storages.doubtful(pools)
    known = [pool for pool in pools if pool.capacity_bytes is not None and pool.available_bytes is not None]
    sized = [pool for pool in known if pool.pk not in doubtful]
    filesystems = _outermost(_each_filesystem_once(sized))
    inside = _in_groups(filesystems)
    again = _free_again(filesystems)
    capacity = _sum([*(pool.capacity_bytes for pool in filesystems), *inside, *again])
    used = _sum([*(pool.used_bytes for pool in filesystems), *inside])
    available = _sum([*(pool.available_bytes for pool in filesystems), *again])
    rows = each_file_once(images_for(actor), pools)
    sums = image_sums(rows)
    scanned = any(pool.last_scanned is not None for pool in pools)
    usable = _sum([*(pool.usable_bytes for pool in filesystems), *inside, *again])
    # Images on storages of unknown size are promised to nobody's account. Who lists them may not have them mounted now.
    counted = {pool.shared_key or pool.pk for pool in sized}
    unsized = [pool.pk for pool in pools if (pool.shared_key or pool.pk) not in counted]
    promised = image_sums(rows.exclude(pool__in=unsized)) if unsized else sums
    overcommit = ratio(promised["virtual_size"] or 0, usable) if scanned and usable else None
    return Totals(
        hosts_count=len(hosts),
        pools_count=len(pools),
        pools_counted=len(sized),
        images_count=sums["count"] or 0,
        measured_count=sums["measured"] or 0,
        sized_count=sums["sized"] or 0,
        capacity_bytes=capacity,
        used_bytes=used,
        available_bytes=available,
        allocated_bytes=_known(sums["allocated_size"], sums["count"]) if scanned else None,
        virtual_bytes=_known(sums["virtual_size"], sums["count"]) if scanned else None,
        overcommit_ratio=overcommit if promised["sized"] == promised["count"] else None,
        analyzed_count=sums["analyzed"] or 0,
        reclaimable_bytes=sums["reclaimable_bytes"],
        reclaimable_low=sums["reclaimable_low"],
        reclaimable_high=sums["reclaimable_high"],
    )


def _each_filesystem_once(sized: list[StoragePool]) -> list[StoragePool]:
    """For each filesystem the pool that knows best how full it is."""
    found: dict[str, list[StoragePool]] = {}
    for pool in sized:
        found.setdefault(filesystem_of(pool), []).append(pool)
    return [best for group in found.values() if (best := freshest(group)) is not None]


def _outermost(filesystems: list[StoragePool]) -> list[StoragePool]:
    """Without datasets with a quota or reservation that lie in a ZFS pool or dataset which is counted as well."""
    keys = {pool.fs_key for pool in filesystems if pool.kind == StoragePool.Kind.ZFS}
    return [pool for pool in filesystems if keys.isdisjoint(_around(pool.fs_key))]


def _around(key: str) -> set[str]:
    parts = key.split("/")
    return {"/".join(parts[:count]) for count in range(1, len(parts))}


def _in_groups(filesystems: list[StoragePool]) -> list[int]:
    """What to take away for each thin pool in a volume group that is counted as well: there it is used space."""
    keys = {pool.fs_key for pool in filesystems if pool.kind == StoragePool.Kind.LVM}
    thin = [pool for pool in filesystems if pool.kind == StoragePool.Kind.LVMTHIN]
    return [-(pool.capacity_bytes or 0) for pool in thin if pool.fs_key.rpartition("/")[0] in keys]


def _free_again(filesystems: list[StoragePool]) -> list[int]:
    """What to take away of the free space that all pools of one Ceph cluster tell, or datasets with a quota of one ZFS
    pool: each could take it, once. What is reserved for a dataset it has beside that.
    """
    free, whole = defaultdict[str, list[int]](list), dict[str, int]()
    for pool in filesystems:
        key, told = pool.fs_key.partition("/")[0], pool.volume_facts or {}
        if pool.kind == StoragePool.Kind.RBD:
            free[key].append(pool.available_bytes or 0)
        elif pool.kind == StoragePool.Kind.ZFS and "pool_available" in told:
            whole[key] = told["pool_available"]
            free[key].append(min(pool.available_bytes or 0, whole[key]))
    shared = {key: whole.get(key, max(sizes)) for key, sizes in free.items() if key}
    return [min(shared[key] - sum(free[key]), 0) for key in shared]


def _known(total: int | None, count: int | None) -> int | None:
    """A sum over images: of none it is 0, of such that nobody knows the sizes of it is not known."""
    return 0 if not count else total


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def each_file_once(rows: QuerySet[Image], pools: list[StoragePool]) -> QuerySet[Image]:
    """Images that are there, without those that another host shows too because it mounts the same pool, or may do.

    Args:
        pools: those that the rows may be in.
    """
    rows = rows.exclude(state__in=Image.NOT_THERE).select_related(None).prefetch_related(None).order_by()
    return rows.exclude(pool__in=shown_again(pools))


def shown_again(pools: list[StoragePool]) -> list[int]:
    """Ids of the pools whose images another one of these has too, or may have."""
    seen: set[str] = set()
    again = list(shared_storages.doubtful(pools))
    for pool in _those_that_list_first(pools):
        if pool.shared_key in seen:
            again.append(pool.pk)
        elif pool.shared_key:
            seen.add(pool.shared_key)
    return again


def _those_that_list_first(pools: list[StoragePool]) -> list[StoragePool]:
    """Of pools that are one storage, one may have all the rows: that one is to be counted."""
    keys = Counter(pool.shared_key for pool in pools if pool.shared_key)
    shared = [pool.pk for pool in pools if keys[pool.shared_key] > 1]
    if not shared:
        return pools
    listing = set(Image.objects.filter(pool__in=shared).order_by().values_list("pool_id", flat=True).distinct())
    return sorted(pools, key=lambda pool: pool.pk not in listing)


def image_sums(rows: QuerySet[Image]) -> dict[str, int | None]:
    """Of rows as :func:`each_file_once` leaves them the ``count``, how many are ``measured`` and ``analyzed``, and the
    sum of each of :data:`SUMS`, each inode once.
    """
    sums = rows.aggregate(
        count=Count("id"),
        analyzed=Count("reclaimable_bytes"),
        measured=Count("allocated_size"),
        sized=Count("virtual_size"),
        linked=Count("id", filter=Q(nlink__gt=1)),
        **{column: Sum(column) for column in SUMS},
    )
    if not sums["linked"]:
        return sums
    # Hard links: rows beyond the first of an inode occupy nothing of their own.
    linked = rows.filter(nlink__gt=1).values("host_id", "dev", "inode").annotate(links=Count("id"), **_largest())
    for found in linked.filter(links__gt=1):
        inode: dict[str, Any] = dict(found)
        for column in SUMS:
            if (size := inode[f"one_{column}"]) is not None:
                sums[column] -= size * (inode[f"known_{column}"] - 1)
    return sums


def _largest() -> dict[str, Max | Count]:
    sizes: dict[str, Max | Count] = {f"one_{column}": Max(column) for column in SUMS}
    return sizes | {f"known_{column}": Count("id", filter=Q(**{f"{column}__isnull": False})) for column in SUMS}
