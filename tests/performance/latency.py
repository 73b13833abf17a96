"""From a POST to the running agent, with a real broker and a real worker."""

import contextlib
import statistics
import sys
import time
from pathlib import Path

import redis
from django.conf import settings
from django.db import connection
from django.test import Client

from storage_admin.accounts.models import SYSTEM, Role
from storage_admin.accounts.services import create_token
from storage_admin.hosts.services import ensure_local_host
from storage_admin.jobs.models import Job
from tests.harness.processes import Daemon
from tests.harness.services import ROOT
from tests.performance.report import Row, seconds

NOTES = (
    (
        "From POST to the running agent: `POST /api/v1/jobs/` for a scan, a Redis and a Celery worker of their "
        "own, until the row says that the agent has answered; that includes the scan of an empty pool, so it is "
        "an upper bound. Median of 15."
    ),
)
TIMES = 15
#: Seconds after which a job counts as lost.
LIMIT = 60


def measure(folder: Path, times: int = TIMES) -> list[Row]:
    """The median of several jobs, one after the other."""
    host = ensure_local_host()
    _, secret = create_token(SYSTEM, "bench", Role.OPERATOR)
    client = Client(headers={"Authorization": f"Bearer {secret}"})
    with contextlib.closing(redis.Redis.from_url(settings.REDIS_URL)) as broker:
        broker.flushall()  # bells of jobs that are done already
    # A scan that waits from before would be the answer to ours, and nobody rings for it again.
    Job.objects.filter(state=Job.State.QUEUED).delete()
    with worker(folder):
        taken = [_one(client, host.pk) for _ in range(times + 2)][2:]
    middle = statistics.median(taken)
    return [
        Row(
            "from POST to the running agent",
            seconds(middle),
            "",
            f"{seconds(max(taken))} at worst",
            "under 1 s",
            middle < 1,
        )
    ]


def worker(folder: Path) -> Daemon:
    """A Celery worker like that of `up`, with its log in the folder."""
    argv = [sys.executable, "-m", "celery", "-A", "storage_admin.celery", "worker", "--pool", "threads"]
    argv += ["--concurrency", "32", "--without-gossip", "--without-mingle", "--loglevel", "INFO"]
    worker = Daemon(argv, folder / "worker.log", cwd=ROOT, grace=30)
    worker.wait_for(lambda: " ready." in worker.said(), 60, "the worker is ready")
    return worker


def _one(client: Client, host_id: int) -> float:
    begin = time.time()
    answer = client.post("/api/v1/jobs/", {"kind": "scan", "host": host_id}, content_type="application/json")
    assert answer.status_code == 202, answer.content
    job_id = answer.json()["id"]
    while True:
        assert time.time() < begin + LIMIT, f"job {job_id} has not ended within {LIMIT} s"
        job = Job.objects.get(pk=job_id)
        if not job.active:
            break
        connection.close()
        time.sleep(0.05)
    assert job.state == "succeeded", job.error_detail
    assert job.finished is not None
    return job.finished.timestamp() - begin
