"""A process that the supervisor starts, and what is known about it while it runs."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: Run under ``setpriv --pdeathsig``, whose signal comes when the parent's starting thread ends. A parent that died
#: before ``setpriv`` had asked for the signal is noticed here, by a process number that has changed.
_UNLESS_ORPHANED = '[ "$PPID" = "$1" ] || exit 1; shift; exec "$@"'


@dataclass(frozen=True)
class ChildSpec:
    """What to start and how to end it.

    Args:
        name: what log lines call it.
        argv: the command, as an argument list.
        cwd: the folder it runs in.
        environment: added to the supervisor's own.
        ready: tells whether it does its work already; None when nothing waits for it.
        ready_seconds: how long the start waits for ``ready``.
        grace_seconds: how long a polite end may take before it is killed.
        death_signal: what the kernel sends it when the supervisor dies (a name without ``SIG``).
        keep_fds: file descriptors of the supervisor that it inherits.
    """

    name: str
    argv: tuple[str, ...]
    cwd: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] | None = None
    ready_seconds: float = 60.0
    grace_seconds: float = 10.0
    death_signal: str = "TERM"
    keep_fds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Backoff:
    """Seconds between a crash and the next start: doubled each time, up to a limit; calm after a good while."""

    first: float = 1.0
    limit: float = 30.0
    good_after: float = 60.0

    def seconds(self, crashes_in_a_row: int) -> float:
        """Seconds to wait after this many crashes in a row (1 is the first)."""
        return float(min(self.limit, self.first * 2 ** min(crashes_in_a_row - 1, 16)))


class Child:
    """A spec, its process if one runs, and how often it has crashed in a row."""

    def __init__(self, spec: ChildSpec, backoff: Backoff) -> None:
        self.spec = spec
        self.backoff = backoff
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.restart_at: float | None = None
        self.crashes = 0

    def start(self, now: float) -> subprocess.Popen[bytes]:
        """Starts the process in a session of its own, its output in one pipe.

        It dies with the supervisor, whatever kills that one, and a Ctrl-C in the terminal does not reach it.
        """
        guard = ("setpriv", "--pdeathsig", self.spec.death_signal, "--")
        orphan = ("sh", "-c", _UNLESS_ORPHANED, "sh", str(os.getpid()))
        self.restart_at = None
        self.started_at = now
        self.process = subprocess.Popen(
            [*guard, *orphan, *self.spec.argv],
            cwd=self.spec.cwd,
            env={**os.environ, **self.spec.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=self.spec.keep_fds,
        )
        return self.process

    def crashed(self, now: float) -> float:
        """Notes an end that nobody asked for and returns the seconds until the next start."""
        self.crashes = 1 if now - self.started_at >= self.backoff.good_after else self.crashes + 1
        wait = self.backoff.seconds(self.crashes)
        self.restart_at = now + wait
        self.process = None
        return wait

    def runs(self) -> bool:
        """True from its start until its end has been noticed."""
        return self.process is not None

    def send(self, number: int) -> None:
        """Sends the signal, if the process still runs."""
        if self.process is not None:
            self.process.send_signal(number)


def how_it_ended(returncode: int) -> str:
    """The end of a process in words: ``exit code 3`` or ``killed by SIGSEGV``."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
