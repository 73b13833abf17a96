"""Who may write next: in the order in which they asked, within one process."""

import os
import threading
from collections import deque


class Turns:
    """A lock that is given to whoever has waited longest."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    def take(self, seconds: float) -> bool:
        """Waits for a turn.

        Args:
            seconds: after which it is given up.

        Returns:
            Whether it was got; then :meth:`give` it back.
        """
        with self._guard:
            if not self._taken:
                self._taken = True
                return True
            mine = threading.Event()
            self._waiting.append(mine)
        if mine.wait(seconds):
            return True
        with self._guard:
            if mine.is_set():  # it came in the last moment
                return True
            self._waiting.remove(mine)
            return False

    def give(self) -> None:
        """Lets the next one go on."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


_of_databases: dict[str, Turns] = {}


def of(database: str) -> Turns:
    """The turns of one database file."""
    return _of_databases.setdefault(database, Turns())


# A child process has none of the threads that would give a turn back.
os.register_at_fork(after_in_child=_of_databases.clear)
