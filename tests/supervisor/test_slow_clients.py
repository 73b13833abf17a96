"""Who sends slowly, or never closes, keeps neither a thread nor the web server's main loop."""

import http.client
from pathlib import Path

from storage_admin import overload
from tests.harness.processes import wait_until
from tests.supervisor.held import PATIENT, held_site

ASKED = b"GET /images/ HTTP/1.1\r\nHost: x\r\n\r\n"


def test_connections_that_say_nothing_take_no_thread(tmp_path: Path) -> None:
    with held_site(tmp_path, PATIENT) as site:
        silent = [site.open() for _ in range(2 * overload.MOST_WAITING)]
        assert site.ask("/images/").getresponse().status == 200, "they are not counted as waiting"
        silent[0].sendall(ASKED)
        assert silent[0].recv(12) == b"HTTP/1.1 200"
        for one in silent:
            one.close()
        assert site.ask("/images/").getresponse().status == 200


def test_half_a_head_takes_no_thread(tmp_path: Path) -> None:
    with held_site(tmp_path, PATIENT) as site, site.open(ASKED[:-2]) as half, site.open(ASKED[:1]) as byte:
        site.seen()
        assert site.ask("/images/").getresponse().status == 200
        for place in range(1, len(ASKED)):
            byte.sendall(ASKED[place : place + 1])
            site.seen()
        half.sendall(ASKED[-2:])
        assert (half.recv(12), byte.recv(12)) == (b"HTTP/1.1 200", b"HTTP/1.1 200")


def test_two_requests_in_one_piece_are_both_answered(tmp_path: Path) -> None:
    posted = b"POST /reads HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    with held_site(tmp_path, PATIENT) as site, site.open(posted + ASKED[:-2]) as both:
        answer = http.client.HTTPResponse(both)
        answer.begin()
        assert (answer.status, answer.read()) == (200, b"3")
        assert site.ask("/images/").getresponse().status == 200, "the half that has come takes no thread"
        both.sendall(ASKED[-2:])
        assert both.recv(12) == b"HTTP/1.1 200"


def test_who_goes_in_the_middle_of_a_head_costs_nothing(tmp_path: Path) -> None:
    with held_site(tmp_path, PATIENT) as site:
        for said in (b"", ASKED[:1], ASKED[:-2]):
            site.open(said).close()
        site.seen()
        assert site.ask("/images/").getresponse().status == 200
        assert site.order() == ["/images/"]


def test_who_never_sends_the_rest_of_a_body_gives_the_thread_back(tmp_path: Path) -> None:
    posted = b"POST /reads HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\nabc"
    with held_site(tmp_path, {"BODY_PATIENCE": 1, **PATIENT}) as site, site.open(posted):
        wait_until(site.reads, 60, "somebody waits for the body")
        assert site.ask("/images/").getresponse().status == 200


def test_who_was_answered_and_does_not_close_keeps_nobody_waiting(tmp_path: Path) -> None:
    last = b"GET /images/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with held_site(tmp_path, {"PARTING": 3600.0, **PATIENT}) as site:
        kept = [site.open(last) for _ in range(3)]
        assert [one.recv(12) for one in kept] == [b"HTTP/1.1 200"] * 3
        site.hold("/hold")
        refused = [site.open(ASKED) for _ in range(overload.MOST_WAITING + 3)][-3:]
        assert [one.recv(12) for one in refused] == [b"HTTP/1.1 503"] * 3
        site.seen()
        assert site.ask("/healthz").getresponse().status == 200
        for one in (*kept, *refused):
            one.close()


def test_a_refusal_is_read_though_a_long_body_still_comes(tmp_path: Path) -> None:
    posted = b"POST /images/ HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
    with held_site(tmp_path, {"PATIENCE": 0.2}) as site:
        site.hold("/hold")
        with site.open(posted) as sends:
            for _ in range(200):
                sends.sendall(b"x" * 10_000)
            assert sends.recv(12) == b"HTTP/1.1 503"


def test_connections_that_say_nothing_make_room_for_others(tmp_path: Path) -> None:
    with held_site(tmp_path, PATIENT, 1, "--worker-connections", "20") as site:
        silent = [site.open() for _ in range(60)]
        assert site.ask("/images/").getresponse().status == 200
        assert silent[0].recv(12) == b"", "the oldest of them was let go"
        for one in silent:
            one.close()
