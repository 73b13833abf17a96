"""A look at some images on the spot, for whoever is about to be refused, or let through, for what a scan has seen.

Who has an image open, whether its guest runs, whether its file is there and unchanged, how much space is free beside
it: all that may have passed since the scan. Each host is asked once, all hosts at the same time, and what one of them
tells is written to the rows as a scan writes it. One that does not answer within ``LOOK_SECONDS`` of the settings keeps
its old facts, with their old time, and holds up nobody any longer.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from celery import current_app
from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from images.models import Image
from images.rewrite import holding, refusals, space
from images.scan import bulk_write, hypervisors, run
from images.scan import rows as scan_rows
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.guests.models import Guest
from storage_admin.hosts import asking, silence, transport
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import routing
from storage_admin.jobs.models import Job

#: Questions to one host without an answer so far, beyond which it gets no further ones.
MOST_UNANSWERED = 12
#: Seconds after which a question is given up for good.
GIVEN_UP = 15.0
#: Seconds between two looks for what a host's own worker has found.
POLL = 0.05
#: Seconds for which the look that was made when a job was submitted is as good as one when it begins.
FRESH = 2.0
#: Images that one look may be at on each host.
AT_ONCE = 2000

_lock = threading.Lock()
_asked: dict[int, int] = defaultdict(int)


@dataclass
class _Told:
    """What a host has told, or the error by which it did not."""

    images: list[dict[str, Any]] = field(default_factory=list)
    pools: list[dict[str, Any]] = field(default_factory=list)
    busy: list[tuple[str, str, str]] = field(default_factory=list)
    #: State and lock by kind and uid.
    guests: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case protocol.IMAGE:
                self.images.append(event)
            case protocol.POOL:
                self.pools.append(event)
            case protocol.SEEN:
                self.busy = [(str(dev), str(number), why) for dev, number, why in event["busy"]]


def at(images: Iterable[Image], job: Job | None = None) -> frozenset[int]:
    """Looks at images and all that they stand on, and writes what is so by now.

    Args:
        images: rows with their hosts; they stay as they are: fetch them again.
        job: the one that is about to begin with them: its worker waits until the host answers or is given up.

    Returns:
        Ids of the hosts that told everything in time.
    """
    if not settings.LOOK_SECONDS:
        return frozenset()
    deadline = time.monotonic() + (settings.LOOK_SECONDS if job is None else GIVEN_UP)
    hosts: dict[int, Host] = {}
    wanted: dict[int, list[int]] = defaultdict(list)
    for image in images:
        # Also one that did not answer last: it may again, and else every job is refused until the next scan.
        if not refusals.without_agent(image.host):
            hosts[image.host_id] = image.host
            wanted[image.host_id].append(image.pk)
    now = timezone.now()
    others = {pk: queue for pk, queue in _others(hosts.values()).items() if _rang(pk, wanted[pk], queue)}
    asked = {pk: _chains(pk, ids[:AT_ONCE]) for pk, ids in wanted.items() if pk not in others}
    answered = {pk for pk, rows in asked.items() if job is not None and _were_looked_at(hosts[pk], rows, now)}
    waiting = [(hosts[pk], _start(hosts[pk], rows)) for pk, rows in asked.items() if pk not in answered]
    for host, (told, threads) in waiting:
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads) or not threads:
            continue
        if bug := next((error for error in told.errors if not isinstance(error, HostError | RefusedError)), None):
            raise bug
        if not told.errors:
            _write(host, {image.pk for image in asked[host.pk]}, told, now, job)
            answered.add(host.pk)
    for pk in others:
        while not (seen := Image.objects.filter(pk__in=wanted[pk][:1], seen__gte=now).exists()):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL)
        answered |= {pk} if seen else set()
    return frozenset(answered)


def _were_looked_at(host: Host, images: list[Image], now: datetime) -> bool:
    """Whether a look told of all of them just now, and no scan has written anything since."""
    seen = [image.seen for image in images]
    recent = bool(seen) and all(0 <= (now - at).total_seconds() <= FRESH for at in seen)
    return recent and (host.last_seen is None or host.last_seen < min(seen))


def _others(hosts: Iterable[Host]) -> dict[int, str]:
    """Ids of the hosts that only a worker of their own reaches, and its queue."""
    far = [host.pk for host in hosts if not transport.is_here(host) and not transport.by_ssh(host)]
    return {pk: queue for pk, queue in routing.hosts_of_others().items() if pk in far} if far else {}


def _rang(host_id: int, ids: list[int], queue: str) -> bool:
    """Whether a host's worker was asked to look: what it finds, it writes itself."""
    try:
        current_app.send_task(
            "images.tasks.look_at_images", (host_id, ids[:AT_ONCE]), queue=queue, expires=GIVEN_UP, retry=False,
            ignore_result=True,
        )  # fmt: skip
    except (OperationalError, RedisError, OSError):
        return False  # the broker is away: the old facts stand
    return True


def _chains(host_id: int, ids: Collection[int]) -> list[Image]:
    """These images and what they stand on, also where that was missing at the last scan; nothing that is set aside."""
    there = Image.objects.filter(host=host_id, aside_since=None, deleted_at=None, pool__kind__in=refusals.FOLDERS)
    there = there.exclude(pool__path_bytes=b"").select_related("pool").defer("header", "estimate")
    found: dict[int, Image] = {}
    which = Q(pk__in=list(ids))
    while rows := [row for row in there.filter(which) if row.pk not in found]:
        found |= {row.pk: row for row in rows}
        keys = {row.backing_key for row in rows if row.backing_key}
        bases = {row.backing_id for row in rows if row.backing_id is not None}
        which = Q(path_key__in=keys) | Q(pk__in=bases)
    return list(found.values())


def _start(host: Host, images: list[Image]) -> tuple[_Told, list[threading.Thread]]:
    """Asks a host, in threads that touch no database. None are started where it leaves too many without an answer."""
    told = _Told()
    args = _arguments(images)

    def look() -> None:
        asking.ask(host, "look", args, seconds=GIVEN_UP, take=told.take)

    def domains() -> None:
        states = control.states(host)
        told.guests.update({(str(Guest.Kind.DOMAIN), uid): (state, "") for uid, state in states.items()})

    def others() -> None:
        told.guests.update({(one.kind, one.uid): (one.state, one.lock) for one in hypervisors.guests_now(host)})

    questions: list[Callable[[], None]] = [look] if images else []
    questions += [domains] if images and host.capabilities.get("libvirt") == "present" else []
    questions += [others] if images and (host.has_proxmox or hypervisors.may_have_containers(host)) else []
    with _lock:
        if _asked[host.pk] + len(questions) > MOST_UNANSWERED:
            return told, []
        _asked[host.pk] += len(questions)
    threads = [threading.Thread(target=_ask, args=(host.pk, one, told), daemon=True) for one in questions]
    for thread in threads:
        thread.start()
    return told, threads


def _ask(host_id: int, question: Callable[[], None], told: _Told) -> None:
    try:
        question()
    except Exception as error:  # noqa: BLE001 (whoever waits raises what is a bug)
        told.errors.append(error)
    finally:
        with _lock:
            _asked[host_id] -= 1


def _arguments(images: list[Image]) -> dict[str, Any]:
    by_pool: dict[int, list[Image]] = defaultdict(list)
    for image in images:
        by_pool[image.pool_id].append(image)
    return {
        "pools": [
            {
                "id": pool_id,
                "path_b64": b64(bytes(rows[0].pool.path_bytes)),
                "kind": "dir",
                # Of one that was missing all is told anew.
                "known_b64": b64(b"".join(bytes(row.fingerprint) for row in rows if row.missing_since is None)),
            }
            for pool_id, rows in by_pool.items()
        ],
        "named_b64": [b64(bytes(image.path_bytes)) for image in images],
    }


def _write(host: Host, ids: set[int], told: _Told, at: datetime, job: Job | None) -> None:
    with transaction.atomic():
        host = Host.objects.select_for_update().get(pk=host.pk)
        pools = {pool.pk: pool for pool in StoragePool.objects.select_for_update().filter(host=host).order_by("pk")}
        facts = [run.unmounted_is_missing(pools[one["id"]], one) for one in told.pools if one["id"] in pools]
        _write_pools(pools, facts, at)
        silence.answers(host)
        entered = [one for one in facts if not run.was_not_entered(one)]
        rewritten = run.rewritten_since(host.pk, at, but=0 if job is None else job.pk)
        rows = Image.every.filter(host=host, pk__in=ids, pool__in=[one["id"] for one in entered], aside_since=None)
        rows = rows.exclude(path_key__in=rewritten)
        changed = _write_files(host, rows, told, entered, at)
        changed |= bulk_write.set_held(rows, told.busy)
        changed |= _write_guests(host, told)
        if changed:
            bulk_write.forget_old_estimates(host)
            bulk_write.resolve_host(host)
            bulk_write.add_samples(host, at)
            holding.note_seen(host.pk, host.resolved_scan + 1)
            rows.filter(changed_scan=host.resolved_scan + 1).update(changed_scan=host.resolved_scan)
            space.write_totals(pools[one["id"]] for one in entered)
        # Whatever was not told anew is as it was.
        rows.filter(missing_since=None).update(seen=at)


def _write_files(host: Host, rows: QuerySet[Image], told: _Told, entered: list[dict[str, Any]], at: datetime) -> bool:
    """What is otherwise than it was, and what is not there any more."""
    known = set(rows.values_list("path_key", flat=True))
    stamp: Any = connection.ops.adapt_datetimefield_value(at)
    # As of a scan after the last one, so that its estimates and samples are looked through.
    found = [scan_rows.row_of(event, host.resolved_scan + 1, stamp) for event in told.images]
    found = [row for row in found if row[-1] in known]
    if found:
        scan_rows.upsert(host.pk, stamp, found)
    gone = 0
    for one in entered:
        others = Image.every.filter(host=host).exclude(path_key__in=[row[-1] for row in found])
        gone += run.mark_gone(rows.filter(pool=one["id"], fingerprint__in=run.vanished_prints(one)), at, others)
    return bool(found or gone)


def _write_guests(host: Host, told: _Told) -> bool:
    """The states and locks that are others than they were."""
    others = []
    for guest in Guest.objects.filter(host=host).only("kind", "uid", "state", "lock") if told.guests else []:
        state, lock = told.guests.get((guest.kind, guest.uid), (guest.state, guest.lock))
        if (guest.state, guest.lock) != (state[:20], lock[:100]):
            guest.state, guest.lock = state[:20], lock[:100]
            others.append(guest)
    Guest.objects.bulk_update(others, ["state", "lock"], batch_size=200)
    return bool(others)


def _write_pools(pools: dict[int, StoragePool], facts: list[dict[str, Any]], at: datetime) -> None:
    """How much space there is, and whether the folders are there."""
    for one in facts:
        pool = pools[one["id"]]
        columns = ["capacity_bytes", "available_bytes", "reserved_bytes", "space_seen"]
        if run.was_not_entered(one) or pool.state in {"missing", StoragePool.SILENT, *refusals.NOT_ENTERED}:
            pool.state, pool.state_detail = one["state"], one["detail"]
            columns += ["state", "state_detail"]
        pool.take_space(one, at)
        pool.save(update_fields=columns)
