"""What cannot be answered within seconds is refused, programs before people, and ``/healthz`` never."""

import http.client
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin import overload
from storage_admin.overload import Refusing
from storage_admin.supervisor import commands
from tests.harness.processes import Daemon, free_port
from tests.harness.services import ROOT


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Callable[[str], http.client.HTTPConnection], Path]]:
    """A web server with one thread, which somebody keeps; what is asked of it is read later."""
    port = free_port()
    argv = [
        *(sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{port}", "--no-control-socket", "--workers", "1"),
        *("--worker-class", commands.WORKER_CLASS, "--threads", "1", "tests.supervisor.held_site"),
    ]
    connections = []

    def ask(path: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path)
        connections.append(connection)
        return connection

    def answers() -> bool:
        try:
            return ask("/healthz").getresponse().status == 200
        except OSError:
            return False

    with Daemon(argv, tmp_path / "web.log", cwd=ROOT, env=os.environ | {"HELD_FOLDER": str(tmp_path)}) as server:
        server.wait_for(answers, 60, "the web server answers")
        ask("/hold")
        server.wait_for((tmp_path / "holds").exists, 60, "the thread is taken")
        yield ask, tmp_path / "go"
        (tmp_path / "go").touch()
    for connection in connections:
        connection.close()


def test_health_is_answered_while_every_thread_is_taken(
    site: tuple[Callable[[str], http.client.HTTPConnection], Path],
) -> None:
    ask, _go = site
    for _ in range(3):
        kept = ask("/healthz")
        assert kept.getresponse().read() == b"ok"
        kept.request("GET", "/healthz")
        assert kept.getresponse().read() == b"ok"


def test_connections_that_say_nothing_take_no_thread(
    site: tuple[Callable[[str], http.client.HTTPConnection], Path],
) -> None:
    ask, go = site
    port = ask("/healthz").port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * overload.MOST_WAITING)]
    assert ask("/healthz").getresponse().status == 200
    waits = ask("/images/")
    go.touch()
    assert waits.getresponse().status == 200, "they are not counted as waiting"
    silent[0].sendall(b"GET /images/ HTTP/1.1\r\nHost: x\r\n\r\n")
    assert silent[0].recv(12) == b"HTTP/1.1 200"
    for one in silent:
        one.close()


def test_of_those_who_waited_too_long_programs_are_refused_and_people_answered(
    site: tuple[Callable[[str], http.client.HTTPConnection], Path],
) -> None:
    ask, go = site
    paths = ("/images/", "/api/v1/images/", "/images.csv", "/metrics", "/", "/api/v1/jobs/")
    asked = {path: ask(path) for path in paths}
    go.touch()
    answers = {path: connection.getresponse() for path, connection in asked.items()}
    assert {path: answer.status for path, answer in answers.items()} == {
        "/images/": 200, "/api/v1/images/": 503, "/images.csv": 503, "/metrics": 503, "/": 200, "/api/v1/jobs/": 503,
    }  # fmt: skip
    refused = answers["/api/v1/images/"]
    assert int(refused.headers["Retry-After"]) > 0
    told = json.loads(refused.read())
    assert (told["code"], told["fields"]) == ("overloaded", {})


def test_more_than_can_wait_are_refused_at_once(
    site: tuple[Callable[[str], http.client.HTTPConnection], Path],
) -> None:
    ask, go = site
    waiting = [ask("/images/") for _ in range(overload.MOST_WAITING)]
    refused = ask("/images/").getresponse()
    assert (refused.status, refused.headers["Content-Type"]) == (503, "text/html; charset=utf-8")
    assert int(refused.headers["Retry-After"]) > 0
    assert ask("/healthz").getresponse().status == 200
    go.touch()
    assert {connection.getresponse().status for connection in waiting} == {200}


def answer(app: Refusing, path: str, method: str = "GET") -> tuple[str, Iterable[bytes]]:
    started: list[str] = []
    body = app({"PATH_INFO": path, "REQUEST_METHOD": method}, lambda status, _headers: started.append(status))
    return started[0][:3], body


def plain(_environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    start("200 OK", [])
    return [b"a line"]


def test_slow_readers_of_long_answers_leave_threads_to_others() -> None:
    app = Refusing(plain)
    held = [answer(app, "/images.csv") for _ in range(overload.MOST_LONG)]
    assert {status for status, _ in held} == {"200"}
    assert answer(app, "/jobs.csv")[0] == "503"
    assert answer(app, "/images/")[0] == "200"
    held[0][1].close()  # type: ignore[attr-defined]
    again, body = answer(app, "/jobs.csv")
    assert (again, list(body)) == ("200", [b"a line"])


def test_an_answer_that_fails_gives_its_place_back() -> None:
    def broken(_environ: dict[str, Any], _start: Callable[..., Any]) -> Iterable[bytes]:
        raise OSError

    app = Refusing(broken)
    for _ in range(2 * overload.MOST_LONG):
        with pytest.raises(OSError):  # noqa: PT011 (the one above)
            answer(app, "/images.csv")


@pytest.mark.parametrize(
    ("method", "path", "bulk"),
    [
        ("GET", "/api/v1/images/", True), ("HEAD", "/images.csv", True), ("GET", "/metrics", True),
        ("POST", "/api/v1/jobs/", False), ("GET", "/images/", False), ("POST", "/images/3/reclaim/", False),
    ],
)  # fmt: skip
def test_what_changes_something_is_not_a_bulk_read(method: str, path: str, bulk: bool) -> None:
    assert overload.is_bulk({"REQUEST_METHOD": method, "PATH_INFO": path}) == bulk
