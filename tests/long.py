"""Tests that take long run before a merge only where they are the first long one of their file, and at night all.

`python -m tests.long REPORT…` writes the list anew from pytest's reports (``--junitxml``) of runs of all of them.
"""

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree as ET

#: A line for each file: its path, then the names of its tests that only the night runs.
LIST = Path(__file__).with_name("long.txt")
#: Seconds from which a test, with all of its cases, is long; above which another one of its file stays instead of the
#: first; and above which none does, unless it is one of faults, of which each is tried before a merge.
LONG, TOO_LONG, FAR_TOO_LONG = 0.4, 5.0, 30.0
#: Whose every test is one of a kind: pairs of an operation and a fault, which a merge tries once each; who may do what.
WHOLE = frozenset({"live/test_faults.py", "api/test_role_table.py", "web/test_role_table.py"})


def listed() -> dict[str, frozenset[str]]:
    """The tests that only the night runs, by their files below ``tests``."""
    lines = (line.split() for line in LIST.read_text().splitlines())
    return {file: frozenset(names) for file, *names in lines}


def chosen(seconds: dict[str, dict[str, float]]) -> dict[str, list[str]]:
    """Of the seconds of each file's tests, in their order: those that only the night runs."""
    found = {}
    for file, tests in seconds.items():
        long = [name for name, taken in tests.items() if taken > LONG]
        if file in WHOLE or not long:
            continue
        stays = next((name for name in long if tests[name] <= TOO_LONG), min(long, key=tests.__getitem__))
        if tests[stays] > FAR_TOO_LONG and not file.startswith("faults/"):
            stays = ""
        if rest := [name for name in long if name != stays]:
            found[file] = rest
    return found


def main(reports: list[str]) -> None:
    """Writes the list."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for report in reports:
        for case in ET.parse(report).getroot().iter("testcase"):
            module, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
            parts = [part for part in module.split(".")[1:] if part[:1].islower()]
            if parts:
                seconds["/".join(parts) + ".py"][name] += float(case.get("time", 0))
    LIST.write_text("".join(f"{file} {' '.join(names)}\n" for file, names in sorted(chosen(seconds).items())))


if __name__ == "__main__":
    main(sys.argv[1:])
