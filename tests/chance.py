"""Where random tests begin: always at the same place before a merge, at another one each night."""

import os
import random

from tests.faults.figures import NIGHTLY

#: Names this run of pytest, for all its processes.
RUN = "STORAGE_ADMIN_TEST_RUN"


def seed() -> int:
    """The seed of a random test, printed: ``STORAGE_ADMIN_SEED`` where it is set, so that a run can be repeated.

    Without it a merge is judged by the same cases each time; `make night` looks for new ones.
    """
    chosen = int(os.environ.get("STORAGE_ADMIN_SEED") or (random.SystemRandom().randrange(1 << 32) if night() else 13))
    print(f"STORAGE_ADMIN_SEED={chosen}")
    return chosen


def night() -> bool:
    """Whether this is a run of `make night`."""
    return bool(os.environ.get(NIGHTLY))
