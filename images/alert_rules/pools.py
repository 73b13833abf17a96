"""What may be wrong with pools: too full, full soon, promised too often, held by undo copies.

All of it is judged by the filesystem, as that is what gets full: what its pools promise and what undo copies hold in
them is added up, by the strictest threshold of them. A filesystem is told of once, and under each other host that has
it to those who are limited to that one. An alert that is open closes only a little below its threshold, and a danger
stays one as long: a pool that sits right on it would otherwise open and close one, or get worse, all day.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from django.db.models import Sum

from images.alert_rules import trend
from images.alert_rules.filling import Filling, filling, is_looked_at
from images.models import Image
from images.rewrite.space import filesystem_of
from images.selectors.pools import freshest, is_never_over, samples
from storage_admin.events import services as events
from storage_admin.events.services import Trouble, Unjudged
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.words import days, size, tenths

#: So many points below its threshold a pool's alert closes, in percent of what can be used.
MARGIN_PERCENT = 2.0
#: The same of other thresholds, as a part of them.
MARGIN = 0.05
MARGIN_DAYS = 0.25
#: Full in so many minutes, it is in danger.
DANGER_MINUTES = 60.0
#: Used to so many percent, a pool is in danger whatever its threshold is.
DANGER_PERCENT = 95.0


@dataclass(frozen=True)
class Place:
    """Pools that are on one filesystem. The first one names them, whether its host answers or not: an alert that went
    from one to the other with that would close and open as often.
    """

    pools: tuple[StoragePool, ...]

    @property
    def pool(self) -> StoragePool:
        return self.pools[0]

    @cached_property
    def sized(self) -> StoragePool | None:
        """The pool whose capacity counts; ``None`` where none is known, as when nobody has it mounted."""
        return freshest(pool for pool in self.pools if pool.capacity_bytes)

    @cached_property
    def measured(self) -> StoragePool | None:
        """The pool whose free space counts; ``None`` where none is known."""
        return freshest(pool for pool in self.pools if pool.used_percent is not None)

    @property
    def beside(self) -> str:
        """A sentence about the other pools of its host; empty where there are none. Another host may not exist for
        whoever reads it.
        """
        others = [str(pool) for pool in self.pools[1:] if pool.host_id == self.pool.host_id]
        named = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        return f" On the same filesystem: {named}." if others else ""

    @property
    def name(self) -> str:
        """What is judged, with ``{pool}`` where a pool's name stands."""
        return "{pool}" if len(self._by_storage()) == 1 else "the filesystem of {pool}"

    @cached_property
    def storages(self) -> list["Place"]:
        """Each storage on it once: one export on three hosts is one. A folder is left out that another one's images
        already include, as on a host that has only the outer one as a pool.
        """
        found = self._by_storage()
        return [Place(tuple(group)) for key, group in found.items() if not _is_walked_by_another(key, found)]

    def _by_storage(self) -> dict[str, list[StoragePool]]:
        found: dict[str, list[StoragePool]] = {}
        for pool in self.pools:
            found.setdefault(pool.shared_key or f"pool {pool.pk}", []).append(pool)
        return found

    @property
    def virtual_bytes(self) -> int | None:
        """What its images promise; ``None`` where that is not known of one of its storages."""
        sizes = [storage._largest("virtual_bytes") for storage in self.storages]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    @property
    def least_virtual_bytes(self) -> int:
        """What they promise at least, where the virtual size of some image is not known."""
        sizes = ((storage, storage._largest("virtual_bytes")) for storage in self.storages)
        return sum(storage._known_virtual_bytes() if size is None else size for storage, size in sizes)

    def _known_virtual_bytes(self) -> int:
        """What the images of one storage promise whose virtual sizes are known; hard links are left out."""
        there = Image.objects.filter(pool__in=self.pools, nlink=1).exclude(state__in=Image.NOT_THERE)
        sums = there.order_by().values("pool").annotate(known=Sum("virtual_size")).values_list("known", flat=True)
        return max((known or 0 for known in sums), default=0)

    @property
    def undo_bytes(self) -> int:
        """What undo copies hold on it."""
        return sum(storage._largest("undo_bytes") or 0 for storage in self.storages)

    def _largest(self, column: str) -> int | None:
        """What one storage has: of several hosts that mount it, one may have all the rows. One that does not answer
        knows the least.
        """
        answering = [pool for pool in self.pools if pool.capacity_bytes and pool.host.status != Host.Status.UNREACHABLE]
        sizes = [getattr(pool, column) for pool in answering or self.pools]
        return max((size for size in sizes if size is not None), default=None)

    def days(self, samples: Mapping[int, Sequence[trend.Day]]) -> Sequence[trend.Day]:
        """Its samples: those of the pool that has the most days; empty where none are of now.

        Args:
            samples: by the pool's id.
        """
        fresh = [known for pool in self.pools if trend.is_fresh(known := samples.get(pool.pk, ()))]
        return max(fresh, key=len, default=())

    def thresholds(self, column: str) -> list[float]:
        """The thresholds of its pools, the lowest first; of those that have one."""
        return sorted(value for pool in self.pools if (value := getattr(pool, column)) is not None)

    def is_told(self, kind: str, is_open: Collection[str], severity: str = "") -> bool:
        """Whether its alert is open, whichever of its pools it was opened by."""
        return any(f"{severity} {kind}:{pool.pk}".strip() in is_open for pool in self.pools)

    def as_it_is(self, kind: str) -> Iterator[Unjudged]:
        """Leaves what is open of it as it is."""
        return (Unjudged(f"{kind}:{pool.pk}") for pool in self.pools)

    def of_each_host(self) -> Iterator["Place"]:
        """The place as each host has it, that of the first pool first."""
        for host in dict.fromkeys(pool.host_id for pool in self.pools):
            yield Place(tuple(pool for pool in self.pools if pool.host_id == host))

    def troubles(self, kind: str, severity: str, title: str, detail: str) -> Iterator[Trouble]:
        """One trouble, and the same once more for each other host, for those who are limited to it.

        Args:
            title: with ``{pool}`` where the pool's name stands.
        """
        for place in self.of_each_host():
            pool = place.pool
            yield Trouble(
                f"{kind}:{pool.pk}", severity, title.format(pool=pool), detail + place.beside, pool.host.slug, "pool",
                pool.pk, str(pool), told_under="" if pool == self.pool else self.pool.host.slug,
            )  # fmt: skip


def _is_walked_by_another(key: str, storages: Mapping[str, Sequence[StoragePool]]) -> bool:
    here = {pool.host_id for pool in storages[key]}
    return any(
        key != outer and key.startswith(outer.rstrip("/") + "/") and any(pool.host_id not in here for pool in pools)
        for outer, pools in storages.items()
    )


def filesystems(pools: Iterable[StoragePool]) -> list[Place]:
    """Pools by the filesystem that they are on, or were when they were last there."""
    found: dict[str, list[StoragePool]] = {}
    for pool in pools:
        found.setdefault(filesystem_of(pool), []).append(pool)
    return [Place(tuple(group)) for group in found.values()]


_BROKEN = (
    "The kernel has switched the thin pool to read-only or failed, or its metadata needs a check. Guests on it get I/O "
    "errors. Shut them down, then repair the pool (lvconvert --repair)."
)


def over_threshold(pools: list[StoragePool], is_open: Collection[str]) -> Iterator[Trouble | Unjudged]:
    """Filesystems that are used to their threshold."""
    kind = events.POOL_OVER_THRESHOLD
    for place in filesystems(pools):
        pool = place.measured
        if any(one.is_broken for one in place.pools):
            yield from place.troubles(kind, "danger", "{pool} takes no writes", _BROKEN)
            continue
        if pool is None:
            yield from place.as_it_is(kind)
            continue
        percent, limit = pool.used_percent or 0.0, min(one.warn_percent for one in place.pools)
        if is_never_over(pool, limit):
            continue
        # A thin pool whose metadata is full takes no more writes either.
        percent = max(percent, pool.metadata_percent or 0.0)
        danger = DANGER_PERCENT - (MARGIN_PERCENT if place.is_told(kind, is_open, "danger") else 0.0)
        # The name in the title is one of several: which of them asks for it may be nobody's business who reads it.
        whose = (
            "its threshold"
            if {one.warn_percent for one in place.pools} == {limit}
            else "the threshold of its filesystem"
        )
        bound = limit - (MARGIN_PERCENT if place.is_told(kind, is_open) else 0.0)
        if percent >= bound:
            yield from place.troubles(
                kind,
                "danger" if percent >= danger else "warning",
                f"{{pool}} is {'over' if percent >= limit else 'just below'} {whose} of {limit} %",
                _what_is_used(pool, bound),
            )


def _what_is_used(pool: StoragePool, bound: float) -> str:
    data, metadata = pool.used_percent or 0.0, pool.metadata_percent
    told = f"{tenths(data)} % used: {size(pool.used_bytes)} of {size(pool.capacity_bytes)}, "
    reserved = f", {size(pool.reserved_bytes)} reserved for root" if pool.reserved_bytes else ""
    told += f"{size(pool.available_bytes)} free{reserved}. "
    if pool.kind != StoragePool.Kind.LVMTHIN or metadata is None:
        more = "Reclaim space (the images page lists the top candidates), discard undo copies, or enlarge the pool."
        return told + more
    which = [name for name, used in (("Data", data), ("Metadata", metadata)) if used >= bound]
    extend = {"Data": "--size", "Metadata": "--poolmetadatasize"}
    how = " and ".join(f"lvextend {extend[name]}" for name in which)
    return (
        f"{' and '.join(which).capitalize()} of the thin pool: {told}{tenths(metadata)} % of "
        f"{size(pool.metadata_bytes)} metadata used. Trim guests, delete snapshots, or extend the pool ({how})."
    )


def full_soon(pools: list[StoragePool], is_open: Collection[str], now: datetime) -> Iterator[Trouble | Unjudged]:
    """Filesystems that are full within hours, by the last looks, or within days, by samples that carry it."""
    kind = events.POOL_DAYS_UNTIL_FULL
    watched = [place for place in filesystems(pools) if place.thresholds("warn_days")]
    taken = samples((pool.pk for place in watched for pool in place.pools), now)
    measured = {place.pool.pk: place.measured for place in watched if place.measured is not None}
    told = {pool.pk for place in watched if place.is_told(kind, is_open) and (pool := place.measured) is not None}
    rising = filling(measured.values(), told, now)
    for place in watched:
        pool, known_days = place.measured, place.days(taken)
        if pool is not None and pool.pk in rising:
            yield from _full_in_hours(place, rising[pool.pk], is_open)
            continue
        if pool is None or pool.available_bytes is None or not (known_days or is_looked_at(pool, now)):
            yield from place.as_it_is(kind)
            continue
        is_told = place.is_told(kind, is_open)
        forecast = trend.forecast(known_days, pool.available_bytes, trend.KNOWN_STILL if is_told else trend.KNOWN)
        # The most days are the strictest: they tell the earliest.
        limit = place.thresholds("warn_days")[-1]
        if forecast is None or forecast.days > limit * (1 + MARGIN_DAYS * is_told):
            continue
        in_danger = place.is_told(kind, is_open, "danger")
        low, high = f"{forecast.low:.1f}", f"{forecast.high:.1f}"
        yield from place.troubles(
            kind,
            "danger" if forecast.days <= limit / 4 * (1 + MARGIN_DAYS * in_danger) else "warning",
            "{pool} will be full soon",
            f"Forecast full in about {days(forecast.days)}{(f' ({low} to {high})' if low != high else '')}: "
            f"used space grew by {size(round(forecast.growth_bytes))} a day in the last {forecast.over_days} days, and "
            f"{size(pool.available_bytes)} are free. The alert is raised at {limit:g} days.",
        )


def _full_in_hours(place: Place, found: Filling, is_open: Collection[str]) -> Iterator[Trouble | Unjudged]:
    kind = events.POOL_DAYS_UNTIL_FULL
    if found.rise is None:
        yield from place.as_it_is(kind)
        return
    limit = DANGER_MINUTES * (1 + MARGIN_DAYS * place.is_told(kind, is_open, "danger"))
    severity = "danger" if found.minutes <= limit else "warning"
    yield from place.troubles(kind, severity, "{pool} will be full soon", found.detail)


def overcommitted(pools: list[StoragePool], is_open: Collection[str]) -> Iterator[Trouble | Unjudged]:
    """Filesystems that promise guests too much; most have no threshold, as many do so on purpose."""
    kind = events.POOL_OVERCOMMIT
    for place in filesystems(pools):
        limits = place.thresholds("warn_overcommit")
        if not limits:
            continue
        capacity, virtual = place.sized and place.sized.usable_bytes, place.virtual_bytes
        least = place.least_virtual_bytes if virtual is None else virtual
        if not capacity or (virtual is None and least < limits[0] * capacity):
            yield from place.as_it_is(kind)
            continue
        ratio, at_least = least / capacity, "at least " if virtual is None else ""
        if ratio >= limits[0] * (1 - MARGIN * place.is_told(kind, is_open)):
            yield from place.troubles(
                kind,
                "warning",
                _sentence(
                    f"{place.name} has {'more' if ratio >= limits[0] else 'only just less'} "
                    f"than {limits[0]:g} times its capacity provisioned"
                ),
                f"Overcommit ratio {at_least}{ratio:.2f}: the images have {at_least}{size(least)} virtual size on "
                f"{size(capacity)}. "
                "If guests fill their disks, the pool runs full. Move images elsewhere, or enlarge the pool.",
            )


def held_by_undo(pools: list[StoragePool], is_open: Collection[str]) -> Iterator[Trouble | Unjudged]:
    """Filesystems of which undo copies hold much."""
    kind = events.UNDO_HELD
    for place in filesystems(pools):
        limits = place.thresholds("warn_undo_percent")
        if not limits:
            continue
        capacity, held = place.sized and place.sized.capacity_bytes, place.undo_bytes
        if not capacity:
            yield from place.as_it_is(kind)
            continue
        percent = 100 * held / capacity
        if percent >= limits[0] * (1 - MARGIN * place.is_told(kind, is_open)):
            yield from place.troubles(
                kind,
                "warning",
                f"Undo copies hold a large part of {place.name}",
                f"Undo copies hold {size(held)}, {tenths(percent)} % of the capacity, until their undo windows "
                f"close. The alert is raised at {limits[0]:g} %. The page of the pool lists its undo copies: "
                "discard those that are not needed.",
            )


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]
