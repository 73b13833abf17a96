"""Threads that do pieces of work at the same time; what they find comes in the order it was asked for."""

from __future__ import annotations

import queue
import threading
import time
from functools import partial
from typing import Callable, Generic, TypeVar

Found = TypeVar("Found")
#: A piece of work; it is given what tells whether it is still wanted, and may end early where it is not.
Work = Callable[[Callable[[], bool]], Found]


class Crew(Generic[Found]):
    """Some threads, started with the first piece of work. Close it in the end.

    They inherit the priority of the thread that asks first. The work must not start tools: these live no longer than
    the thread that starts them.

    Args:
        at_once: how many threads.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._threads: list[threading.Thread] = []
        self._asked: queue.SimpleQueue[tuple[int, Work[Found]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Found | None, BaseException | None]] = queue.SimpleQueue()
        self._early: dict[int, tuple[Found | None, BaseException | None]] = {}
        self._first = self._next = 0

    @property
    def waiting(self) -> int:
        """How many pieces were asked for and not taken."""
        return self._next - self._first

    def ask(self, work: Work[Found]) -> None:
        """Have a piece of work done."""
        if not self._threads:
            self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._at_once)]
            for thread in self._threads:
                thread.start()
        self._asked.put((self._next, work))
        self._next += 1

    def is_ready(self, seconds: float) -> bool:
        """Whether :meth:`take` would not have to wait; it is waited for at most so many seconds."""
        deadline = time.monotonic() + seconds
        while self._first not in self._early:
            try:
                self._note(max(deadline - time.monotonic(), 0))
            except queue.Empty:
                return False
        return True

    def take(self) -> Found:
        """What the first piece that was not taken found; waits for it, and raises what it raised."""
        found, error = self._outcome(self._first)
        self._first += 1
        if error is not None:
            raise error
        return found  # type: ignore[return-value]

    def drop(self) -> None:
        """Forget what was asked, and wait until nobody is at work."""
        until = self._next
        first, self._first = self._first, until
        for number in range(first, until):
            self._outcome(number)

    def close(self) -> None:
        """End the threads; the work that they are at is done first."""
        self.drop()
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _outcome(self, number: int) -> tuple[Found | None, BaseException | None]:
        while number not in self._early:
            self._note()
        return self._early.pop(number)

    def _note(self, seconds: float | None = None) -> None:
        done, found, error = self._done.get(timeout=seconds)
        self._early[done] = found, error

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            number, work = asked
            found, error = None, None
            try:
                # What was dropped meanwhile is not done any more.
                found = work(partial(self._is_wanted, number)) if self._is_wanted(number) else None
            except BaseException as raised:  # noqa: BLE001 - whoever takes it gets it
                error = raised
            self._done.put((number, found, error))
            del asked, work, found, error  # nothing of it is kept while this waits

    def _is_wanted(self, number: int) -> bool:
        return number >= self._first
