"""The agent's line to its controller: events go out, and the life of the work hangs on what comes in.

A thread reads standard input; the main thread runs the verb, starts tools and writes events. The thread only takes
notes; whether to go on is asked by the main thread, in :meth:`Lifeline.check`.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from typing import Any, Callable, Protocol

from storage_admin.agent import protocol
from storage_admin.agent.protocol import RefusedError, Request, StoppedError

#: Seconds between two progress events of one stage.
PROGRESS_INTERVAL = 0.2
#: Events that wait to be written, in bytes and in seconds.
BUFFER_BYTES = 64 * 1024
BUFFER_SECONDS = 0.2
#: Seconds that the controller has to answer ``ready`` with ``go``, and to take the last event. Its database may be
#: locked or away: as long as it pings, the work that is done is not thrown away.
GO_LIMIT = 3600.0
FAREWELL_LIMIT = 2.0

_PING = protocol.encode(protocol.PING).rstrip()


class AgentIO(Protocol):
    """What a verb needs of its controller; one to an agent."""

    def __hash__(self) -> int:
        """By identity."""

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Send one event now, and what waits before it. Any thread may."""

    def emit_raw(self, line: bytes) -> None:
        """Send one event that is encoded already, with its newline; it may wait a moment with others."""

    def progress(self, stage: str, done: int, total: int | None, message: str = "") -> None:
        """Say how far a stage is; ``done`` and ``total`` in the stage's own unit. Too frequent ones are dropped."""

    def log(self, text: str, level: str = "info") -> None:
        """Say something for the job's log; ``level`` is ``info``, ``warning`` or ``error``."""

    def command(self, argv: Sequence[str], exit_code: int | None) -> None:
        """Say which tool was run, and how it ended; ``None`` where it was stopped."""

    def check(self) -> None:
        """Go on, or raise StoppedError: ``cancelled``, or ``interrupted`` where the controller is gone or silent.

        Sends what has waited long enough.
        """

    def wait_for_go(self, generation: int, **made: int | str) -> None:
        """Ask for the one permission that cannot be taken back: say ``ready``, and return when the controller says go.

        Args:
            generation: of the request; a ``go`` for another one is a no.
            made: what is known of the files by now. The controller keeps it: it can tell by that whether it came to the
                swap.

        Raises:
            RefusedError: the controller says why not.
            StoppedError: ``no_go`` for another answer or none in time; as :meth:`check` otherwise.
        """

    def take_data(self) -> bytes:
        """Ask for the next bytes of a file that the controller sends.

        Returns:
            At most what one line holds; nothing at the end.

        Raises:
            RefusedError: ``invalid``: the controller answers something else.
            StoppedError: as :meth:`check`.
        """


class Lifeline:
    """An :class:`AgentIO`, which says what its methods do, on a pair of descriptors.

    Args:
        incoming: descriptor that the controller's lines are read from.
        outgoing: descriptor that events are written to.
        silence_limit: seconds without a line after which the controller is taken for gone.
        go_limit: seconds that the controller has to say ``go``.
    """

    def __init__(
        self,
        incoming: int,
        outgoing: int,
        silence_limit: float = protocol.SILENCE_LIMIT,
        go_limit: float = GO_LIMIT,
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._silence_limit = silence_limit
        self._go_limit = go_limit
        self._news = threading.Condition()
        self._request: bytes | None = None
        self._answers: list[dict[str, Any]] = []
        self._stop: tuple[str, str] | None = None
        self._heard = time.monotonic()
        self._writing = threading.RLock()
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._flushed = time.monotonic()
        self._said: tuple[str, int, int | None, str] = ("", 0, None, "")
        self._progressed = 0.0
        # A full pipe must not hold the main thread: it looks after its tool and its lifeline while it waits.
        os.set_blocking(outgoing, False)
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    # Incoming

    def read_request(self) -> Request:
        """The controller's first line.

        Raises:
            StoppedError: none came in time.
            ValueError: it is no request.
        """
        with self._news:
            while self._request is None:
                self._raise_if_stopped()
                self._news.wait(0.2)
            line = self._request
        fields = protocol.decode(line)
        verb, job, generation = fields.get("verb"), fields.get("job"), fields.get("generation")
        args, roots = fields.get("args", {}), fields.get("roots", {})
        if fields["event"] != protocol.REQUEST or not isinstance(verb, str) or not isinstance(job, str):
            raise ValueError("the first line is no request")
        if not isinstance(generation, int) or isinstance(generation, bool) or not isinstance(args, dict):
            raise ValueError("the request's generation or args are of the wrong type")
        if not isinstance(roots, dict):
            raise ValueError("the request's roots are no folders by path")
        return Request(verb, job, generation, args, roots)

    def stop(self, code: str, detail: str) -> None:
        """Have the next :meth:`check` raise StoppedError; the first reason stands. Safe in a signal handler."""
        if self._stop is None:
            self._stop = (code, detail)

    def check(self) -> None:
        self._raise_if_stopped()
        with self._writing:
            if self._buffer and time.monotonic() - self._flushed > BUFFER_SECONDS:
                self._flush()

    def wait_for_go(self, generation: int, **made: int | str) -> None:
        answer = self._ask(protocol.READY, "the dashboard did not confirm the swap", generation=generation, **made)
        if answer["event"] == protocol.NO:
            raise RefusedError(str(answer.get("code")), str(answer.get("detail")))
        if answer["event"] != protocol.GO or answer.get("generation") != generation:
            raise StoppedError(protocol.NO_GO, f"the controller answered {answer['event']!r}, not go for {generation}")

    def take_data(self) -> bytes:
        answer = self._ask(protocol.MORE, "the dashboard sent nothing")
        try:
            if answer["event"] != protocol.DATA:
                raise ValueError(answer["event"])
            return protocol.unb64(answer["b64"])
        except (KeyError, AttributeError, ValueError) as error:
            raise RefusedError(protocol.INVALID, f"these are no bytes of a file: {error}") from error

    def _ask(self, kind: str, late: str, /, **fields: Any) -> dict[str, Any]:
        """Say something, and wait for the controller's answer to it."""
        with self._news:
            self._answers.clear()
        self.emit(kind, **fields)
        deadline = time.monotonic() + self._go_limit
        with self._news:
            while not self._answers:
                self._raise_if_stopped()
                if time.monotonic() > deadline:
                    raise StoppedError(protocol.NO_GO, f"{late} within {self._go_limit:.0f} s")
                self._news.wait(0.1)
            self._raise_if_stopped()
            return self._answers[0]

    def _raise_if_stopped(self) -> None:
        if self._stop is None and time.monotonic() - self._heard > self._silence_limit:
            self.stop(protocol.INTERRUPTED, f"the dashboard was silent for {self._silence_limit:.0f} s")
        if self._stop is not None:
            raise StoppedError(*self._stop)

    def _listen(self) -> None:
        """The reader thread: take notes until the line ends."""
        pending = bytearray()
        while True:
            try:
                select.select([self._incoming], [], [])
                chunk = os.read(self._incoming, 1 << 20)
            except BlockingIOError:
                continue
            except OSError as error:
                self._end(f"the connection to the dashboard broke: {error.strerror}")
                return
            if not chunk:
                self._end("the connection to the dashboard was closed")
                return
            self._heard = time.monotonic()
            pending += chunk
            if b"\n" not in chunk:
                if len(pending) > protocol.MAX_LINE:
                    self._end("the controller sent a line that is too long")
                    return
                continue
            *lines, rest = bytes(pending).split(b"\n")
            pending = bytearray(rest)
            for line in lines:
                self._note(line)

    def _note(self, line: bytes) -> None:
        if line == _PING:
            return  # that it was heard is noted already; the controller may still be gathering its request
        with self._news:
            if self._request is None:
                self._request = line
                self._news.notify_all()
                return
            try:
                fields = protocol.decode(line)
            except ValueError:
                fields = {"event": "unreadable line"}
            if fields["event"] == protocol.CANCEL:
                self.stop(protocol.CANCELLED, "cancelled")
            else:
                self._answers.append(fields)
            self._news.notify_all()

    def _end(self, detail: str) -> None:
        with self._news:
            self.stop(protocol.INTERRUPTED, detail)
            self._news.notify_all()

    # Outgoing

    def emit(self, kind: str, /, **fields: Any) -> None:
        with self._writing:
            self._append(protocol.encode(kind, **fields))
            self._flush()

    def emit_raw(self, line: bytes) -> None:
        with self._writing:
            self._append(line)
            if self._buffered > BUFFER_BYTES or time.monotonic() - self._flushed > BUFFER_SECONDS:
                self._flush()

    def progress(self, stage: str, done: int, total: int | None, message: str = "") -> None:
        now = time.monotonic()
        said = (stage, done, total, message)
        soon = stage == self._said[0] and now - self._progressed < PROGRESS_INTERVAL and done != total
        if soon or said == self._said:
            return
        self._said, self._progressed = said, now
        self.emit(protocol.PROGRESS, stage=stage, done=done, total=total, message=message)

    def log(self, text: str, level: str = "info") -> None:
        self.emit(protocol.LOG, text=text, level=level)

    def command(self, argv: Sequence[str], exit_code: int | None) -> None:
        self.emit(protocol.COMMAND, argv=list(argv), exit_code=exit_code)

    def farewell(self, kind: str, /, **fields: Any) -> bool:
        """Send the last event, also when the work was stopped.

        Returns:
            Whether it was taken; a controller that is gone does not take it.
        """
        with self._writing:
            self._append(protocol.encode(kind, **fields))
            deadline = time.monotonic() + FAREWELL_LIMIT
            try:
                self._write(lambda: time.monotonic() < deadline)
            except StoppedError:
                return False
            return not self._buffer

    def _append(self, line: bytes) -> None:
        self._buffer.append(line)
        self._buffered += len(line)

    def _flush(self) -> None:
        def alive() -> bool:
            self._raise_if_stopped()
            return True

        self._write(alive)

    def _write(self, alive: Callable[[], bool]) -> None:
        """Write the buffer, as long as ``alive`` says so; what was not taken stays in it."""
        data = memoryview(b"".join(self._buffer))
        try:
            while data:
                try:
                    data = data[os.write(self._outgoing, data) :]
                except BlockingIOError:
                    if not alive():
                        return
                    select.select([], [self._outgoing], [], 0.1)
        except OSError as error:
            self.stop(protocol.INTERRUPTED, f"the connection to the dashboard broke: {error.strerror}")
            raise StoppedError(*(self._stop or (protocol.INTERRUPTED, ""))) from error
        finally:
            self._buffer = [bytes(data)] if data else []
            self._buffered = len(data)
            self._flushed = time.monotonic()
