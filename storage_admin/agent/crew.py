"""Threads that do pieces of work at the same time; what they find comes in the order it was asked for."""

from __future__ import annotations

import queue
import threading
from typing import Callable, Generic, TypeVar

Found = TypeVar("Found")


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
        self._asked: queue.SimpleQueue[tuple[int, Callable[[], Found]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Found | None, BaseException | None]] = queue.SimpleQueue()
        self._early: dict[int, tuple[Found | None, BaseException | None]] = {}
        self._first = self._next = 0

    @property
    def waiting(self) -> int:
        """How many pieces were asked for and not taken."""
        return self._next - self._first

    def ask(self, work: Callable[[], Found]) -> None:
        """Have a piece of work done."""
        if not self._threads:
            self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._at_once)]
            for thread in self._threads:
                thread.start()
        self._asked.put((self._next, work))
        self._next += 1

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
            done, found, error = self._done.get()
            self._early[done] = found, error
        return self._early.pop(number)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            number, work = asked
            found, error = None, None
            try:
                # What was dropped meanwhile is not done any more.
                found = work() if number >= self._first else None
            except BaseException as raised:  # noqa: BLE001 - whoever takes it gets it
                error = raised
            self._done.put((number, found, error))
            del asked, work, found, error  # nothing of it is kept while this waits
