"""A webhook's receiver on the loopback: a real HTTP server that keeps what it got and answers as it is told to."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PIECE = 65536


@dataclass
class Received:
    """One POST as it came."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiver:
    """What came, and what is answered next: a status, ``hang`` (never), ``drip`` (a byte now and then), ``close``.

    The last answer holds for all that follow. ``slow`` are seconds before each answer, ``sent`` the bytes of bodies
    that were taken, with what the kernel holds on the way.
    """

    answers: list[int | str] = field(default_factory=lambda: [200])
    body: bytes = b"thank you"
    slow: float = 0.0
    elsewhere: str = "/elsewhere"
    sent: int = 0
    got: list[Received] = field(default_factory=list)
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_answer(self, received: Received) -> int | str:
        with self.lock:
            self.got.append(received)
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def receiver(*answers: int | str, **settings: Any) -> Iterator[Receiver]:
    """A receiver that listens as long as the context lasts."""
    told = Receiver(answers=list(answers) or [200], **settings)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = told.next_answer(Received(self.path, dict(self.headers), body))
            if answer == "close":
                self.connection.close()
                return
            if answer == "hang":
                told.over.wait(60)
                return
            if answer == "drip":
                self._drip()
                return
            time.sleep(told.slow)
            self.send_response(int(answer))
            if 300 <= int(answer) < 400:
                self.send_header("Location", told.elsewhere)
            self.send_header("Content-Length", str(len(told.body)))
            self.end_headers()
            self._send(memoryview(told.body))

        def _send(self, body: memoryview) -> None:
            with suppress(OSError):  # who asked has read enough
                for start in range(0, len(body), _PIECE):
                    self.wfile.write(body[start : start + _PIECE])
                    told.sent += len(body[start : start + _PIECE])

        def _drip(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not told.over.wait(0.1):
                try:
                    self.wfile.write(b"X-More: and more\r\n")
                except OSError:
                    return

        def log_message(self, *_about: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_port}/hook"
    try:
        yield told
    finally:
        told.over.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
