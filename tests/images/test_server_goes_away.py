"""A server that goes away while jobs are at work on its files."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage_admin.accounts.models import SYSTEM
from storage_admin.agent import main
from storage_admin.agent.protocol import b64
from storage_admin.events.models import Alert
from storage_admin.hosts import transport
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests.agent.harness import leftovers
from tests.agent.recording import RecordingIO
from tests.harness.processes import Daemon, wait_until
from tests.images.far import answering_again
from tests.working import ADMIN, OPERATOR, create, image_at, reread, run, said, scan

pytestmark = [pytest.mark.services, pytest.mark.qemu, pytest.mark.django_db]
pytestmark.append(pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve"))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that lose their patience sooner."""
    agent = str(transport.agent_bundle().path)
    code = f"import sys; sys.argv[0] = {agent!r}; sys.path.insert(0, {agent!r}); "
    code += "from storage_admin.agent import main; from storage_admin.agent.host import special_mounts; "
    code += "main.BEAT, main.SILENCE, special_mounts.PATIENCE = 0.3, 5.0, 3.0; sys.exit(main.main())"
    monkeypatch.setattr(transport, "local_command", lambda: [sys.executable, "-I", "-c", code])


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Job], bool]], None]:
    """``meanwhile(step)``: has ``step`` called while a job is at work, every half second until it is done."""
    tick = Recorder.tick
    steps: list[Callable[[Job], bool]] = []

    def hooked(recorder: Recorder) -> None:
        tick(recorder)
        if steps and (step := steps.pop())(Job.objects.get(pk=recorder._job.pk)) is False:
            steps.append(step)

    monkeypatch.setattr(Recorder, "tick", hooked)
    return steps.append


@pytest.fixture
def goes_away(monkeypatch: pytest.MonkeyPatch, far_server: Daemon) -> dict[str, float]:
    """Has the server stop as soon as a job has begun its work; ``at`` is the moment."""
    seen: dict[str, float] = {}

    def begins(recorder: Recorder, event: dict[str, Any]) -> None:
        if "at" not in seen:
            psutil.Process(far_server.pid).suspend()
            seen["at"] = time.monotonic()

    monkeypatch.setattr(Recorder, "progress", begins)
    return seen


@pytest.fixture
def declared(far_host: Host) -> StoragePool:
    """The pool on the server, of which all users are registered, with two images."""
    pool = far_host.pools.get(name="far")
    pool.all_hosts_registered = True
    pool.save()
    create(Path(pool.path).parent / "export/second.qcow2")
    scan(far_host)
    return pool


def _far(pool: StoragePool, name: str = "away.qcow2") -> int:
    return image_at(Path(pool.path) / name).pk


def test_a_job_whose_server_goes_away_says_so_takes_no_slot_and_can_be_cancelled_at_once(
    declared: StoragePool, far_server: Daemon, near: Path, goes_away: dict[str, float],
    meanwhile: Callable[[Callable[[Job], bool]], None],
) -> None:  # fmt: skip
    host, seen = declared.host, goes_away
    export = near.parent.parent / "export/away.qcow2"
    before = export.read_bytes()
    job = services.submit(OPERATOR, "reclaim", _far(declared), {"method": "copy", "undo_hours": 0})
    later = services.submit(OPERATOR, "check", _far(declared, "second.qcow2"), {})

    def says_so(row: Job) -> bool:
        if row.stalled_since is None:
            return False
        seen["said"] = time.monotonic()
        assert row.state == "running"
        assert "The storage pool far has not answered since" in row.message
        host.refresh_from_db()
        assert (host.status, "The storage pool far does not answer." in host.status_detail) == ("degraded", True)
        assert host.pools.get(name="far").state == "silent"
        assert Alert.objects.filter(key=f"pool_silent:{declared.pk}", closed=None, severity="danger").exists()
        return True

    def is_cancelled(row: Job) -> bool:
        # The one slot of the host is free for work elsewhere; nothing is started there.
        assert run(services.submit(OPERATOR, "reclaim", image_at(near).pk, {"undo_hours": 0})).state == "succeeded"
        for kind in ("flatten", "reclaim", "analyze", "set_aside"):
            assert "pool_silent" in {one.code for one in services.plan(ADMIN, kind, _far(declared), {}).refusals}
        assert claims.claim(later.pk, "w") is None
        assert (reread(later).state, later.waiting_for) == ("queued", "the storage pool far to answer")
        seen["cancelled"] = time.monotonic()
        services.cancel(OPERATOR, row)
        return True

    meanwhile(is_cancelled)
    meanwhile(says_so)
    with answering_again(far_server):
        ended = run(job)
        seen["ended"] = time.monotonic()
        assert (ended.state, ended.needs_recovery, ended.stalled_since) == ("cancelled", True, None)
        assert seen["said"] - seen["at"] < 30
        assert seen["ended"] - seen["cancelled"] < 5
    wait_until(lambda: not leftovers(export.parent), 20, "what it has left is removed")
    scan(host)
    assert (reread(host).status, host.pools.get(name="far").state) == ("ok", "ok")
    assert not Alert.objects.filter(key=f"pool_silent:{declared.pk}", closed=None).exists()
    assert run(services.submit(SYSTEM, "recover", host.pk, {})).state == "succeeded"
    assert not reread(ended).needs_recovery
    assert export.read_bytes() == before
    assert run(later).state == "succeeded"


@pytest.mark.usefixtures("hasty")
def test_a_job_goes_on_where_its_server_comes_back(
    declared: StoragePool, far_server: Daemon, goes_away: dict[str, float],
    meanwhile: Callable[[Callable[[Job], bool]], None],
) -> None:  # fmt: skip
    def comes_back(row: Job) -> bool:
        if row.stalled_since is None:
            return False
        psutil.Process(far_server.pid).resume()
        return True

    meanwhile(comes_back)
    with answering_again(far_server):
        job = run(services.submit(OPERATOR, "reclaim", _far(declared), {"method": "copy", "undo_hours": 0}))
    assert goes_away
    assert (job.state, job.stalled_since, job.message) == ("succeeded", None, "")
    assert "the storage answers again; the job continues" in said(job)
    assert declared.host.pools.get(name="far").state == "ok"


@pytest.mark.usefixtures("hasty")
def test_a_job_that_only_looks_fails_where_its_server_goes_away_and_the_next_scan_leaves_the_pool_alone(
    declared: StoragePool, far_server: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = declared.host
    with answering_again(far_server):
        job = services.submit(OPERATOR, "analyze", _far(declared), {"mode": "full"})
        psutil.Process(far_server.pid).suspend()  # before its agent can have read it all
        job = run(job)
        assert (job.state, job.error_code, job.needs_recovery) == ("failed", "pool_silent", False)
        reaper.look_again()
        assert not Job.objects.filter(kind="scan", state="queued").exists(), "not more often than once a minute"
        monkeypatch.setattr(reaper, "LOOK_AGAIN", timedelta(0))
        reaper.look_again()
        again = Job.objects.get(kind="scan", state="queued")
        assert again.host == host
        assert run(again).state == "succeeded"
        assert (reread(host).status, host.pools.get(name="far").state) == ("degraded", "silent")
    scan(host)
    assert host.pools.get(name="far").state == "ok"


def test_an_agent_tells_of_pools_that_fall_silent_and_answer_again_and_of_none_that_it_leaves_alone(
    far_server: Daemon, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "BEAT", 0.2)
    monkeypatch.setattr(main, "SILENCE", 1.0)
    far, io = bytes(near.parent.parent / "far"), RecordingIO()
    args = {
        "chain": [{"pool_path_b64": b64(far), "path_b64": b64(far + b"/away.qcow2")}],
        "pools": [{"path_b64": b64(bytes(near.parent))}], "path_b64": "no base64", "known_b64": b64(b"/x"),
    }  # fmt: skip

    def told() -> list[str]:
        before = len(io.events)
        wait_until(lambda: len(io.events) >= before + 2, 10, "it has told twice")
        return list(io.events[-1]["silent"])

    with main.sentry(args, io):
        assert told() == []
        with answering_again(far_server):
            psutil.Process(far_server.pid).suspend()
            wait_until(lambda: told() == [b64(far)], 10, "it tells of the silent one")
            monkeypatch.setattr(main, "left_alone", {far})
            assert told() == []
            monkeypatch.setattr(main, "left_alone", set())
        wait_until(lambda: told() == [], 10, "it tells of none")
