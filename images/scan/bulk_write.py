"""Many rows at once, in as few statements as possible."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.db import connection
from django.db.models import F, Q, QuerySet

from images.models import Image, ImageSample, ImageUse
from images.orphans import host_facts
from images.rewrite import refusals, space
from images.scan import shared_storages
from images.scan.linking import Disk, Resolved, Resolver, Row
from images.scan.rows import stand_in
from storage_admin.guests.models import GuestDisk
from storage_admin.hosts.models import Host, PoolSample, StoragePool
from storage_admin.hosts.names import path_key

ROW_COLUMNS = (
    "id", "name", "path_key", "dev", "inode", "format", "unreadable", "missing_since", "admin_format", "backing_file",
    "backing_format", "backing_key", "backing_found", "backing_unsafe", "held", "pool_id", "path", "aside_since",
    "deleted_at", "merged", "mtime_ns",
)  # fmt: skip
#: The states of a pool of which the images may all be as last seen.
AS_LAST_SEEN = frozenset({"missing", "changed", "not_listed", "unreadable", StoragePool.SILENT})
#: What :func:`resolve_host` decides of an image, in the order in which it is compared and written.
RESOLVED_COLUMNS = (
    "backing_id", "root_id", "chain_depth", "overlays_count", "declared_format", "declared_by", "state",
    "state_detail", "in_use", "in_use_detail", "orphan", "orphan_evidence", "listed",
)  # fmt: skip


def resolve_host(host: Host) -> None:
    """Works out links, states and owners of all images of a host, and writes those that came out otherwise."""
    shared = shared_storages.unknown(host)
    pools = StoragePool.objects.filter(host=host)
    unknown = {pool.pk: pool.owners_unknown or host.owners_unknown or shared.get(pool.pk, "") for pool in pools}
    unseen = {pool.pk for pool in pools if pool.state in AS_LAST_SEEN}
    of_volumes = {pool.pk for pool in pools if pool.kind not in refusals.FOLDERS}
    rows, before = [], {}
    for values in _raw_rows(host, (*ROW_COLUMNS, *RESOLVED_COLUMNS)):
        (
            row_id, name, path_key, dev, inode, format_, unreadable, missing_since, admin_format, backing_file,
            backing_format, backing_key, backing_found, backing_unsafe, held, pool_id, path, aside_since, deleted_at,
            merged, written, *resolved,
        ) = values  # fmt: skip
        before[row_id] = resolved
        rows.append(
            Row(
                row_id, name, path_key, f"{dev}:{inode}", format_, unreadable, missing_since is not None, admin_format,
                backing_file, backing_format, backing_key, backing_found, backing_unsafe, held,
                unknown.get(pool_id, ""), path, "deleted" if deleted_at else "set_aside" if aside_since else "",
                pool_id in unseen, _merged_by(merged, f"{dev}:{inode}:{written}"), pool_id in of_volumes,
            )
        )  # fmt: skip
    rows.sort()  # by id; the database would copy all columns to do that
    answers = Resolver(rows, _disks(host), host_facts.of(host)).resolve()
    changed, sound_again = [], []
    for row_id, answer in answers.items():
        after = _resolved_values(answer)
        *plain, evidence, listed = before[row_id]
        if after != (*plain, _evidence(evidence), listed):
            changed.append((*after[:-2], json.dumps(answer.orphan_evidence), True, row_id))
            if answer.state == Image.State.OK != plain[RESOLVED_COLUMNS.index("state")]:
                sound_again.append(row_id)
    _update(Image, RESOLVED_COLUMNS, changed)
    away = any(answer.state != Image.State.OK for answer in answers.values())
    if sound_again or away or any(pool.network for pool in pools):
        space.settle_offers(host, sound_again)
    _write_uses(host, answers)


def _merged_by(told: str | None, file: str) -> str:
    """The job that has merged an overlay; empty for none, and where another file has its name by now."""
    found = json.loads(told) if told else None
    return str(found["job"]) if found and found["file"] == file else ""


def _raw_rows(host: Host, columns: Sequence[str]) -> Iterable[tuple[Any, ...]]:
    """Columns of all images of a host as the database gives them: JSON as text, SQLite's booleans as numbers."""
    quote = connection.ops.quote_name
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {', '.join(map(quote, columns))} FROM {quote(Image._meta.db_table)} "  # noqa: S608 (our own names)
            "WHERE host_id = %s",
            [host.pk],
        )
        while batch := cursor.fetchmany(5000):
            yield from batch


@lru_cache(maxsize=1024)
def _evidence(text: str) -> list[str]:
    """A column of evidence; few sentences stand in very many rows."""
    found: list[str] = json.loads(text)
    return found


def _resolved_values(answer: Resolved) -> tuple[Any, ...]:
    return (
        answer.backing_id, answer.root_id, answer.chain_depth, answer.overlays_count, answer.declared_format,
        answer.declared_by, str(answer.state), answer.state_detail, answer.in_use, answer.in_use_detail, answer.orphan,
        answer.orphan_evidence, True,
    )  # fmt: skip


def _disks(host: Host) -> list[Disk]:
    """The disks of its guests, and of those of other nodes that lie in storages which this node lists for all."""
    found = Q(guest__host=host)
    if host.by_api_alone and host.cluster:
        for name in StoragePool.objects.filter(host=host, network=True).values_list("name", flat=True):
            found |= Q(guest__host__cluster=host.cluster, volume__startswith=f"{name}:")
    known = [_disk(disk, host) for disk in GuestDisk.objects.filter(found).exclude(path="").select_related("guest")]
    known_ids = {disk.id for disk in known}
    # By the path alone: a device's number is another one on each host.
    shared = [(disk, path) for disk, path in shared_storages.disks(host)]
    shared = [one for one in shared if one[0].guest.host_id == host.pk or one[0].pk not in known_ids]
    return [
        *known,
        *(
            replace(_disk(disk, host), path_key=path_key(path), inode=":", of_another_host=True)
            for disk, path in shared
        ),
    ]


def _disk(disk: GuestDisk, host: Host) -> Disk:
    name = disk.guest.name if disk.guest.host_id == host.pk else ""
    # One that is not there may be a volume that is inactive, which has this as its inode.
    number = disk.inode or stand_in(bytes(disk.path_bytes))
    return Disk(
        id=disk.pk, guest=name, guest_off=disk.guest.off, path_key=disk.path_key,
        inode=f"{disk.dev}:{number}", format=disk.format, target=disk.target, only_in=disk.only_in,
        kind=disk.guest.kind, uid=disk.guest.uid,
    )  # fmt: skip


def _write_uses(host: Host, answers: dict[int, Resolved]) -> None:
    wanted = {disk.id: answer.id for answer in answers.values() for disk in answer.disks if not disk.of_another_host}
    # What its guests use of other hosts' images, those hosts' own scans say.
    known = dict(ImageUse.objects.filter(image__host=host).values_list("disk_id", "image_id"))
    gone = [disk_id for disk_id, image_id in known.items() if wanted.get(disk_id) != image_id]
    gone += [disk_id for disk_id in wanted if disk_id not in known]
    ImageUse.objects.filter(disk_id__in=gone).delete()
    ImageUse.objects.bulk_create(
        ImageUse(disk_id=disk_id, image_id=image_id)
        for disk_id, image_id in wanted.items()
        if known.get(disk_id) != image_id
    )


def _update(model: type[Image], columns: Sequence[str], values: Sequence[tuple[Any, ...]]) -> None:
    """Updates one row per tuple (its last value is the id): a tenth of what ``bulk_update`` needs for 10,000 rows."""
    if not values:
        return
    quote = connection.ops.quote_name
    assignments = ", ".join(f"{quote(column)} = %s" for column in columns)
    with connection.cursor() as cursor:
        cursor.executemany(f"UPDATE {quote(model._meta.db_table)} SET {assignments} WHERE id = %s", values)  # noqa: S608


def add_samples(host: Host, at: datetime) -> None:
    """One sample for each image that was found at another size than its last sample says, by this scan or by one that
    died since the last whole one.
    """
    quote = connection.ops.quote_name
    image, sample = quote(Image._meta.db_table), quote(ImageSample._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            INSERT INTO {sample} (image_id, at, virtual_size, allocated_size, file_size)
            SELECT i.id, %s, i.virtual_size, i.allocated_size, i.file_size FROM {image} i
            WHERE i.host_id = %s AND i.changed_scan > %s AND NOT EXISTS (
                SELECT 1 FROM {sample} s WHERE s.image_id = i.id
                AND s.at = (SELECT max(at) FROM {sample} l WHERE l.image_id = i.id)
                AND coalesce(s.allocated_size, -1) = coalesce(i.allocated_size, -1)
                AND coalesce(s.file_size, -1) = coalesce(i.file_size, -1)
                AND coalesce(s.virtual_size, -1) = coalesce(i.virtual_size, -1))
            """,  # noqa: S608 (names of our own tables)
            [connection.ops.adapt_datetimefield_value(at), host.pk, host.resolved_scan],
        )


def set_held(images: QuerySet[Image], busy: Iterable[tuple[str, str, str]]) -> bool:
    """Writes which inodes something on a host holds, from ``(device, inode, why)``.

    Args:
        images: those of the host that were looked at.

    Returns:
        Whether anything changed.
    """
    why = {(dev, inode): reason[:200] for dev, inode, reason in busy}
    by_reason: dict[str, list[int]] = defaultdict(list)
    held = images.exclude(held="").order_by().values_list("pk", "dev", "inode", "held")
    for pk, dev, inode, before in held:
        if before != why.get((dev, inode), ""):
            by_reason[why.get((dev, inode), "")].append(pk)
    for (dev, inode), reason in why.items():
        by_reason[reason].extend(images.filter(dev=dev, inode=inode).exclude(held=reason).values_list("pk", flat=True))
    changed = 0
    for reason, ids in by_reason.items():
        changed += images.filter(pk__in=ids).update(held=reason)
    return changed > 0


def sample_pools(pools: Iterable[StoragePool], since: datetime) -> None:
    """How full the pools are, for the day on which each will be full; of those whose space was seen since then."""
    PoolSample.objects.bulk_create(
        PoolSample(
            pool=pool,
            at=pool.space_seen,
            capacity_bytes=pool.capacity_bytes,
            available_bytes=pool.available_bytes,
            reserved_bytes=pool.reserved_bytes,
        )
        for pool in pools
        if pool.capacity_bytes is not None and pool.available_bytes is not None
        if pool.space_seen is not None and pool.space_seen >= since
    )


def forget_old_estimates(host: Host) -> None:
    """An estimate holds for the content that was sampled: images that changed since have none until the next one."""
    changed = Image.every.filter(host=host, changed_scan__gt=host.resolved_scan, analyzed_at__isnull=False)
    changed.filter(~Q(analyzed_fingerprint=F("fingerprint"))).update(
        reclaimable_bytes=None, reclaimable_low=None, reclaimable_high=None, reclaimable_method="", estimate=None
    )
