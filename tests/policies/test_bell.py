"""A run goes on when one of its jobs has ended, not only when the scheduler rings."""

import pytest

from images.models import PolicyPick, PolicyRun
from images.rewrite import record
from tests.factories import JobFactory, PolicyRunFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def rung(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rings: list[int] = []
    monkeypatch.setattr(record, "_ring_policies", lambda: rings.append(1))
    return rings


def test_rings_when_a_job_of_a_run_at_work_has_ended(rung: list[int]) -> None:
    job = JobFactory.create(state="succeeded")
    PolicyPick.objects.create(run=PolicyRunFactory.create(), label="vm.qcow2", state="submitted", job=job)
    record.ring_policies_after(job)
    assert rung == [1]
    PolicyRun.objects.update(state="stopped")
    record.ring_policies_after(job)
    assert rung == [1]


def test_is_silent_for_a_job_that_somebody_asked_for(rung: list[int]) -> None:
    record.ring_policies_after(JobFactory.create(state="succeeded"))
    assert rung == []
