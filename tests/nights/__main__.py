"""Nights of a dashboard that works by itself, with the time moved and faults thrown in; then the sums are compared.

`python -m tests.nights` is ten nights over 200 images on three hosts; `--nights 2 --images 30` is a short one.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.nights import site as sites


def main() -> int:
    """Prints what was done and what held; answers 1 where something did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.nights", description=__doc__)
    parser.add_argument("--nights", type=int, default=10)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--database", default="", help="a DATABASE_URL; else SQLite")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    # A short path: the broker's socket is in it.
    folder = Path(tempfile.mkdtemp(prefix="sa-nights-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        moved = sites.prepare(folder, given.database)
        # Models can be imported only now that Django is set up.
        from tests.nights import nights  # noqa: PLC0415

        rng = random.Random(given.seed)
        with sites.site(folder, moved, given.images, rng) as site:
            return nights.run(site, given.nights)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
