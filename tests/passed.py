"""What passed in a run that was cut off, test by test: the next one leaves it out (`tests.stages --go-on`)."""

import json
import os
from pathlib import Path

import pytest

from tests.chance import RUN

#: Names the file, which has a line for each test.
KEEP = "STORAGE_ADMIN_PASSED"


def keep(path: Path, test: str, seconds: float, run: str = "") -> None:
    """Adds a test that passed in a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"test": test, "seconds": round(seconds, 2), "run": run}) + "\n")


def passed(path: Path, *, but: str | None = None) -> dict[str, float]:
    """The tests that passed, but for those of one run, and the seconds that each took."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {line["test"]: line["seconds"] for line in lines if line["run"] != but}


class Keeper:
    """Writes down at once what passed."""

    def __init__(self, path: Path) -> None:
        self._path, self._seconds, self._bad = path, dict[str, float](), set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.outcome != "passed":
            self._bad.add(test)
        elif report.when == "teardown" and test not in self._bad:
            keep(self._path, test, self._seconds.pop(test), os.environ[RUN])
