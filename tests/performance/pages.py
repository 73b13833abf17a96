"""The list of images on a page and over REST, with 10,000 and with 100,000 rows."""

import hashlib
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from images.models import Image, ImageUse
from storage_admin.accounts.models import User
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key
from tests.performance.report import Row, seconds

NOTES = (
    (
        "Pages: rows written directly (four hosts, a guest on every tenth image), asked through Django's test "
        "client, which runs all of the dashboard's own code: session, query, template. Median of 20 after 3 to "
        "warm up; queries counted separately. What a filter or a search finds is counted anew for each page, by "
        "reading one index from end to end, so that this part grows with the rows; a number that was kept from "
        "before could be wrong."
    ),
)
REPETITIONS = 20
GIB = 1024**3

ADDRESSES = {
    "page, first": "/images/",
    "page, by name": "/images/?ordering=name",
    "page, filtered and searched": "/images/?format=qcow2&search=web",
    "REST, first": "/api/v1/images/",
    "REST, by reclaimable": "/api/v1/images/?ordering=-reclaimable_bytes",
    "REST, filtered": "/api/v1/images/?format=qcow2&min_chain_depth=2",
}


def measure(_folder: Path, counts: tuple[int, int] = (10_000, 100_000)) -> list[Row]:
    """Queries and time of each address with the smaller and the larger number of rows."""
    client = signed_in()
    times: dict[int, dict[str, float]] = {}
    queries: dict[int, dict[str, int]] = {}
    for count in counts:
        rows_up_to(count)
        times[count] = {what: median_of(client, address) for what, address in ADDRESSES.items()}
        queries[count] = {what: queries_of(client, address) for what, address in ADDRESSES.items()}
    clear()
    return [row for what in ADDRESSES for row in _judged(what, counts, times, queries)]


def signed_in() -> Client:
    user, _ = User.objects.get_or_create(username="bench", defaults={"role": "admin"})
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def clear() -> None:
    """Removes the rows that were made for measuring."""
    Image.every.filter(host__slug__startswith="bench-").delete()
    Host.objects.filter(slug__startswith="bench-").delete()


def _judged(
    what: str, counts: tuple[int, int], times: dict[int, dict[str, float]], queries: dict[int, dict[str, int]]
) -> Iterator[Row]:
    few, many = counts
    before, after = times[few][what], times[many][what]
    growth, asked = after / before, queries[many][what]
    most = math.inf if "filtered" in what else 1.5
    wanted = "at most 15 queries, 100 ms" if most == math.inf else f"at most {most} times, 15 queries, 100 ms"
    yield Row(
        f"list of images, {what}: {many:,} rows", seconds(after), f"{few:,} rows: {seconds(before)}",
        f"{growth:.2f} times the time, {asked} queries", wanted,
        growth <= most and asked <= 15 and after < 0.1,
    )  # fmt: skip


def _get(client: Client, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 200, f"{address}: {answer.status_code}"
    assert len(answer.content) > 5000, f"{address} shows nothing"
    assert b"Ignored invalid" not in answer.content, f"{address} asks for something else"


def median_of(client: Client, address: str) -> float:
    taken = []
    for number in range(REPETITIONS + 3):
        begin = time.perf_counter()
        _get(client, address)
        if number >= 3:
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def queries_of(client: Client, address: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        _get(client, address)
    return len(captured)


def rows_up_to(count: int) -> None:
    """Fills the inventory with plausible rows until there are ``count``."""
    pools = [_pool(number) for number in range(4)]
    there = Image.objects.count()
    for start in range(there, count, 2000):
        Image.every.bulk_create(_image(number, pools[number % 4]) for number in range(start, min(start + 2000, count)))
    _guests()
    for pool in pools:
        pool.images_count = Image.objects.filter(pool=pool).count()
        pool.save()


def _pool(number: int) -> StoragePool:
    host, _ = Host.objects.get_or_create(
        slug=f"bench-{number}",
        defaults={"name": f"node{number}", "kind": Host.Kind.LOCAL, "status": "ok", "owners_unknown": ""},
    )
    raw = f"/srv/images{number}".encode()
    pool, _ = StoragePool.objects.get_or_create(
        host=host, path_key=path_key(raw),
        defaults={
            "name": f"images{number}", "path": raw.decode(), "path_bytes": raw, "state": "ok", "fs_key": f"fs{number}",
            "capacity_bytes": 4000 * GIB, "available_bytes": 900 * GIB, "last_scanned": timezone.now(),
        },
    )  # fmt: skip
    return pool


def _image(number: int, pool: StoragePool) -> Image:
    kind = ("web", "mail", "db", "build", "desktop")[number % 5]
    name = f"{kind}-{number:06}.{'raw' if number % 7 == 0 else 'qcow2'}"
    path = f"{pool.path}/{name}"
    allocated = (number * 7919) % 60 * GIB + number * 4096
    return Image(
        host=pool.host, pool=pool, path=path, name=name, path_bytes=path.encode(), path_key=path_key(path.encode()),
        fingerprint=hashlib.blake2b(path.encode(), digest_size=16).digest(), dev="2049", inode=str(number),
        mtime_ns=0, ctime_ns=0, file_size=allocated, allocated_size=allocated, virtual_size=80 * GIB,
        format="raw" if number % 7 == 0 else "qcow2", declared_format="raw" if number % 7 == 0 else "qcow2",
        cluster_size=65536, header={"compat": "1.1", "refcount_bits": 16}, chain_depth=1 + number % 4,
        in_use=number % 10 == 0, orphan=number % 50 == 3, state="chain_broken" if number % 997 == 5 else "ok",
        reclaimable_bytes=None if number % 3 else allocated // 3, reclaimable_method="" if number % 3 else "compress",
        first_seen=timezone.now(), seen=timezone.now(), listed=True,
    )  # fmt: skip


def _guests() -> None:
    now = timezone.now()
    used = list(Image.objects.filter(in_use=True, uses__isnull=True).select_related("host").defer("header"))
    guests = Guest.objects.bulk_create(
        Guest(
            host=image.host, kind="domain", uid=f"g{image.pk}", name=f"guest-{image.pk}", state="running", last_seen=now
        )
        for image in used
    )
    disks = GuestDisk.objects.bulk_create(
        GuestDisk(guest=guest, target="vda", path=image.path, path_key=image.path_key, format=image.format)
        for guest, image in zip(guests, used, strict=True)
    )
    ImageUse.objects.bulk_create(ImageUse(image=image, disk=disk) for image, disk in zip(used, disks, strict=True))
