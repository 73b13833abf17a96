"""Workers on hypervisors, each with its own queue: real processes, a real Redis, and on PostgreSQL in its stage.

All hosts are this machine under several names, each with a folder of its own.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import redis
from celery import current_app
from django.conf import settings
from django.db import connection
from django.utils import timezone

from images.models import Image
from images.tasks import look_at_guests_of
from storage_admin.hosts import secrets, transport
from storage_admin.hosts.models import Host
from storage_admin.hosts.transport import agent_bundle
from storage_admin.jobs import claims, reaper, routing, services
from storage_admin.jobs.models import Job, Worker
from storage_admin.jobs.routing import RUN_JOB
from tests.agent.harness import leftovers, same_content
from tests.factories import HostFactory
from tests.harness.processes import Daemon, wait_until
from tests.harness.services import RedisServer, database_url
from tests.harness.sshd import Sshd, sshd
from tests.jobs.test_live_worker import slow_reclaim
from tests.working import OPERATOR, create, register, reread, said

pytestmark = [pytest.mark.services, pytest.mark.qemu, pytest.mark.django_db(transaction=True)]

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., Daemon]


@pytest.fixture
def start(transactional_db: None, redis_server: RedisServer, tmp_path: Path) -> Iterator[Start]:
    """``start("--host", "a")``: ``manage.py worker`` with these words, on the test's database and Redis."""
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"} | {
        "STORAGE_ADMIN_DATA_DIR": str(settings.DATA_DIR),
        "DATABASE_URL": database_url(connection.settings_dict),
        "REDIS_URL": redis_server.url,
    }
    with ExitStack() as stack:

        def worker(*words: str, **more: str) -> Daemon:
            argv = [sys.executable, str(ROOT / "manage.py"), "worker", "--threads", "4", *words]
            log = tmp_path / f"worker{len(list(tmp_path.glob('worker*')))}.log"
            started = stack.enter_context(Daemon(argv, log, env=environment | more, grace=30))
            started.wait_for(lambda: " ready." in started.said(), 60, "the worker is ready")
            pid = f":{started.pid}"
            started.wait_for(lambda: Worker.objects.filter(name__endswith=pid).exists(), 20, "its heart beats")
            return started

        yield worker


def a_host(slug: str, folder: Path, **columns: object) -> Host:
    folder.mkdir()
    host = HostFactory.create(slug=slug, kind=Host.Kind.SSH, transport=Host.Transport.SSH, capabilities={}, **columns)
    register(host, folder)
    return host


def settled(seconds: float = 60) -> None:
    wait_until(lambda: not Job.objects.filter(state__in=Job.ACTIVE).exists(), seconds, "all jobs end")


def messages(server: RedisServer, queue: str) -> int:
    with closing(redis.Redis.from_url(server.url)) as client:
        return int(client.llen(queue))


def send(job: Job, queue: str, times: int = 1) -> None:
    for _ in range(times):
        current_app.send_task(RUN_JOB, (job.pk,), queue=queue, retry=False, ignore_result=True)


def test_each_hosts_jobs_are_done_by_its_own_worker_whatever_is_rung_where(
    start: Start, redis_server: RedisServer, tmp_path: Path
) -> None:
    hosts = {slug: a_host(slug, tmp_path / slug) for slug in ("a", "b")}
    for slug in hosts:
        create(tmp_path / slug / f"{slug}.qcow2")
    pids = {slug: start("--host", slug).pid for slug in hosts}
    jobs: list[tuple[str, Job]] = []
    for _ in range(5):
        for slug, host in hosts.items():
            job = services.submit(OPERATOR, "scan", host.pk, {})
            for queue in ("host.a", "host.b"):
                send(job, queue, times=10)
            jobs.append((slug, job))
        settled()
    wait_until(lambda: messages(redis_server, "host.a") + messages(redis_server, "host.b") == 0, 30, "all is heard")
    for slug, job in jobs:
        expected = ("succeeded", 1, str(pids[slug]))
        assert (reread(job).state, job.generation, job.worker.rpartition(":")[2]) == expected, said(job)
    assert {image.name: image.host.slug for image in Image.objects.all()} == {"a.qcow2": "a", "b.qcow2": "b"}
    assert {worker.host: worker.general for worker in Worker.objects.all()} == {"a": False, "b": False}


def test_a_forged_message_with_a_job_of_another_host_has_no_effect(
    start: Start, redis_server: RedisServer, tmp_path: Path
) -> None:
    foreign, own = a_host("a", tmp_path / "a"), a_host("b", tmp_path / "b")
    job = services.submit(OPERATOR, "scan", foreign.pk, {})  # into the default queue, which nobody listens to
    # Whom nobody hears is rung for again after a while.
    row = Job.objects.filter(pk=job.pk).values(*(field.attname for field in Job._meta.fields if field.name != "rung"))
    before = row.get()
    start("--host", "b")
    send(job, "host.b", times=100)
    look_at_guests_of.apply_async((foreign.pk,), queue="host.b")
    for _ in range(2):
        after = services.submit(OPERATOR, "scan", own.pk, {})
        wait_until(lambda: not Job.objects.get(pk=after.pk).active, 60, "the worker goes on")  # noqa: B023
    wait_until(lambda: messages(redis_server, "host.b") == 0, 30, "all is heard")
    assert row.get() == before
    assert said(job) == [f"queued by {OPERATOR.name}"]


def test_the_general_worker_on_the_machine_local_is_rung_for_in_its_queue(
    start: Start, redis_server: RedisServer
) -> None:
    host = HostFactory.create(slug="local", capabilities=transport.machine_facts())
    worker = start()
    assert list(Worker.objects.values_list("host", "general")) == [("local", True)]
    job = services.submit(OPERATOR, "scan", host.pk, {})
    settled()
    assert (reread(job).state, job.worker.endswith(f":{worker.pid}")) == ("succeeded", True), said(job)
    assert worker.stop() == 0
    assert not Worker.objects.exists()
    before = messages(redis_server, "celery")  # bells of tests before this one may have come back with its worker's end
    services.submit(OPERATOR, "scan", host.pk, {})
    assert (messages(redis_server, "host.local"), messages(redis_server, "celery")) == (0, before + 1)
    start()
    settled()
    assert set(Job.objects.values_list("state", flat=True)) == {"succeeded"}


@pytest.fixture
def reachable(tmp_path: Path) -> Iterator[Sshd]:
    """An ssh server where a key can run the agent of this version and nothing else."""
    with sshd(tmp_path / "sshd") as server:
        public = (server.folder / "user_key.pub").read_text().strip()
        server.authorize(f'restrict,command="{sys.executable} -I {agent_bundle().path}" {public}')
        yield server


def test_where_the_worker_of_a_host_is_killed_its_job_is_interrupted_and_a_general_one_goes_on(
    start: Start, redis_server: RedisServer, tmp_path: Path, reachable: Sshd
) -> None:
    host = a_host(
        "a", tmp_path / "a", address="127.0.0.1", port=reachable.port, user="root", host_key=reachable.host_key,
        private_key_locked=secrets.lock(reachable.private_key),
    )  # fmt: skip
    Host.objects.filter(pk=host.pk).update(transport=Host.Transport.FORCED)
    own, general = start("--host", "a"), start()
    job = slow_reclaim(host, tmp_path / "a" / "disk.qcow2", wait_until)
    assert reread(job).worker.endswith(f":{own.pid}")
    agents = psutil.Process(own.pid).children(recursive=True)
    own.kill()
    _gone, left = psutil.wait_procs(agents, timeout=30)
    assert left == [], "its agent sees that it is gone, and ends"

    # Nobody knows yet that it is gone: what is rung now lies in its queue.
    waiting = services.submit(OPERATOR, "scan", host.pk, {})
    assert messages(redis_server, "host.a") == 1
    later = timezone.now() + claims.LEASE + timedelta(seconds=1)
    Worker.objects.filter(host="a").update(seen=timezone.now() - routing.ALIVE - timedelta(seconds=1))
    assert reaper.reap(later) == 1
    reaper.sweep(later)
    settled()
    assert (reread(job).state, job.error_code, job.needs_recovery) == ("interrupted", "interrupted", False)
    assert (reread(waiting).state, waiting.worker.endswith(f":{general.pid}")) == ("succeeded", True), said(waiting)
    recovery = Job.objects.get(kind="recover")
    assert (recovery.state, recovery.worker) == ("succeeded", waiting.worker)
    assert leftovers(tmp_path / "a") == set()
    assert same_content(tmp_path / "a" / "disk.qcow2", tmp_path / "copy.qcow2")

    # The next worker of that host finds the old message, which means nothing any more, and has the host's jobs again.
    again = start("--host", "a")
    wait_until(lambda: messages(redis_server, "host.a") == 0, 30, "the old message is heard")
    next_one = services.submit(OPERATOR, "scan", host.pk, {})
    settled()
    assert (reread(next_one).worker.endswith(f":{again.pid}"), reread(waiting).generation) == (True, 1)
