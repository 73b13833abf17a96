"""Processes that tests start, and end again by their number."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self


def free_port() -> int:
    """A TCP port on the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(happened: Callable[[], object], seconds: float, what: str) -> None:
    """Waits until ``happened`` answers something true.

    Raises:
        AssertionError: it did not within ``seconds``; ``what`` names it.
    """
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def running(argv: Sequence[str | Path], says: bytes, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program once it has said that line, which ends when its standard input does: when it is left."""
    with subprocess.Popen(argv, **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **how}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == says
        yield process
        process.communicate()


def holder(path: Path, mode: str = "rb", *words: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """Another program that has a file open, and asks nobody for a lock; with these words on its command line."""
    hold = "import sys; f = open(sys.argv[-2], sys.argv[-1]); print('open', flush=True); sys.stdin.read()"
    return running([sys.executable, "-c", hold, *words, path, mode], b"open\n")


class Daemon:
    """A process in a session of its own, with its output in a file; leaving the context ends it.

    Args:
        argv: the command.
        log: where its output goes.
        grace: seconds between the polite signal and the other one.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace: float = 15.0,
    ) -> None:
        self.log, self._grace = log, grace
        self._argv, self._env, self._cwd = list(argv), dict(env) if env is not None else None, cwd
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=self._env,
                cwd=self._cwd, start_new_session=True,
            )  # fmt: skip

    def start_again(self) -> None:
        """Ends it at once, and starts it anew."""
        self.kill()
        self.process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        """What it wrote so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, happened: Callable[[], object], seconds: float, what: str) -> None:
        """Waits for something that this process brings about.

        Raises:
            AssertionError: it ended, or the time has passed; with the end of its output.
        """
        deadline = time.monotonic() + seconds
        while not happened():
            code = self.process.poll()
            assert code is None, f"{what}: the process ended with {code}:\n{self.said()[-2000:]}"
            assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s:\n{self.said()[-2000:]}"
            time.sleep(0.05)

    def stop(self) -> int:
        """Ends it politely, else not; answers its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(self._grace)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()
