"""Signs of life: the heartbeat of a worker, and what a job does while a storage that it needs gives none.

One thread per process says which jobs the worker holds, and that it is alive.

Where a storage does not answer, an agent is held up in the kernel, or its tool is, and neither can be ended until the
server is back. The row says so, and so do pool, host and an alert. The job takes no slot meanwhile. One that only looks
fails at once; one that rewrites waits, unless it is cancelled: then its row ends, and the agent puts everything back
when the storage answers.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django.db import Error, InterfaceError, OperationalError, close_old_connections, connection
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin.accounts.models import SYSTEM
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, StoppedError, unb64
from storage_admin.hosts import silence as pools
from storage_admin.hosts.session import AgentSession
from storage_admin.jobs import claims, routing, services
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.models import Job, JobLog, Worker
from storage_admin.jobs.plan_and_progress import Recorder

logger = logging.getLogger(__name__)


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
            self._thread.join(claims.HEARTBEAT_INTERVAL)
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
        claims.beat(self.name, held)
        post = routing.post()
        where = {"host": post.host, "general": post.general, "place": routing.place()}
        Worker.objects.update_or_create(name=self.name, defaults={"seen": timezone.now(), **where})
        now = time.monotonic()
        if now - self._beaten > 2 * claims.HEARTBEAT_INTERVAL:
            self._steady_since = now
        self._beaten = now

    def is_beating(self) -> bool:
        """Whether beats get through: the database is there."""
        return time.monotonic() - self._beaten < 2 * claims.HEARTBEAT_INTERVAL

    def is_steady(self) -> bool:
        """Whether beats have got through for so long that every other worker has had the time for one as well.

        Right after the database was away, a job without a heartbeat says nothing about its worker.
        """
        return self.is_beating() and time.monotonic() - self._steady_since > 1.5 * claims.HEARTBEAT_INTERVAL

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                close_old_connections()
                self.beat()
            except Error as error:
                # The database may be away for a while; what is at work goes on, and its lease decides.
                logger.warning("no heartbeat: %s", error)
                connection.close()
            self._stopped.wait(claims.HEARTBEAT_INTERVAL)
        connection.close()


heart = Heart()


POOL_SILENT = "pool_silent"
#: Seconds without any word from an agent that tells of its storages every three: it is held up as a whole. A scan
#: is asked for then, which tells by what.
UNHEARD = 12.0
#: Stands for what an agent that says nothing at all is held up by.
UNKNOWN = frozenset([b""])


class Silence:
    """Looks at what the agent of one job tells of its storages."""

    def __init__(self, job: Job, kind: JobKind, session: AgentSession, recorder: Recorder) -> None:
        self._job, self._kind, self._session, self._recorder = job, kind, session, recorder
        self._pools: frozenset[bytes] = frozenset()
        self._since: datetime | None = None
        self._named = ""

    def look(self, event: dict[str, Any] | None) -> None:
        """Takes one event, or that there was none; writes what has changed.

        Raises:
            HostError: ``pool_silent``: a job that only looks waits for no storage.
        """
        if event is not None and event["event"] == protocol.STORAGE:
            self._note(frozenset(map(unb64, event["silent"])))
        elif event is not None and event["event"] == protocol.RESULT:
            self._note(frozenset())  # it came to its end
        elif self._session.unheard > UNHEARD and not self._pools:
            self._note(UNKNOWN)
        if self._since is not None and not self._kind.rewrites:
            self._leave()
            raise HostError(
                _("{who} stopped answering. Run the job again when the storage is back.").format(who=self._named),
                POOL_SILENT,
            )

    def end_cancelled(self) -> None:
        """Ends a job that is to stop, and whose agent cannot; nothing where that can.

        Raises:
            StoppedError: the agent is left to itself; it puts everything back as soon as the storage answers.
        """
        if self._since is None:
            return
        self._leave()
        if self._session.let_go or not self._kind.asks:
            told = _(
                "Stopped because {who} did not answer at the moment when the image was to be replaced. A recovery "
                "finds out which of the two files is in place as soon as the storage answers."
            )
            raise StoppedError(protocol.INTERRUPTED, told.format(who=self._named))
        told = _(
            "Cancelled while {who} did not answer. The image is unchanged. Files that the job left beside it are "
            "removed as soon as the storage answers."
        )
        raise StoppedError(protocol.CANCELLED, told.format(who=self._named))

    def _leave(self) -> None:
        self._recorder.agent_left = True
        self._session.leave()

    def _note(self, silent: frozenset[bytes]) -> None:
        if silent == self._pools:
            return
        try:
            self._write(silent)
        except (OperationalError, InterfaceError) as error:  # what the agent tells next is written then
            logger.warning("job %s: the database is away: %s", self._job.pk, error)
            connection.close()
        else:
            self._pools = silent

    def _write(self, silent: Collection[bytes]) -> None:
        host = self._job.host
        if back := self._pools - UNKNOWN - set(silent):
            pools.answer_again(host, back)
        if not silent:
            self._since = None
            self._job.ours().update(stalled_since=None, message="")
            claims.log(self._job, "the storage answers again; the job continues")
            return
        since = self._since or timezone.now()
        names = sorted(pools.fall_silent(host, silent, since)) if silent != UNKNOWN else []
        self._named = f"The storage pool {' and '.join(names)}" if names else f"The agent on {host.name}"
        if not names:
            services.submit(SYSTEM, "scan", host.pk, {})
        self._since = since
        said = f"{self._named} has not answered since {since:%H:%M} UTC. The job continues when it does."
        self._job.ours().update(stalled_since=since, message=said, bytes_per_sec=None, eta_seconds=None)
        claims.log(self._job, said, JobLog.Level.WARNING)
