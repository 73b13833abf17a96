"""Which of the product's modules a job passes: the number that says how far somebody has to walk to follow one.

A module counts as passed where at least one of its functions is called while the job is planned and run; what is only
imported does not count. ``python -m tests.modules_passed`` prints the lists; ``tests/images/test_modules_passed.py``
holds their lengths. With an agent behind it on the command line, it runs that agent and counts there as well.
"""

import os
import runpy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

OURS = ("storage_admin", "images", "benchmarks")


def is_import(frame: FrameType | None) -> bool:
    """Whether a module of the product is being imported: a class's body is then called as a function is."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
            return True
        frame = frame.f_back
    return False


class Counter:
    """Appends each module of the product to a file, when the first of its functions is called."""

    def __init__(self, told: Path) -> None:
        self.file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.seen: set[str] = set()

    def called(self, frame: FrameType, event: str, _of: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name not in self.seen and name.partition(".")[0] in OURS and not is_import(frame):
            self.seen.add(name)
            os.write(self.file, f"{name}\n".encode())

    def start(self) -> None:
        threading.setprofile(self.called)
        sys.setprofile(self.called)

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


@contextmanager
def counted(told: Path) -> Iterator[None]:
    counter = Counter(told)
    counter.start()
    try:
        yield
    finally:
        counter.end()


def agent(command: list[str], told: Path) -> list[str]:
    """The command of an agent, so that it counts: ``[python, -IS, agent]`` with this file between."""
    return [*command[:2], __file__, str(told), *command[2:]]


if __name__ == "__main__":
    if len(sys.argv) == 1:
        os.execvp(sys.executable, [sys.executable, "-m", "pytest", "-q", "-rP", "tests/images/test_modules_passed.py"])
    Counter(Path(sys.argv[1])).start()
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
