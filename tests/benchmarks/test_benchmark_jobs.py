"""A benchmark as a job: what it refuses, waits for and reserves, and what becomes of the agent's events."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from benchmarks import results, services
from benchmarks.filters import BenchmarkFilters
from benchmarks.kind import RunBenchmark
from benchmarks.models import Benchmark
from benchmarks.steps import GIB, MIB
from images.rewrite.space import Admitted
from storage_admin.agent.protocol import RefusedError, unb64
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import claims
from storage_admin.jobs import services as jobs
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests.factories import ImageFactory, JobFactory, StoragePoolFactory
from tests.working import OPERATOR, invalid_fields, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

DATA = Path(__file__).parent.parent / "data" / "benchmarks"
SAMPLE = {"event": "sample", "setting": {}, "metric": "write_rate", "unit": "B/s", "value": 5, "repetition": 1}


def submitted(pool: StoragePool, kind: str = "dd", **options: Any) -> Job:
    job = services.submit(OPERATOR, kind, pool.pk, options).job
    assert job is not None
    return job


def refusal_of(pool: StoragePool, kind: str = "dd", **options: Any) -> str:
    plan = jobs.plan(OPERATOR, "benchmark", pool.pk, {"kind": kind} | options)
    if not plan.refusals:
        return ""
    with pytest.raises(RefusedError) as caught:
        services.submit(OPERATOR, kind, pool.pk, options)
    assert (caught.value.code, caught.value.detail) == (plan.refusals[0].code, plan.refusals[0].detail)
    return plan.refusals[0].code


def claimed(job: Job) -> bool:
    return claims.claim(job.pk, "worker") is not None


def waiting_for(job: Job) -> str:
    assert not claimed(job)
    return reread(job).waiting_for


def test_a_submission_keeps_its_steps_and_sends_them(pool: StoragePool) -> None:
    job = submitted(pool, size_bytes=64 * MIB, repetitions=2)
    run = Benchmark.objects.get(job=job)
    assert (run.kind, run.pool, run.host, run.quick, run.source) == ("dd", pool, pool.host, True, "run")
    asked = RunBenchmark().request(job)
    assert unb64(asked["pool_path_b64"]) == pool.path.encode()
    assert (asked["kind"], asked["repetitions"], asked["steps"]) == ("dd", 2, run.steps)
    assert asked["reserve_bytes"] == 5 * GIB
    assert {step["count"] * step["block_bytes"] for step in run.steps} == {64 * MIB}
    assert json.dumps(asked)


def test_a_job_submitted_as_a_job_is_a_benchmark_too(pool: StoragePool) -> None:
    job = jobs.submit(OPERATOR, "benchmark", pool.pk, {"kind": "fio"})
    assert Benchmark.objects.get(job=job).kind == "fio"


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "fio"},
        {"argv": ["rm"]},
        {"size_bytes": 5},
        {"size_bytes": MIB + 1},
        {"repetitions": 21},
        {"seconds": 0},
    ],
)
def test_unknown_and_senseless_options_are_named(pool: StoragePool, options: dict[str, Any]) -> None:
    assert invalid_fields(services.submit, OPERATOR, "dd", pool.pk, options)


def test_an_unknown_pool_or_kind_is_said(pool: StoragePool) -> None:
    with pytest.raises(NotFoundError):
        services.submit(OPERATOR, "dd", pool.pk + 1)
    with pytest.raises(InvalidError):
        services.submit(OPERATOR, "hdparm", pool.pk)


def test_a_missing_tool_is_named_with_its_package(pool: StoragePool) -> None:
    pool.host.capabilities["tools"] = {"qemu-img": True, "fio": False}
    pool.host.save()
    assert refusal_of(pool, "fio") == "tool_missing"
    (refusal,) = jobs.plan(OPERATOR, "benchmark", pool.pk, {"kind": "fio"}).refusals
    assert "Install fio there" in refusal.detail
    assert refusal_of(pool, "dd") == ""


def test_a_host_that_does_not_answer_and_a_pool_that_is_no_folder_are_refused(pool: StoragePool) -> None:
    Host.objects.update(status=Host.Status.UNREACHABLE)
    assert refusal_of(pool) == "host_unreachable"
    Host.objects.update(status=Host.Status.OK)
    StoragePool.objects.update(kind=StoragePool.Kind.LVM)
    assert refusal_of(pool) == "unsupported_pool"


def test_a_pool_without_room_is_refused_and_keeps_its_reserve(pool: StoragePool) -> None:
    StoragePool.objects.update(available_bytes=6 * GIB)
    assert refusal_of(pool, size_bytes=2 * GIB) == "not_enough_space"
    assert refusal_of(pool, size_bytes=GIB) == ""


def test_what_it_needs_is_reserved_against_rewrites_and_theirs_against_it(pool: StoragePool) -> None:
    job = submitted(pool, size_bytes=10 * GIB)
    assert Admitted().worst(pool) == 10 * GIB
    beside = StoragePoolFactory.create(host=pool.host, fs_key=pool.fs_key)
    assert refusal_of(beside, size_bytes=30 * GIB) == "not_enough_space"
    image = ImageFactory.create(pool=pool, allocated_size=26 * GIB)
    copy = {"method": "copy", "undo_hours": 0}
    assert jobs.plan(OPERATOR, "reclaim", image.pk, copy).refusals[0].code == "not_enough_space"
    jobs.cancel(OPERATOR, job)
    assert jobs.plan(OPERATOR, "reclaim", image.pk, copy).refusals == ()


def test_one_at_a_time_on_a_host_whatever_its_pool(pool: StoragePool) -> None:
    first, second = submitted(pool), submitted(pool, "fio")
    other = submitted(StoragePoolFactory.create(host=pool.host), alongside=True)
    elsewhere = submitted(StoragePoolFactory.create())
    assert first.pk != second.pk
    assert claimed(first)
    assert waiting_for(second) == waiting_for(other) == "the running benchmark on Host mine"
    assert claimed(elsewhere)
    Job.objects.filter(pk=first.pk).update(state="succeeded")
    assert claimed(second)


def test_it_waits_for_a_rewriting_job_unless_asked(pool: StoragePool) -> None:
    rewrite = jobs.submit(OPERATOR, "reclaim", ImageFactory.create(pool=pool).pk, {})
    patient, other = submitted(pool), submitted(pool, alongside=True)
    assert claimed(rewrite)
    assert waiting_for(patient) == "the running rewriting job on Host mine"
    assert claimed(other)


def test_a_rewriting_job_waits_for_a_benchmark_unless_that_was_asked_for(pool: StoragePool) -> None:
    rewrite = jobs.submit(OPERATOR, "reclaim", ImageFactory.create(pool=pool).pk, {})
    run = submitted(pool)
    assert claimed(run)
    assert waiting_for(rewrite) == "the running benchmark on Host mine"
    Job.objects.filter(pk=run.pk).update(options=run.options | {"alongside": True})
    assert claimed(rewrite)


def test_an_undo_waits_for_no_benchmark_and_the_benchmark_says_that_it_was_there(pool: StoragePool) -> None:
    undone = JobFactory.create(
        kind="convert", target=ImageFactory.create(pool=pool), state="succeeded", finished=timezone.now(),
        undo_state="available", undo_expires=timezone.now() + timedelta(hours=1), rewrites=True,
    )  # fmt: skip
    measuring = submitted(pool)
    assert claimed(measuring)
    undo = jobs.submit(OPERATOR, "undo", undone.pk, {})
    assert claimed(undo)
    Job.objects.filter(pk=undo.pk).update(state="succeeded", finished=timezone.now())
    RunBenchmark().record(reread(measuring), {"caches": "direct"})
    (note,) = Benchmark.objects.get(job=measuring).notes
    assert note == f"Other jobs were running on the host at the same time and affected the results: undo {undo.pk}."


def test_a_benchmark_waits_for_an_undo(pool: StoragePool) -> None:
    JobFactory.create(
        kind="undo", target=ImageFactory.create(pool=pool), state="running", started=timezone.now(), rewrites=True,
    )  # fmt: skip
    assert waiting_for(submitted(pool)) == "the running rewriting job on Host mine"


def test_a_run_that_had_the_host_to_itself_says_nothing_of_others(pool: StoragePool) -> None:
    JobFactory.create(
        kind="convert", target=ImageFactory.create(pool=pool), state="succeeded", started=timezone.now(),
        finished=timezone.now(),
    )  # fmt: skip
    measuring = submitted(pool)
    assert claimed(measuring)
    JobFactory.create(kind="scan", target=pool.host, state="running", started=timezone.now())
    JobFactory.create(kind="convert", target=ImageFactory.create(), state="running", started=timezone.now())
    RunBenchmark().record(reread(measuring), {})
    assert Benchmark.objects.get(job=measuring).notes == []


def fed(pool: StoragePool, kind: str, *events: dict[str, Any], **options: Any) -> Benchmark:
    job = submitted(pool, kind, **options)
    told = RunBenchmark()
    told.request(job)
    for event in events:
        told.on_event(job, event)
    return Benchmark.objects.get(job=job)


def output(tool: str, name: str, setting: dict[str, Any], repetition: int = 1) -> dict[str, Any]:
    text = (DATA / name).read_text()
    return {"event": "output", "tool": tool, "setting": setting, "repetition": repetition, "text": text}


def test_samples_and_outputs_become_figures_of_their_steps(pool: StoragePool) -> None:
    setting = {"rw": "randread", "block": "4K", "depth": 32}
    run = fed(
        pool, "fio",
        {"event": "environment", "data": {"kernel": "6.1", "load": [0.1]}},
        output("fio", "fio-3.33-randread.json", setting),
        output("fio", "fio-3.33-randread.json", setting, 2),
        {"event": "environment_after", "data": {"load": [2.5]}},
        {"event": "note", "text": "caches could not be dropped"},
        {"event": "note", "text": "caches could not be dropped"},
    )  # fmt: skip
    assert run.environment["kernel"] == "6.1"
    assert run.environment_after == {"load": [2.5]}
    assert run.notes == ["caches could not be dropped"]
    rows = {row.metric: row for row in results.of(run)}
    assert rows["rand_read_iops"].repetitions == 2
    assert {sample.step for sample in run.samples.all()} == {
        number for number, step in enumerate(run.steps) if step["setting"] == setting
    }


def test_an_unreadable_output_is_a_note_and_the_run_goes_on(pool: StoragePool) -> None:
    setting = {"size": "2G"}
    broken = {"event": "output", "tool": "bonnie++", "setting": setting, "repetition": 1, "text": "Can't open file\0"}
    run = fed(pool, "bonnie", broken, output("bonnie++", "bonnie-2.00a.csv", setting, 2))
    assert any(note.startswith("bonnie++ at 2G: Line 1 begins with “Can't open file”") for note in run.notes)
    rows = {row.metric: row for row in results.of(run)}
    assert (rows["seq_write_rate"].median, rows["seq_write_rate"].repetitions) == (745_887 * 1024, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"value": "fast"},
        {"unit": "parsec"},
        {"value": True},
        {"value": float("nan")},
        {"value": float("inf")},
        {"value": -1},
    ],
)
def test_a_figure_that_is_none_is_not_kept(pool: StoragePool, change: dict[str, Any]) -> None:
    run = fed(pool, "preallocation", SAMPLE | change, SAMPLE)
    assert [sample.value for sample in run.samples.all()] == [5]
    assert any("invalid result" in note for note in run.notes)


def test_what_devices_call_themselves_is_kept_as_every_database_takes_it(pool: StoragePool) -> None:
    data = {"device": {"model": "DISK\0\x1b[2J", "load": [float("nan"), 1.5]}, "drop_caches": True}
    run = fed(pool, "dd", {"event": "environment", "data": data}, {"event": "environment_after", "data": "none"})
    assert "\0" not in run.environment["device"]["model"]
    assert run.environment["device"]["load"] == [None, 1.5]
    assert run.environment["drop_caches"] is True
    assert run.environment_after == {}


def test_too_quick_to_measure_is_kept_as_that(pool: StoragePool) -> None:
    run = fed(pool, "preallocation", SAMPLE | {"value": None, "note": "too quick to measure"})
    (row,) = results.of(run)
    assert (row.median, row.repetitions, row.note) == (None, 0, "too quick to measure")


def test_steps_that_are_done_are_a_share_and_never_called_bytes(pool: StoragePool) -> None:
    job = claims.claim(submitted(pool).pk, "worker")
    assert job is not None
    kind = RunBenchmark()
    recorder = Recorder(job, kind.stages, in_bytes=kind.progress_in_bytes)
    recorder.progress({"stage": "dd", "done": 3, "total": 8, "message": "mode write, sync direct"})
    recorder.flush()
    assert (reread(job).progress, job.stage, job.message) == (37.5, "dd", "mode write, sync direct")
    assert (job.done_bytes, job.total_bytes, job.bytes_per_sec) == (None, None, None)


def test_every_option_and_filter_is_in_the_documentation() -> None:
    told = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text()
    options = set(RunBenchmark.properties) - {"kind"}
    assert {name for name in options if f"| `{name}` |" not in told} == set()
    assert {name for name in BenchmarkFilters.base_filters if f"`{name}`" not in told} == set()


def test_an_event_that_nobody_knows_is_a_bug(pool: StoragePool) -> None:
    job = submitted(pool)
    with pytest.raises(ValueError, match="does not know the event"):
        RunBenchmark().on_event(job, {"event": "image"})


def test_a_second_attempt_begins_with_no_figures(pool: StoragePool) -> None:
    run = fed(pool, "dd", SAMPLE)
    assert run.job is not None
    RunBenchmark().request(run.job)
    assert not run.samples.exists()
