"""A clock that a test moves: what every process of a dashboard takes for now.

:func:`django.utils.timezone.now` is moved, by which the dashboard tells all that it writes down, and with it the clock
that only runs on, by which it tells what has surely passed. What waits for seconds (heartbeats, time limits) goes on
with real ones, and so do the hosts, on which what was written down lies further back instead.
"""

import os
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from django.utils import timezone

from storage_admin.agent.protocol import Moment

#: The file in which the seconds stand that the clock is ahead.
VARIABLE = "STORAGE_ADMIN_TEST_CLOCK"
_really = timezone.now


class Clock:
    """Seconds ahead of the real time, in a file that all processes read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            self._write(0.0)

    def now(self) -> datetime:
        """The moved time."""
        return _really() + timedelta(seconds=float(self.path.read_text()))

    def move_to(self, moment: datetime) -> None:
        """From now on it is that time; it only goes forward.

        Raises:
            AssertionError: it lies in the past.
        """
        assert moment >= self.now(), f"{moment} has passed: it is {self.now()}"
        self._write((moment - _really()).total_seconds())

    def _write(self, seconds: float) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(f"{seconds:.3f}")
        new.replace(self.path)


def install() -> None:
    """Moves this process's clock; before any model is imported, whose defaults would keep the real one."""
    clock = Clock(Path(os.environ[VARIABLE]))
    timezone.now = clock.now
    really = Moment.now

    def moved() -> Moment:
        return replace(really(), boottime=really().boottime + (clock.now() - _really()).total_seconds())

    Moment.now = moved  # type: ignore[method-assign]
