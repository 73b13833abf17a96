"""What `make test` runs: every stage, also after one that failed, and one table at the end.

`python -m tests.stages` runs all of them; with names (`lint`, or those of the table) only these. `night` is none of
them: it is the faults with the figures of `make faults`, and takes hours.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from tests import postgres
from tests.faults.figures import NIGHTLY

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
#: What `make test` is made for; more of them would not make the longest files shorter.
CORES = 2
#: pytest's exit code for that.
NOTHING_COLLECTED = 5
SLOW = ("guest", "browser", "faults")
#: What somebody has set in the shell must not reach the tests.
FOREIGN = (
    NIGHTLY,
    "DATABASE_URL",
    "REDIS_URL",
    "SECRET_KEY",
    "STORAGE_ADMIN_BIND",
    "STORAGE_ADMIN_DATA_DIR",
    "STORAGE_ADMIN_LOCAL",
    "STORAGE_ADMIN_SECRETS_KEY",
    "STORAGE_ADMIN_WORKER_HOST",
    "DEBUG",
    "HTTPS",
)


@dataclass(frozen=True)
class Stage:
    """A command and how its outcome is counted: a tool counts as one, pytest by its tests."""

    name: str
    argv: tuple[str, ...]
    group: str = "tests"
    pytest: bool = False
    database: str = "sqlite"
    limit_seconds: float = 1800.0


@dataclass(frozen=True)
class Outcome:
    """How a stage ended. ``note`` says why where the numbers alone do not."""

    name: str
    passed: int
    failed: int
    seconds: float
    note: str = ""


def _lint(name: str, *argv: str) -> Stage:
    return Stage(name, argv, group="lint", limit_seconds=900)


def _tests(name: str, markers: str, *, workers: int = 0, database: str = "sqlite") -> Stage:
    spread = ("-n", str(workers), "--dist", "loadfile") if workers else ()
    argv = (str(BIN / "pytest"), "-m", markers, *spread, "-p", "no:cacheprovider")
    return Stage(name, argv, pytest=True, database=database)


def _only(marker: str, *without: str) -> str:
    return " and ".join([marker, *(f"not {other}" for other in without)])


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
    # The guests' libvirt is the machine's, and agents ask it who uses an image: nothing else may run beside these.
    _tests("guest", _only("guest", *SLOW[1:])),
    _tests("browser", _only("browser", "faults")),
    _tests("faults", "faults", workers=CORES + 1),
)

#: What only runs when it is asked for by name.
NIGHT = Stage(
    "night",
    ("env", f"{NIGHTLY}=1", *_tests("", "faults").argv, "--capture=no", "--durations=0"),
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
    for stage in chosen:
        print(f"\n=== {stage.name}: {' '.join(stage.argv)}", flush=True)
        outcomes.append(_run(stage))
    _print_table(outcomes)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _run(stage: Stage) -> Outcome:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sa-stage-") as folder:
        report = Path(folder) / "report.xml"
        argv = [*stage.argv, f"--junitxml={report}"] if stage.pytest else list(stage.argv)
        try:
            with _environment(stage) as environment:
                code = _wait(argv, environment, stage.limit_seconds)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(error)
            return Outcome(stage.name, 0, 1, time.monotonic() - started, "could not be started")
        seconds = time.monotonic() - started
        if code is None:
            return Outcome(stage.name, 0, 1, seconds, f"did not end within {stage.limit_seconds:.0f} s")
        if not stage.pytest:
            return Outcome(stage.name, int(code == 0), int(code != 0), seconds)
        return _counted(stage, code, report, seconds)


def _counted(stage: Stage, code: int, report: Path, seconds: float) -> Outcome:
    """Reads pytest's own report. A skipped test has shown nothing, so it counts as failed; so does an empty stage."""
    if code == NOTHING_COLLECTED or not report.is_file():
        note = "no test was found" if code == NOTHING_COLLECTED else f"pytest ended with exit code {code}"
        return Outcome(stage.name, 0, 1, seconds, note)
    cases = list(ET.parse(report).getroot().iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    bad = sum(not _good(case) for case in cases)
    note = f"{skipped} skipped" if skipped else ""
    if code != 0 and not bad:
        bad, note = 1, f"pytest ended with exit code {code}"
    return Outcome(stage.name, sum(_good(case) for case in cases), bad, seconds, note)


def _good(case: ET.Element) -> bool:
    return all(case.find(kind) is None for kind in ("failure", "error", "skipped"))


@contextlib.contextmanager
def _environment(stage: Stage) -> Iterator[Mapping[str, str]]:
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    if stage.database == "sqlite":
        yield environment
        return
    with postgres.cluster() as url:
        yield environment | {"TEST_DATABASE": stage.database, "DATABASE_URL": url}


def _wait(argv: Sequence[str], environment: Mapping[str, str], limit_seconds: float) -> int | None:
    """The exit code of the command, or None when it took too long and was killed with all that it had started."""
    # Who starts us in the background, or by nohup, has signals ignored in all that we start: tests send these.
    command = ["env", "--default-signal=HUP,INT,QUIT,TERM,PIPE", *argv]
    process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
