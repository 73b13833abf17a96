"""``make bench``: everything that is promised about speed, measured in one run and printed as a table."""

import argparse
import importlib
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from tests.harness.services import RedisServer
from tests.performance import report, site

PAGE = Path(__file__).resolve().parents[2] / "docs/performance.md"
PARTS = (
    "inventory",
    "volumes",
    "zfs",
    "pages",
    "lists",
    "load",
    "compress",
    "in_place",
    "latency",
    "looks",
    "live",
    "fleet",
)


def main() -> int:
    """Measures, prints, writes the page; answers 1 where something was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.performance", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="where images are made (needs 12 GiB)")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; no page is written then")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sa-bench-", dir=given.folder))
    folder.chmod(0o755)
    try:
        site.prepare(folder)
        rows: list[report.Row] = []
        notes: list[str] = []
        with RedisServer(folder, site.broker_socket(folder)):
            # The benchmark's process is its worker, too.
            importlib.import_module("storage_admin.jobs.tasks").settle_memory()
            for name in given.part or PARTS:
                print(f"measuring: {name} …", file=sys.stderr, flush=True)
                # Models can be imported only now that Django is set up.
                part = importlib.import_module(f"tests.performance.{name}")
                notes += part.NOTES
                try:
                    measured = part.measure(folder)
                    print(report.table(measured), file=sys.stderr, flush=True)  # known even where a later part hangs
                    rows += measured
                except Exception as error:  # noqa: BLE001 (what the other parts measured is worth an hour)
                    traceback.print_exc()
                    rows.append(report.Row(f"{name}: broke off", "", "", repr(error)[:200], "an end", reached=False))
        where = report.machine(folder)
        print(report.table(rows), "", where, sep="\n")
        if not given.part:
            report.write(PAGE, rows, where, notes)
        return 0 if all(row.reached for row in rows) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
