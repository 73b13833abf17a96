"""Tests that take long run before a merge only where they are the first long one of their file, and at night all.

Of one with many cases that take long together, every so many-th case runs before a merge. `python -m tests.long
REPORT…` writes the list anew from pytest's reports (``--junitxml``) of runs of all of them.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from xml.etree import ElementTree as ET

#: A line for each file: its path, then the names of its tests that only the night runs; behind a name, ``/5`` says that
#: one case of five runs before a merge as well.
LIST = Path(__file__).with_name("long.txt")
#: Seconds from which a test, with all of its cases, is long; above which another one of its file stays instead of the
#: first; and above which none does, unless it is one of faults, of which each is tried before a merge.
LONG, TOO_LONG, FAR_TOO_LONG = 0.4, 5.0, 30.0
#: Seconds that the cases of one test may take together before a merge, about.
CASES = 3.0
#: Whose every test is one of a kind: pairs of an operation and a fault, which a merge tries once each; who may do what.
WHOLE = frozenset(
    {"live/test_faults.py", "live/test_snapshot_faults.py", "api/test_role_table.py", "web/test_role_table.py"}
)
NEVER = 0


def listed() -> dict[str, dict[str, int]]:
    """The tests that only the night runs, by their files below ``tests``, or whose cases it alone runs: of how many one
    runs before a merge, or :data:`NEVER`.
    """
    lines = (line.split() for line in LIST.read_text().splitlines())
    return {file: {name: int(stride or NEVER) for name, _, stride in (one.partition("/") for one in names)}
            for file, *names in lines}  # fmt: skip


def chosen(seconds: Mapping[str, Mapping[str, list[float]]]) -> dict[str, list[str]]:
    """Of the seconds of the cases of each file's tests, in their order: those that only the night runs."""
    found = {}
    for file, tests in seconds.items():
        taken = {name: sum(cases) for name, cases in tests.items()}
        long = [name for name, together in taken.items() if together > LONG]
        stays = set(long)
        if file not in WHOLE and long:
            first = next((name for name in long if taken[name] <= TOO_LONG), min(long, key=taken.__getitem__))
            stays = {first} if taken[first] <= FAR_TOO_LONG or file.startswith("faults/") else set()
        rest = [name + (_some(tests[name], file) if name in stays else "") for name in long]
        if rest := [name for name in rest if name not in stays]:
            found[file] = rest
    return found


def _some(cases: list[float], file: str) -> str:
    """Which of a test's cases run before a merge, as the list says it; empty for all, as of each fault."""
    stride = min(ceil(sum(cases) / CASES), len(cases))
    return f"/{stride}" if stride > 1 and file not in WHOLE and not file.startswith("faults/") else ""


def main(reports: list[str]) -> None:
    """Writes the list."""
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for report in reports:
        for case in ET.parse(report).getroot().iter("testcase"):
            module, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
            parts = [part for part in module.split(".")[1:] if part[:1].islower()]
            if parts:
                seconds["/".join(parts) + ".py"][name].append(float(case.get("time", 0)))
    LIST.write_text("".join(f"{file} {' '.join(names)}\n" for file, names in sorted(chosen(seconds).items())))


if __name__ == "__main__":
    main(sys.argv[1:])
