"""Trials of a fault: each has a number, and a random generator that the run's seed and that number make.

A run writes its seed and what came of it into ``var/faults``. What fails says how to repeat just that trial:
``STORAGE_ADMIN_SEED=N STORAGE_ADMIN_TRIAL=K pytest …``.
"""

import json
import os
import random
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.chance import RUN, night, seed
from tests.faults.figures import trials_of

#: Where an agent dies, of a step. What it leaves after one is mostly what it would leave before the next.
WHEN = [pytest.param("before", marks=pytest.mark.night), "after"]
#: More steps than any run takes: a run that gets through ends the walk.
MOST_STEPS = 80
#: Before a merge one step of so many: a number that has no factor in common with what repeats.
STRIDE = 5
#: Failures after which the rest is not tried.
PATIENCE = 5
#: Seconds between two lines that say how far it is.
TELL_EVERY = 20.0
#: One file for all processes of a run.
RECORDS = Path(__file__).resolve().parents[2] / "var" / "faults" / f"{os.environ[RUN]}.jsonl"


def steps(first: int = 1, stride: int = STRIDE, most: int = MOST_STEPS) -> Iterator[int]:
    """The steps at which an agent dies, from the first one on: at night each of them.

    Raises:
        AssertionError: no run came to its end, which ends the walk.
    """
    yield from range(first, most, 1 if night() else stride)
    raise AssertionError("no run came to its end")


@dataclass
class Outcome:
    """What came of a test's trials. ``planned`` and ``held`` count in the fault's figure."""

    fault: str
    what: str
    seed: int
    planned: int
    held: int = 0
    failed: list[int] = field(default_factory=list)
    seconds: float = 0.0
    tally: Counter[str] = field(default_factory=Counter)


class Trials:
    """Iterate over it, and do each trial within ``with trial:``. A failed one does not end the others.

    Args:
        fault: its number, as in ``figures.FIGURES``.
        what: is done, in a few words.
        part: of the fault's figure that this test is to show.
        points: how many there are where that is no figure: each is another point, and all are tried in every run.
        worth: for how many of the figure one trial counts, as when it has that many jobs at once.
        patience: failures after which the rest is not tried.
    """

    def __init__(
        self,
        fault: str,
        what: str,
        *,
        part: float = 1.0,
        points: int | None = None,
        worth: int = 1,
        patience: int = PATIENCE,
    ) -> None:
        only = os.environ.get("STORAGE_ADMIN_TRIAL")
        count = trials_of(fault, part) if points is None else points
        self.numbers = [int(only)] if only else list(range(-(-count // worth)))
        #: Whether all of them are done, so that what they came to can be judged.
        self.all = not only
        self.worth = worth
        self.outcome = Outcome(fault, what, seed(), len(self.numbers) * worth)
        self._patience = patience
        self._test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        self._errors: list[str] = []

    @property
    def tally(self) -> Counter[str]:
        """How often each note was made."""
        return self.outcome.tally

    def __iter__(self) -> Iterator["Trial"]:
        began = told = time.monotonic()
        self._record("begun")
        self._tell("begins")
        try:
            for number in self.numbers:
                if len(self.outcome.failed) >= self._patience:
                    break
                yield Trial(self, number)
                self.outcome.seconds = time.monotonic() - began
                if time.monotonic() - told > TELL_EVERY:
                    told = time.monotonic()
                    self._tell(f"after {self.outcome.seconds:.0f} s")
        finally:
            self.outcome.seconds = time.monotonic() - began
            self._record("ended")
            self._tell(f"ended after {self.outcome.seconds:.0f} s, {dict(self.tally)}")
        if self._errors:
            raise AssertionError("\n".join(self._errors))

    def held(self) -> None:
        """One trial more held."""
        self.outcome.held += self.worth

    def failed(self, trial: "Trial", error: BaseException) -> None:
        """One trial more failed; says how to repeat it."""
        self.outcome.failed.append(trial.number)
        traceback.print_exception(error)
        again = f"STORAGE_ADMIN_SEED={self.outcome.seed} STORAGE_ADMIN_TRIAL={trial.number} pytest '{self._test}'"
        notes = ", ".join(trial.notes)
        self._errors.append(f"trial {trial.number} ({notes}) failed: {error}\n    once more: {again}")
        print(self._errors[-1], flush=True)

    def _tell(self, how_far: str) -> None:
        one = self.outcome
        failed = f", {len(one.failed)} FAILED" if one.failed else ""
        held = f"{one.held} of {one.planned} held{failed}"
        print(f"{one.fault} {one.what}: {held}, {how_far} (STORAGE_ADMIN_SEED={one.seed})", flush=True)

    def _record(self, what: str) -> None:
        """A line in the run's file: also a run that is cut off has left its seeds."""
        one = self.outcome
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line: dict[str, Any] = {"at": now, "event": what, "test": self._test}
        line |= {"fault": one.fault, "what": one.what, "seed": one.seed, "planned": one.planned}
        if what == "ended":
            line |= {"held": one.held, "failed": one.failed, "seconds": round(one.seconds, 1), "tally": dict(one.tally)}
        RECORDS.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with RECORDS.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Trial:
    """One of them: ``with trial:`` counts whether it held."""

    def __init__(self, trials: Trials, number: int) -> None:
        self._trials = trials
        self.number = number
        self.rng = random.Random(f"{trials.outcome.seed}-{trials.outcome.what}-{number}")
        self.notes: list[str] = []
        self._folder: Path | None = None

    def note(self, *what: str) -> None:
        """Says what this trial was like; it is counted, and shown where the trial fails."""
        self.notes += what
        self._trials.tally.update(what)

    def folder(self, parent: Path) -> Path:
        """A folder to be made for this trial; it is removed where the trial held."""
        self._folder = parent / str(self.number)
        return self._folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._trials.held()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            return False
        if not isinstance(error, Exception):
            return False
        self._trials.failed(self, error)
        return True


def recorded() -> list[Outcome]:
    """What all processes of this run have tried to the end."""
    lines = [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []
    names = ("fault", "what", "seed", "planned", "held", "failed", "seconds")
    return [Outcome(**{name: line[name] for name in names}) for line in lines if line["event"] == "ended"]


def figures_table(outcomes: list[Outcome]) -> list[str]:
    """The lines that a run ends with."""
    rows = [f"{'fault':<5}  {'trials':>6}  {'held':>6}  {'seconds':>8}  {'seed':>10}  what"]
    for one in outcomes:
        numbers = f"{one.planned:>6}  {one.held:>6}  {one.seconds:>8.1f}  {one.seed:>10}"
        failed = f"  FAILED: trials {', '.join(map(str, one.failed))}" if one.failed else ""
        rows.append(f"{one.fault:<5}  {numbers}  {one.what}{failed}")
    return rows
