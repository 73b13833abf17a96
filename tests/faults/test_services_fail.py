"""A worker that stands still (fault F12), and a Redis that dies and comes back empty (F10)."""

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from storage_admin.agent import protocol
from storage_admin.hosts.models import Host
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.models import Job
from tests.agent.harness import leftovers, make_image, same_content
from tests.factories import HostFactory
from tests.harness.services import LiveWorker, RedisServer
from tests.working import OPERATOR, image_at, register

pytestmark = [pytest.mark.faults, pytest.mark.django_db(transaction=True)]

#: Workers that stand still at once, and times that Redis is killed.
STOPPED = int(os.environ.get("STORAGE_ADMIN_STOPPED", "5"))
BROKERS = int(os.environ.get("STORAGE_ADMIN_BROKERS", "20"))


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    (tmp_path / "pool").mkdir()
    return tmp_path / "pool"


@pytest.fixture
def host(live_worker: LiveWorker, pool: Path) -> Host:
    host = HostFactory.create(slug="local", max_jobs=STOPPED)
    register(host, pool)
    return host


def idle(worker: LiveWorker) -> None:
    worker.wait_for(lambda: not Job.objects.filter(state__in=Job.ACTIVE).exists(), 60, "all jobs end")


def agents() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if any(word.endswith(b".pyz") and b"/agent-" in word for word in words) and state != "Z":
                found.append(int(entry.name))
    return found


def test_a_worker_that_stands_still_past_its_lease_swaps_nothing(
    host: Host, pool: Path, live_worker: LiveWorker
) -> None:
    for number in range(STOPPED):
        make_image(pool / f"{number}.qcow2", "24M")
        noise = f"write -s /dev/urandom 8M {4 << 20}"
        subprocess.run(["qemu-io", "-f", "qcow2", "-c", noise, pool / f"{number}.qcow2"], capture_output=True)
        subprocess.run(["cp", pool / f"{number}.qcow2", pool.parent], check=True)
    services.submit(OPERATOR, "scan", host.pk, {})
    idle(live_worker)
    options = {"method": "compress", "bandwidth_bytes_sec": 1_048_576}
    jobs = [
        services.submit(OPERATOR, "reclaim", image_at(pool / f"{number}.qcow2").pk, options)
        for number in range(STOPPED)
    ]
    at_work = Job.objects.filter(pk__in=[job.pk for job in jobs], stage="copying")
    live_worker.wait_for(lambda: at_work.count() == STOPPED, 60, "all of them copy")
    inodes = {path.name: path.stat().st_ino for path in pool.glob("*.qcow2")}
    os.kill(live_worker.pid, signal.SIGSTOP)
    began = time.monotonic()
    while agents():
        assert time.monotonic() - began < protocol.SILENCE_LIMIT + 15, "an agent outlived the silence"
        time.sleep(0.5)
    print(f"silence ended {STOPPED} agents after {time.monotonic() - began:.0f} s")
    assert leftovers(pool) == set()
    assert reaper.reap(timezone.now() + claims.LEASE + timedelta(seconds=1)) == STOPPED
    os.kill(live_worker.pid, signal.SIGCONT)
    idle(live_worker)
    for job in jobs:
        job.refresh_from_db()
        assert (job.state, job.generation) == ("interrupted", 2)
    assert {path.name: path.stat().st_ino for path in pool.glob("*.qcow2")} == inodes
    assert all(same_content(pool / name, pool.parent / name) for name in inodes)


def test_a_redis_that_dies_and_forgets_delays_work_and_repeats_none(
    host: Host, live_worker: LiveWorker, redis_server: RedisServer
) -> None:
    restarts = 0
    for trial in range(BROKERS):
        if trial % 2:
            redis_server.kill()  # the ring does not get through
        job = services.submit(OPERATOR, "scan", host.pk, {})
        redis_server.start_again()  # or what was rung is forgotten
        redis_server.wait_for(redis_server.answers, 20, "Redis answers again")
        deadline = time.monotonic() + 60
        while Job.objects.get(pk=job.pk).active:
            assert time.monotonic() < deadline, f"trial {trial}: {live_worker.said()[-3000:]}"
            # What the scheduler does every few seconds, half a minute later.
            reaper.sweep(timezone.now() + reaper.RING_AGAIN + timedelta(seconds=1))
            time.sleep(0.5)
            if live_worker.process.poll() is not None:
                # kombu gives up where Redis dies in the moment of an acknowledgement; `up` starts the worker again.
                restarts += 1
                live_worker.start_again()
        job.refresh_from_db()
        assert (job.state, job.generation) == ("succeeded", 1), trial
        assert job.log_lines.filter(text__startswith="started by").count() == 1
    print(f"Redis killed {BROKERS} times, the worker started again {restarts} times")
