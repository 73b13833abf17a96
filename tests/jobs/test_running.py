"""One job and its agent: what an agent may say, and what its controller makes of it.

The agents here are small programs that speak the protocol, or do not.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError

from images.kinds.reclaim import Reclaim
from images.kinds.scan import Scan
from images.models import Image
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts import session
from storage_admin.hosts.session import AgentSession
from storage_admin.hosts.transport import agent_bundle
from storage_admin.jobs import plan_and_progress, runner, services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests.factories import ImageFactory
from tests.harness.patching import do_after, raising
from tests.images.away import goes_away
from tests.working import OPERATOR, reread, run, said, succeeded

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet", "no_hypervisor"), pytest.mark.sql]

PROGRAM = """
import json, os, select, signal, sys, time
def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)
def hear(seconds=20):
    return json.loads(sys.stdin.readline()) if select.select([sys.stdin], [], [], seconds)[0] else None
HELLO = dict(protocol=1, hash=sys.argv[1], uid=0, python="3")
RESULT = dict(method="compress", before_bytes=100, after_bytes=40, held_bytes=100, freed_bytes=0, compression="zstd",
              dev=1, inode=2, swapped=True, seconds=0.1, undo=dict(path=".sa-x.orig", bytes=100))
"""
DoneBy = Callable[[str], Job]
POLITE = PROGRAM + 'say("hello", **HELLO)\nrequest = hear()\n'
OBEDIENT = f'{POLITE}say("log", text="at work")\nsay("error", code="cancelled", detail=hear()["event"])\n'


@pytest.fixture
def job() -> Job:
    image = ImageFactory.create(pool__host__slug="local")
    return services.submit(OPERATOR, "reclaim", image.pk, {})


@pytest.fixture
def done_by(monkeypatch: pytest.MonkeyPatch, job: Job) -> DoneBy:
    """``done_by(program)``: runs the job with this program as its agent."""

    def with_agent(program: str) -> Job:
        argv = [sys.executable, "-c", program, agent_bundle().hash]
        monkeypatch.setattr(runner, "agent_command", lambda host: contextlib.nullcontext(argv))
        return run(job)

    return with_agent


def test_a_result_is_recorded_with_what_was_done(done_by: DoneBy) -> None:
    job = done_by(POLITE + """
say("progress", stage="copying", done=1, total=2, message="half")
say("command", argv=["qemu-img", "convert", "a b"], exit_code=0)
say("log", text="words", level="warning")
say("result", data=RESULT)
""")  # fmt: skip
    assert (job.state, job.progress, job.error_code, job.locks.count()) == ("succeeded", 100.0, "", 0)
    assert job.commands == [{"argv": ["qemu-img", "convert", "a b"], "exit_code": 0}]
    assert job.result is not None
    assert (job.result["before_bytes"], job.result["held_bytes"], job.result["freed_bytes"]) == (100, 100, 0)
    assert (job.undo_state, job.undo_bytes) == ("available", 100)
    assert "words" in said(job)
    entry = AuditEntry.objects.get(what="reclaim ended")
    assert (entry.who, entry.before) == ("olga", {"allocated_bytes": 100})
    assert {"state": "succeeded", "allocated_bytes": 40, "held_bytes": 100}.items() <= (entry.after or {}).items()


@pytest.mark.parametrize(
    ("program", "state", "code", "words"),
    [
        (PROGRAM + 'print("Welcome to Debian!", flush=True)', "interrupted", "interrupted", "invalid event"),
        (PROGRAM + 'print("[1, 2]", flush=True)', "interrupted", "interrupted", "invalid event"),
        (PROGRAM + 'sys.stdout.buffer.write(b"\\xff\\xfe\\n")', "interrupted", "interrupted", "invalid event"),
        (PROGRAM + 'say("hello", **HELLO | {"hash": "0" * 32})', "failed", "agent_outdated", "Install"),
        (PROGRAM + 'say("hello", **HELLO | {"protocol": 99})', "failed", "agent_outdated", "Install"),
        (PROGRAM + 'say("result", data=RESULT)', "failed", "agent_outdated", "Install"),
        (POLITE + 'sys.exit("out of luck")', "interrupted", "interrupted", "exit code 1: out of luck"),
        (POLITE + "os.kill(os.getpid(), signal.SIGKILL)", "interrupted", "interrupted", "signal 9"),
        (POLITE + "sys.exit(0)", "interrupted", "interrupted", "ended without an answer"),
        (POLITE + 'say("error", code="stale_plan", detail="It changed.")', "failed", "stale_plan", "It changed."),
        (POLITE + 'say("error", code="tool_failed", detail="exit 1")', "failed", "tool_failed", "exit 1"),
        (POLITE + 'say("error", code="no_go", detail="no go")', "interrupted", "no_go", "no go"),
        (POLITE + 'say("error", code="bug", detail="KeyError")', "failed", "bug", "KeyError"),
        (POLITE + 'say("dance")', "failed", "bug", "dance"),
        (POLITE + 'say("result")', "failed", "bug", "KeyError"),
    ],
)  # fmt: skip
def test_whatever_an_agent_says_the_row_tells(done_by: DoneBy, program: str, state: str, code: str, words: str) -> None:
    job = done_by(program)
    assert (job.state, job.error_code) == (state, code)
    assert words in job.error_detail
    assert (job.locks.count(), job.result) == (0, None)
    entry = AuditEntry.objects.get(what="reclaim ended")
    assert entry.after == {"job": job.pk, "host": "local", "state": state, "code": code}
    assert job.needs_recovery == (state == "interrupted" or code == "bug")


def test_an_agent_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, done_by: DoneBy) -> None:
    monkeypatch.setattr(session, "HELLO_TIMEOUT", 0.2)
    job = done_by(PROGRAM + "sys.stdin.read()")
    assert (job.state, job.error_code) == ("interrupted", "interrupted")
    assert "did not start" in job.error_detail


@pytest.mark.parametrize("deaf", ["at work", "let go"])
def test_an_agent_that_hangs_when_it_is_to_stop_is_ended_and_its_host_recovered(
    monkeypatch: pytest.MonkeyPatch, job: Job, done_by: DoneBy, tmp_path: Path, deaf: str
) -> None:
    monkeypatch.setattr(session, "STOP_TIMEOUT", 1.5)
    monkeypatch.setattr(Recorder, "log", _then(Recorder.log, lambda: services.cancel(OPERATOR, job)))
    ready = 'say("ready", generation=request["generation"], before_bytes=100, made_bytes=40, made_inode=2)\n'
    let_go = ready + 'assert hear()["event"] == "go"\n' if deaf == "let go" else ""
    began = time.monotonic()
    job = done_by(
        f"{POLITE}{let_go}open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        'say("log", text="at work")\ntime.sleep(1)\nsay("log", text="a last word")\ntime.sleep(60)\n',
    )
    # From its last word on, not from the request.
    assert 2.5 < time.monotonic() - began < 12
    assert (job.state, job.error_code, job.needs_recovery) == ("interrupted", "interrupted", True)
    assert "has not responded for" in job.error_detail
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_words_that_no_database_takes_are_shown_as_they_are(done_by: DoneBy) -> None:
    job = done_by(POLITE + r"""
say("log", text="nul \0 esc \x1b lone \udcff", level="something long and unknown")
say("command", argv=["qemu-img", "a\0b"], exit_code=1)
say("progress", stage="copying", done=0, total=None, message="\0")
say("error", code="tool_failed", detail="nul \0 there")
""")  # fmt: skip
    assert (job.state, job.error_code) == ("failed", "tool_failed")
    assert "nul \\x00 esc \\x1b lone \\udcff" in said(job)
    assert job.error_detail == "nul \\x00 there"


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Does something in the moment when the agent is ready."""
    prepare, calls = Reclaim.prepare, []

    def second(kind: Reclaim, job: Job) -> None:
        prepare(kind, job)
        calls.append(1)
        if len(calls) == 2:
            act(job)

    monkeypatch.setattr(Reclaim, "prepare", second)


READY = f"""{POLITE}
say("ready", generation=request["generation"], before_bytes=100, made_bytes=40, made_inode=2)
answer = hear()
say("log", text="heard " + answer["event"])
if answer["event"] == "go":
    say("result", data=RESULT)
else:
    say("error", code="cancelled", detail="put back")
"""


def test_an_agent_that_is_ready_is_let_go(done_by: DoneBy) -> None:
    job = succeeded(done_by(READY))
    assert "heard go" in said(job)


@pytest.mark.parametrize("error", [None, RefusedError("guest_running", "Guest web is running.")])
def test_one_that_has_exchanged_files_is_told_whether_guests_stayed_off(
    monkeypatch: pytest.MonkeyPatch, done_by: DoneBy, error: RefusedError | None
) -> None:
    monkeypatch.setattr(Reclaim, "exchanged", raising(error) if error else lambda *_: None)
    asks = """
say("ready", generation=request["generation"], exchanged=1)
answer = hear()
say("log", text=f"then {answer.get('generation') == request['generation']}")
"""
    go = 'if answer["event"] == "go":'
    job = succeeded(done_by(READY.replace(f"{go}\n", go + asks.replace("\n", "\n    ") + "\n")))
    assert f"then {error is None}" in said(job)


def test_a_cancelled_job_is_not_let_go(monkeypatch: pytest.MonkeyPatch, done_by: DoneBy) -> None:
    meanwhile(monkeypatch, lambda job: services.cancel(OPERATOR, job))
    job = done_by(READY)
    assert (job.state, job.error_code, job.result) == ("cancelled", "", None)
    assert "heard cancel" in said(job)


def test_a_job_that_was_taken_away_is_not_let_go(monkeypatch: pytest.MonkeyPatch, done_by: DoneBy) -> None:
    meanwhile(monkeypatch, lambda job: Job.objects.filter(pk=job.pk).update(generation=7))
    job = done_by(READY)
    assert (job.state, job.generation, job.result) == ("running", 7, None)
    assert "heard cancel" in said(job)
    assert Image.objects.get(pk=job.target_id).inode != "2"


def test_a_guest_that_started_meanwhile_wins(monkeypatch: pytest.MonkeyPatch, done_by: DoneBy) -> None:
    meanwhile(monkeypatch, raising(RefusedError("guest_running", "Guest web is running.")))
    job = done_by(READY)
    assert (job.state, job.error_code) == ("failed", "guest_running")
    assert "heard go" not in said(job)


def test_what_comes_after_go_comes_too_late_to_stop_it(
    monkeypatch: pytest.MonkeyPatch, job: Job, done_by: DoneBy
) -> None:
    do_after(monkeypatch, AgentSession, "go", lambda *_: services.cancel(OPERATOR, job))
    ended = done_by(READY.replace('    say("result"', '    say("log", text=f"then {hear(1.5)}")\n    say("result"'))
    assert "then None" in said(succeeded(ended))


def test_a_running_job_that_is_cancelled_has_its_agent_stopped(
    monkeypatch: pytest.MonkeyPatch, job: Job, done_by: DoneBy
) -> None:
    monkeypatch.setattr(Recorder, "log", _then(Recorder.log, lambda: services.cancel(OPERATOR, job)))
    began = time.monotonic()
    job = done_by(OBEDIENT)
    assert (job.state, job.error_code, job.error_detail) == ("cancelled", "", "cancel")
    assert not job.needs_recovery
    assert time.monotonic() - began < 5


def _then(method: Any, act: Any) -> Any:
    """``method``, and ``act`` after its first call."""
    calls: list[int] = []

    def both(self: Any, *arguments: Any) -> None:
        method(self, *arguments)
        calls.append(1)
        if len(calls) == 1:
            act()

    return both


def test_a_worker_that_is_told_to_end_has_everything_put_back(monkeypatch: pytest.MonkeyPatch, done_by: DoneBy) -> None:
    stopping = threading.Event()
    monkeypatch.setattr(runner, "stopping", stopping)
    monkeypatch.setattr(Recorder, "log", _then(Recorder.log, stopping.set))
    job = done_by(OBEDIENT)
    assert (job.state, job.error_code) == ("interrupted", "interrupted")
    assert "was stopped" in job.error_detail
    assert job.needs_recovery


def test_a_worker_that_is_told_to_end_takes_no_new_job(monkeypatch: pytest.MonkeyPatch, done_by: DoneBy) -> None:
    stopping = threading.Event()
    stopping.set()
    monkeypatch.setattr(runner, "stopping", stopping)
    assert done_by(POLITE).state == "queued"


def test_work_goes_on_while_the_database_is_away(monkeypatch: pytest.MonkeyPatch, done_by: DoneBy) -> None:
    flush, calls = Recorder.flush, []

    def away(keeper: Recorder) -> None:
        calls.append(1)
        if 2 <= len(calls) <= 4:
            keeper._written = 0.0
            raise OperationalError("the database is away")
        flush(keeper)

    monkeypatch.setattr(Recorder, "flush", away)
    monkeypatch.setattr(plan_and_progress, "connection", type("Kept", (), {"close": staticmethod(lambda: None)}))
    monkeypatch.setattr(plan_and_progress, "INTERVAL", 0.0)
    program = POLITE + 'for i in range(9):\n    say("log", text=f"line {i}")\nsay("result", data=RESULT)'
    job = succeeded(done_by(program))
    assert [line for line in said(job) if line.startswith("line")] == [f"line {number}" for number in range(9)]


def test_a_result_that_cannot_be_recorded_is_a_bug_that_recovery_looks_at(
    monkeypatch: pytest.MonkeyPatch, done_by: DoneBy
) -> None:
    monkeypatch.setattr(Reclaim, "record", raising(ZeroDivisionError("oops")))
    job = done_by(POLITE + 'say("result", data=RESULT)')
    assert (job.state, job.error_code, job.needs_recovery, job.undo_state) == ("failed", "bug", True, "none")
    assert any("ZeroDivisionError" in line and "Traceback" in line for line in said(job))


def test_a_database_that_stays_away_until_the_worker_ends_is_no_go(
    monkeypatch: pytest.MonkeyPatch, done_by: DoneBy
) -> None:
    tries = goes_away(monkeypatch, Reclaim, "before_swap", times=99)
    monkeypatch.setattr(runner, "stopping", type("Third", (), {"is_set": staticmethod(lambda: len(tries) > 2)}))
    job = done_by(READY)
    assert (job.state, job.needs_recovery, len(tries)) == ("interrupted", True, 3)
    assert "connection to the database was lost" in job.error_detail


def test_without_the_right_to_become_root_the_host_says_how_to_give_it(
    monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert (run(job).state, job.error_code) == ("failed", "host_unreachable")
    assert "agent_installer --user" in job.error_detail
    host = reread(job.host)
    assert (host.status, host.status_detail) == ("degraded", job.error_detail)


def test_nobody_hears_of_a_job_that_another_worker_has(job: Job, done_by: DoneBy) -> None:
    Job.objects.filter(pk=job.pk).update(state="running", worker="other:1")
    job = done_by(POLITE + 'say("result", data=RESULT)')
    assert (job.state, job.worker, job.result) == ("running", "other:1", None)


def test_percent_speed_and_time_left_follow_the_stages(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    keeper = Recorder(job, Reclaim.stages)
    seen = []
    for done in (0, 50, 100):
        keeper.progress({"stage": "copying", "done": done, "total": 200})
        seen.append((keeper._progress["progress"], keeper._progress["bytes_per_sec"], keeper._progress["eta_seconds"]))
        clock[0] += 10
    assert seen == [(2.0, None, None), (19.0, 5, 30), (36.0, 5, 20)]
    keeper.progress({"stage": "verifying", "done": None, "total": None})
    assert (keeper._progress["progress"], keeper._progress["bytes_per_sec"]) == (70.0, None)


@pytest.mark.parametrize(("limit", "shown"), [(None, (797, 1)), (1, (None, None)), (797, (797, 1))])
def test_holes_that_are_passed_are_no_speed_above_the_limit(
    monkeypatch: pytest.MonkeyPatch, job: Job, limit: int | None, shown: tuple[int | None, int | None]
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    job.options = {"bandwidth_bytes_sec": limit}
    keeper = Recorder(job, Reclaim.stages, at_most=Reclaim().at_most(job))
    for done in (0, 7970):
        keeper.progress({"stage": "copying", "done": done, "total": 8767})
        clock[0] += 10
    assert (keeper._progress["bytes_per_sec"], keeper._progress["eta_seconds"]) == shown


def test_a_hosts_limit_counts_where_the_job_has_none_and_only_for_what_keeps_to_it(job: Job) -> None:
    job.host.bandwidth_bytes_sec = 5
    job.options = {}
    assert Reclaim().at_most(job) == 5
    job.options = {"bandwidth_bytes_sec": 7}
    assert Reclaim().at_most(job) == 7
    assert Scan().at_most(job) is None
