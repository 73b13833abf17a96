"""How many trials of each fault there are: in `make test`, and in the many hours of `make faults`.

The numbers of the faults are those of the table in docs/reliability.md. What is not here (F4, F6) has a fixed number of
points, and all of them are tried each time.
"""

import os
from dataclasses import dataclass

#: Set by `make faults`.
NIGHTLY = "STORAGE_ADMIN_NIGHTLY"


@dataclass(frozen=True)
class Figure:
    """Trials of one fault.

    Args:
        variable: of the environment, which sets another number.
        per_merge: in `make test`.
        nightly: in `make faults`.
    """

    variable: str
    per_merge: int
    nightly: int

    @property
    def trials(self) -> int:
        """How many there are in this run."""
        if given := os.environ.get(self.variable):
            return int(given)
        return self.nightly if os.environ.get(NIGHTLY) else self.per_merge


FIGURES = {
    "chains": Figure("STORAGE_ADMIN_CHAINS", 40, 400),
    "F1": Figure("STORAGE_ADMIN_KILLS", 300, 3_000),
    "F2": Figure("STORAGE_ADMIN_CUTS", 20, 200),
    "F5": Figure("STORAGE_ADMIN_IO_ERRORS", 20, 100),
    "F7": Figure("STORAGE_ADMIN_GUESTS", 20, 200),
    "F9": Figure("STORAGE_ADMIN_MESSAGES", 1_000, 10_000),
    "F10": Figure("STORAGE_ADMIN_BROKERS", 20, 300),
    "F11": Figure("STORAGE_ADMIN_DATABASES", 5, 50),
    "F11 locked": Figure("STORAGE_ADMIN_LOCKED", 1, 50),
    "F12": Figure("STORAGE_ADMIN_STOPPED", 5, 100),
    "F13": Figure("STORAGE_ADMIN_LINES", 10, 100),
    "links": Figure("STORAGE_ADMIN_LINKS", 5, 60),
    "F14": Figure("STORAGE_ADMIN_CANCELS", 50, 500),
    "F15": Figure("STORAGE_ADMIN_HISTORIES", 8, 100),
    "headers": Figure("STORAGE_ADMIN_HEADERS", 40, 500),
    "nfs": Figure("STORAGE_ADMIN_NFS", 50, 50),
    "strangers": Figure("STORAGE_ADMIN_STRANGERS", 30, 500),
}


def trials_of(fault: str, part: float = 1.0) -> int:
    """The number of trials of a fault, or of a part of them; at least one."""
    return max(1, round(FIGURES[fault].trials * part))
