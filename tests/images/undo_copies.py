"""What the tests of undo copies share."""

from pathlib import Path

import pytest

from storage_admin.jobs.models import Job
from tests import passing
from tests.agent.harness import leftovers
from tests.working import OPERATOR, image_at, run, succeeded, work


@pytest.fixture
def job(path: Path) -> Job:
    """A finished reclaim whose undo copy waits; the host was scanned since."""
    job = succeeded(work("reclaim", image_at(path).pk, OPERATOR, undo_hours=1))
    run(Job.objects.get(kind="scan", state="queued"))
    return job


def window_closes(job: Job) -> None:
    passing.undo_window(job)


def recovery() -> Job:
    """The recovery that was asked for, as it ended."""
    return succeeded(run(Job.objects.get(kind="recover", state="queued")))


def by_name(job: Job, path: Path) -> None:
    (path.parent / f".sa-{job.uid}.orig").unlink()


def with_its_journal(job: Job, path: Path) -> None:
    for name in leftovers(path.parent):
        (path.parent / name).unlink()
