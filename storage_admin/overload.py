"""Overload is told, not queued: what cannot be answered within seconds is refused with 503 and ``Retry-After``.

A request takes no thread before its head has come, and then waits in one of three queues (:class:`Threads`):
``/healthz`` has a thread that nothing else takes, pages come before bulk reads (REST, CSV, metrics), and bulk reads
leave some threads to pages. Who waited longer than that queue's patience is refused by the process's main loop
(:class:`Worker`), which waits for nobody, so that no thread has to come free for it. What has a thread is answered to
its end.
"""

import gc
import json
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from gunicorn.workers.gthread import TConn, ThreadWorker

#: Seconds that a bulk read and anything else may wait for a thread.
BULK_PATIENCE, PATIENCE = 2.0, 5.0
#: Requests of one queue of a process that wait for a thread.
MOST_WAITING = 60
#: Threads of a process that bulk reads leave to pages.
KEPT_FOR_PAGES = 2
#: Long answers of a process at the same time, such as CSV to slow readers: they keep a thread to their end.
MOST_LONG = 3
#: Seconds that a thread waits for the next piece of a body; somebody who is gone says nothing any more.
BODY_PATIENCE = 30
#: Seconds in which somebody who was answered for the last time may close the connection.
PARTING = 2.0
RETRY_AFTER = 5
HEALTH = "/healthz"
#: Of a head so much is looked at; where it is longer, gunicorn judges it.
_HEAD = 16 * 1024
_DETAIL = "The dashboard has more to do than it can answer within seconds. Try again in a moment."
_PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    f"<title>Too busy</title></head><body><h1>Too busy</h1><p>{_DETAIL}</p></body></html>"
)

Environ = dict[str, Any]
Start = Callable[..., Any]
App = Callable[[Environ, Start], Iterable[bytes]]


@dataclass(frozen=True)
class Asked:
    """A request whose head has come, on its connection."""

    conn: TConn
    method: str
    path: str
    since: float = field(default_factory=time.monotonic)
    answered: "Future[Any]" = field(default_factory=Future)

    @property
    def bulk(self) -> bool:
        """Whether it reads for programs: nobody looks at a page that waits for it."""
        reads = self.method in {"GET", "HEAD"}
        return reads and (self.path.startswith("/api/") or self.path == "/metrics" or self.path.endswith(".csv"))


class _Queue(deque[Asked]):
    """Those who wait, the oldest first, and for how many seconds they do."""

    def __init__(self, patience: float) -> None:
        super().__init__()
        self.patience = patience

    @property
    def due(self) -> float:
        """When the oldest has waited for too long."""
        return self[0].since + self.patience if self else float("inf")

    @property
    def hopeless(self) -> bool:
        """Whether who comes now had better be told at once: too many wait, or the oldest has done so for half the time.

        A longer queue answers no more of them, it answers each of them later.
        """
        return len(self) >= MOST_WAITING or time.monotonic() > self.due - self.patience / 2


class Threads:
    """The threads of a process of the web server, and who waits for one.

    Args:
        work: answers the request of a connection.
        size: how many there are, besides the one for health.
    """

    def __init__(self, work: Callable[[TConn], Any], size: int) -> None:
        self._work = work
        self._health, self._pages, self._bulk = _Queue(PATIENCE), _Queue(PATIENCE), _Queue(BULK_PATIENCE)
        #: Bulk reads that may have a thread just now.
        self._room_for_bulk = max(size - KEPT_FOR_PAGES, 1)
        # A signal may end the process while the main loop holds it.
        lock = threading.RLock()
        self._asked, self._health_asked = threading.Condition(lock), threading.Condition(lock)
        self._ended = False
        for number in range(size):
            usual = (self._asked, self._next)
            threading.Thread(target=self._serve, args=usual, name=f"web-{number}", daemon=True).start()
        health = (self._health_asked, self._next_health)
        threading.Thread(target=self._serve, args=health, name="health", daemon=True).start()

    def offer(self, asked: Asked) -> bool:
        """Has a request wait for a thread; answers false where that is hopeless."""
        health = asked.path == HEALTH
        queue = self._health if health else self._bulk if asked.bulk else self._pages
        with self._asked:
            if queue.hopeless:
                return False
            queue.append(asked)
            (self._health_asked if health else self._asked).notify()
        return True

    def seconds_left(self) -> float:
        """Until somebody has waited for too long."""
        with self._asked:
            return max(min(queue.due for queue in self._queues()) - time.monotonic(), 0.0)

    def late(self) -> list[Asked]:
        """Those who have waited for too long, and do so no more."""
        found, now = [], time.monotonic()
        with self._asked:
            for queue in self._queues():
                while queue.due <= now:
                    found.append(queue.popleft())
        return found

    def hurry(self) -> None:
        """The process is to end: from now on nobody waits for longer than a bulk read."""
        for queue in self._queues():
            queue.patience = BULK_PATIENCE

    def shutdown(self, *, wait: bool) -> None:  # noqa: ARG002 (gunicorn calls it so)
        """Ends threads that have nothing to do, as gunicorn calls it; it never waits here."""
        with self._asked:
            self._ended = True
            self._asked.notify_all()
            self._health_asked.notify_all()

    def _queues(self) -> tuple[_Queue, ...]:
        return self._health, self._pages, self._bulk

    def _next_health(self) -> Asked | None:
        return self._health.popleft() if self._health else None

    def _next(self) -> Asked | None:
        if self._pages:
            return self._pages.popleft()
        if self._bulk and self._room_for_bulk:
            self._room_for_bulk -= 1
            return self._bulk.popleft()
        return None

    def _serve(self, come: threading.Condition, take: Callable[[], Asked | None]) -> None:
        while True:
            with come:
                while (asked := take()) is None:
                    if self._ended:
                        return
                    come.wait()
            try:
                asked.answered.set_result(self._work(asked.conn))
            except BaseException as error:  # noqa: BLE001 (the thread has others to answer)
                asked.answered.set_exception(error)
            if asked.bulk:
                with come:
                    self._room_for_bulk += 1


class Worker(ThreadWorker):  # type: ignore[misc] # gunicorn tells no types
    """gunicorn's process with threads. Its main loop knows who waits, and itself waits for nobody."""

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
        return Threads(self.handle, self.cfg.threads)

    def accept(self, listener: socket.socket) -> None:
        """Takes a connection. Where there is room for no more, one that says nothing goes: none waits unseen."""
        if self.nr_conns >= self.worker_connections - 1:
            for idle in (self.keepalived_conns, self.pending_conns):
                if idle:
                    self._drop(idle.popleft())
                    break
        super().accept(listener)

    def enqueue_req(self, conn: TConn) -> None:
        """Has a connection wait for a thread once the head of a request has come on it."""
        head, ended = _head(conn)
        if ended and not head:
            self._close(conn)
        elif ended or b"\r\n\r\n" in head or len(head) >= _HEAD:
            conn.data_ready, conn.timeout = True, None
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", BODY_PATIENCE, 0))
            asked = Asked(conn, *_request(head))
            asked.answered.add_done_callback(lambda done: self.method_queue.defer(self.finish_request, conn, done))
            if not self.tpool.offer(asked):
                self._refuse(asked)
        else:
            # From the first look on, however many pieces it comes in.
            self._watch(conn, self.on_pending_socket_readable, conn.timeout or time.monotonic() + self.cfg.keepalive)

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """Waits as gunicorn does, and no longer than somebody else may wait."""
        super().wait_for_and_dispatch_events(min(timeout, self.tpool.seconds_left()))
        for asked in self.tpool.late():
            self._refuse(asked)

    def finish_request(self, conn: TConn, done: "Future[Any]") -> None:
        """Ends the connection where its answer was the last one; gunicorn would wait here for the other side."""
        if done.exception() is None and done.result():
            super().finish_request(conn, done)
        else:
            self._part(conn)

    def murder_pending(self) -> None:
        """Drops those whose time is over, in whatever order they came."""
        now = time.monotonic()
        for conn in [conn for conn in self.pending_conns if conn.timeout <= now]:
            self.pending_conns.remove(conn)
            self._drop(conn)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to end."""
        self.tpool.hurry()
        super().handle_exit(sig, frame)

    def _refuse(self, asked: Asked) -> None:
        try:
            asked.conn.sock.send(refusal(asked.method, asked.path), socket.MSG_DONTWAIT)
        except OSError as error:
            self.log.debug("Nobody takes the refusal: %s", error)
        self._part(asked.conn)

    def _part(self, conn: TConn) -> None:
        """Closes a connection without cutting off its last answer: what still comes is read, for a moment."""
        try:
            conn.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(conn)
        else:
            self._watch(conn, self._let_go, time.monotonic() + PARTING)

    def _let_go(self, conn: TConn, sock: socket.socket) -> None:
        try:
            if sock.recv(_HEAD):
                return
        except BlockingIOError:
            return
        except OSError as error:
            self.log.debug("Closing connection. %s", error)
        self.pending_conns.remove(conn)
        self._drop(conn)

    def _watch(self, conn: TConn, come: Callable[[TConn, socket.socket], None], until: float) -> None:
        conn.timeout = until
        conn.sock.setblocking(False)
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(come, conn))

    def _drop(self, conn: TConn) -> None:
        self.poller.unregister(conn.sock)
        self._close(conn)

    def _close(self, conn: TConn) -> None:
        self.nr_conns -= 1
        conn.close()


def _head(conn: TConn) -> tuple[bytes, bool]:
    """The beginning of what has come on a connection, which stays to be read; and whether nothing more will come."""
    before = conn.parser.unreader.buf.getvalue() if conn.initialized else b""
    try:
        come = conn.sock.recv(_HEAD, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return before, False
    except OSError:
        return before, True
    # The poller tells when there is more than that; or when there will be none.
    if come and b"\r\n\r\n" not in before + come:
        more = len(come) + 1
        if conn.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == more:
            return before + come, True
        conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, more)
    return before + come, not come


def _request(head: bytes) -> tuple[str, str]:
    """Method and path of a request's first line."""
    method, _, rest = head.lstrip(b"\r\n").partition(b"\r\n")[0].decode("latin-1").partition(" ")
    return method, rest.partition(" ")[0].partition("?")[0]


class Refusing:
    """The application, with as many long answers at the same time as leave threads to others."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._long = threading.BoundedSemaphore(MOST_LONG)

    def __call__(self, environ: Environ, start: Start) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if not path.endswith(".csv"):
            return self._app(environ, start)
        if not self._long.acquire(blocking=False):
            headers, told = _told(path)
            start("503 Service Unavailable", headers)
            return [told]
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


def refusal(method: str, path: str) -> bytes:
    """The whole answer to a request. It is the last one on its connection, since what else of it came was not read."""
    headers, told = _told(path)
    lines = ["HTTP/1.1 503 Service Unavailable", "Connection: close", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else told)


def _told(path: str) -> tuple[list[tuple[str, str]], bytes]:
    api = path.startswith("/api/")
    told = (json.dumps({"code": "overloaded", "detail": _DETAIL, "fields": {}}) if api else _PAGE).encode()
    return [
        ("Content-Type", "application/json" if api else "text/html; charset=utf-8"),
        ("Content-Length", str(len(told))),
        ("Retry-After", str(RETRY_AFTER)),
        ("Cache-Control", "no-store"),
    ], told
