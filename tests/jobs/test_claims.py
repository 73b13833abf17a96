"""Who holds a job: one worker, within the host's limit, as long as its generation is the last."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import InterfaceError, OperationalError, connection
from django.utils import timezone

from storage_admin.jobs import claims, routing
from storage_admin.jobs.models import Job, ResourceLock
from storage_admin.jobs.routing import Heart
from tests.factories import HostFactory, ImageFactory, JobFactory, ResourceLockFactory
from tests.working import reread

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def at_once(count: int, act: Callable[[int], Any]) -> list[Any]:
    """What ``act`` answers to each of so many threads that start together; an exception is an answer."""
    ready, answers = threading.Barrier(count), []

    def run(number: int) -> None:
        ready.wait()
        try:
            answers.append(act(number))
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            answers.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.django_db(transaction=True)
def test_of_twenty_workers_one_gets_the_job() -> None:
    job = JobFactory.create()
    answers = at_once(20, lambda number: claims.claim(job.pk, f"worker{number}"))
    (taken,) = [answer for answer in answers if answer is not None]
    assert (reread(job).state, job.generation, job.worker) == ("running", 1, taken.worker)
    assert job.log_lines.count() == 1


@pytest.mark.django_db(transaction=True)
def test_of_twenty_rewrites_at_once_a_host_starts_as_many_as_it_may() -> None:
    host = HostFactory.create(max_jobs=3)
    jobs = [JobFactory.create(kind="reclaim", target=ImageFactory.create(pool__host=host)) for _ in range(20)]
    answers = at_once(20, lambda number: claims.claim(jobs[number].pk, f"worker{number}"))
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    assert len([answer for answer in answers if answer is not None]) == 3
    assert Job.objects.filter(state="running").count() == 3
    waiting = set(Job.objects.filter(state="queued").values_list("waiting_for", flat=True))
    assert waiting == {f"a free slot on {host.name} (limit: 3 rewriting jobs)"}


def test_what_starts_by_itself_leaves_threads_for_what_somebody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[int] = []
    monkeypatch.setattr(routing, "ring_now", rung.append)
    monkeypatch.setattr(claims, "threads", 16)
    samples = [JobFactory.create(kind="sample", target=HostFactory.create()) for _ in range(7)]
    taken = [claims.claim(job.pk, "worker") for job in samples]
    assert [job is not None for job in taken] == [True] * 4 + [False] * 3
    assert reread(samples[-1]).waiting_for == "one of the 4 running sample jobs on other hosts"
    assert claims.claim(samples[4].pk, "another worker") is not None, "which has threads of its own"
    asked = JobFactory.create(kind="reclaim", target=ImageFactory.create())
    assert claims.claim(asked.pk, "worker") is not None
    assert taken[0] is not None
    assert claims.finish(taken[0], "succeeded")
    routing.ring_next(taken[0])
    assert rung == [samples[5].pk, samples[6].pk], "the place is free for any host's"
    assert claims.claim(samples[5].pk, "worker") is not None
    assert claims.claim(samples[6].pk, "worker") is None


def test_a_worker_with_one_thread_samples_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "threads", 1)
    job = JobFactory.create(kind="sample", target=HostFactory.create())
    assert claims.claim(job.pk, "worker") is not None


def test_a_rewrite_waits_for_a_slot_and_goes_on_when_one_is_free() -> None:
    image = ImageFactory.create()
    first, second = (JobFactory.create(kind="reclaim", target=image) for _ in range(2))
    held = claimed(first)
    assert claims.claim(second.pk, "w") is None
    assert (reread(second).state, second.worker) == ("queued", "")
    assert "free slot" in second.waiting_for
    assert claims.finish(held, Job.State.SUCCEEDED)
    assert claimed(second).waiting_for == ""


def test_what_rewrites_nothing_waits_for_no_slot() -> None:
    host = HostFactory.create()
    JobFactory.create(kind="reclaim", target=ImageFactory.create(pool__host=host), state="running")
    assert claims.claim(JobFactory.create(kind="scan", target=host).pk, "w") is not None


@pytest.mark.parametrize("state", ["running", "succeeded", "failed", "cancelled", "interrupted"])
def test_only_a_queued_job_can_be_claimed(state: str) -> None:
    job = JobFactory.create(state=state)
    assert claims.claim(job.pk, "w") is None
    assert (reread(job).state, job.generation) == (state, 0)


def test_a_job_that_does_not_exist_can_not_be_claimed() -> None:
    assert claims.claim(4711, "w") is None


def claimed(job: Job) -> Job:
    taken = claims.claim(job.pk, "w")
    assert taken is not None
    return taken


@pytest.fixture
def held() -> Job:
    return claimed(JobFactory.create())


def test_whoever_holds_it_may_swap(held: Job) -> None:
    assert claims.may_swap(held)
    assert reread(held).stage == "swapping"


@pytest.mark.parametrize(
    "meanwhile", [{"generation": 2}, {"cancel_requested": True}, {"state": "interrupted"}, {"state": "queued"}]
)
def test_a_stale_worker_may_not_swap(held: Job, meanwhile: dict[str, Any]) -> None:
    Job.objects.filter(pk=held.pk).update(**meanwhile)
    assert not claims.may_swap(held)
    assert reread(held).stage != "swapping"


@pytest.mark.parametrize("meanwhile", [{"generation": 2}, {"state": "interrupted"}])
def test_a_stale_worker_ends_nothing(held: Job, meanwhile: dict[str, Any]) -> None:
    ResourceLockFactory.create(job=held)
    Job.objects.filter(pk=held.pk).update(**meanwhile)
    assert not claims.finish(held, Job.State.SUCCEEDED, result={"won": 1})
    assert (reread(held).result, held.finished) == (None, None)
    assert ResourceLock.objects.count() == 1


def test_an_end_gives_the_locks_back(held: Job) -> None:
    ResourceLockFactory.create(job=held)
    other = ResourceLockFactory.create()
    assert claims.finish(held, Job.State.FAILED, error_code="bug")
    assert list(ResourceLock.objects.all()) == [other]


def test_a_beat_counts_for_what_the_worker_holds_alone(held: Job) -> None:
    stale = JobFactory.create(state="running", worker="w", generation=3, heartbeat=None)
    foreign = JobFactory.create(state="running", worker="x", generation=1, heartbeat=None)
    before = timezone.now()
    routing.beat("w", [(held.pk, held.generation), (stale.pk, 2), (foreign.pk, 1)])
    for job in (held, stale, foreign):
        job.refresh_from_db()
    assert held.heartbeat is not None
    assert held.heartbeat > before
    assert (stale.heartbeat, foreign.heartbeat) == (None, None)


def test_the_heart_goes_on_beating_whatever_the_database_does(monkeypatch: pytest.MonkeyPatch) -> None:
    heart, beats, enough = Heart(), [], threading.Event()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 3:
            enough.set()
        raise InterfaceError("closed") if len(beats) % 2 else OperationalError("away")

    monkeypatch.setattr(routing, "HEARTBEAT_INTERVAL", 0.01)
    monkeypatch.setattr(heart, "beat", beat)
    thread = threading.Thread(target=heart._run)
    thread.start()
    assert enough.wait(10)
    heart._stopped.set()
    thread.join(10)
    assert not thread.is_alive()
