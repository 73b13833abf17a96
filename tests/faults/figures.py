"""How many trials of each fault there are: in `make test`, and in the hours of `make night`.

The numbers of the faults are those of the table in docs/reliability.md. What is not here (F4, F6) has a fixed number of
points, and all of them are tried each time.
"""

import os
from dataclasses import dataclass

#: Set by `make night`.
NIGHTLY = "STORAGE_ADMIN_NIGHTLY"


@dataclass(frozen=True)
class Figure:
    """Trials of one fault.

    Args:
        variable: of the environment, which sets another number.
        per_merge: in `make test`.
        nightly: in `make night`.
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
    "chains": Figure("STORAGE_ADMIN_CHAINS", 16, 400),
    "F1": Figure("STORAGE_ADMIN_KILLS", 30, 3_000),
    "F2": Figure("STORAGE_ADMIN_CUTS", 4, 200),
    "F5": Figure("STORAGE_ADMIN_IO_ERRORS", 4, 100),
    "F7": Figure("STORAGE_ADMIN_GUESTS", 4, 200),
    "F9": Figure("STORAGE_ADMIN_MESSAGES", 100, 10_000),
    "F10": Figure("STORAGE_ADMIN_BROKERS", 3, 300),
    "F11": Figure("STORAGE_ADMIN_DATABASES", 1, 50),
    "F11 locked": Figure("STORAGE_ADMIN_LOCKED", 1, 50),
    "F12": Figure("STORAGE_ADMIN_STOPPED", 5, 100),
    "F13": Figure("STORAGE_ADMIN_LINES", 2, 100),
    "links": Figure("STORAGE_ADMIN_LINKS", 3, 60),
    "F14": Figure("STORAGE_ADMIN_CANCELS", 5, 500),
    "F15": Figure("STORAGE_ADMIN_HISTORIES", 2, 100),
    "headers": Figure("STORAGE_ADMIN_HEADERS", 10, 500),
    "nfs": Figure("STORAGE_ADMIN_NFS", 5, 50),
    "nfs faults": Figure("STORAGE_ADMIN_NFS_FAULTS", 14, 14),
    "strangers": Figure("STORAGE_ADMIN_STRANGERS", 10, 500),
    "trims": Figure("STORAGE_ADMIN_TRIMS", 2, 60),
    "strangers less": Figure("STORAGE_ADMIN_STRANGERS_LESS", 1, 50),
}


def trials_of(fault: str, part: float = 1.0) -> int:
    """The number of trials of a fault, or of a part of them; at least one."""
    return max(1, round(FIGURES[fault].trials * part))
