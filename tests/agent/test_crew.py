"""Threads that work at the same time, and whose findings come in order."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from storage_admin.agent.host import priority
from storage_admin.agent.host.crew import Crew


@pytest.fixture
def crew() -> "Crew[int]":
    return Crew(3)


def test_findings_come_in_the_order_they_were_asked_for(crew: Crew[int]) -> None:
    def slow_first(number: int) -> int:
        time.sleep(0.05 if number % 3 == 0 else 0)
        return number

    for number in range(9):
        crew.ask(lambda _, number=number: slow_first(number))  # type: ignore[misc]
    assert crew.waiting == 9
    assert [crew.take() for _ in range(9)] == list(range(9))
    assert crew.waiting == 0
    crew.close()


def test_they_work_at_the_same_time(crew: Crew[int]) -> None:
    all_there = threading.Barrier(3, timeout=10)
    for _ in range(3):
        crew.ask(lambda _: all_there.wait())
    assert sorted(crew.take() for _ in range(3)) == [0, 1, 2]
    crew.close()


def test_an_error_comes_in_its_place_and_the_rest_after_it(crew: Crew[int]) -> None:
    crew.ask(lambda _: 1)
    crew.ask(lambda _: 1 // 0)
    crew.ask(lambda _: 3)
    assert crew.take() == 1
    with pytest.raises(ZeroDivisionError):
        crew.take()
    assert crew.take() == 3
    crew.close()


def test_what_is_dropped_is_not_begun_and_nobody_is_at_work_afterwards(crew: Crew[int]) -> None:
    begun: list[int] = []
    ended: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        time.sleep(0.05)
        ended.append(number)
        return number

    for number in range(100):
        crew.ask(lambda _, number=number: work(number))  # type: ignore[misc]
    crew.drop()
    assert begun == [] or len(begun) < 10
    assert sorted(begun) == sorted(ended)
    assert crew.waiting == 0
    crew.ask(lambda _: 7)
    assert crew.take() == 7
    crew.close()


def test_who_is_at_work_learns_that_it_is_not_wanted_any_more(crew: Crew[int]) -> None:
    begun = threading.Event()

    def work(is_wanted: Callable[[], bool]) -> int:
        begun.set()
        rounds = 0
        while is_wanted() and rounds < 2000:
            rounds += 1
            time.sleep(0.01)
        return rounds

    crew.ask(work)
    assert begun.wait(10)
    asked = time.monotonic()
    crew.drop()
    assert time.monotonic() - asked < 5
    crew.close()


def test_it_can_be_asked_whether_there_is_something_to_take(crew: Crew[int]) -> None:
    free = threading.Event()
    crew.ask(lambda _: int(free.wait(10)))
    crew.ask(lambda _: 7)
    assert not crew.is_ready(0.05)  # the second one is, but its turn has not come
    free.set()
    assert crew.is_ready(10)
    assert [crew.take(), crew.take()] == [1, 7]
    crew.close()


def test_no_thread_is_left(crew: Crew[int]) -> None:
    before = threading.active_count()
    crew.ask(lambda _: 1)
    crew.ask(lambda _: 1 // 0)
    assert threading.active_count() == before + 3
    crew.close()
    assert threading.active_count() == before


def test_they_work_at_the_priority_of_who_asks_first(crew: Crew[int]) -> None:
    before = priority.io_priority()
    with priority.idle(True):
        crew.ask(lambda _: os.getpriority(os.PRIO_PROCESS, 0))
        crew.ask(lambda _: priority.io_priority() or 0)
        assert [crew.take(), crew.take()] == [19, 3 << 13]
        crew.close()
    assert priority.io_priority() == before
