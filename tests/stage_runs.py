"""Runs commands of the tiers of tests, some beside each other, and counts how they ended."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from xml.etree import ElementTree as ET

import psutil

from tests import postgres
from tests.chance import RUN
from tests.faults.figures import NIGHTLY
from tests.machines.lab import WANTED
from tests.passed import KEEP, keep, passed

ROOT = Path(__file__).resolve().parent.parent
#: pytest's exit code where it found no test.
NOTHING_COLLECTED = 5
_LOOKS = 0.1
#: Characters of the line that a failed test gets.
_LINE = 300
#: What somebody has set in the shell must not reach the tests.
FOREIGN = (
    NIGHTLY,
    RUN,
    KEEP,
    WANTED,
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
    # Modules that are compiled anew by each process that a test starts would cost a third of the whole.
    "PYTHONDONTWRITEBYTECODE",
)
#: Where libvirt and the tests' own libvirtd have their sockets, their state and the guests that are defined.
_LIBVIRT = ("/run/libvirt", "/run/storage-admin-tests", "/etc/libvirt/qemu", "/var/lib/libvirt", "/var/log/libvirt")
#: Runs a command that sees empty folders there: agents ask the machine's libvirt who uses an image, and tests would
#: hear of the machine's guests, and of those of the stage beside them.
_OWN_LIBVIRT = f"""
for folder in {" ".join(_LIBVIRT)}; do
    mkdir -p "$folder"
    mount -t tmpfs -o mode=755 tmpfs "$folder"
done
exec "$@"
"""


@dataclass(frozen=True)
class Stage:
    """A command and how its outcome is counted: a tool counts as one, pytest by its tests.

    Args:
        beside: stages that follow each other and have the same word here run at once, each with a libvirt of its own.
        passed: the file that keeps what passed, which is not run again.
        where: it is left out where this says no.
    """

    name: str
    argv: tuple[str, ...]
    group: str = "tests"
    pytest: bool = False
    database: str = "sqlite"
    limit_seconds: float = 3600.0
    beside: str = ""
    passed: Path | None = None
    where: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Outcome:
    """How a stage ended. ``note`` says why where the numbers alone do not, ``bad`` which tests failed and how."""

    name: str
    passed: int
    failed: int
    seconds: float
    note: str = ""
    bad: tuple[str, ...] = ()


def run(stages: Sequence[Stage]) -> list[Outcome]:
    """Runs stages beside each other. What the first one of pytest prints is seen at once, that of the others when all
    have ended.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sa-stage-")))
        running = [stack.enter_context(_Running(stage, folder / str(at))) for at, stage in enumerate(stages)]
        at_once = next((at for at, stage in enumerate(stages) if stage.pytest), 0)
        for at, one in enumerate(running):
            one.begin(quiet=at != at_once)
        while [one for one in running if not one.has_ended()]:
            running[at_once].show()
            time.sleep(_LOOKS)
        running[at_once].show()
        for one in running[:at_once] + running[at_once + 1 :]:
            print(f"\n=== what {one.name} printed:", flush=True)
            one.show()
        return [one.outcome() for one in running]


class _Running:
    """A stage at work. At its end all that it had started is killed."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self._stage, self._folder = stage, folder
        self.name, self._output, self._shown = stage.name, folder / "output", 0
        self._stack = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._outcome: Outcome | None = None
        self._before = {} if stage.passed is None else passed(stage.passed)

    def __enter__(self) -> Self:
        self._folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self, *, quiet: bool) -> None:
        """Starts it; with ``quiet`` its output waits for :meth:`show`."""
        stage, self._started = self._stage, time.monotonic()
        if self._before and not stage.pytest:
            self._end(1, 0)
            return
        # All of it into a file, also what is shown meanwhile: where a test hangs is read there.
        output = self._stack.enter_context(self._output.open("wb"))
        print(f"\n=== {stage.name}: {' '.join(stage.argv)}{' (its output follows)' if quiet else ''}", flush=True)
        report = [f"--junitxml={self._report}"] if stage.pytest else []
        # Who starts us in the background, or by nohup, has signals ignored in all that we start: tests send these.
        argv = ["env", "--default-signal=HUP,INT,QUIT,TERM,PIPE", *stage.argv, *report]
        if os.geteuid() == 0 and (stage.pytest or stage.beside):
            argv = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _OWN_LIBVIRT, "sh", *argv]
        try:
            environment = self._stack.enter_context(_environment(stage))
            self._process = subprocess.Popen(
                argv, env=environment, cwd=ROOT, start_new_session=True, stdout=output, stderr=output
            )
            self._stack.callback(self._kill, self._process)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(error)
            self._end(0, 1, "could not be started")

    def has_ended(self) -> bool:
        """Whether it ended by itself, or was killed just now as its time was over."""
        if self._outcome is None and self._process is not None:
            code = self._process.poll()
            if code is not None:
                self._count(code)
            elif time.monotonic() > self._started + self._stage.limit_seconds:
                self._end(0, 1, f"did not end within {self._stage.limit_seconds:.0f} s", _stands(self._output))
        return self._outcome is not None

    def show(self) -> None:
        """Prints what it printed since the last call."""
        with contextlib.suppress(FileNotFoundError), self._output.open("rb") as output:
            output.seek(self._shown)
            shutil.copyfileobj(output, sys.stdout.buffer)
            self._shown = output.tell()
            sys.stdout.flush()

    def outcome(self) -> Outcome:
        assert self._outcome is not None
        return self._outcome

    @property
    def _report(self) -> Path:
        return self._folder / "report.xml"

    def _count(self, code: int) -> None:
        """Reads pytest's own report. A skipped test has shown nothing, so it counts as failed; so does no test."""
        if not self._stage.pytest:
            if code == 0 and self._stage.passed is not None:
                keep(self._stage.passed, self._stage.name, time.monotonic() - self._started)
            self._end(int(code == 0), int(code != 0))
        elif code == NOTHING_COLLECTED and self._before:
            self._end(len(self._before), 0)
        elif code == NOTHING_COLLECTED or not self._report.is_file():
            why = "no test was found" if code == NOTHING_COLLECTED else f"pytest ended with exit code {code}"
            self._end(0, 1, why, _stands(self._output))
        else:
            cases = list(ET.parse(self._report).getroot().iter("testcase"))
            skipped = sum(case.find("skipped") is not None for case in cases)
            told = tuple(line for case in cases if (line := _bad(case)))
            note, bad = (f"{skipped} skipped" if skipped else ""), len(told)
            if code != 0 and not bad:
                bad, note = 1, f"pytest ended with exit code {code}"
            self._end(len(cases) - len(told) + len(self._before), bad, note, told + _stands(self._output))

    def _end(self, good: int, bad: int, note: str = "", told: tuple[str, ...] = ()) -> None:
        if self._before:
            note = f"{note} {len(self._before)} of them passed before, in {sum(self._before.values()):.0f} s".lstrip()
        self._outcome = Outcome(self._stage.name, good, bad, time.monotonic() - self._started, note, told)
        self._stack.close()

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Those in sessions of their own: a server that a test has stopped would hold up whoever looks at it.
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def _bad(case: ET.Element) -> str:
    """Of a test that did not pass, its name and the first line of what was said; empty for one that passed."""
    for kind in ("failure", "error", "skipped"):
        if (ended := case.find(kind)) is not None:
            said = ended.get("message", "").partition("\n")[0]
            return f"{case.get('classname')}::{case.get('name')}: {said}"[:_LINE]
    return ""


def _stands(output: Path) -> tuple[str, ...]:
    """Where a test that hung was within our files, the innermost first, by what pytest's faulthandler has printed."""
    said = output.read_text(errors="replace") if output.exists() else ""
    __, dumped, stacks = said.rpartition("Timeout (")
    lines = [line.strip() for line in stacks.splitlines() if f'"{ROOT}/' in line and "/.venv/" not in line]
    return tuple(lines) if dumped else ()


@contextlib.contextmanager
def _environment(stage: Stage) -> Iterator[Mapping[str, str]]:
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    if stage.passed is not None:
        environment[KEEP] = str(stage.passed)
    if stage.database == "sqlite":
        yield environment
        return
    with postgres.cluster() as url:
        yield environment | {"DATABASE_URL": url}
