"""One look: everything that is wrong now, as the open alerts."""

from collections.abc import Iterable, Iterator
from datetime import datetime

from images.alert_rules import jobs as of_jobs
from images.alert_rules import pools as of_pools
from images.alert_rules import snapshots
from images.models import Image, ImageUse
from storage_admin.events import sending
from storage_admin.events import services as events
from storage_admin.events.models import Alert
from storage_admin.events.services import Trouble, Unjudged
from storage_admin.hosts import silence
from storage_admin.hosts.models import Host, StoragePool

#: So many images of a pool have an alert each; the rest share one: a base that vanishes may break thousands.
EACH = 20
BROKEN = (Image.State.CHAIN_BROKEN, Image.State.CHAIN_CYCLE)


def look(now: datetime) -> None:
    """Opens, updates and closes alerts after what the database knows. Two looks at once have one effect.

    What raises alerts by itself (policies, benchmarks) closes them by itself; here they end with their pool.
    """
    pools, is_open = _pools(), _open_alerts()
    found: dict[str, Iterable[Trouble | Unjudged]] = {
        events.POOL_OVERCOMMIT: of_pools.overcommitted(pools, is_open),
        events.UNDO_HELD: of_pools.held_by_undo(pools, is_open),
        events.UNDO_KEPT: of_jobs.undo_kept(),
        events.CLOCK_JUMPED: of_jobs.clock_changed(),
        events.HOST_UNREACHABLE: _unreachable(),
        events.POOL_CHANGED: [trouble for pool in pools if (trouble := _not_entered(pool)) is not None],
        events.POOL_SILENT: [silence.trouble(pool) for pool in pools if pool.state == StoragePool.SILENT],
        events.JOB_STALLED: of_jobs.stalled(now),
        events.SNAPSHOTS_FORGOTTEN: snapshots.forgotten(now),
        events.BROKEN_CHAIN: [
            *_images(events.BROKEN_CHAIN, BROKEN, "has a broken chain", "have broken chains"),
            *_merged_in_use(),
        ],
        events.FORMAT_MISMATCH: _images(
            events.FORMAT_MISMATCH, (Image.State.FORMAT_MISMATCH,), "contradicts its format", "contradict their formats"
        ),
    }
    for kind, troubles in found.items():
        events.reconcile(kind, troubles)
    _look_at_space(pools, is_open, now)
    _close_where_the_pool_is_gone({pool.pk for pool in pools})
    sending.close_where_nobody_is_told()


def look_at_space(now: datetime) -> None:
    """The same for what a look at how full pools are may change."""
    _look_at_space(_pools(), _open_alerts(), now)


def _look_at_space(pools: list[StoragePool], is_open: set[str], now: datetime) -> None:
    events.reconcile(events.POOL_OVER_THRESHOLD, of_pools.over_threshold(pools, is_open))
    events.reconcile(events.POOL_DAYS_UNTIL_FULL, of_pools.full_soon(pools, is_open, now))


def _pools() -> list[StoragePool]:
    return list(StoragePool.objects.select_related("host").defer("path_bytes", "host__capabilities").order_by("pk"))


def _open_alerts() -> set[str]:
    """Keys of the open alerts, each alone and behind its severity."""
    known = Alert.objects.filter(closed=None).values_list("key", "severity")
    return {name for key, severity in known for name in (key, f"{severity} {key}")}


def _not_entered(pool: StoragePool) -> Trouble | None:
    """A folder that no job goes into any more. One that was never listed is said to whoever registers it."""
    if pool.state == "changed":
        severity, title, detail = "danger", f"The path of {pool} leads to a different folder", pool.state_detail
    elif pool.state == "not_listed" and pool.last_scanned is not None:
        severity, title = "warning", f"{pool} is no longer in the list of image folders of its host"
        detail = f"{pool.state_detail.rstrip('.')}."
    else:
        return None
    return Trouble(
        f"{events.POOL_CHANGED}:{pool.pk}", severity, title, f"{detail} No job runs in this pool until this is "
                                                             "resolved.",
        pool.host.slug, "pool", pool.pk, str(pool),
    )  # fmt: skip


def _unreachable() -> Iterator[Trouble]:
    for host in Host.objects.filter(status=Host.Status.UNREACHABLE).defer("capabilities"):
        seen = f"Last seen {host.last_seen:%Y-%m-%d %H:%M} UTC." if host.last_seen else "It has never answered."
        yield Trouble(
            f"{events.HOST_UNREACHABLE}:{host.pk}", "danger", f"{host.name} does not answer",
            f"{host.status_detail} {seen} Its numbers are as of then.", host.slug, "host", host.pk, host.name,
        )  # fmt: skip


def _images(kind: str, states: tuple[str, ...], one: str, many: str) -> Iterator[Trouble]:
    # In the words of the index of the few that are not.
    rows = Image.objects.exclude(state=Image.State.OK).filter(state__in=states).order_by("pool_id", "pk")
    rows = rows.select_related("pool__host").defer("pool__path_bytes", "pool__host__capabilities")
    pool: StoragePool | None = None
    count = 0
    for image in rows.iterator():
        if pool is not None and image.pool_id != pool.pk:
            yield from _rest(kind, pool, count - EACH, many)
            count = 0
        pool, count = image.pool, count + 1
        if count <= EACH:
            yield Trouble(
                f"{kind}:{image.pk}", "danger", f"{image.name} {one}",
                f"{image.state_detail} The image is in {pool}. Guests that use it do not start, and jobs cannot "
                "rewrite it.",
                pool.host.slug, "image", image.pk, image.name,
            )  # fmt: skip
    if pool is not None:
        yield from _rest(kind, pool, count - EACH, many)


def _merged_in_use() -> Iterator[Trouble]:
    """Overlays that were merged, and that a guest names: what it reads through them may be damaged."""
    rows = Image.objects.exclude(state=Image.State.OK)  # in the words of the index of the few that are not
    rows = rows.filter(state=Image.State.MERGED, pk__in=ImageUse.objects.values("image"))
    for image in rows.select_related("pool__host").order_by("pk")[:EACH]:
        yield Trouble(
            f"{events.BROKEN_CHAIN}:{image.pk}", "danger", f"A guest names {image.name}, which was merged",
            image.state_detail, image.pool.host.slug, "image", image.pk, image.name,
        )  # fmt: skip


def _rest(kind: str, pool: StoragePool, count: int, many: str) -> Iterator[Trouble]:
    if count > 0:
        yield Trouble(
            f"{kind}:pool:{pool.pk}", "danger", f"More images in {pool} {many}",
            f"{count:,} more than the {EACH} that have their own alerts. See the images page for all of them.",
            pool.host.slug, "pool", pool.pk, str(pool),
        )  # fmt: skip


def _close_where_the_pool_is_gone(pools: set[int]) -> None:
    raised = Alert.objects.filter(kind=events.BENCHMARK_REGRESSION, closed=None).values_list("key", "target_id")
    for key, pool_id in raised:
        if pool_id not in pools:
            events.close_alert(key)
