"""A web server whose threads somebody keeps."""

import contextlib
import http.client
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.harness.processes import Daemon, free_port, wait_until
from tests.harness.services import ROOT

#: Nobody waits for too long.
PATIENT = {"BULK_PATIENCE": 3600.0, "PATIENCE": 3600.0}


class Held:
    """The server. What is asked of it is read later."""

    def __init__(self, folder: Path, port: int, server: Daemon) -> None:
        self._folder, self.port, self._server = folder, port, server
        self._connections: list[http.client.HTTPConnection] = []

    def ask(self, path: str, method: str = "GET", body: bytes | None = None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self._connections.append(connection)
        connection.request(method, path, body)
        return connection

    def open(self, begun: bytes = b"") -> socket.socket:
        """A connection on which so much was said."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        made.sendall(begun)
        return made

    def hold(self, *paths: str) -> list[http.client.HTTPConnection]:
        """Keeps a thread by each of these."""
        count = self.held() + len(paths)
        asked = [self.ask(path) for path in paths]
        wait_until(lambda: self.held() == count, 60, "the threads are taken")
        return asked

    def held(self) -> int:
        """How many threads were kept so far."""
        holds = self._folder / "holds"
        return len(holds.read_bytes()) if holds.exists() else 0

    def let_go(self) -> None:
        (self._folder / "go").touch()

    def reads(self) -> bool:
        """Whether somebody waits for a body."""
        return (self._folder / "reads").exists()

    def seen(self) -> None:
        """Returns once the server's main loop has seen what was sent before: it comes to a second round after that."""
        for _ in range(2):
            assert self.ask("/healthz").getresponse().status == 200

    def order(self) -> list[str]:
        """Which paths had a thread, in their turn."""
        return self.ask("/order").getresponse().read().decode().split("\n")

    def end(self) -> None:
        """Asks it politely to end."""
        os.kill(self._server.pid, signal.SIGTERM)

    def close(self) -> None:
        self.let_go()
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def held_site(folder: Path, settings: Mapping[str, float], threads: int = 1, *options: str) -> Iterator[Held]:
    """A web server with so many threads, and other numbers than those of ``storage_admin/overload.py``."""
    port = free_port()
    argv = [
        *(sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{port}", "--no-control-socket", "--workers", "1"),
        *("--worker-class", "tests.supervisor.held_site.Worker", "--threads", str(threads)),
        *("--graceful-timeout", "30", *options, "tests.supervisor.held_site"),
    ]
    environment = {
        "HELD_FOLDER": str(folder),
        "HELD_SETTINGS": " ".join(f"{name}={value}" for name, value in settings.items()),
    }
    with Daemon(argv, folder / "web.log", cwd=ROOT, env=os.environ | environment) as server:
        held = Held(folder, port, server)

        def answers() -> bool:
            try:
                return held.ask("/healthz").getresponse().status == 200
            except OSError:
                return False

        server.wait_for(answers, 60, "the web server answers")
        try:
            yield held
        finally:
            held.close()
