"""A worker that stands still (fault F12), and a Redis that dies and comes back empty (F10)."""

import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from django.utils import timezone

from storage_admin.agent import protocol
from storage_admin.hosts.models import Host
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.models import Job
from tests.agent.harness import leftovers, make_image, qemu_io, same_content
from tests.factories import HostFactory
from tests.faults.test_duplicates import settled
from tests.faults.trials import Trials
from tests.harness.processes import wait_until
from tests.harness.services import LiveWorker, RedisServer
from tests.working import OPERATOR, image_at, register

pytestmark = [pytest.mark.faults, pytest.mark.django_db(transaction=True)]

#: Jobs that are at work when their worker is stopped.
AT_ONCE = 5


@pytest.fixture
def host(live_worker: LiveWorker, pool: Path) -> Host:
    host = HostFactory.create(slug="local", max_jobs=AT_ONCE)
    register(host, pool)
    return host


def agents(worker: LiveWorker) -> list[psutil.Process]:
    """What the worker has started and has not ended yet."""
    children = psutil.Process(worker.pid).children()
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


def test_a_worker_that_stands_still_past_its_lease_swaps_nothing(
    host: Host, pool: Path, live_worker: LiveWorker
) -> None:
    for trial in Trials("F12", "a worker with five rewrites stands still", worth=AT_ONCE, patience=1):
        with trial:
            images = [make_slow_image(pool / f"{trial.number}-{number}.qcow2") for number in range(AT_ONCE)]
            services.submit(OPERATOR, "scan", host.pk, {})
            settled(live_worker)
            stand_still(images, live_worker, trial.rng.uniform(0, 2))
            settled(live_worker)
            for image in images:
                assert same_content(image, pool.parent / image.name)
                image.unlink()
                (pool.parent / image.name).unlink()


def make_slow_image(path: Path) -> Path:
    """An image whose compression takes some seconds, and a copy of it elsewhere."""
    make_image(path, "24M")
    qemu_io(path, f"write -s /dev/urandom 8M {4 << 20}")
    shutil.copy(path, path.parent.parent)
    return path


def slow_rewrite(image: Path) -> Job:
    options = {"method": "compress", "bandwidth_bytes_sec": 1_048_576}
    return services.submit(OPERATOR, "reclaim", image_at(image).pk, options)


def ring_again() -> None:
    """What the scheduler does every few seconds, half a minute later."""
    reaper.sweep(timezone.now() + reaper.RING_AGAIN + timedelta(seconds=1))


def stand_still(images: list[Path], worker: LiveWorker, moment: float) -> None:
    """Stops the worker while it rewrites these images, until its lease has run out; then it goes on."""
    jobs = [slow_rewrite(image) for image in images]
    at_work = Job.objects.filter(pk__in=[job.pk for job in jobs], stage="copying")
    worker.wait_for(lambda: at_work.count() == len(jobs), 60, "all of them copy")
    time.sleep(moment)
    inodes = [path.stat().st_ino for path in images]
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        wait_until(lambda: not agents(worker), protocol.SILENCE_LIMIT + 15, "no agent outlives the silence")
        print(f"silence ended {len(jobs)} agents after {time.monotonic() - began:.0f} s")
        assert leftovers(images[0].parent) == set()
        # Other jobs of that worker, such as a sample after the scan, are lost as well.
        assert reaper.reap(timezone.now() + claims.LEASE + timedelta(seconds=1)) >= len(jobs)
        assert not at_work.filter(state=Job.State.RUNNING).exists()
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    settled(worker)
    for job in jobs:
        job.refresh_from_db()
        assert (job.state, job.generation) == ("interrupted", 2)
    assert [path.stat().st_ino for path in images] == inodes


def test_a_redis_that_dies_and_forgets_delays_work_and_repeats_none(
    host: Host, live_worker: LiveWorker, redis_server: RedisServer
) -> None:
    started, worker = [], live_worker.pid
    for trial in Trials("F10", "Redis is killed and comes back without its data", patience=1):
        with trial:
            if trial.number % 2:
                redis_server.kill()  # the ring does not get through
            job = services.submit(OPERATOR, "scan", host.pk, {})
            time.sleep(trial.rng.choice([0, 0, trial.rng.uniform(0, 0.5)]))
            redis_server.start_again()  # or what was rung is forgotten
            redis_server.wait_for(redis_server.answers, 20, "Redis answers again")
            deadline = time.monotonic() + 60
            while Job.objects.get(pk=job.pk).active:
                assert time.monotonic() < deadline, live_worker.said()[-3000:]
                ring_again()
                time.sleep(0.5)
            job.refresh_from_db()
            assert (job.state, job.generation) == ("succeeded", 1)
            assert job.log_lines.filter(text__startswith="started by").count() == 1
            started.append(job.started)
            assert (live_worker.process.poll(), live_worker.pid) == (None, worker), live_worker.said()[-3000:]
    assert len(set(started)) == len(started)


def test_a_rewrite_goes_on_while_redis_dies_and_its_worker_hears_of_other_jobs_meanwhile(
    host: Host, pool: Path, live_worker: LiveWorker, redis_server: RedisServer
) -> None:
    image, worker = make_slow_image(pool / "vm.qcow2"), live_worker.pid
    services.submit(OPERATOR, "scan", host.pk, {})
    settled(live_worker)
    job = slow_rewrite(image)
    at_work = Job.objects.filter(pk=job.pk, stage="copying")
    live_worker.wait_for(at_work.exists, 30, "it copies")
    for _ in range(3):
        # In the moment of an acknowledgement, or near it.
        other = services.submit(OPERATOR, "scan", host.pk, {})
        redis_server.start_again()
        redis_server.wait_for(redis_server.answers, 20, "Redis answers again")
    heard = Job.objects.filter(pk=other.pk, state="succeeded")
    while not heard.exists():
        assert at_work.exists(), live_worker.said()[-3000:]
        ring_again()
        time.sleep(0.2)
    settled(live_worker)
    job.refresh_from_db()
    assert (job.state, job.generation) == ("succeeded", 1), job.error_detail
    assert (live_worker.process.poll(), live_worker.pid) == (None, worker)
