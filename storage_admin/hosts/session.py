"""One agent at work: its lifeline, its events, and what the controller says to it."""

import contextlib
import fcntl
import os
import select
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from django.utils.translation import gettext as _

from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError, Request

#: Seconds for the agent's greeting, and for its end after everything was said.
HELLO_TIMEOUT = 30.0
END_TIMEOUT, UNGREETED_END_TIMEOUT, KILLED_TIMEOUT = 45.0, 1.0, 10.0
#: Seconds without a word after which an agent that was told to stop hangs, as on a disk that answers no more. One that
#: does not stops within five, unless the kernel is still at what it was asked to write.
STOP_TIMEOUT = 120.0
CHUNK = 1 << 18
#: As much as everybody may ask for: an agent reads on while what it found before is written.
PIPE_SIZE = 1 << 20


class UngreetedError(HostError):
    """The agent did not even greet, so nothing was begun.

    Args:
        exit_code: of the command that was to start it; ``None`` where that is still at it.
        said: its last words on standard error.
    """

    def __init__(self, detail: str, exit_code: int | None = None, said: bytes = b"") -> None:
        super().__init__(detail, protocol.INTERRUPTED)
        self.exit_code, self.said = exit_code, said


class AgentMissingError(HostError):
    """The agent is not on its host, where it was installed: another start installs it again."""


class AgentSession:
    """An agent that was started by ``command`` and works on one request.

    Use it as a context manager: leaving it closes the lifeline, upon which the agent stops its tool, puts everything
    back and ends.

    Args:
        command: argument list that starts the agent.
        expected_hash: content hash that it must greet with; another one is an agent of another version.
    """

    def __init__(self, command: list[str], expected_hash: str) -> None:
        self._expected_hash = expected_hash
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        if self._process.stdin is None or self._process.stdout is None or self._process.stderr is None:
            raise TypeError("the agent's pipes are missing")
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # it works as well with a small one
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self._stdin, self._stdout, self._stderr_pipe = self._process.stdin, self._process.stdout, self._process.stderr
        os.set_blocking(self._stdin.fileno(), False)  # of one that does not read nobody may wait for ever
        self._write_lock = threading.Lock()
        self._ended = threading.Event()
        self._started, self._greeted = time.monotonic(), False
        self._heard = self._started
        self._stop_asked: float | None = None
        self._let_go = self._hangs = self._left = False
        #: Seconds for which it took no byte; 0 of one that reads.
        self._deaf_for = 0.0
        self._tells_of_storages, self._last_word = False, self._started
        self._stderr: deque[bytes] = deque(maxlen=50)
        self._threads = [
            threading.Thread(target=self._ping, daemon=True),
            threading.Thread(target=self._drain_stderr, daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._write_lock, contextlib.suppress(OSError):
            self._stdin.close()
        if self._left:
            self._stdout.close()
            threading.Thread(target=self._process.wait, daemon=True).start()
            return
        # One that has not greeted has nothing to put back, and what hangs is not waited for a second time.
        waits = self._greeted and not self._hangs
        self._await_silence(END_TIMEOUT if waits else UNGREETED_END_TIMEOUT)
        try:
            self._process.wait(END_TIMEOUT if waits else 0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(PermissionError):  # as another user's: sudo, which ends when its work does
                self._process.kill()
            # Even that waits for a disk that answers no more; what is left then is a process that does nothing further.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_TIMEOUT)
        for thread in self._threads:
            thread.join(protocol.PING_INTERVAL + 1)
        self._stdout.close()
        # Else its reader waits for the end of what cannot be killed, and closes it then: closing would wait, too.
        if not self._threads[1].is_alive():
            self._stderr_pipe.close()

    def _await_silence(self, seconds: float) -> None:
        """Waits for the end of its output: waiting for the process by time would look at it only now and then."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0 and selector.select(left):
                if not os.read(self._stdout.fileno(), CHUNK):
                    return

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: Request) -> None:
        """Gives the agent its work."""
        self._say(protocol.encode(protocol.REQUEST, **vars(request)), HELLO_TIMEOUT)

    @property
    def cancelled(self) -> bool:
        """Whether it was told to stop."""
        return self._stop_asked is not None

    def cancel(self) -> None:
        """Asks the agent to stop and put everything back; its last event says that it did.

        It is asked once. One that was let go is not asked any more, but has no longer than others to say something.
        """
        if self._stop_asked is None:
            self._stop_asked = time.monotonic()
            if not self._let_go:
                self._say(protocol.encode(protocol.CANCEL), 0)

    def give_up(self) -> None:
        """Takes it for hanging: leaving the context manager does not wait for its end, but kills it."""
        self._hangs = True

    def leave(self) -> None:
        """Leaves it to itself: nobody waits for its end, and nobody kills it. It puts everything back as soon as the
        storage that holds it up lets it.
        """
        self._left = True

    @property
    def let_go(self) -> bool:
        """Whether it may have swapped."""
        return self._let_go

    @property
    def unheard(self) -> float:
        """Seconds since the last word of an agent that tells of its storages every few; 0 of one that does not."""
        return time.monotonic() - self._last_word if self._tells_of_storages else 0.0

    def go(self, generation: int) -> None:
        """Lets an agent that is ready swap."""
        self._let_go = True
        self._say(protocol.encode(protocol.GO, generation=generation), STOP_TIMEOUT)

    def feed(self, piece: bytes) -> None:
        """Gives an agent that wants more of a file the next bytes of it; none at its end."""
        self._say(protocol.encode(protocol.DATA, b64=protocol.b64(piece)), STOP_TIMEOUT)

    def say_no(self, error: RefusedError | HostError) -> None:
        """Tells an agent that has exchanged files that others use the one that went, or may use either of them."""
        self._say(protocol.encode(protocol.NO, code=error.code, detail=error.detail), STOP_TIMEOUT)

    def events(self, tick: float = 0.5) -> Iterator[dict[str, Any] | None]:
        """What the agent says, as it comes; ``None`` at least every ``tick`` seconds in which it says nothing.

        Ends after a result or an error.

        Raises:
            RefusedError: ``agent_outdated``.
            UngreetedError: it has not greeted in time, or ended before.
            HostError: ``interrupted``: the agent ended, or greeted wrongly, without an answer; or it was told to stop,
                and hangs.
        """
        for lines in self._lines(tick):
            if not lines:
                self._check_time()
                yield None
            for event in self._decode(lines):
                if not self._greeted:
                    self._check_hello(event)
                    self._greeted = True
                self._hear(event)
                yield event
                if event["event"] in {protocol.RESULT, protocol.ERROR}:
                    return
        detail = _("The agent ended without an answer{why}.").format(why=self._why())
        if not self._greeted:
            raise UngreetedError(detail, self._process.returncode, b"".join(self._stderr))
        raise HostError(detail, protocol.INTERRUPTED)

    def _hear(self, event: dict[str, Any]) -> None:
        self._last_word = time.monotonic()
        if event["event"] == protocol.STORAGE:
            self._tells_of_storages = True
        else:  # the other comes also from one whose work hangs
            self._heard = self._last_word

    def _lines(self, tick: float) -> Iterator[list[bytes]]:
        """The lines that have come, together; none where nothing came within ``tick`` seconds."""
        fd, rest = self._stdout.fileno(), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while True:
                if not selector.select(tick):
                    yield []
                    continue
                chunk = os.read(fd, CHUNK)
                if not chunk:
                    return
                rest += chunk
                if len(rest) > protocol.MAX_LINE + CHUNK:
                    raise HostError(_("The agent sent a line that is too long."), protocol.INTERRUPTED)
                if b"\n" in chunk:
                    *lines, tail = bytes(rest).split(b"\n")
                    rest = bytearray(tail)
                    yield lines

    @staticmethod
    def _decode(lines: list[bytes]) -> Iterator[dict[str, Any]]:
        try:
            yield from protocol.decode_all(lines)
        except ValueError as error:
            raise HostError(
                _("The agent sent an invalid event: {error}.").format(error=error), protocol.INTERRUPTED
            ) from error

    def _check_time(self) -> None:
        now = time.monotonic()
        if self._deaf_for and self._greeted:
            self.give_up()
            raise HostError(
                _("The agent has not read what it was sent for {seconds:.0f} s.").format(seconds=self._deaf_for),
                protocol.INTERRUPTED,
            )
        if not self._greeted and (self._deaf_for or now > self._started + HELLO_TIMEOUT):
            raise UngreetedError(_("The agent did not start within {seconds:.0f} s.").format(seconds=HELLO_TIMEOUT))
        if self._stop_asked is not None and now - max(self._stop_asked, self._heard) > STOP_TIMEOUT:
            self.give_up()
            raise HostError(
                _(
                    "The agent was told to stop, but has not responded for {seconds:.0f} s. A disk on the host "
                    "may be hanging. The recovery job cleans up what the agent left."
                ).format(seconds=STOP_TIMEOUT),
                protocol.INTERRUPTED,
            )

    def _check_hello(self, event: dict[str, Any]) -> None:
        if event["event"] != protocol.HELLO or event.get("protocol") != protocol.VERSION:
            raise RefusedError(
                "agent_outdated", _("The agent on the host uses another protocol. Install the current agent.")
            )
        if event.get("hash") != self._expected_hash:
            raise RefusedError(
                "agent_outdated", _("The agent on the host has another version. Install the current agent.")
            )

    def _say(self, line: bytes, patience: float) -> None:
        """Args:

        patience: seconds without a byte taken after which the agent counts as deaf, which reading its events tells; 0
            for a short line that it need not get.
        """
        rest, writable = memoryview(line), select.poll()
        # A broken pipe means that the agent is gone; reading its events tells why.
        with self._write_lock, contextlib.suppress(OSError, ValueError):
            writable.register(self._stdin, select.POLLOUT)
            while rest and not self._deaf_for:
                if writable.poll(patience * 1000):
                    rest = rest[os.write(self._stdin.fileno(), rest) :]
                elif patience:
                    self._deaf_for = patience
                else:
                    return

    def _ping(self) -> None:
        while not self._ended.wait(protocol.PING_INTERVAL):
            self._say(protocol.encode(protocol.PING), 0)

    def _drain_stderr(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._stderr_pipe:
                self._stderr.append(line[:1000])
            if self._ended.is_set():
                self._stderr_pipe.close()

    def _why(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return ""
        self._threads[1].join(1)  # its last words may still be in the pipe
        said = b" ".join(self._stderr).decode("utf-8", "replace").strip()
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f" ({ended}{': ' + said[-500:] if said else ''})"
