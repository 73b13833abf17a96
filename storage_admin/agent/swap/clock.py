"""The host's clocks: the one on the wall, which somebody may set, beside the one that only runs on."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage_admin.agent.swap.journal import JournalError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Seconds by which the clock on the wall may have been put right without being called a jump.
STEP = 120.0


@dataclass(frozen=True)
class Moment:
    """A point in time.

    Args:
        boot_id: of the boot of the machine in which it was.
        boottime: seconds since that boot, with those in which the machine slept.
        wall: seconds since 1970, by the clock on the wall.
    """

    boot_id: str
    boottime: float
    wall: float

    @classmethod
    def now(cls) -> Moment:
        """This moment."""
        return cls(_BOOT_ID.read_text("ascii").strip(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time())

    @classmethod
    def parse(cls, fields: Any) -> Moment:
        """The moment that :meth:`fields` took apart; raises JournalError."""
        try:
            return cls(str(fields["boot_id"]), float(fields["boottime"]), float(fields["wall"]))
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError("it does not say when") from error

    def fields(self) -> dict[str, Any]:
        """As a journal has it."""
        return asdict(self)

    def passed(self, before: Moment) -> float | None:
        """Seconds since an earlier moment; ``None`` where the machine was booted since, so that nothing can tell."""
        return self.boottime - before.boottime if self.boot_id == before.boot_id else None

    def jumped(self, before: Moment) -> float:
        """Seconds by which the clock on the wall was set since an earlier moment; 0 where that cannot be told."""
        passed = self.passed(before)
        step = 0.0 if passed is None else self.wall - before.wall - passed
        return step if abs(step) > STEP else 0.0
