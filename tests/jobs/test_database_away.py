"""The database goes away and comes back: what is written then is written once, and nobody is taken for dead too soon.

With a real PostgreSQL that is really stopped: ``tests/faults/test_database_away.py``.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, transaction
from django.utils import timezone

from images.kinds.reclaim import Reclaim
from storage_admin.jobs import claims, reaper, routing, runner, tasks
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.plan_and_progress import Recorder
from storage_admin.jobs.routing import Heart
from tests.factories import ImageFactory, JobFactory
from tests.harness.patching import do_after, do_before, raising
from tests.images.away import goes_away
from tests.jobs.test_claims import claimed
from tests.jobs.test_running import POLITE, READY, DoneBy, done_by, job
from tests.working import reread, said

__all__ = ["done_by", "job"]

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet", "no_hypervisor"), pytest.mark.sql]


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> Heart:
    """A worker's heart that has not beaten yet."""
    made = Heart()
    monkeypatch.setattr(tasks, "heart", made)
    monkeypatch.setattr(runner, "heart", made)
    return made


def reap_meanwhile(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """The reaper takes the worker for dead when its agent says these words."""

    def reaped(_: Recorder, text: str, *more: Any) -> None:
        if text == after:
            assert reap_later() == 1

    do_after(monkeypatch, Recorder, "log", reaped)


def reap_later() -> int:
    """As of when a job has had no heartbeat for too long."""
    return reaper.reap(timezone.now() + claims.LEASE + timedelta(seconds=1))


def test_the_result_of_a_job_that_was_called_interrupted_too_soon_is_recorded(
    monkeypatch: pytest.MonkeyPatch, done_by: DoneBy
) -> None:
    reap_meanwhile(monkeypatch, "swapped")
    job = done_by(POLITE + 'say("log", text="swapped")\nsay("result", data=RESULT)')
    assert (job.state, job.error_code, job.error_detail, job.needs_recovery) == ("succeeded", "", "", False)
    assert (job.undo_state, job.locks.count()) == ("available", 0)
    assert any("was still running the job" in line for line in said(job))


def test_one_that_was_called_interrupted_before_is_not_let_go(monkeypatch: pytest.MonkeyPatch, done_by: DoneBy) -> None:
    reap_meanwhile(monkeypatch, "made")
    job = done_by(READY.replace('say("ready"', 'say("log", text="made")\nsay("ready"'))
    assert (job.state, job.generation, job.needs_recovery, job.result) == ("interrupted", 2, True, None)


@pytest.mark.parametrize("step", ["may_swap", "note_ready", "prepare", "before_swap"])
def test_a_finished_rewrite_waits_for_a_database_that_is_locked(
    monkeypatch: pytest.MonkeyPatch, done_by: DoneBy, step: str
) -> None:
    # It is there at first, where that is asked twice.
    spared = 0 if step in {"note_ready", "before_swap"} else 1
    failed = goes_away(monkeypatch, claims if step == "may_swap" else Reclaim, step, spared=spared)
    job = done_by(READY)
    assert (job.state, job.error_code, len(failed)) == ("succeeded", "", 2)


def test_a_worker_that_is_told_to_end_puts_a_finished_rewrite_back_while_the_database_is_locked(
    monkeypatch: pytest.MonkeyPatch, done_by: DoneBy
) -> None:
    def locked(*_: Any) -> Any:
        runner.stopping.set()
        raise OperationalError("database is locked")

    monkeypatch.setattr(claims, "may_swap", locked)
    try:
        job = done_by(READY)
    finally:
        runner.stopping.clear()
    assert (job.state, job.error_code) == ("interrupted", "interrupted")


def test_a_measure_of_space_that_cannot_be_written_yet_does_not_end_a_rewrite(
    monkeypatch: pytest.MonkeyPatch, done_by: DoneBy
) -> None:
    asked = list[Any]()
    goes_away(monkeypatch, Reclaim, "on_event")
    do_before(monkeypatch, Reclaim, "on_event", lambda *given: asked.append(given))
    job = done_by(POLITE + 'say("space", needed_bytes=5)\nsay("result", data=RESULT)')
    assert (job.state, len(asked)) == ("succeeded", 3)


def test_what_recovery_has_told_already_stays(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    taken = claimed(job)
    reap_later()
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    assert not claims.take_back(taken)
    Job.objects.filter(pk=job.pk).update(state="interrupted", generation=3)
    assert not claims.take_back(taken)


def test_what_rewrites_nothing_is_not_taken_back() -> None:
    scan = claimed(JobFactory.create())
    reap_later()
    assert not claims.take_back(scan)
    assert reread(scan).state == "interrupted"


def failing_once(monkeypatch: pytest.MonkeyPatch, *, kept: bool) -> None:
    """The next transaction of the recorder ends without an answer; what it wrote is there, or not."""
    atomic, calls = transaction.atomic, list[int]()

    @contextlib.contextmanager
    def without_answer() -> Iterator[None]:
        calls.append(1)
        with atomic():
            yield
            if len(calls) == 1 and not kept:
                raise OperationalError("the server closed the connection unexpectedly")
        if len(calls) == 1:
            raise OperationalError("the server closed the connection unexpectedly")

    monkeypatch.setattr("storage_admin.jobs.plan_and_progress.transaction", SimpleNamespace(atomic=without_answer))


@pytest.mark.parametrize("kept", [True, False])
def test_each_line_of_the_log_is_written_once(monkeypatch: pytest.MonkeyPatch, job: Job, kept: bool) -> None:
    keeper = Recorder(job, {})
    for text in ("one", "two"):
        keeper.log(text)
    failing_once(monkeypatch, kept=kept)
    with pytest.raises(OperationalError):
        keeper.flush()
    keeper.log("three")
    keeper.flush()
    keeper.flush()
    assert [line for line in said(job) if line in {"one", "two", "three"}] == ["one", "two", "three"]


def test_a_key_from_an_attempt_that_came_to_nothing_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    """By then it may be the key of somebody else's line."""
    keeper = Recorder(job, {})
    keeper.log("ours")
    failing_once(monkeypatch, kept=False)
    with pytest.raises(OperationalError):
        keeper.flush()
    theirs = JobLog.objects.create(job=JobFactory.create(), text="theirs")
    keeper.flush()
    assert reread(theirs).text == "theirs"
    assert said(job)[-1] == "ours"


def test_the_reaper_waits_until_every_worker_could_say_that_it_lives(heart: Heart) -> None:
    image = ImageFactory.create()
    lost = JobFactory.create(kind="reclaim", target=image, state="running", generation=1, heartbeat=None)
    tasks.reap()
    assert reread(lost).state == "running"
    heart._steady_since -= 2 * routing.HEARTBEAT_INTERVAL
    tasks.reap()
    assert reread(lost).state == "interrupted"


def test_a_recovery_that_was_cut_off_is_done_again_at_once() -> None:
    image = ImageFactory.create()
    JobFactory.create(kind="reclaim", target=image, state="interrupted", needs_recovery=True)
    JobFactory.create(kind="recover", target=image.host, state="interrupted", finished=timezone.now())
    reaper.recover_hosts()
    assert Job.objects.filter(kind="recover", state="queued").count() == 1


def test_a_heart_that_has_missed_beats_is_not_steady_at_once(heart: Heart) -> None:
    assert not heart.is_beating()
    heart.beat()
    assert (heart.is_beating(), heart.is_steady()) == (True, False)
    heart._steady_since -= 2 * routing.HEARTBEAT_INTERVAL
    assert heart.is_steady()
    heart._beaten -= 3 * routing.HEARTBEAT_INTERVAL
    assert not heart.is_steady()
    heart.beat()
    assert (heart.is_beating(), heart.is_steady()) == (True, False)


def away_for(seconds: float) -> Callable[[], None]:
    """A write that fails until so many seconds have passed."""
    until = time.monotonic() + seconds

    def write() -> None:
        if time.monotonic() < until:
            raise OperationalError("the database is away")

    return write


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FINISH_PATIENCE", 0.2)
    monkeypatch.setattr(runner, "FINISH_AGAIN", 0.05)
    monkeypatch.setattr(runner, "connection", type("Kept", (), {"close": staticmethod(lambda: None)}))


@pytest.mark.usefixtures("impatient")
def test_the_end_of_a_job_is_written_however_long_the_database_is_away(heart: Heart) -> None:
    began = time.monotonic()
    runner._persist(away_for(1))
    assert time.monotonic() - began >= 1


@pytest.mark.usefixtures("impatient")
def test_an_end_that_cannot_be_written_though_the_database_is_there_is_left_to_recovery(heart: Heart) -> None:
    heart.beat()
    for write in (runner._persist, runner._patiently):  # what ends a job, and what an agent waits for
        with pytest.raises(OperationalError):
            write(away_for(3))


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_is_told_to_end_does_not_wait_for_the_database_for_ever(
    monkeypatch: pytest.MonkeyPatch, heart: Heart
) -> None:
    monkeypatch.setattr(runner, "stopping", type("Set", (), {"is_set": staticmethod(lambda: True)}))
    with pytest.raises(OperationalError):
        runner._persist(away_for(3))


def test_a_worker_ends_also_when_the_database_is_away(monkeypatch: pytest.MonkeyPatch, heart: Heart) -> None:
    monkeypatch.setattr("storage_admin.jobs.routing.Worker.objects.filter", raising(OperationalError("gone")))
    monkeypatch.setattr("storage_admin.jobs.routing.close_old_connections", lambda: None)
    heart.stop()
    assert not heart.is_beating()
