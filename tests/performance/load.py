"""Requests at fixed times on 10,000 images, by the real web server with its usual processes; and with two thirds of the
machine taken by something else.
"""

import contextlib
import http.client
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from django.conf import settings
from django.db import connection
from django.test import Client
from django.utils import timezone

from images.models import Image, Policy, PolicyPick
from storage_admin.accounts.models import SYSTEM, Role, User
from storage_admin.accounts.services import create_token
from storage_admin.events.models import Alert
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from storage_admin.supervisor import commands
from tests.factories import AlertFactory, PolicyFactory, PolicyRunFactory
from tests.harness.processes import Daemon, free_port
from tests.harness.services import ROOT
from tests.performance import pages
from tests.performance.report import Row, seconds

COUNT, SECONDS = 10_000, 300
#: How many requests a second, and within how many seconds 95 of 100 of them have to be answered.
RATES = {40: 0.2, 60: 0.3}
#: The same where two thirds of the machine are gone: for so many seconds, from so many connections, and within how many
#: seconds the slowest has to be answered or refused. There are more connections than the server lets wait.
HARD_RATE, HARD_SECONDS, HARD_THREADS, HARD_LIMIT = 60, 60, 300, 12.0
JOBS = 10_000
POLICIES, RUNS, PICKS = 20, 5, 40
ALERTS = 200
THREADS = 24
REFUSED = "refused"
NOTES = (
    (
        f"Load: gunicorn as `up` starts it ({commands.WEB_WORKERS} processes with {commands.WEB_THREADS} threads "
        f"each), SQLite with {COUNT:,} images, requests at fixed times for {SECONDS} s from "
        f"{THREADS} connections that are kept open; how long a request took counts from the moment at which it was "
        "due, so that one that waits for others is not left out. Half of them are REST with a token (lists, filters, "
        "one image, its chain, jobs, pools, the ledger and its sums, policies, alerts), half are pages of somebody who "
        "is signed in (overview, images, one image, jobs, ledger, policies, alerts and their count). Once a second "
        f"/metrics is asked for beside them. There are {JOBS:,} jobs, half of them lines of the ledger, {POLICIES} "
        f"policies with {RUNS} runs each, and {ALERTS} alerts, half of them open. A job's progress is written twice a "
        "second, as by a worker. The client shares the 2 cores."
    ),
    (
        "Overload: the same requests while each core has two processes beside the server's that do nothing but "
        f"compute, from {HARD_THREADS} connections, so that nobody waits for one. A refusal is a 503 with "
        "`Retry-After`; /healthz is asked for once a second. How long it took counts from the moment at which it was "
        "due."
    ),
)

#: What is asked for, how often of a hundred times. ``{id}`` is an image's id.
REST = {
    "/api/v1/images/?limit=50": 12,
    "/api/v1/images/?ordering=-reclaimable_bytes&limit=50": 8,
    "/api/v1/images/?format=qcow2&min_chain_depth=2": 6,
    "/api/v1/images/{id}/": 10,
    "/api/v1/images/{id}/chain/": 4,
    "/api/v1/jobs/": 5,
    "/api/v1/pools/": 3,
    "/api/v1/overview/": 2,
    "/api/v1/ledger/?limit=50": 3,
    "/api/v1/ledger/summary/": 1,
    "/api/v1/policies/": 2,
    "/api/v1/alerts/": 2,
}
PAGES = {
    "/images/": 14,
    "/images/?ordering=-allocated_size": 6,
    "/images/?search=web": 4,
    "/": 8,
    "/images/{id}/": 12,
    "/jobs/": 6,
    "/ledger/": 2,
    "/policies/": 2,
    "/alerts/": 2,
    "/alerts/count/": 2,
}
#: Asked for once a second beside them.
SCRAPED, HEALTH = "/metrics", "/healthz"


@dataclass
class Asked:
    """What the requests took, in seconds, by what was asked for: those answered, and those refused for now; and what
    went wrong.
    """

    taken: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    refused: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wrong: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, took: float, problem: str) -> None:
        with self._lock:
            (self.refused if problem == REFUSED else self.taken)[what].append(took)
            if problem:
                self.wrong[f"{what}: {problem}"] += 1


@dataclass(frozen=True)
class Server:
    """The web server that is asked: its port, headers for programs and for somebody signed in, ids of images."""

    port: int
    token: dict[str, str]
    session: dict[str, str]
    ids: list[int]


def measure(folder: Path, count: int = COUNT, length: int = SECONDS) -> list[Row]:
    """Keeps the server busy, and tells how long answers took."""
    with _server(folder, count) as server, _work():
        rows = [_judged(_load(server, rate, length), rate, length, limit) for rate, limit in RATES.items()]
        with _two_thirds_gone():
            return [*rows, _hard(_load(server, HARD_RATE, min(length, HARD_SECONDS), HARD_THREADS))]


@contextlib.contextmanager
def _server(folder: Path, count: int) -> Iterator[Server]:
    pages.rows_up_to(count)
    _jobs(JOBS)
    _nights()
    _alerts()
    ids = list(Image.objects.order_by("id").values_list("pk", flat=True)[:count:97])
    _token, secret = create_token(SYSTEM, "load", Role.OPERATOR)
    port = free_port()
    argv = commands.web(f"127.0.0.1:{port}")
    with Daemon(argv, folder / "web.log", cwd=ROOT, env=os.environ | commands.ENVIRONMENT) as server:
        server.wait_for(lambda: _answers(port), 60, "the web server answers")
        yield Server(port, {"Authorization": f"Bearer {secret}"}, {"Cookie": _session()}, ids)
    Policy.objects.filter(name__startswith="bench ").delete()
    Alert.objects.filter(key__startswith="bench:").delete()
    Job.objects.filter(created_by="bench").delete()
    Image.every.filter(host__slug__startswith="bench-").delete()
    Host.objects.filter(slug__startswith="bench-").delete()


def _judged(asked: Asked, rate: int, length: int, limit: float) -> Row:
    every = [took for taken in asked.taken.values() for took in taken]
    p95 = _p95(every)
    wrong = sum(asked.wrong.values())
    middle = {what: statistics.median(taken) for what, taken in asked.taken.items()}
    worst = max(middle, key=lambda what: middle[what])
    return Row(
        f"{rate} requests a second for {length} s on {COUNT:,} images, 95 of 100", seconds(p95),
        f"median {seconds(statistics.median(every))}; slowest is {worst}, {seconds(middle[worst])}",
        f"{len(every):,} requests, {wrong} wrong {dict(asked.wrong.most_common(3)) if wrong else ''}".strip(),
        f"under {limit:g} s, none wrong or refused", p95 < limit and not wrong,
    )  # fmt: skip


def _hard(asked: Asked) -> Row:
    """What became of the requests while the machine had no time for all of them."""
    refused = [took for taken in asked.refused.values() for took in taken]
    answered = [took for taken in asked.taken.values() for took in taken]
    pages = [took for what in PAGES for took in asked.taken[what]]
    refused_pages = sum(len(asked.refused[what]) for what in PAGES)
    wrong = sum(asked.wrong.values()) - len(refused)
    slowest = max(refused + answered)
    return Row(
        f"{HARD_RATE} requests a second, two thirds of the machine taken by others: pages, 95 of 100",
        seconds(_p95(pages)), f"/healthz {seconds(_p95(asked.taken[HEALTH]))}; slowest answer {seconds(slowest)}",
        f"{len(refused) / (len(refused) + len(answered)):.0%} refused with 503 and Retry-After, of pages "
        f"{refused_pages / max(refused_pages + len(pages), 1):.0%}; {wrong} wrong",
        f"nobody waits for more than {HARD_LIMIT:g} s, none wrong", slowest < HARD_LIMIT and not wrong,
    )  # fmt: skip


def _p95(taken: list[float]) -> float:
    return statistics.quantiles(taken, n=20)[-1] if len(taken) > 1 else max(taken, default=0.0)


@contextlib.contextmanager
def _two_thirds_gone() -> Iterator[None]:
    """Two processes on each core that compute and do nothing else, beside one of the web server's."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def _jobs(count: int) -> None:
    """Jobs that have ended, on the benchmark's hosts: every second one is a line of the ledger."""
    pools = list(StoragePool.objects.filter(host__slug__startswith="bench-").order_by("id"))
    now = timezone.now()
    rows = []
    for number in range(count):
        pool, ended = pools[number % len(pools)], now - timedelta(minutes=10 * (count - number))
        line = {"space_pool": pool, "host_name": pool.host.name, "pool_name": pool.name} if number % 2 else {}
        freed = {"freed_bytes": number << 20, "freed_at": ended, "freed_month": f"{ended:%Y-%m}"} if number % 2 else {}
        rows.append(
            Job(
                kind="reclaim" if number % 2 else "sample", state="succeeded" if number % 9 else "failed",
                host=pool.host, target_kind="pool", target_id=pool.pk, target_label=pool.name, created_by="bench",
                created=ended, started=ended, finished=ended + timedelta(seconds=number % 700), **line, **freed,
            )
        )  # fmt: skip
    Job.objects.bulk_create(rows, batch_size=500)


def _nights() -> None:
    """Policies whose runs have ended, each with images that were compacted and others that were left out."""
    images = list(Image.objects.order_by("id").select_related("host", "pool")[:PICKS])
    jobs = iter(Job.objects.filter(created_by="bench", kind="reclaim")[: POLICIES * RUNS * PICKS // 2])
    now = timezone.now()
    for number in range(POLICIES):
        policy = PolicyFactory.create(name=f"bench {number}")
        for night in range(RUNS):
            due = now - timedelta(days=night + 1)
            run = PolicyRunFactory.create(policy=policy, due=due, state="finished", chosen_at=due, finished=due)
            PolicyPick.objects.bulk_create(
                PolicyPick(
                    run=run, image=image, pool=image.pool, host=image.host, label=image.name, place=place,
                    **({"state": "succeeded", "job": next(jobs), "predicted_bytes": place << 20} if place < PICKS // 2
                       else {"state": "skipped", "code": "too_little", "reason": "The job would free too little."}),
                )
                for place, image in enumerate(images)
            )  # fmt: skip


def _alerts() -> None:
    closed = timezone.now()
    for number in range(ALERTS):
        AlertFactory.create(key=f"bench:{number}", closed=closed if number % 2 else None)


@contextlib.contextmanager
def _work() -> Iterator[None]:
    """A job's progress is written meanwhile, twice a second."""
    job, stop = Job.objects.filter(created_by="bench").latest("id"), threading.Event()

    def write() -> None:
        done = 0
        while not stop.wait(0.5):
            done += 1 << 20
            Job.objects.filter(pk=job.pk).update(done_bytes=done)
        connection.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _when(due: tuple[float, str, dict[str, str]]) -> float:
    return due[0]


def _session() -> str:
    """The cookie of somebody who has signed in; the session is one that the dashboard knows."""
    user, _ = User.objects.get_or_create(username="bench", defaults={"role": "admin"})
    client = Client(REMOTE_ADDR="127.0.0.1")
    client.force_login(user, settings.AUTHENTICATION_BACKENDS[-1])
    return f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}"


def _answers(port: int) -> bool:
    try:
        return _ask(http.client.HTTPConnection("127.0.0.1", port, timeout=5), "/login/", {}) == ""
    except OSError:
        return False


def _ask(connection: http.client.HTTPConnection, path: str, headers: dict[str, str]) -> str:
    """What was wrong with the answer; empty where nothing was."""
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    answer.read()
    if answer.status == 503 and int(answer.headers.get("Retry-After", "0")):
        return REFUSED
    # There is no worker here, which /healthz says.
    return "" if answer.status == 200 or path == HEALTH else f"status {answer.status}"


def _load(server: Server, rate: int, length: int, clients: int = THREADS) -> Asked:
    rng = random.Random(7)
    weighted = [(path, server.token) for path, share in REST.items() for _ in range(share)]
    weighted += [(path, server.session) for path, share in PAGES.items() for _ in range(share)]
    due = [(number / rate, *rng.choice(weighted)) for number in range(rate * length)]
    due += [(float(second), path, server.token) for second in range(length) for path in (SCRAPED, HEALTH)]
    asked, begin, turn, lock = Asked(), time.monotonic() + 1, iter(enumerate(sorted(due, key=_when))), threading.Lock()

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        while True:
            with lock:
                number, (at, what, headers) = next(turn, (-1, (0.0, "", {})))
            if number < 0:
                return
            moment = begin + at
            time.sleep(max(moment - time.monotonic(), 0))
            try:
                problem = _ask(connection, what.format(id=server.ids[number % len(server.ids)]), headers)
            except (OSError, http.client.HTTPException) as error:
                problem = repr(error)
                connection.close()
            asked.note(what, time.monotonic() - moment, problem)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return asked
