"""Quick profiles on a schedule."""

from datetime import timedelta

import pytest
from django.utils import timezone

from benchmarks import services, tasks
from benchmarks.models import Benchmark, Watch
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import automation
from storage_admin.jobs.models import Job
from tests.working import ADMIN, OPERATOR, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


def rounds(number: int = 1) -> int:
    """The scheduler rings; how many runs there are."""
    for _ in range(number):
        tasks.start_watches()
    return Benchmark.objects.count()


def test_a_watch_starts_its_quick_profile_when_it_is_due(pool: StoragePool) -> None:
    watch = services.watch(OPERATOR, pool, "fio", 24)
    assert rounds(3) == 1
    run = Benchmark.objects.select_related("job").get()
    assert run.job is not None
    assert (run.kind, run.quick, run.pool, run.created_by) == ("fio", True, pool, "system")
    run.job.state = Job.State.SUCCEEDED
    run.job.save()
    assert rounds() == 1
    Watch.objects.update(last_started=timezone.now() - timedelta(hours=25))
    assert rounds(2) == 2
    assert timezone.now() - reread(watch).last_started < timedelta(minutes=1)  # type: ignore[operator]


def test_no_watch_starts_while_automation_is_paused(pool: StoragePool) -> None:
    services.watch(OPERATOR, pool, "fio", 24)
    automation.switch(ADMIN, paused=True)
    assert rounds() == 0
    automation.switch(ADMIN, paused=False)
    assert rounds() == 1


def test_a_run_that_still_waits_is_not_queued_twice(pool: StoragePool) -> None:
    services.watch(OPERATOR, pool, "fio", 1)
    services.watch(OPERATOR, pool, "dd", 1)
    assert rounds() == 2
    Watch.objects.update(last_started=timezone.now() - timedelta(hours=2))
    assert rounds() == 2
    Job.objects.filter(options__kind="dd").update(state="failed")
    assert rounds() == 3


def test_why_one_could_not_start_stands_in_its_row_until_it_can(pool: StoragePool) -> None:
    services.watch(OPERATOR, pool, "dd", 1)
    StoragePool.objects.update(available_bytes=0)
    assert rounds() == 0
    assert "must stay free" in Watch.objects.get().problem
    StoragePool.objects.update(available_bytes=pool.available_bytes)
    assert rounds() == 0  # not before its time
    Watch.objects.update(last_started=timezone.now() - timedelta(hours=2))
    assert rounds() == 1
    assert Watch.objects.get().problem == ""


def test_one_watch_that_is_refused_does_not_keep_the_others(pool: StoragePool) -> None:
    pool.host.capabilities["tools"] = {"fio": False}
    pool.host.save()
    services.watch(OPERATOR, pool, "fio", 1)
    services.watch(OPERATOR, pool, "dd", 1)
    assert rounds() == 1


def test_a_second_watch_of_the_same_changes_how_often(pool: StoragePool) -> None:
    services.watch(OPERATOR, pool, "dd", 24)
    services.watch(OPERATOR, pool, "dd", 6)
    assert Watch.objects.get().every_hours == 6


@pytest.mark.parametrize(("kind", "hours"), [("boot", 24), ("hdparm", 24), ("dd", 0), ("dd", 10_000)])
def test_senseless_watches_are_refused(pool: StoragePool, kind: str, hours: int) -> None:
    with pytest.raises(InvalidError):
        services.watch(OPERATOR, pool, kind, hours)
    assert not Watch.objects.exists()
