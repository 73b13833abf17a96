"""Pools that fill up within hours, by the looks between scans; what LVM would do about it is told as well."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from images.alert_rules.rise import ADDED, ADDED_STILL, STALE, Look, Rise, rise
from images.selectors.pools import looks, lowest, lows_and_highs
from storage_admin.hosts.models import StoragePool
from storage_admin.words import seconds, size

#: A rise that came and went on so many of the last days is one that goes again: a backup of each night.
SEEN_BEFORE = 2
#: How much higher than on those days it may be by now, as part of how much it has risen.
AS_HIGH = 0.1


@dataclass(frozen=True)
class Filling:
    """How a pool fills up.

    Args:
        rise: ``None`` where an alert is open and nobody has looked lately.
        metadata: whether it is the metadata of a thin pool that does.
    """

    pool: StoragePool
    rise: Rise | None
    metadata: bool = False

    @property
    def minutes(self) -> float:
        """Until it is full."""
        return self.rise.minutes if self.rise else float("inf")

    @property
    def detail(self) -> str:
        """What is told of it."""
        if self.rise is None:
            return ""
        free = self.pool.available_bytes
        if self.metadata:
            free = (self.pool.metadata_bytes or 0) - (self.pool.metadata_used_bytes or 0)
        what = "metadata of the thin pool" if self.metadata else "used space"
        at = f" at {self.pool.space_at:%H:%M} UTC" if self.pool.space_at else ""
        return (
            f"Forecast full in about {seconds(self.minutes * 60)}: {what} has grown by "
            f"{size(round(self.rise.bytes_a_minute))} a minute for {seconds(self.rise.since * 60)}, and {size(free)} "
            f"were free{at}.{extension(self.pool)}"
        )


def extension(pool: StoragePool) -> str:
    """A sentence about what LVM does when a thin pool fills up; empty for what is none, or where nobody has told."""
    told = pool.volume_facts or {}
    if pool.kind != StoragePool.Kind.LVMTHIN or "group_free" not in told:
        return ""
    free = f"{size(told['group_free'])} of its volume group were free at the last scan"
    if "extend_at" not in told:
        return f" LVM does not extend it automatically; {free}."
    return f" LVM extends it by {told['extend_by']} % when it is {told['extend_at']} % used; {free}."


def is_looked_at(pool: StoragePool, now: datetime) -> bool:
    """Whether a look between scans tells of now."""
    return pool.space_seen is not None and now - pool.space_seen <= timedelta(minutes=STALE)


def filling(pools: Collection[StoragePool], told: Collection[int], now: datetime) -> dict[int, Filling]:
    """The pools that fill up within hours, by their ids.

    Args:
        told: ids of pools of which an alert is open.
    """
    # Most pools need no further look: they have too much room, or got too little in the last day.
    used = [pool for pool in pools if _may_fill(pool, (0, 0), still=pool.pk in told)]
    lows = lowest([pool.pk for pool in used], now) if used else {}
    close = [pool for pool in used if pool.pk in lows and _may_fill(pool, lows[pool.pk], still=pool.pk in told)]
    if not close:
        return {}
    known = looks([pool.pk for pool in close], now)
    days = lows_and_highs([pool.pk for pool in close], now)
    found = {}
    for pool in close:
        rows = [(one, (now - one.at).total_seconds() / 60) for one in known.get(pool.pk, [])]
        data = [Look(age, one.used_bytes) for one, age in rows]
        metadata = [Look(age, one.metadata_used_bytes) for one, age in rows if one.metadata_used_bytes is not None]
        if not is_looked_at(pool, now):
            if pool.pk in told:
                found[pool.pk] = Filling(pool, None)
            continue
        is_told = pool.pk in told
        rises = []
        of_data = rise(data, pool.available_bytes or 0, told=is_told)
        if of_data is not None and (is_told or not _comes_and_goes(data, of_data, days.get(pool.pk, ()))):
            rises.append(Filling(pool, of_data))
        if pool.metadata_bytes is not None and pool.metadata_used_bytes is not None:
            of_metadata = rise(metadata, pool.metadata_bytes - pool.metadata_used_bytes, told=is_told)
            rises += [Filling(pool, of_metadata, metadata=True)] if of_metadata is not None else []
        if rises:
            found[pool.pk] = min(rises, key=lambda one: one.minutes)
    return found


def _may_fill(pool: StoragePool, low: tuple[int, int | None], *, still: bool) -> bool:
    """Whether as much was added as a rise has to, if so much of data and metadata was used at its beginning."""
    times = ADDED_STILL if still else ADDED
    if pool.used_bytes is not None and pool.available_bytes is not None:
        added = pool.used_bytes - low[0]
        if added > 0 and added >= times * pool.available_bytes:
            return True
    if low[1] is None or pool.metadata_bytes is None or pool.metadata_used_bytes is None:
        return False
    added = pool.metadata_used_bytes - low[1]
    return added > 0 and added >= times * (pool.metadata_bytes - pool.metadata_used_bytes)


def _comes_and_goes(data: Sequence[Look], found: Rise, days: Sequence[tuple[int, int]]) -> bool:
    """Whether the pool was about as full on several of the last days, and not for all of the day."""
    now = data[-1].used_bytes
    lows = [low for low, high in days if now - high <= AS_HIGH * (now - low)]
    return sum(now - low >= found.added_bytes / 2 for low in lows) >= SEEN_BEFORE
