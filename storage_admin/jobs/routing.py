"""Which queue a job is rung into, which jobs a worker may take, and that a worker is alive.

A *general* worker listens to the default queue and takes the jobs of every host that it can reach. One that was started
for a host (``manage.py worker --host SLUG``) listens to that host's queue, ``host.<slug>``, and takes that host's jobs
alone: there the agent is a process beside it. So does a general worker for ``local``, where it runs on that machine. A
job is rung into its host's queue as long as a worker that listens there is alive, else into the default one.

Rings Celery: there is a job. The message is the job's id and nothing else; the queue, its host's or the default.

One thread per process says which jobs the worker holds, and that it is alive.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from celery import current_app
from django.conf import settings
from django.db import Error, close_old_connections, connection, transaction
from django.db.models import QuerySet
from django.utils import timezone
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from storage_admin.hosts import transport
from storage_admin.hosts.models import Host
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job, Worker

#: Seconds between two beats of a worker.
HEARTBEAT_INTERVAL = 10.0
#: One that missed three of them is not counted on.
ALIVE = timedelta(seconds=30)


@dataclass(frozen=True)
class Post:
    """What a process listens to: the queue of a host (its slug, or empty), the default queue, or nothing."""

    host: str = ""
    general: bool = False

    @property
    def queues(self) -> list[str]:
        """The names of its queues."""
        own = [queue_of(self.host)] if self.host else []
        return [*([current_app.conf.task_default_queue] if self.general else []), *own]


_post = Post()


def post() -> Post:
    """What this process listens to."""
    return _post


def take_post() -> Post:
    """Decides what this worker listens to; called once, before it does.

    Raises:
        django.db.Error: the database is away.
    """
    global _post  # noqa: PLW0603 (a process has one)
    _post = Post(host=settings.WORKER_HOST) if settings.WORKER_HOST else Post(general=True)
    if _post.general:
        here = [
            host.slug
            for host in Host.objects.filter(kind=Host.Kind.LOCAL)
            if transport.machine_of(host) == transport.this_machine()
        ]
        if settings.LOCAL_MACHINE and here:
            _post = Post(host=here[0], general=True)
    return _post


def queue_of(slug: str) -> str:
    """The name of a host's queue."""
    return f"host.{slug}"


def alive() -> QuerySet[Worker]:
    """The workers that were heard of lately."""
    return Worker.objects.filter(seen__gte=timezone.now() - ALIVE)


def queue_for(job_id: int) -> str | None:
    """The queue of a job's host, as long as somebody listens there; ``None`` for the default one."""
    slugs = Job.objects.filter(pk=job_id).values("host__slug")
    slug = alive().exclude(host="").filter(host__in=slugs).values_list("host", flat=True).first()
    return None if slug is None else queue_of(slug)


def hosts_of_others() -> dict[int, str]:
    """Hosts with a worker of their own that is alive and is not this process: their ids, and their queues."""
    slugs = alive().filter(general=False).exclude(host__in=["", _post.host]).values("host")
    return {pk: queue_of(slug) for pk, slug in Host.objects.filter(slug__in=slugs).values_list("pk", "slug")}


def serves(host: Host) -> bool:
    """Whether this process may do the jobs of a host. Whether it reaches the host is another question."""
    if settings.WORKER_HOST:
        return bool(host.slug == settings.WORKER_HOST)
    return host.kind != Host.Kind.LOCAL or transport.is_here(host)


def is_served(host: Host) -> bool:
    """Whether a worker is alive that may do the jobs of a host."""
    able = alive().filter(host=host.slug)
    if host.kind != Host.Kind.LOCAL or not transport.machine_of(host):
        able = able | alive().filter(general=True)
    return able.exists()


def place() -> str:
    """The machine and its process numbers: within it, a number that nobody has is that of a process that is gone.

    A container has numbers of its own, and may have its machine's name and id.
    """
    namespace = Path("/proc/self/ns/pid").readlink() if Path("/proc/self/ns/pid").is_symlink() else os.uname().nodename
    return f"{transport.this_machine()} {namespace}"[:200]


logger = logging.getLogger(__name__)

RUN_JOB = "storage_admin.jobs.tasks.run_job"


def ring(job: Job) -> None:
    """Tells a worker that the job is there, once its row is committed. If nobody hears, the sweeper rings again."""
    transaction.on_commit(lambda: ring_now(job.pk))


def ring_now(job_id: int) -> None:
    """Rings for a job that is committed already."""
    try:
        queue = queue_for(job_id)
    except Error as error:
        logger.warning("job %s stays queued until the database is back: %s", job_id, error)
        return
    send(f"job {job_id}", RUN_JOB, job_id, queue=queue)


def send(what: str, task: str, *args: int, queue: str | None = None) -> None:
    """Asks workers for a task. If the broker is away, whoever looks from time to time finds what is to be done.

    Args:
        what: is to be done, for the log.
    """
    try:
        current_app.send_task(task, args, queue=queue, retry=False, ignore_result=True)
    except (OperationalError, RedisError, OSError) as error:
        logger.warning("%s stays queued until the broker is back: %s", what, error)


def ring_next(job: Job) -> None:
    """Rings for jobs that may have waited for the place of one that has ended."""
    waiting = Job.objects.filter(state=Job.State.QUEUED, parked_at=None).exclude(waiting_for="").order_by("id")
    ids = list(waiting.filter(host=job.host_id).values_list("pk", flat=True)[:5])
    if kinds.get(job.kind).share < 1:
        # Its place is free for one of any host.
        ids += waiting.filter(kind=job.kind).exclude(pk__in=ids).values_list("pk", flat=True)[:2]
    for next_id in ids:
        ring_now(next_id)


def beat(worker: str, held: Iterable[tuple[int, int]]) -> None:
    """Says that the worker still holds these jobs (pairs of id and generation)."""
    now = timezone.now()
    for job_id, generation in held:
        Job.objects.filter(pk=job_id, state=Job.State.RUNNING, generation=generation, worker=worker).update(
            heartbeat=now
        )


class Heart:
    """Beats every ten seconds for the jobs that it was given."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0
        # When the last beat got through, and when the last time began in which none was missed; seconds.
        self._beaten = self._steady_since = float("-inf")

    @property
    def name(self) -> str:
        """The worker's name: machine and process."""
        return f"{socket.gethostname()}:{os.getpid()}"

    def start(self) -> None:
        """Starts to beat, once per process."""
        with self._lock:
            if self._thread is not None and self._pid == os.getpid():
                return
            self._pid, self._held = os.getpid(), {}
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stops to beat and takes the worker off the list."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(HEARTBEAT_INTERVAL)
            self._thread = None
        try:
            close_old_connections()
            Worker.objects.filter(name=self.name).delete()
        except Error as error:
            logger.warning("%s stays on the list until it is seen that it is gone: %s", self.name, error)

    @contextmanager
    def holding(self, job: Job) -> Iterator[None]:
        """Beats for this job meanwhile."""
        with self._lock:
            self._held[job.pk] = job.generation
        try:
            yield
        finally:
            self.release(job)

    def release(self, job: Job) -> None:
        """Does not beat for this job any more."""
        with self._lock:
            self._held.pop(job.pk, None)

    def beat(self) -> None:
        """One beat."""
        with self._lock:
            held = list(self._held.items())
        beat(self.name, held)
        where = {"host": _post.host, "general": _post.general, "place": place()}
        Worker.objects.update_or_create(name=self.name, defaults={"seen": timezone.now(), **where})
        now = time.monotonic()
        if now - self._beaten > 2 * HEARTBEAT_INTERVAL:
            self._steady_since = now
        self._beaten = now

    def is_beating(self) -> bool:
        """Whether beats get through: the database is there."""
        return time.monotonic() - self._beaten < 2 * HEARTBEAT_INTERVAL

    def is_steady(self) -> bool:
        """Whether beats have got through for so long that every other worker has had the time for one as well.

        Right after the database was away, a job without a heartbeat says nothing about its worker.
        """
        return self.is_beating() and time.monotonic() - self._steady_since > 1.5 * HEARTBEAT_INTERVAL

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                close_old_connections()
                self.beat()
            except Error as error:
                # The database may be away for a while; what is at work goes on, and its lease decides.
                logger.warning("no heartbeat: %s", error)
                connection.close()
            self._stopped.wait(HEARTBEAT_INTERVAL)
        connection.close()


heart = Heart()
