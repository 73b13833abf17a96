"""What cannot be answered within seconds is refused though no thread comes free, programs before people."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from storage_admin import overload
from storage_admin.overload import Asked, Refusing, Threads
from tests.supervisor.held import PATIENT, held_site

SOON = {"BULK_PATIENCE": 0.2, "PATIENCE": 0.5}


def test_health_is_answered_while_every_thread_is_taken(tmp_path: Path) -> None:
    with held_site(tmp_path, PATIENT) as site:
        site.hold("/hold")
        for _ in range(3):
            kept = site.ask("/healthz")
            assert kept.getresponse().read() == b"ok"
            kept.request("GET", "/healthz?now")
            assert kept.getresponse().read() == b"ok"


def test_whoever_waits_is_refused_in_time_though_no_thread_ever_comes_free(tmp_path: Path) -> None:
    with held_site(tmp_path, SOON, 3) as site:
        site.hold("/hold", "/hold", "/hold")
        asked = {
            (method, path): site.ask(path, method, b"x" * 300_000 if method == "POST" else None)
            for method, path in (
                ("GET", "/images/"), ("HEAD", "/images/"), ("POST", "/images/3/reclaim/"), ("GET", "/api/v1/images/"),
                ("POST", "/api/v1/jobs/"), ("HEAD", "/images.csv"), ("GET", "/metrics"),
            )
        }  # fmt: skip
        for (method, path), connection in asked.items():
            answer = connection.getresponse()
            told = answer.read()
            assert (answer.status, int(answer.headers["Retry-After"]) > 0) == (503, True), (method, path)
            kind = "application/json" if path.startswith("/api/") else "text/html; charset=utf-8"
            assert (answer.headers["Content-Type"], bool(told)) == (kind, method != "HEAD")
            if kind == "application/json":
                assert (json.loads(told)["code"], json.loads(told)["fields"]) == ("overloaded", {})
        assert site.ask("/healthz").getresponse().status == 200
        assert site.held() == 3


def test_a_kept_connection_is_refused_as_well(tmp_path: Path) -> None:
    with held_site(tmp_path, SOON) as site:
        kept = site.ask("/images/")
        assert kept.getresponse().read() == b"ok"
        site.hold("/hold")
        kept.request("GET", "/images/")
        refused = kept.getresponse()
        assert (refused.status, refused.headers["Connection"]) == (503, "close")


def test_nobody_waits_for_longer_than_six_seconds() -> None:
    # The main loop looks at the latest a second after somebody's time was over.
    assert max(overload.PATIENCE, overload.BULK_PATIENCE) + 1 <= 6
    assert overload.BULK_PATIENCE < overload.PATIENCE


def test_a_page_that_came_after_ten_bulk_reads_is_answered_before_them(tmp_path: Path) -> None:
    with held_site(tmp_path, PATIENT) as site:
        site.hold("/hold")
        bulk = [site.ask(f"/api/v1/images/{number}/") for number in range(10)]
        site.seen()
        page = site.ask("/images/")
        changes = site.ask("/api/v1/jobs/", "POST", b"{}")
        site.seen()
        site.let_go()
        assert {one.getresponse().status for one in (page, changes, *bulk)} == {200}
        assert site.order()[:3] == ["/hold", "/images/", "/api/v1/jobs/"]
        assert sorted(site.order()[3:13]) == [f"/api/v1/images/{number}/" for number in range(10)]


def test_bulk_reads_leave_threads_to_pages(tmp_path: Path) -> None:
    with held_site(tmp_path, PATIENT, 2 + overload.KEPT_FOR_PAGES) as site:
        site.hold("/api/hold", "/api/hold")
        waits = site.ask("/api/v1/images/")
        site.seen()
        assert site.ask("/images/").getresponse().status == 200
        assert site.ask("/api/v1/jobs/", "POST", b"{}").getresponse().status == 200
        assert "/api/v1/images/" not in site.order()
        site.let_go()
        assert waits.getresponse().status == 200


def test_more_than_can_wait_are_refused_at_once_each_in_their_own_queue(tmp_path: Path) -> None:
    with held_site(tmp_path, PATIENT) as site:
        site.hold("/hold")
        waiting = [site.ask("/api/v1/images/") for _ in range(overload.MOST_WAITING)]
        waiting += [site.ask("/images/") for _ in range(overload.MOST_WAITING)]
        site.seen()
        for path in ("/images/", "/api/v1/images/", "/images/"):
            refused = site.ask(path).getresponse()
            assert (refused.status, int(refused.headers["Retry-After"]) > 0) == (503, True)
        assert site.ask("/healthz").getresponse().status == 200
        site.let_go()
        assert {connection.getresponse().status for connection in waiting} == {200}


def test_who_comes_when_others_have_waited_for_half_their_time_is_refused_at_once() -> None:
    go, worked = threading.Event(), list[str]()

    def work(name: str) -> None:
        go.wait()
        worked.append(name)

    threads = Threads(work, 1)
    try:
        now = time.monotonic()
        held = Asked("held", "GET", "/images/")
        assert threads.offer(held)
        while threads.seconds_left() != float("inf"):
            time.sleep(0.01)
        waits = Asked("waits", "GET", "/images/", now - overload.PATIENCE / 2)
        assert threads.offer(waits)
        assert not threads.offer(Asked("refused", "GET", "/images/"))
        assert threads.offer(Asked("bulk", "GET", "/metrics")), "another queue"
        go.set()
        waits.answered.result(60)
        fresh = Asked("fresh", "GET", "/images/")
        assert threads.offer(fresh)
        fresh.answered.result(60)
        assert {"held", "waits", "fresh"} <= set(worked) <= {"held", "waits", "fresh", "bulk"}
    finally:
        threads.shutdown(wait=False)


def test_who_still_waits_when_the_server_ends_is_told(tmp_path: Path) -> None:
    with held_site(tmp_path, {"PATIENCE": 3600.0, "BULK_PATIENCE": 1.0}) as site:
        site.hold("/hold")
        waits = site.ask("/images/")
        site.seen()
        site.end()
        answer = waits.getresponse()
        assert (answer.status, answer.headers["Retry-After"]) == (503, str(overload.RETRY_AFTER))


def test_who_has_a_thread_when_the_server_ends_is_answered(tmp_path: Path) -> None:
    with held_site(tmp_path, PATIENT) as site:
        (begun,) = site.hold("/hold")
        site.end()
        site.let_go()
        assert begun.getresponse().read() == b"ok"


def answer(app: Refusing, path: str) -> tuple[str, Iterable[bytes]]:
    started: list[str] = []
    body = app({"PATH_INFO": path, "REQUEST_METHOD": "GET"}, lambda status, _headers: started.append(status))
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
    assert Asked(None, method, path).bulk == bulk
