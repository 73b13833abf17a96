"""What `make test` runs: every stage, also after one that failed, and one table at the end.

`python -m tests.stages` runs all of them; with names (`lint`, or those of the table) only these. `night` is none of
them: it is the faults with the figures of `make faults`, and takes hours. Only it runs what needs two machines, which
`make machines` builds.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.faults.figures import NIGHTLY
from tests.stage_runs import Outcome, Stage, run

BIN = Path(sys.executable).parent
#: What `make test` is made for; more of them would not make the longest files shorter.
CORES = 2
SLOW = ("guest", "browser", "faults")


def _lint(name: str, *argv: str) -> Stage:
    return Stage(name, argv, group="lint", limit_seconds=900)


def _tests(
    name: str,
    markers: str,
    *,
    workers: int = 0,
    options: tuple[str, ...] = (),
    database: str = "sqlite",
    beside: str = "",
) -> Stage:
    spread = ("-n", str(workers), "--dist", "loadfile", *options) if workers else ()
    argv = (str(BIN / "pytest"), "-m", markers, *spread, "-p", "no:cacheprovider")
    return Stage(name, argv, pytest=True, database=database, beside=beside)


def _only(marker: str, *without: str) -> str:
    return " and ".join([marker, *(f"not {other}" for other in (*without, "machines"))])


STAGES = (
    _lint("ruff check", str(BIN / "ruff"), "check", "."),
    _lint("ruff format", str(BIN / "ruff"), "format", "--check", "."),
    _lint("mypy", str(BIN / "mypy"), "."),
    _lint("imports", str(BIN / "lint-imports")),
    _lint("migrations", sys.executable, "manage.py", "makemigrations", "--check", "--dry-run"),
    _tests("unit", _only("not qemu", "services", *SLOW), workers=CORES),
    # What these wait for, as disks, other programs and the time limits that they try, is most of their time.
    _tests("qemu", _only("qemu", "services", *SLOW), workers=CORES + 1),
    _tests("services", _only("services", *SLOW), workers=CORES + 1),
    _tests("postgresql", _only("not guest", *SLOW[1:]), workers=CORES + 1, database="postgresql"),
    # One process each, as a test here is alone with its libvirt or its browser; much of it is waiting for a guest.
    _tests("browser", _only("browser", "faults"), beside="guests"),
    _tests("guest", _only("guest", *SLOW[1:]), beside="guests"),
    # In the order in which they were collected: the longest first.
    _tests("faults", _only("faults"), workers=CORES + 1, options=("--no-loadscope-reorder",)),
)

#: What only runs when it is asked for by name.
NIGHT = Stage(
    "night",
    ("env", f"{NIGHTLY}=1", *_tests("", "faults or fuzz or machines").argv, "--capture=no", "--durations=0"),
    group="night",
    pytest=True,
    limit_seconds=24 * 3600.0,
)


def main(wanted: Sequence[str]) -> int:
    """Runs the stages of these names or groups (all, without any) and prints the table.

    Returns:
        0 when everything passed, else 1.
    """
    every = (*STAGES, NIGHT)
    known = {stage.name for stage in every} | {stage.group for stage in every}
    if unknown := set(wanted) - known:
        print(f"There is no stage {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}")
        return 2
    chosen = [stage for stage in every if {stage.name, stage.group} & set(wanted)] if wanted else STAGES
    outcomes = []
    for together in _together(chosen):
        outcomes += run(together)
    _print_table(outcomes)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


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
    passed, failed = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("passed", "failed"))
    print(f"\n{passed} passed, {failed} failed", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs the checks and tests of Storage Admin, and prints one table.")
    parser.add_argument("stage", nargs="*", help="only these stages, or the group lint or tests; or night")
    sys.exit(main(parser.parse_args().stage))
