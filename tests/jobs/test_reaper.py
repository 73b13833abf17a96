"""Jobs whose worker is gone, hosts to be recovered, and jobs that nobody heard of."""

import os
import socket
import subprocess
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from storage_admin.jobs import claims, reaper, routing
from storage_admin.jobs.models import Job, ResourceLock, Worker
from tests.factories import ImageFactory, JobFactory, ResourceLockFactory, StoragePoolFactory, WorkerFactory
from tests.working import reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet"), pytest.mark.sql]


@pytest.fixture(autouse=True)
def rung(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ids: list[int] = []
    monkeypatch.setattr(reaper, "ring_now", ids.append)
    return ids


def rewrite(**columns: Any) -> Job:
    return JobFactory.create(kind="reclaim", target=ImageFactory.create(), **columns)


def test_a_job_without_a_heartbeat_is_interrupted_and_its_host_recovered() -> None:
    now = timezone.now()
    silent = rewrite(state="running", generation=1, heartbeat=now - claims.LEASE - timedelta(seconds=1))
    never = rewrite(state="running", generation=1, heartbeat=None)
    alive = rewrite(state="running", generation=1, heartbeat=now - timedelta(seconds=20))
    ResourceLockFactory.create(job=silent)
    assert reaper.reap() == 2
    silent, never, alive = map(reread, (silent, never, alive))
    assert (silent.state, silent.generation, silent.error_code) == ("interrupted", 2, "interrupted")
    assert (silent.needs_recovery, silent.finished is not None) == (True, True)
    assert (never.state, alive.state, alive.generation) == ("interrupted", "running", 1)
    assert not ResourceLock.objects.exists()
    recoveries = Job.objects.filter(kind="recover", state="queued")
    assert set(recoveries.values_list("host_id", flat=True)) == {silent.host_id, never.host_id}
    assert not claims.may_swap(Job(pk=silent.pk, generation=1))


def test_reaping_twice_marks_and_recovers_once() -> None:
    rewrite(state="running", heartbeat=None)
    assert (reaper.reap(), reaper.reap()) == (1, 0)
    assert Job.objects.filter(kind="recover").count() == 1


def test_an_interrupted_job_that_rewrites_nothing_needs_no_recovery() -> None:
    job = JobFactory.create(state="running", heartbeat=None)
    reaper.reap()
    assert (reread(job).state, job.needs_recovery) == ("interrupted", False)
    assert not Job.objects.filter(kind="recover").exists()


def test_a_benchmark_that_was_cut_off_has_its_host_recovered() -> None:
    running = {"state": "running", "heartbeat": None, "options": {"kind": "dd"}}
    job = JobFactory.create(kind="benchmark", target=StoragePoolFactory.create(), **running)
    reaper.reap()
    assert (reread(job).state, job.rewrites, job.needs_recovery) == ("interrupted", False, True)
    assert Job.objects.get(kind="recover").host_id == job.host_id


def test_a_recovery_that_failed_waits_before_the_next() -> None:
    lost = rewrite(state="interrupted", needs_recovery=True)
    failed = JobFactory.create(kind="recover", target=lost.host, state="failed", finished=timezone.now())
    reaper.recover_hosts()
    assert Job.objects.filter(kind="recover").count() == 1
    Job.objects.filter(pk=failed.pk).update(finished=timezone.now() - reaper.RECOVER_AGAIN - timedelta(seconds=1))
    reaper.recover_hosts()
    assert Job.objects.filter(kind="recover", state="queued").count() == 1


@pytest.mark.parametrize(("ago", "since", "again"), [(1, 0.1, False), (1, 0.4, True), (600, 9, False), (600, 11, True)])
def test_a_host_where_an_agent_hangs_is_recovered_less_and_less_often(ago: float, since: float, again: bool) -> None:
    """Minutes since the job was given up, and since the recovery that found its agent still there."""
    now = timezone.now()
    lost = rewrite(state="interrupted", needs_recovery=True, finished=now - timedelta(minutes=ago))
    looked = now - timedelta(minutes=since)
    JobFactory.create(kind="recover", target=lost.host, state="succeeded", started=looked, finished=looked)
    # Of an earlier one.
    earlier = now - timedelta(minutes=ago + 1)
    JobFactory.create(kind="recover", target=lost.host, state="succeeded", started=earlier, finished=now)
    reaper.recover_hosts()
    assert Job.objects.filter(kind="recover", state="queued").exists() is again


def test_a_recovery_is_not_queued_beside_one_that_is_at_work() -> None:
    lost = rewrite(state="interrupted", needs_recovery=True)
    JobFactory.create(kind="recover", target=lost.host, state="running", heartbeat=timezone.now())
    reaper.recover_hosts()
    assert Job.objects.filter(kind="recover").count() == 1


def test_jobs_of_a_dead_worker_of_this_machine_wait_for_no_lease() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = f"{socket.gethostname()}:{ended.pid}", f"{socket.gethostname()}:{os.getpid()}"
    # Another machine, or a container, may have this one's name; its process numbers are its own.
    elsewhere = f"{socket.gethostname()}:{ended.pid + 1}"
    for name, place in ((dead, routing.place()), (alive, routing.place()), (elsewhere, "elsewhere pid:[1]")):
        WorkerFactory.create(name=name, place=place)
    jobs = [rewrite(state="running", worker=name, heartbeat=timezone.now()) for name in (dead, alive, elsewhere)]
    assert reaper.reap_dead_workers() == 1
    assert [Job.objects.get(pk=job.pk).state for job in jobs] == ["interrupted", "running", "running"]
    assert set(Worker.objects.values_list("name", flat=True)) == {alive, elsewhere}
    assert Job.objects.get(kind="recover").host_id == jobs[0].host_id


def test_old_queued_jobs_are_rung_again_and_young_ones_are_not(rung: list[int]) -> None:
    now = timezone.now()
    old = JobFactory.create(rung=now - timedelta(minutes=5))
    JobFactory.create(target=old.host, rung=now)
    JobFactory.create(target=old.host, rung=now - timedelta(minutes=5), state="running")
    assert reaper.sweep() == 1
    assert rung == [old.pk]
    assert reaper.sweep() == 0


def test_workers_that_fell_silent_long_ago_are_forgotten() -> None:
    WorkerFactory.create(name="old:1", seen=timezone.now() - claims.LEASE * 11)
    WorkerFactory.create(name="new:1")
    reaper.reap()
    assert list(Worker.objects.values_list("name", flat=True)) == ["new:1"]
