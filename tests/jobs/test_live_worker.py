"""With a real Redis and a real worker: no effect of what is forged, and a true row whoever dies."""

import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest
from celery import current_app
from django.utils import timezone
from kombu import Connection

from images.alert_rules.jobs import PATIENCE
from images.alert_rules.looking import look
from storage_admin.events.models import Alert
from storage_admin.hosts.models import Host
from storage_admin.jobs import reaper, services
from storage_admin.jobs.models import Job, Worker
from storage_admin.jobs.routing import RUN_JOB
from tests.agent.harness import leftovers, make_image, same_content
from tests.factories import HostFactory
from tests.harness.processes import wait_until
from tests.harness.services import LiveWorker, RedisServer
from tests.working import OPERATOR, digests, image_at, register, reread

pytestmark = [pytest.mark.services, pytest.mark.django_db(transaction=True), pytest.mark.sql]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    (tmp_path / "pool").mkdir()
    return tmp_path / "pool"


@pytest.fixture
def host(live_worker: LiveWorker, pool: Path) -> Host:
    host = HostFactory.create(slug="local")
    register(host, pool)
    return host


def ended(job: Job, worker: LiveWorker, seconds: float = 60) -> Job:
    worker.wait_for(lambda: not Job.objects.get(pk=job.pk).active, seconds, f"the end of {job}")
    return reread(job)


@pytest.fixture
def left_key() -> Iterator[Path]:
    """What a worker that was killed while it spoke with a host has left in memory."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder = Path(tempfile.mkdtemp(prefix=f"storage-admin-{ended.pid}-", dir="/dev/shm"))
    (folder / "key").write_text("PRIVATE")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_worker_begins_with_removing_the_keys_that_a_killed_one_has_left(
    left_key: Path, live_worker: LiveWorker
) -> None:
    live_worker.wait_for(lambda: not left_key.exists(), 60, "the key is gone")


def send(*arguments: object) -> None:
    current_app.send_task(RUN_JOB, arguments, retry=False, ignore_result=True)


def test_forged_messages_have_no_effect(
    host: Host, live_worker: LiveWorker, redis_server: RedisServer, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {canary}",)

    url = current_app.conf.broker_url
    with Connection(url) as connection, connection.SimpleQueue("celery") as queue:
        queue.put(pickle.dumps(Bomb()), content_type="application/x-python-serialize", content_encoding="binary")
        queue.put({"task": RUN_JOB, "id": "x", "args": [1], "kwargs": {}})
        queue.put("no task at all")
    for forged in (("abc",), (-1,), (4711,), ({"id": 1},), ([1],), (1, "extra"), ()):
        send(*forged)
    current_app.send_task("os.system", (f"touch {canary}",), ignore_result=True)
    finished = Job.objects.create(kind="scan", host=host, target_kind="host", target_id=host.pk, state="failed")
    send(finished.pk)
    job = ended(services.submit(OPERATOR, "scan", host.pk, {}), live_worker)
    assert (job.state, reread(finished).state, canary.exists()) == ("succeeded", "failed", False)


def slow_reclaim(host: Host, image: Path, wait: Callable[[Callable[[], object], float, str], None]) -> Job:
    """A reclaim that copies for a long while; a copy of its image stands beside the pool."""
    make_image(image, "64M")
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -P 7 8M 48M", image], check=True, stdout=-3)
    subprocess.run(["cp", image, image.parent.parent / "copy.qcow2"], check=True)
    scan = services.submit(OPERATOR, "scan", host.pk, {})
    wait(lambda: Job.objects.filter(kind="sample").exists(), 60, "the new image is sampled")
    wait(lambda: not Job.objects.filter(state__in=Job.ACTIVE).exists(), 60, "all jobs end")
    assert reread(scan).state == "succeeded"
    job = services.submit(OPERATOR, "reclaim", image_at(image).pk, {"bandwidth_bytes_sec": 1_048_576})
    wait(lambda: Job.objects.get(pk=job.pk).stage == "copying", 30, "it copies")
    return job


def agent_of(worker: LiveWorker) -> int:
    """The number of the agent's process that the worker has started."""
    children = Path(f"/proc/{worker.pid}/task")
    for task in children.iterdir():
        for child in (task / "children").read_text().split():
            if b"agent-" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError("no agent is at work")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.qemu
def test_a_cancel_ends_agent_and_tool_within_five_seconds(host: Host, pool: Path, live_worker: LiveWorker) -> None:
    job = slow_reclaim(host, pool / "disk.qcow2", live_worker.wait_for)
    before, agent = digests(pool)["disk.qcow2"], agent_of(live_worker)
    services.cancel(OPERATOR, job)
    job = ended(job, live_worker, 5)
    live_worker.wait_for(lambda: gone(agent), 5, "the agent is gone")
    assert (job.state, job.error_code, leftovers(pool)) == ("cancelled", "", set())
    assert digests(pool)["disk.qcow2"] == before


def told_as_stalled(job: Job, after: timedelta) -> bool:
    """Whether an alert is open that the job makes no progress, as of so much later."""
    look(timezone.now() + after)
    return Alert.objects.filter(kind="job_stalled", target_id=job.pk, closed=None).exists()


@pytest.mark.qemu
def test_a_tool_that_stands_still_is_told_of_until_it_goes_on_and_can_be_cancelled(
    host: Host, pool: Path, live_worker: LiveWorker
) -> None:
    job = slow_reclaim(host, pool / "disk.qcow2", live_worker.wait_for)
    before, agent = digests(pool)["disk.qcow2"], agent_of(live_worker)
    [tool] = [child for child in psutil.Process(agent).children(recursive=True) if child.name() == "qemu-img"]
    last = stand_still(tool, job)
    tool.resume()
    live_worker.wait_for(Job.objects.filter(pk=job.pk, progressed__gt=last).exists, 20, "it goes on")
    assert not told_as_stalled(job, PATIENCE - timedelta(minutes=1))
    stand_still(tool, job)
    services.cancel(OPERATOR, job)
    job = ended(job, live_worker, 5)
    live_worker.wait_for(lambda: gone(agent) and gone(tool.pid), 5, "agent and tool are gone")
    assert (job.state, leftovers(pool), digests(pool)["disk.qcow2"]) == ("cancelled", set(), before)
    assert not told_as_stalled(job, PATIENCE + timedelta(minutes=1))


def stand_still(tool: psutil.Process, job: Job) -> datetime:
    """Stops a job's tool; of that an alert opens after half an hour, and not before. When it came further last."""
    tool.suspend()
    time.sleep(1)  # what was on its way is written
    last = Job.objects.get(pk=job.pk).progressed
    time.sleep(2)
    assert last is not None
    assert (reread(job).state, job.progressed) == ("running", last)
    assert not told_as_stalled(job, PATIENCE - timedelta(minutes=1))
    assert told_as_stalled(job, PATIENCE + timedelta(minutes=1))
    return last


@pytest.mark.qemu
def test_an_agent_killed_in_its_work_leaves_a_true_row_and_is_recovered(
    host: Host, pool: Path, live_worker: LiveWorker
) -> None:
    job = slow_reclaim(host, pool / "disk.qcow2", live_worker.wait_for)
    os.kill(agent_of(live_worker), signal.SIGKILL)
    job = ended(job, live_worker, 10)
    assert (job.state, job.needs_recovery) == ("interrupted", True)
    reaper.reap()
    live_worker.wait_for(lambda: not Job.objects.get(pk=job.pk).needs_recovery, 30, "it is recovered")
    assert leftovers(pool) == set()
    assert same_content(pool / "disk.qcow2", pool.parent / "copy.qcow2")


@pytest.mark.qemu
def test_a_worker_that_is_told_to_end_puts_everything_back(host: Host, pool: Path, live_worker: LiveWorker) -> None:
    job = slow_reclaim(host, pool / "disk.qcow2", live_worker.wait_for)
    agent = agent_of(live_worker)
    live_worker.process.send_signal(signal.SIGTERM)
    live_worker.process.wait(30)
    assert (reread(job).state, job.error_code) == ("interrupted", "interrupted")
    assert "was stopped" in job.error_detail
    assert gone(agent)
    assert leftovers(pool) == set()
    assert not Worker.objects.filter(name=job.worker).exists()


@pytest.mark.qemu
def test_a_worker_that_is_killed_loses_nothing_and_the_next_one_says_so(
    host: Host, pool: Path, live_worker: LiveWorker
) -> None:
    job = slow_reclaim(host, pool / "disk.qcow2", live_worker.wait_for)
    agent = agent_of(live_worker)
    live_worker.kill()
    wait_until(lambda: gone(agent), 15, "the agent ends with its lifeline")
    assert reaper.reap_dead_workers() == 1
    assert (reread(job).state, job.needs_recovery, job.generation) == ("interrupted", True, 2)
    assert leftovers(pool) == set()
    assert same_content(pool / "disk.qcow2", pool.parent / "copy.qcow2")
    assert Job.objects.filter(kind="recover", state="queued").count() == 1
