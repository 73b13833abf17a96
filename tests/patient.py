"""A kind that waits for guests, whatever the kinds of this version do."""

from dataclasses import replace
from typing import Any

import pytest

from images.kinds.reclaim import Reclaim
from images.rewrite import wait_for_guests
from images.rewrite.neighbours import find
from storage_admin.accounts.models import Actor
from storage_admin.jobs import kinds
from storage_admin.jobs.kinds import JobKind, Wait
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan

_WAITING = wait_for_guests.WaitsForGuests()


class PatientReclaim(Reclaim):
    """Reclaim with the options of a job that waits."""

    properties = {**Reclaim.properties, **wait_for_guests.WAIT_OPTIONS}

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        plan = super().plan(actor, target_id, options)
        left, warnings = wait_for_guests.set_aside(find(target_id), list(plan.refusals), options)
        return replace(plan, refusals=tuple(left), warnings=(*plan.warnings, *warnings))

    def must_wait(self, job: Job, *, ask: bool) -> Wait | None:
        return _WAITING.must_wait(job, ask=ask)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> JobKind:
    """``reclaim`` takes ``when_running``, ``wait_hours`` and ``start_after``."""
    kind = PatientReclaim()
    monkeypatch.setitem(kinds._table(), "reclaim", kind)
    return kind
