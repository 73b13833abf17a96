"""What may be wrong with pools: too full, full soon, promised too often, held by undo copies.

A filesystem that several pools lie on is told of once, and so is a storage that several hosts mount; that it is full is
told under each of these hosts to those who are limited to it. An alert that is open closes only a little below its
threshold, and a danger stays one as long: a pool that sits right on it would otherwise open and close one, or get
worse, all day.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from images.selectors.pools import forecasts
from images.space import filesystem_of
from images.templatetags.storage import days, size
from images.watch import trend
from storage_admin.events import services as events
from storage_admin.events.services import Trouble
from storage_admin.hosts.models import StoragePool

#: So many points below its threshold a pool's alert closes, in percent of what can be used.
MARGIN_PERCENT = 2.0
#: The same of other thresholds, as a part of them.
MARGIN = 0.05
MARGIN_DAYS = 0.25
#: Used to so many percent, a pool is in danger whatever its threshold is.
DANGER_PERCENT = 95.0


@dataclass(frozen=True)
class Place:
    """Pools that are one filesystem, or one storage; the first one names them."""

    pools: tuple[StoragePool, ...]

    @property
    def pool(self) -> StoragePool:
        return self.pools[0]

    @property
    def beside(self) -> str:
        """A sentence about the other pools of its host; empty where there are none. Another host may not exist for
        whoever reads it.
        """
        others = [str(pool) for pool in self.pools[1:] if pool.host_id == self.pool.host_id]
        named = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        return f" On the same filesystem: {named}." if others else ""

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


def filesystems(pools: Iterable[StoragePool]) -> list[Place]:
    """Pools of known size by the filesystem that they are on."""
    found: dict[str, list[StoragePool]] = {}
    for pool in pools:
        if pool.capacity_bytes and pool.available_bytes is not None:
            found.setdefault(filesystem_of(pool), []).append(pool)
    return [Place(tuple(group)) for group in found.values()]


def storages(pools: Iterable[StoragePool]) -> list[Place]:
    """Pools of known size by the storage that they are: one export on three hosts is one."""
    found: dict[str, list[StoragePool]] = {}
    for pool in pools:
        if pool.capacity_bytes:
            found.setdefault(pool.shared_key or f"pool {pool.pk}", []).append(pool)
    # Of several hosts that mount it, one may have all the rows.
    return [Place(tuple(sorted(group, key=lambda pool: -pool.images_count))[:1]) for group in found.values()]


def over_threshold(pools: list[StoragePool], is_open: Collection[str]) -> Iterator[Trouble]:
    """Filesystems that are used to their threshold."""
    kind = events.POOL_OVER_THRESHOLD
    for place in filesystems(pools):
        pool = place.pool
        percent, limit = pool.used_percent or 0.0, min(one.warn_percent for one in place.pools)
        danger = DANGER_PERCENT - (MARGIN_PERCENT if f"danger {kind}:{pool.pk}" in is_open else 0.0)
        # The name in the title is one of several: which of them asks for it may be nobody's business who reads it.
        whose = (
            "its threshold" if {one.warn_percent for one in place.pools} == {limit} else "its filesystem's threshold"
        )
        if percent >= limit - (MARGIN_PERCENT if f"{kind}:{pool.pk}" in is_open else 0.0):
            yield from place.troubles(
                kind,
                "danger" if percent >= danger else "warning",
                f"{{pool}} is over {whose} of {limit} %",
                f"{int(percent)} % used: {size(pool.used_bytes)} of {size(pool.capacity_bytes)}, "
                f"{size(pool.available_bytes)} free. Win space back (the images page lists the largest wins), discard "
                "undo copies, or make it larger.",
            )


def full_soon(pools: list[StoragePool], is_open: Collection[str], now: datetime) -> Iterator[Trouble]:
    """Filesystems whose samples carry when they are full, and that is soon."""
    kind = events.POOL_DAYS_UNTIL_FULL
    watched = [place for place in filesystems(pools) if _days(place) is not None]
    opened = [place.pool for place in watched if f"{kind}:{place.pool.pk}" in is_open]
    found = forecasts([place.pool for place in watched], now) | forecasts(opened, now, trend.KNOWN_STILL)
    for place in watched:
        pool, limit, forecast = place.pool, _days(place) or 0, found.get(place.pool.pk)
        if forecast is None or forecast.days > limit * (1 + MARGIN_DAYS * (f"{kind}:{pool.pk}" in is_open)):
            continue
        in_danger = f"danger {kind}:{pool.pk}" in is_open
        yield from place.troubles(
            kind,
            "danger" if forecast.days <= limit / 4 * (1 + MARGIN_DAYS * in_danger) else "warning",
            "{pool} will be full soon",
            f"Full in about {days(forecast.days)} (between {forecast.low:.1f} and {forecast.high:.1f}) if it goes on "
            f"as in the last {forecast.over_days} days: {size(round(forecast.growth_bytes))} a day, "
            f"{size(pool.available_bytes)} free. Told from {limit} days on.",
        )


def _days(place: Place) -> int | None:
    return max((pool.warn_days for pool in place.pools if pool.warn_days is not None), default=None)


def overcommitted(pools: list[StoragePool], is_open: Collection[str]) -> Iterator[Trouble]:
    """Storages that promise guests more than their threshold; most have none, as many promise too much on purpose."""
    kind = events.POOL_OVERCOMMIT
    for place in storages(pools):
        pool, limit = place.pool, place.pool.warn_overcommit
        if limit is None or pool.virtual_bytes is None or not pool.capacity_bytes:
            continue
        ratio = pool.virtual_bytes / pool.capacity_bytes
        if ratio >= limit * (1 - MARGIN * (f"{kind}:{pool.pk}" in is_open)):
            yield from place.troubles(
                kind,
                "warning",
                f"{{pool}} promises more than {limit:g} times its capacity",
                f"{ratio:.2f} times: images of {size(pool.virtual_bytes)} virtual size on {size(pool.capacity_bytes)}. "
                "Where guests fill what they were promised, it is full: move images, or make it larger.",
            )


def held_by_undo(pools: list[StoragePool], is_open: Collection[str]) -> Iterator[Trouble]:
    """Storages of which undo copies hold much."""
    kind = events.UNDO_HELD
    for place in storages(pools):
        pool, limit = place.pool, place.pool.warn_undo_percent
        if limit is None or not pool.capacity_bytes:
            continue
        percent = 100 * pool.undo_bytes / pool.capacity_bytes
        if percent >= limit * (1 - MARGIN * (f"{kind}:{pool.pk}" in is_open)):
            yield from place.troubles(
                kind,
                "warning",
                "Undo copies hold much of {pool}",
                f"{size(pool.undo_bytes)}, {int(percent)} % of its capacity, is not free until their windows close; "
                f"told from {limit} % on. The pool's page lists them: discard those that nobody needs.",
            )
