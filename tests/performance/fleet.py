"""200 hosts of 500 images, each behind an SSH server of its own: all inventoried, while the pages stay usable."""

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from django.conf import settings
from django.db import connection
from django.test import Client

from images.models import Image
from storage_admin.accounts.models import SYSTEM, User
from storage_admin.hosts import secrets
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.services import add_pool
from storage_admin.jobs import reaper, services
from storage_admin.jobs.models import Job
from tests.harness.processes import free_port
from tests.harness.sshd import Sshd, sshd
from tests.performance.inventory import make_images
from tests.performance.latency import worker
from tests.performance.report import Row, seconds

#: Seconds between two rounds of the sweeper, as in the settings.
SWEEP = 15
HOSTS, IMAGES, HANGING, REFUSING = 200, 500, 5, 5
#: Seconds that all of it may take, and the list page while it goes on.
LIMIT, PAGE_LIMIT = 300, 0.5
NOTES = (
    (
        f"The fleet: {HOSTS} hosts, each an sshd on loopback with a host key of its own, in front of a folder with "
        f"{IMAGES} qcow2 images in chains; {HANGING} accept the connection and say nothing, {REFUSING} refuse it. One "
        "Celery worker with 32 threads, SQLite. Clients, servers and agents share the 2 cores. All hosts are this "
        "machine, so that the agent is installed once and then found. The list page was asked for all the time, in a "
        "process of its own beside the worker."
    ),
)


def measure(folder: Path, hosts: int = HOSTS, images: int = IMAGES) -> list[Row]:
    """From the first request for a scan to the end of the last."""
    with contextlib.ExitStack() as stack:
        rows = _hosts(stack, folder / "fleet", hosts, images)
        with contextlib.closing(redis.Redis.from_url(settings.REDIS_URL)) as broker:
            broker.flushall()
        Job.objects.filter(state=Job.State.QUEUED).delete()
        stack.enter_context(worker(folder))
        client = Client()
        client.force_login(User.objects.create_user(username="fleet", password="x", role="viewer"))
        begin = time.time()
        jobs = [services.submit(SYSTEM, "scan", host.pk, {}).pk for host in rows]
        pages = _pages_until(client, jobs, begin + 2 * LIMIT)
        ended = [job.finished.timestamp() for job in Job.objects.filter(pk__in=jobs) if job.finished]
        _check(rows, jobs, hosts, images)
    took = max(ended) - begin
    slow = statistics.quantiles(pages, n=20)[-1]
    number = f"{hosts} hosts with {images} images each"
    return [
        Row(
            f"first inventory of {number} by ssh, {HANGING} hanging and {REFUSING} refusing", seconds(took), "",
            f"{(hosts - HANGING - REFUSING) * images / took:,.0f} images a second", "at most 5 minutes", took <= LIMIT,
        ),
        Row(
            "list page meanwhile, 95 of 100", seconds(slow), f"median {seconds(statistics.median(pages))}",
            f"{len(pages)} pages", "under 0.5 s", slow < PAGE_LIMIT,
        ),
    ]  # fmt: skip


def _hosts(stack: contextlib.ExitStack, folder: Path, hosts: int, images: int) -> list[Host]:
    rows = []
    for number in range(hosts):
        if number < HANGING:
            rows.append(row_of(number, stack.enter_context(hangs()), "ssh-ed25519 " + "A" * 68, ""))
        elif number < HANGING + REFUSING:
            rows.append(row_of(number, free_port(), "ssh-ed25519 " + "A" * 68, ""))
        else:
            server: Sshd = stack.enter_context(sshd(folder / f"sshd-{number}", "MaxStartups 50"))
            rows.append(row_of(number, server.port, server.host_key, server.private_key))
        pool = folder / f"images-{number}"
        pool.mkdir(parents=True)
        if number >= HANGING + REFUSING:
            make_images(pool, images)
        add_pool(rows[-1], bytes(pool), StoragePool.Source.ADMIN)
    return rows


def row_of(number: int, port: int, host_key: str, key: str) -> Host:
    """A host that is reached by ssh on this machine, at a port of its own."""
    return Host.objects.create(
        slug=f"fleet-{number}", name=f"fleet-{number}", kind=Host.Kind.SSH, transport=Host.Transport.SSH,
        address="127.0.0.1", port=port, user="root", host_key=host_key, private_key_locked=secrets.lock(key),
    )  # fmt: skip


@contextlib.contextmanager
def hangs() -> Iterator[int]:
    """A port that takes connections in and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(50)
        yield listener.getsockname()[1]


def _pages_until(client: Client, jobs: list[int], deadline: float) -> list[float]:
    """Asks for the list page again and again until the jobs have ended; how long each took."""
    taken: list[float] = []
    swept = time.time()
    while Job.objects.filter(pk__in=jobs, state__in=Job.ACTIVE).exists():
        assert time.time() < deadline, f"{Job.objects.filter(pk__in=jobs, state__in=Job.ACTIVE).count()} not ended"
        begin = time.perf_counter()
        answer = client.get("/images/")
        taken.append(time.perf_counter() - begin)
        assert answer.status_code == 200, answer.content[:500]
        if time.time() - swept > SWEEP:
            # There is no scheduler here, which rings for that.
            reaper.sweep()
            swept = time.time()
        connection.close()
        time.sleep(0.3)
    return taken


def _check(rows: list[Host], jobs: list[int], hosts: int, images: int) -> None:
    away = HANGING + REFUSING
    states = {host.pk: host.status for host in Host.objects.filter(pk__in=[row.pk for row in rows])}
    assert [states[row.pk] for row in rows[:away]] == ["unreachable"] * away
    failed = Job.objects.filter(pk__in=jobs).exclude(state="succeeded")
    assert failed.count() == away, list(failed.values_list("host__name", "error_detail"))[:20]
    assert Image.objects.filter(host__in=rows).count() == (hosts - away) * images
