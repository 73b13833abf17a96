"""A worker's heartbeat: one thread per process that says which jobs it holds, and that it is alive."""

import logging
import os
import socket
import threading
import time

from django.db import Error, close_old_connections, connection
from django.utils import timezone

from storage_admin.jobs import claims, routing
from storage_admin.jobs.models import Job, Worker

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

    def hold(self, job: Job) -> None:
        """Beats for this job from now on."""
        with self._lock:
            self._held[job.pk] = job.generation

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
