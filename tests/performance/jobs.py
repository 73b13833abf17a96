"""One of the dashboard's jobs, run in this process as a worker would."""

import time
from typing import Any

from storage_admin.accounts.models import Actor, Role
from storage_admin.jobs import runner, services
from storage_admin.jobs.models import Job

ADMIN = Actor("bench", Role.ADMIN)


def run_job(kind: str, target_id: int, options: dict[str, Any] | None = None) -> tuple[Job, float]:
    """Submits a job and does it in this process, as a worker would: claim, agent, rows.

    Returns:
        The job's row, and the seconds from its submission to its end.

    Raises:
        AssertionError: it did not succeed.
    """
    begin = time.perf_counter()
    job = services.submit(ADMIN, kind, target_id, options or {})
    runner.run(job.pk)
    took = time.perf_counter() - begin
    job.refresh_from_db()
    assert job.state == "succeeded", f"{kind}: {job.state} {job.error_code} {job.error_detail}"
    return job, took
