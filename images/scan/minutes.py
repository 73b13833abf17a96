"""How much room there is in pools, looked at between scans: one question to each host, in which no image is read.

The agent is asked, or the API of Proxmox VE where that is the only way.

A host is asked every minute as long as one of its pools is half full or has grown since the last look, and else every
five minutes. Some hosts are asked at the same time, and never more than that; one that does not answer is left alone
for five minutes. What is asked for is noted on the rows first, so that no other worker asks the same.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import closing, suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.db import transaction
from django.db.models import Min, Q, QuerySet, Value
from django.db.models.functions import Floor
from django.utils import timezone

from images.alert_rules import trend
from images.rewrite import refusals
from images.scan import from_proxmox, volume_places
from images.selectors.pools import EpochDays
from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.hosts import asking, silence, transport
from storage_admin.hosts.models import Host, PoolMinute, PoolSample, StoragePool
from storage_admin.hosts.proxmox import reader, registration

logger = logging.getLogger(__name__)
T = TypeVar("T")
Kind = StoragePool.Kind

#: What the agent tells of, by its name of it (the request's field is the kind).
ROOM = {Kind.ZFS: volume_places.zfs_room, Kind.RBD: volume_places.rbd_room}

#: From so many percent on a pool is looked at each minute, and where it has grown by so much of its capacity.
HALF, GREW = 50.0, 0.01
#: After which a look is due; the rounds come every 30 seconds, so that looks are a minute and five minutes apart.
OFTEN, SELDOM = timedelta(seconds=45), timedelta(minutes=4, seconds=45)
#: Hosts that are asked at the same time, and seconds for one answer and for all of a round.
AT_ONCE, ANSWER, ROUND = 16, 20.0, 25.0
#: Looks are kept for so long; older than ``DENSE`` one in ten minutes.
KEPT, DENSE = timedelta(days=1), timedelta(hours=3)


def look(now: datetime, *, but_not: Collection[int] = (), only: int | None = None) -> None:
    """Asks the hosts that are due, and writes what they tell.

    Args:
        but_not: ids of hosts that others ask.
        only: id of the one host to ask; ``None`` for all.
    """
    due = {host: rows for host, rows in _pools(but_not, only).items() if _claimed(rows, now)}
    silent = dict(due)
    for host, (at, answer) in ask_at_once(due, lambda host: _told(host, due[host])):
        _write(host, {row.pk for row in silent.pop(host)}, answer, at)
    for rows in silent.values():
        StoragePool.objects.filter(pk__in=[row.pk for row in rows]).update(space_due=now + SELDOM)


def ask_at_once(hosts: Collection[Host], question: Callable[[Host], T]) -> Iterator[tuple[Host, T]]:
    """What hosts answer, as it comes; those that do not answer in time, or with an error, are left out.

    Args:
        question: asked in threads that touch no database.
    """
    if not hosts:
        return
    threads = ThreadPoolExecutor(min(AT_ONCE, len(hosts)), "ask")
    asked: dict[Future[T], Host] = {threads.submit(question, host): host for host in hosts}
    try:
        with suppress(NotInTimeError):
            for done in as_completed(asked, ROUND):
                try:
                    yield asked[done], done.result()
                except (HostError, RefusedError) as error:
                    logger.info("%s was passed over: %s", asked[done], error.detail)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _pools(but_not: Collection[int], only: int | None) -> dict[Host, list[StoragePool]]:
    """The pools that can be looked at, by their hosts. What a scan found silent or away is the next scan's."""
    rows = StoragePool.objects.exclude(host__in=but_not).exclude(host__status=Host.Status.UNREACHABLE)
    rows = rows.exclude(state__in=(StoragePool.SILENT, "missing", *refusals.NOT_ENTERED)).exclude(last_scanned=None)
    folders = Q(kind__in=refusals.FOLDERS) & ~Q(path_bytes=b"")
    read = Q(kind__in=(Kind.LVMTHIN, *ROOM), volume_facts__isnull=False)
    told, by_api = Q(source=StoragePool.Source.PROXMOX), Q(host__transport=Host.Transport.API)
    rows = rows.filter((by_api & told) | (~by_api & (folders | read))).select_related("host")
    found: dict[Host, list[StoragePool]] = defaultdict(list)
    for row in rows.filter(host=only) if only is not None else rows:
        if row.host.by_api_alone or _has_agent(row.host):
            found[row.host].append(row)
    return found


def _has_agent(host: Host) -> bool:
    reached = transport.is_here(host) or (transport.by_ssh(host) and host.transport != Host.Transport.PLAIN)
    return reached and not refusals.without_agent(host)


def _claimed(rows: Iterable[StoragePool], now: datetime) -> bool:
    """Whether one of them is due, and nobody else has begun to look."""
    due = Q(space_due=None) | Q(space_due__lte=now)
    own = StoragePool.objects.filter(pk__in=[row.pk for row in rows])
    return own.filter(due).update(space_due=now + OFTEN) > 0


def _told(host: Host, rows: Iterable[StoragePool]) -> tuple[datetime, dict[str, Any]]:
    """What a host tells: when it was asked, and the answer, with the path of each folder."""
    at = timezone.now()
    if host.by_api_alone:
        with closing(registration.client(host, ANSWER)) as api:
            return at, {"storages": reader.read_room(api, host.node)}
    paths = [bytes(row.path_bytes) for row in rows if row.kind in refusals.FOLDERS]
    thin = any(row.kind == Kind.LVMTHIN for row in rows)
    rooms: dict[str, list[str]] = {
        kind: sorted({room(row) for row in rows if row.kind == kind}) for kind, room in ROOM.items()
    }
    args = {"folders_b64": [b64(path) for path in paths], "thin": thin, **rooms}
    answer = asking.ask(host, "space", args, seconds=ANSWER)
    return at, answer | {"folders": dict(zip(paths, answer["folders"], strict=True))}


def _write(host: Host, ids: Collection[int], answer: dict[str, Any], at: datetime) -> None:
    thin = {f"{one['group']}/{one['name']}": one for one in answer.get("thin", ())}
    with transaction.atomic():
        rows = list(StoragePool.objects.select_for_update().filter(host=host, pk__in=ids).order_by("pk"))
        often = [_take(row, answer, thin, at) for row in rows]
        due = at + (OFTEN if any(often) else SELDOM)
        for row in rows:
            row.space_due = due
        columns = ["capacity_bytes", "available_bytes", "reserved_bytes", "volume_facts", "space_seen", "space_due"]
        StoragePool.objects.bulk_update(rows, columns)
        PoolMinute.objects.bulk_create(
            PoolMinute(pool=row, at=at, used_bytes=row.used_bytes, metadata_used_bytes=row.metadata_used_bytes)
            for row in rows
            if row.space_seen == at and row.used_bytes is not None
        )
    if away := [path for path, told in answer.get("folders", {}).items() if (told or {}).get("silent")]:
        silence.fall_silent(host, away, at)


def _take(row: StoragePool, answer: dict[str, Any], thin: dict[str, Any], at: datetime) -> bool:
    """Takes what was told of a pool, and says whether it is to be looked at often."""
    before = row.used_bytes
    if "storages" in answer:
        if (storage := answer["storages"].get(row.name)) is not None and storage.active:
            row.take_space(from_proxmox.room(storage), at)
    elif row.kind == Kind.LVMTHIN:
        told = thin.get(volume_places.lvm_name(row))
        if told is not None:
            row.volume_facts = (row.volume_facts or {}) | volume_places.fullness(told)
            size, used = told["size"], told["used"]
            row.take_space({} if size is None else {"capacity_bytes": size, "available_bytes": size - used}, at)
    elif row.kind in ROOM:
        row.take_space(answer[row.kind].get(ROOM[Kind(row.kind)](row)) or {}, at)
    else:
        told = answer["folders"].get(bytes(row.path_bytes))
        # Another filesystem than the pool's is there while that is not mounted.
        if told is not None and told.get("fs_key") == row.told_fs_key:
            row.take_space(told, at)
    grown = 0 if before is None or row.used_bytes is None else row.used_bytes - before
    fullest = max(row.used_percent or 0.0, row.metadata_percent or 0.0)
    return fullest >= HALF or grown >= GREW * (row.capacity_bytes or 1)


def thin_out(now: datetime) -> None:
    """Forgets looks of more than a day ago, all but one in ten minutes of those that are hours old, and all but one a
    day of what scans wrote down before the days that anything is worked out from.
    """
    PoolMinute.objects.filter(at__lt=now - KEPT).delete()
    _keep_some(PoolMinute.objects.filter(at__lt=now - DENSE), a_day=144.0)
    _keep_some(PoolSample.objects.filter(at__lt=now - timedelta(days=trend.WINDOW + 1)), a_day=1.0)


def _keep_some(rows: QuerySet[Any], a_day: float) -> None:
    """Deletes all but so many a day of each pool's."""
    parts = rows.annotate(part=Floor(EpochDays("at") * Value(a_day))).order_by().values("pool", "part")
    rows.exclude(pk__in=parts.annotate(first=Min("pk")).values("first")).delete()
