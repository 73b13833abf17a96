"""Every kind, small, with the real agent and the real tools: figures arrive, and nothing is left or changed."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import profiles, results, selectors, services
from benchmarks.kind import RunBenchmark
from benchmarks.models import Benchmark
from benchmarks.steps import MADE, MIB
from storage_admin.agent.bench import bonnie, creation, dd, fio, layouts, modes
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.session import AgentSession
from storage_admin.jobs import reaper
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests.harness.patching import do_after
from tests.images.test_reclaim_job import at_stage
from tests.working import OPERATOR, create, digests, reread, run, said, scan, succeeded

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]

PARSERS = {
    "dd": dd.parse, "bonnie": bonnie.parse, "fio": fio.parse, "preallocation": creation.parse,
    "cluster_size": creation.parse, "formats": layouts.parse, "modes": modes.parse,
}  # fmt: skip
#: What each kind must have measured in every step, at least; rates of dd and fio depend on the step.
METRICS = {
    "dd": {"write_rate", "read_rate"},
    "bonnie": {"seq_write_latency_seconds", "seq_read_latency_seconds", "seeks_latency_seconds"},
    "fio": {"seq_write_rate", "rand_read_iops", "latency_p99_seconds"},
    "preallocation": {"create_seconds", "physical_bytes", "write_seconds", "write_rate"},
    "cluster_size": {"create_seconds", "write_seconds", "write_rate"},
    "formats": {"seq_write_rate", "seq_read_rate", "rand_write_iops", "rand_read_iops"},
    "modes": {"seq_write_rate", "seq_read_rate", "rand_write_iops", "rand_read_iops"},
}


def submitted(pool: StoragePool, kind: str, **options: Any) -> tuple[Benchmark, Job]:
    benchmark = services.submit(OPERATOR, kind, pool.pk, {"size_bytes": 4 * MIB} | options)
    assert benchmark.job is not None
    return benchmark, benchmark.job


def measure(pool: StoragePool, kind: str, **options: Any) -> Benchmark:
    benchmark, job = submitted(pool, kind, seconds=1, **options)
    succeeded(run(job))
    return reread(benchmark)


@pytest.mark.parametrize("kind", METRICS)
def test_a_kind_is_measured_and_leaves_nothing(here: StoragePool, folder: Path, kind: str) -> None:
    create(folder / "disk.qcow2")
    before = digests(folder)
    done = measure(here, kind, repetitions=2 if kind == "dd" else 1)
    assert digests(folder) == before
    assert sorted(path.name for path in folder.iterdir()) == ["disk.qcow2"]
    rows = results.of(done)
    assert METRICS[kind] <= {row.metric for row in rows}
    settings = {row.key for row in rows}
    for step in done.steps:
        named = {results.key_of(step["setting"] | more) for more in ({}, {"direction": "read"})}
        assert named & settings, step
    if kind != "bonnie":  # whose files are too small here
        assert all(row.median for row in rows if row.metric.endswith(("_rate", "_iops")) and not row.note), rows
    assert done.finished is not None
    assert done.caches in {"dropped", "direct", "not dropped"}
    assert done.environment["kernel"]
    assert done.environment_after["load"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("size_bytes", [MIB, 5 * MIB, None])
def test_the_agent_takes_every_profile_and_needs_no_more_than_was_stated(
    pool: StoragePool, kind: str, quick: bool, size_bytes: int | None
) -> None:
    profile = profiles.build(pool, kind, quick=quick, size_bytes=size_bytes)
    # As they travel.
    steps = PARSERS[kind](json.loads(json.dumps(list(profile.steps))))
    assert len(steps) == len(profile.steps) <= 400
    assert max(step.needed_bytes for step in steps) <= profile.cost.scratch_bytes


def test_every_kind_with_steps_is_tried_here() -> None:
    assert set(MADE) - {"boot"} == set(METRICS) == set(PARSERS)  # guests boot in tests/guests/test_boot_jobs.py


def test_cancelled_in_the_middle_it_leaves_nothing_and_no_advice(
    here: StoragePool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(folder / "disk.qcow2")
    before = digests(folder)
    benchmark, job = submitted(here, "fio", seconds=60)
    do_after(monkeypatch, RunBenchmark, "on_event", lambda *_: Job.objects.update(cancel_requested=True))
    began = time.monotonic()
    ended = run(job)
    assert (ended.state, ended.error_code) == ("cancelled", "")
    assert time.monotonic() - began < 30
    assert digests(folder) == before
    assert [path.name for path in folder.iterdir()] == ["disk.qcow2"]
    assert reread(benchmark).finished is None
    assert benchmark.environment


def test_a_second_run_stands_in_the_history_and_is_no_regression_by_itself(here: StoragePool) -> None:
    runs = [measure(here, "preallocation", repetitions=1) for _ in range(2)]
    assert runs[0].profile_key == runs[1].profile_key
    assert [one.pk for one in selectors.history(runs[1])] == [one.pk for one in runs]
    assert runs[1].regressions == []
    job = Job.objects.get(benchmark=runs[1])
    assert job.result is not None
    assert (job.result["benchmark"], job.result["regressions"]) == (runs[1].pk, 0)


def test_a_killed_benchmark_has_its_host_recovered_without_waiting_for_a_scan(
    here: StoragePool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at_its_first_step(monkeypatch)
    ended = run(submitted(here, "fio", seconds=60)[1])
    assert (ended.state, ended.needs_recovery) == ("interrupted", True)
    assert list(folder.iterdir())
    reaper.recover_hosts()
    recovery = succeeded(run(Job.objects.get(kind="recover")))
    assert not list(folder.iterdir())
    assert not reread(ended).needs_recovery
    assert said(ended)[-1] == "recovered: its leftover scratch files were removed"
    assert any("which a benchmark had left, was removed" in line for line in said(recovery))
    reaper.recover_hosts()
    assert Job.objects.filter(kind="recover").count() == 1


def test_a_scan_while_one_is_at_work_asks_for_no_recovery(
    here: StoragePool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, job = submitted(here, "dd", repetitions=1)
    looked: list[list[str]] = []

    def and_scan(_: Recorder, event: dict[str, Any]) -> None:
        if event["stage"] == "dd" and not looked:
            looked.append([path.name for path in folder.iterdir()])
            scan(here.host)

    do_after(monkeypatch, Recorder, "progress", and_scan)
    succeeded(run(job))
    assert looked == [[f".sa-{job.uid}.bench"]]
    assert not Job.objects.filter(kind="recover").exists()


def test_what_a_killed_agent_left_is_found_by_a_scan_and_removed(
    here: StoragePool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(folder / "disk.qcow2")
    before = digests(folder)
    benchmark, job = submitted(here, "fio", seconds=60)
    kill_at_its_first_step(monkeypatch)
    ended = run(job)
    assert (ended.state, ended.error_code) == ("interrupted", "interrupted")
    (left,) = [path for path in folder.iterdir() if path.name != "disk.qcow2"]
    assert left.name == f".sa-{ended.uid}.bench"
    scan(here.host)
    succeeded(run(Job.objects.get(kind="recover")))
    assert not left.exists()
    assert digests(folder) == before
    assert reread(benchmark).finished is None


def test_what_a_killed_agent_left_is_removed_by_the_next_benchmark(
    here: StoragePool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        kill_at_its_first_step(patched)
        run(submitted(here, "fio", seconds=60)[1])
    assert list(folder.iterdir())
    measure(here, "preallocation", repetitions=1)
    assert not list(folder.iterdir())


def kill_at_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is killed when it says that it is at work."""

    def kill(session: AgentSession) -> None:
        time.sleep(0.3)
        os.kill(session.pid, signal.SIGKILL)

    at_stage(monkeypatch, "fio", kill)
