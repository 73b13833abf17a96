"""Plain commands on a host, where there is no agent to ask."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Args:
        exit_code: 128 and the signal's number where one ended it, as shells say it.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes

    def words(self) -> str:
        """What it said, shortened, for a sentence."""
        said = (self.stderr or self.stdout).decode("utf-8", "replace").strip()
        return said[-300:] or f"exit code {self.exit_code}"


class Shell(Protocol):
    """Runs commands on one host, as root."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        """One command.

        Args:
            argv: the command and its arguments; no shell of ours or theirs sees them as anything else.
            stdin: what it reads.
            seconds: after which it is ended there.

        Raises:
            HostError: the host cannot be reached, or the time is up.
        """
        ...


class LocalShell:
    """This machine."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = None if env is None else dict(env)

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        """See :meth:`Shell.run`."""
        try:
            done = subprocess.run(
                list(argv), input=stdin, capture_output=True, timeout=seconds, check=False, env=self._env
            )
        except subprocess.TimeoutExpired:
            raise HostError(
                _("{program} did not end within {seconds:.0f} s.").format(program=argv[0], seconds=seconds)
            ) from None
        except FileNotFoundError:
            return Done(127, b"", f"{argv[0]}: not found".encode())
        except OSError as error:
            raise HostError(
                _("{program} could not be started: {strerror}.").format(program=argv[0], strerror=error.strerror)
            ) from error
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        return Done(code, done.stdout, done.stderr)
