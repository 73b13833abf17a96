"""``kill -9`` of a real worker, of its agent, or of both with the tool, at a random moment of a job (fault F1)."""

import contextlib
import random
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.utils import timezone

from storage_admin.hosts.models import Host
from storage_admin.jobs import reaper, services
from storage_admin.jobs.models import Job
from tests.factories import HostFactory
from tests.faults.scene import Scene
from tests.faults.trials import Trials
from tests.harness.services import LiveWorker
from tests.working import OPERATOR, image_at, register

pytestmark = [pytest.mark.faults, pytest.mark.services, pytest.mark.qemu, pytest.mark.django_db(transaction=True)]

#: Seconds within which a row has to tell how its job ended.
TRUE_WITHIN = 60
SLOW = {"bandwidth_bytes_sec": 2 << 20}
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("reclaim", {"method": "compress"}),
    ("reclaim", {"method": "copy", **SLOW}),
    ("reclaim", {"method": "in_place", **SLOW}),
    ("check", {"repair": "leaks", **SLOW}),
    ("flatten", {"method": "rebase"}),
]


@pytest.fixture
def host(live_worker: LiveWorker, pool: Path) -> Host:
    host = HostFactory.create(slug="local")
    register(host, pool)
    return host


def test_a_row_is_true_soon_after_its_worker_or_agent_was_killed(
    host: Host, pool: Path, tmp_path: Path, live_worker: LiveWorker, by_format: dict[str, list[Path]]
) -> None:
    trials, waited = Trials("F1", "kills of a worker, its agent or both", part=1 / 100, patience=2), [0.0]
    for trial in trials:
        with trial:
            kind, options = WAYS[trial.number % len(WAYS)]
            template = by_format["qcow2"][-1 if kind == "flatten" else 0]
            scene = Scene(trial.folder(tmp_path), template, pool / str(trial.number))
            services.submit(OPERATOR, "scan", host.pk, {})
            settled(live_worker)
            job = services.submit(OPERATOR, kind, image_at(scene.image).pk, options)
            scene.job = job.uid
            running = Job.objects.filter(pk=job.pk).exclude(state="queued")
            live_worker.wait_for(running.exists, 30, "it is claimed")
            time.sleep(trial.rng.uniform(0, 2.5))
            trial.note(f"{kind} {options.get('method', '')}", kill_some(trial.rng, live_worker))
            waited.append(seconds_until_true(job))
            trial.note(job.state)
            settled(live_worker)
            in_place = options.get("method") == "in_place"
            assert job.state == ("succeeded" if scene.swapped else "interrupted") or in_place, job.error_detail
            assert job.undo_available == scene.swapped
            scene.verify(dug=in_place)
            shutil.rmtree(scene.pool)
    print(f"true {max(waited):.1f} s after the kill at the latest")


def kill_some(rng: random.Random, worker: LiveWorker) -> str:
    """Kills a worker, its agents, or it with all that it has started; a killed worker is started again."""
    who = rng.choice(["worker", "agent", "tree"])
    own = psutil.Process(worker.pid)
    children = [] if who == "worker" else own.children(recursive=who == "tree")
    if who == "agent":
        children = [child for child in children if "/agent-" in " ".join(child.cmdline())]
    for process in [*([own] if who != "agent" else []), *children]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if who != "agent":
        before = worker.said().count(" ready.")
        worker.start_again()
        worker.wait_for(lambda: worker.said().count(" ready.") > before, 60, "the next worker is ready")
    return who


def seconds_until_true(job: Job) -> float:
    """Waits until the row says how the job ended, and nothing is left to be recovered."""
    began = time.monotonic()
    while True:
        job.refresh_from_db()
        seconds = time.monotonic() - began
        if not job.active and not job.needs_recovery:
            return seconds
        assert seconds < TRUE_WITHIN, (job.state, job.stage, job.needs_recovery)
        time.sleep(0.2)
        # As the scheduler has it done every few seconds.
        reaper.recover_hosts()
        reaper.sweep()


def settled(worker: LiveWorker) -> None:
    """Waits until nothing is queued or at work; rings again at once for what the killed worker had heard of."""

    def done() -> bool:
        reaper.sweep(timezone.now() + reaper.RING_AGAIN + timedelta(seconds=1))
        return not Job.objects.filter(state__in=Job.ACTIVE).exists()

    worker.wait_for(done, 60, "all jobs end")
