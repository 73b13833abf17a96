"""Overload is told, not queued: what could not be answered within seconds is refused with 503 and ``Retry-After``.

A request that waits for a free thread notes since when (:class:`Threads`). Once it has one, and it waited too long for
what it is, it is refused before anything is looked up, so that those behind it do not wait as well (:class:`Refusing`).
Bulk reads (REST, CSV, metrics) have the least patience, and pages more. ``/healthz`` is never refused, and has a thread
that nothing else takes, as have refusals where too many wait already.
"""

import gc
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from gunicorn.workers.gthread import TConn, ThreadWorker

#: Seconds that a bulk read and anything else may have waited for a thread and is still answered.
BULK_PATIENCE, PATIENCE = 2.0, 5.0
#: Requests of a process that wait for a thread; what comes then is refused at once.
MOST_WAITING = 60
#: Long answers of a process at the same time, such as CSV to slow readers: they keep a thread to their end.
MOST_LONG = 3
RETRY_AFTER = 5
HEALTH = "/healthz"
_DETAIL = "The dashboard has more to do than it can answer within seconds. Try again in a moment."
_PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    f"<title>Too busy</title></head><body><h1>Too busy</h1><p>{_DETAIL}</p></body></html>"
)

Environ = dict[str, Any]
Start = Callable[..., Any]
App = Callable[[Environ, Start], Iterable[bytes]]


class _Waited(threading.local):
    """Of the request that a thread is at work on: since when it waited; ``None`` where nobody noted it."""

    since: float | None = None
    #: Whether too many waited when it came.
    turned_away = False


_waited = _Waited()


class Threads:
    """The threads of a process of the web server, for :class:`Worker`."""

    def __init__(self, size: int) -> None:
        self._usual = ThreadPoolExecutor(max_workers=size, thread_name_prefix="web")
        self._health = ThreadPoolExecutor(max_workers=1, thread_name_prefix="health")
        self._refusals = ThreadPoolExecutor(max_workers=2, thread_name_prefix="refusals")
        self._lock = threading.Lock()
        self._waiting = 0

    def submit(self, work: Callable[[TConn], Any], connection: TConn) -> "Future[Any]":
        """Has one request of a connection worked on."""
        now = time.monotonic()
        if (_begun(connection.sock) or b"").startswith((b"GET /healthz", b"HEAD /healthz")):
            return self._health.submit(_noted, work, connection, now)
        with self._lock:
            if self._waiting >= MOST_WAITING:
                return self._refusals.submit(_noted, work, connection, now, turned_away=True)
            self._waiting += 1
        return self._usual.submit(self._take, work, connection, now)

    def shutdown(self, *, wait: bool) -> None:
        """Ends the threads when they are done."""
        for threads in (self._usual, self._health, self._refusals):
            threads.shutdown(wait=wait)

    def _take(self, work: Callable[[TConn], Any], connection: TConn, since: float) -> Any:
        with self._lock:
            self._waiting -= 1
        return _noted(work, connection, since)


def _noted(work: Callable[[TConn], Any], connection: TConn, since: float, *, turned_away: bool = False) -> Any:
    _waited.since, _waited.turned_away = since, turned_away
    return work(connection)


def _begun(sock: socket.socket) -> bytes | None:
    """The beginning of what has come on a connection, which stays to be read; ``None`` where nothing has."""
    try:
        return sock.recv(32, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Worker(ThreadWorker):  # type: ignore[misc] # gunicorn tells no types
    """gunicorn's process with threads, which knows how long each request has waited for one."""

    def load_wsgi(self) -> None:
        """Loads the application, and leaves all that it is made of out of later collections of garbage.

        Each of those stops every thread, for a tenth of a second where it looks at modules, models and classes again.
        """
        super().load_wsgi()
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)

    def get_thread_pool(self) -> Threads:
        """Called once in each process."""
        return Threads(self.cfg.threads)

    def enqueue_req(self, conn: TConn) -> None:
        """Gives a connection to the threads once something came on it: browsers open some in advance."""
        if conn.initialized or conn.data_ready or _begun(conn.sock) is not None:
            super().enqueue_req(conn)
            return
        # As gunicorn does with one on which nothing came for some seconds.
        conn.timeout = time.monotonic() + self.cfg.keepalive
        conn.sock.setblocking(False)
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn))


class Refusing:
    """The application, as far as it can answer within seconds."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._long = threading.BoundedSemaphore(MOST_LONG)

    def __call__(self, environ: Environ, start: Start) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == HEALTH:
            return self._app(environ, start)
        # What a thread did before on its own, as a body that came late, is not waiting.
        since, _waited.since = _waited.since, None
        bulk = is_bulk(environ)
        late = since is not None and time.monotonic() - since > (BULK_PATIENCE if bulk else PATIENCE)
        if late or _waited.turned_away:
            return _refuse(path, start)
        if not path.endswith(".csv"):
            return self._app(environ, start)
        return self._long_answer(environ, start) if self._long.acquire(blocking=False) else _refuse(path, start)

    def _long_answer(self, environ: Environ, start: Start) -> Iterable[bytes]:
        try:
            return _Long(self._app(environ, start), self._long)
        except BaseException:
            self._long.release()
            raise


class _Long:
    """An answer that gives its place back when it has been sent, or its reader is gone."""

    def __init__(self, answer: Iterable[bytes], room: threading.BoundedSemaphore) -> None:
        self._answer, self._room = answer, room

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._answer)

    def close(self) -> None:
        self._room.release()
        if close := getattr(self._answer, "close", None):
            close()


def is_bulk(environ: Environ) -> bool:
    """Whether a request reads for programs: nobody looks at a page that waits for it."""
    path = environ.get("PATH_INFO", "")
    reads = environ.get("REQUEST_METHOD") in {"GET", "HEAD"}
    return reads and (path.startswith("/api/") or path == "/metrics" or path.endswith(".csv"))


def _refuse(path: str, start: Start) -> Iterable[bytes]:
    api = path.startswith("/api/")
    told = json.dumps({"code": "overloaded", "detail": _DETAIL, "fields": {}}) if api else _PAGE
    headers = [
        ("Content-Type", "application/json" if api else "text/html; charset=utf-8"),
        ("Content-Length", str(len(told.encode()))),
        ("Retry-After", str(RETRY_AFTER)),
        ("Cache-Control", "no-store"),
    ]
    start("503 Service Unavailable", headers)
    return [told.encode()]
