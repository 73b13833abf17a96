"""Commands on a host, and the list of those that were run."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage_admin.agent.protocol import HostError
from storage_admin.hosts.names import display
from storage_admin.hosts.shells import Done, Shell

#: Longest output that is kept with a command, in characters; the end says more than the beginning.
KEPT = 2000
#: What these print is what was asked for, and is told elsewhere.
READERS = frozenset({"sh", "vzlist"})


@dataclass(frozen=True)
class CommandRun:
    """A command that was run.

    Args:
        exit_code: ``None`` where its end was never heard of.
        said: what it printed, control characters shown; only errors of what reads.
    """

    argv: tuple[str, ...]
    exit_code: int | None
    said: str = ""

    @property
    def line(self) -> str:
        """As it would be typed."""
        return shlex.join(self.argv)


class Commands:
    """A shell that keeps what was run in it.

    Args:
        told: hears of each command as soon as it ended, also of those before one that failed.
    """

    def __init__(self, shell: Shell, told: Callable[[CommandRun], None] | None = None) -> None:
        self._shell = shell
        self._told = told
        self.ran: list[CommandRun] = []

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        """See :meth:`storage_admin.hosts.shells.Shell.run`."""
        try:
            done = self._shell.run(argv, stdin=stdin, seconds=seconds)
        except HostError as error:
            self._keep(CommandRun(tuple(argv), None, error.detail))
            raise
        said = done.stderr if argv[0].rpartition("/")[2] in READERS else done.stdout + done.stderr
        self._keep(CommandRun(tuple(argv), done.exit_code, plain(said)))
        return done

    def script(self, text: str, *words: str, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        """A script for ``sh``; what it works on are positional parameters and never part of its text."""
        return self.run(["sh", "-c", text, "sh", *words], stdin=stdin, seconds=seconds)

    def tool(self, argv: Sequence[str], seconds: float) -> Done:
        """One of OpenVZ's own commands, which a user's shell may not find."""
        done = self.run(argv, seconds=seconds)
        return self.run([f"/usr/sbin/{argv[0]}", *argv[1:]], seconds=seconds) if is_missing(done) else done

    def _keep(self, run: CommandRun) -> None:
        self.ran.append(run)
        if self._told is not None:
            self._told(run)


def has_vzctl(shell: Shell) -> bool:
    """Whether vzctl is there to set a priority; else configurations are edited."""
    return shell.run(["sh", "-c", "PATH=$PATH:/usr/sbin:/sbin; command -v vzctl"]).exit_code == 0


def plain(said: bytes) -> str:
    """Output as lines that a terminal and a page can show."""
    return "\n".join(display(line) for line in said[-KEPT:].strip().split(b"\n"))


def is_missing(done: Done) -> bool:
    """Whether the command was not there to be run, as a shell (127) or sudo (1) says it."""
    return done.exit_code == 127 or (done.exit_code == 1 and b"command not found" in done.stderr)
