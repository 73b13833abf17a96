"""What `make check`, `make test` and `make night` run: every stage, also after one that failed, then one table.

`python -m tests.stages` runs what a merge has to pass; with names (`check`, `night`, or those of the table) these.
A night takes hours: with `--go-on`, tests that passed before at the same commit are not run again, so that one that
was cut off comes to its end, and its table is of one state of the code.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.figures import NIGHTLY
from tests.machines import lab
from tests.stage_runs import ROOT, Outcome, Stage, run

BIN = Path(sys.executable).parent
#: One more than the cores that `make test` is made for: much of a test is waiting for disks and other programs.
WORKERS = 3
#: Of the figures, which wait most of their time: for databases that are away, and for agents that are killed.
WAITING = 5
#: Only the night sees these.
NIGHT = "not (night or machines)"
#: So many failed tests of a stage are named at the end.
_NAMED = 20
#: What runs beside each other, so that no core waits: what waits for guests beside most tests and types, and browsers
#: beside PostgreSQL.
GUESTS, BROWSERS = "guests", "browsers"
#: The night has stages of their own for the others.
BY_DAY = "not (faults or fuzz or machines)"
#: What has a stage of its own, in one process: a test there is alone with its libvirt or its browser.
ALONE = "not (guest or browser)"


def _lint(name: str, *argv: str) -> Stage:
    return Stage(name, argv, group="lint", limit_seconds=900)


def _tests(
    name: str,
    *markers: str,
    workers: int = 0,
    dist: str = "loadfile",
    database: str = "sqlite",
    beside: str = "",
    at: tuple[str, ...] = (),
) -> Stage:
    # In the order in which they were collected: the longest first. A process that dies (of a test that hung, too) ends
    # the stage, named: pytest-xdist 3.8 waits for ever for the files that it had done (its issue 1378).
    ended = "--max-worker-restart=0"
    spread = ("-n", str(workers), "--dist", dist, "--no-loadscope-reorder", ended) if workers else ()
    argv = (str(BIN / "pytest"), "-m", " and ".join(markers), *spread, "-p", "no:cacheprovider", *at)
    return Stage(name, argv, pytest=True, database=database, beside=beside)


def _with(marker: str) -> tuple[str, ...]:
    """pytest's argument that leaves out files without this marker."""
    return ("--files-with", rf"mark\.{marker}\b")


def _at_night(stage: Stage, *variables: str) -> Stage:
    patient = ("-o", "faulthandler_timeout=7200") if stage.pytest else ()
    argv = ("env", f"{NIGHTLY}=1", *variables, *stage.argv, *patient)
    return replace(stage, argv=argv, limit_seconds=24 * 3600.0)


def _in_parts(name: str, parts: int, files: Sequence[Path], *markers: str, beside: str) -> tuple[Stage, ...]:
    """Every second file, or third one, in a stage of its own, as they wait much."""
    at = sorted(str(path.relative_to(ROOT)) for path in files)
    return tuple(
        _tests(f"{name} {part + 1}", *markers, beside=beside, at=tuple(at[part::parts])) for part in range(parts)
    )


def _clicked(*more: str, prefix: str = "") -> tuple[Stage, ...]:
    """Whole dashboards in a browser, and single pages."""
    whole = list((ROOT / "tests" / "e2e").glob("test_*.py"))
    return (
        *_in_parts(f"{prefix}browser", 2, whole, "browser", *more, beside=BROWSERS),
        _tests(f"{prefix}pages", "browser", *more, beside=BROWSERS, at=("--ignore=tests/e2e", *_with("browser"))),
    )


def _guests(*more: str, prefix: str = "") -> tuple[Stage, ...]:
    others = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "e2e"]
    marked = [path for path in others if "pytest.mark.guest" in path.read_text()]
    return _in_parts(f"{prefix}guests", 3, marked, "guest and not browser", *more, beside=GUESTS)


LINT = (
    _lint("ruff check", str(BIN / "ruff"), "check", "."),
    _lint("ruff format", str(BIN / "ruff"), "format", "--check", "."),
    _lint("templates", str(BIN / "djlint"), "templates", "--lint", "--quiet"),
    _lint("imports", str(BIN / "lint-imports")),
    # What the oldest Python does not know that docs/hosts.md promises; types are checked for a later one.
    _lint("python 3.9", str(BIN / "vermin"), "--target=3.9-", "--no-tips", "--violations", "storage_admin/agent"),
    _lint("migrations", sys.executable, "manage.py", "makemigrations", "--check", "--dry-run"),
)
TYPES = replace(_lint("mypy", str(BIN / "mypy"), "."), beside="types")
#: Whether every test can be found. It also compiles them once, which each process of the stages below would do else.
FOUND = replace(_lint("found", str(BIN / "pytest"), "--collect-only", "-qq", "-p", "no:cacheprovider"), beside="types")
UNIT = _tests("unit", ALONE, NIGHT, "not (qemu or services or faults or fuzz)", workers=2, beside=GUESTS)
#: Fewer than else: three browsers run beside it, and each process makes a database of its own first.
ON_POSTGRESQL: Any = {"workers": 2, "database": "postgresql", "beside": BROWSERS}
#: Live work on guests and their definitions, on the libvirt and QEMU of the next Debian.
ON_DEBIAN_13 = Stage(
    "guests on debian 13",
    (sys.executable, "-m", "tests.debian_13", "-m", f"guest and not browser and {BY_DAY}", "-p", "no:cacheprovider",
     "tests/live", "tests/guests/test_disk_settings.py", "tests/guests/test_repointing.py"),
    pytest=True,
)  # fmt: skip
#: Of the machines what reads a real LVM and ZFS, and deletes there: before a merge where they have been built.
IN_A_MACHINE = replace(
    _tests(
        "a virtual machine", "machines", "not night",
        at=tuple(
            f"tests/machines/test_{of}.py::test_{name}"
            for of in ("lvm", "zfs")
            for name in (f"each_figure_is_what_{of}_says_and_a_scan_changes_nothing",
                         "what_deleting_a_volume_frees_is_what_was_said")
        ),
    ),
    where=lab.is_built,
)  # fmt: skip
#: What works on volumes, with the kernel, LVM and ZFS of the next Debian.
VOLUMES_ON_DEBIAN_13 = _tests(
    "volumes on debian 13", "machines",
    at=tuple(
        f"tests/machines/test_{of}.py"
        for of in ("lvm", "exclusive", "volume_orphans", "volume_reclaim", "zfs", "zfs_orphans", "zfs_promote", "move",
                   "move_zfs")
    ),
)  # fmt: skip
TIERS = {
    "check": (*LINT, TYPES, UNIT),
    "test": (
        *LINT,
        TYPES,
        FOUND,
        _tests("tests", ALONE, NIGHT, workers=WORKERS, beside=GUESTS),
        *_guests(NIGHT),
        _tests("postgresql", "sql and database", ALONE, NIGHT, **ON_POSTGRESQL, at=_with("sql")),
        *_clicked(NIGHT),
        IN_A_MACHINE,
    ),
    "night": (
        *LINT,
        TYPES,
        FOUND,
        *map(
            _at_night,
            (
                _tests("every test", ALONE, BY_DAY, workers=WORKERS, beside=GUESTS),
                *_guests("not machines", prefix="all "),
                _tests("all on postgresql", "database", ALONE, "not (faults or machines)", **ON_POSTGRESQL),
                *_clicked(BY_DAY, prefix="all "),
                _tests("figures", "(faults or fuzz)", "not (machines or guest)", workers=WAITING, dist="load"),
                _tests("two machines", "machines", at=("tests/machines",)),
                ON_DEBIAN_13,
                Stage("nights", (sys.executable, "-m", "tests.nights")),
            ),
        ),
        _at_night(VOLUMES_ON_DEBIAN_13, f"{lab.WANTED}={lab.SUITES[1]}"),
    ),
}


#: What passed: of each commit a folder, in it a file for each stage.
PASSED = ROOT / "var" / "passed"


def main(wanted: Sequence[str], *, go_on: bool = False) -> int:
    """Runs the tiers, or the stages, of these names (`test`, without any) and prints the table.

    Args:
        go_on: leaves out what passed before at this commit.

    Returns:
        0 when everything passed, else 1.
    """
    every = {stage.name: stage for tier in TIERS.values() for stage in tier}
    known = {*TIERS, *every, "lint"}
    if unknown := set(wanted) - known:
        print(f"There is no stage {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}")
        return 2
    named = set(wanted or ["test"])
    tiers = {stage.name for name in named & TIERS.keys() for stage in TIERS[name]}
    chosen = [stage for name, stage in every.items() if name in named | tiers or stage.group in named]
    chosen = [stage for stage in chosen if stage.where()]
    commit = _commit() if go_on else ""
    if commit:
        chosen = [replace(stage, passed=PASSED / commit / stage.name) for stage in chosen]
    outcomes = [outcome for together in _together(chosen) for outcome in run(together)]
    _print_table(outcomes)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _commit() -> str:
    """The commit that this is; empty where files differ from it."""
    told = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    return "" if told[1] else told[0]


def _together(stages: Sequence[Stage]) -> list[list[Stage]]:
    """The stages in their order, those that run beside each other in one list."""
    groups: list[list[Stage]] = []
    for stage in stages:
        if groups and stage.beside and groups[-1][0].beside == stage.beside:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _print_table(outcomes: Sequence[Outcome]) -> None:
    width = max(len(outcome.name) for outcome in outcomes)
    print(f"\n{'stage':<{width}}  {'passed':>7}  {'failed':>7}  {'seconds':>8}")
    for outcome in outcomes:
        numbers = f"{outcome.passed:>7}  {outcome.failed:>7}  {outcome.seconds:>8.1f}"
        print(f"{outcome.name:<{width}}  {numbers}  {outcome.note}".rstrip())
    print()
    # Here as well as far above: who reads the end of a log alone has to know where to look.
    for outcome in outcomes:
        for line in outcome.bad[:_NAMED]:
            print(f"{outcome.name}: {line}")
    passed, failed = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("passed", "failed"))
    print(f"{passed} passed, {failed} failed", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs the checks and tests of Storage Admin, and prints one table.")
    parser.add_argument("stage", nargs="*", help="check, test, night, lint, or stages of the table")
    parser.add_argument("--go-on", action="store_true", help="leave out tests that passed before at this commit")
    given = parser.parse_args()
    sys.exit(main(given.stage, go_on=given.go_on))
