"""Starts children in order, carries their output, restarts the crashed ones and ends them all in reverse order.

One thread and one selector: each child has a pipe for its output and a pidfd for its end, and signals wake the
selector through a socket. The thread matters: the kernel's death signal follows the thread that started a child.
"""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TextIO

from storage_admin.supervisor.child import Backoff, Child, ChildSpec, how_it_ended
from storage_admin.supervisor.errors import SetupError

_WATCH_SECONDS = 1.0
_CHUNK_BYTES = 65536
_LONGEST_LINE_BYTES = 65536
#: Log lines quote names that strangers chose: what would steer a terminal is shown, not obeyed.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code != 0x09}


def _stop_signals() -> list[signal.Signals]:
    """The signals that ask to stop. Under ``nohup`` a closed terminal is not one of them."""
    asked = [signal.SIGINT, signal.SIGTERM]
    return asked if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*asked, signal.SIGHUP]


class Supervisor:
    """Runs children until it is told to stop.

    Args:
        specs: what to start, in this order; ended in the reverse one.
        output: where the log goes, each line under its child's name.
        backoff: how long a crashed child waits.
    """

    def __init__(self, specs: Sequence[ChildSpec], output: TextIO, backoff: Backoff | None = None) -> None:
        self.children = [Child(spec, backoff or Backoff()) for spec in specs]
        self._output = output
        self._width = max((len(spec.name) for spec in specs), default=0)
        self._selector = selectors.DefaultSelector()
        self._partial: dict[int, bytes] = {}
        self._signals_seen = 0
        self._stopping = False

    def run(self, on_ready: Callable[[], None], watch: Callable[[], bool] | None = None) -> None:
        """Starts everything, calls ``on_ready`` once all are ready, then keeps all running until a signal asks to stop.

        Args:
            on_ready: called once, in this thread.
            watch: called about once a second after that, until it returns False.

        Raises:
            SetupError: a child was not ready in its time; the others have been stopped.
        """
        previous = {number: signal.signal(number, self._on_signal) for number in _stop_signals()}
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        old_wakeup = signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda: self._drain(wake_read))
        try:
            for child in self.children:
                if not self._signals_seen:
                    self._start_and_wait(child)
            if not self._signals_seen:
                on_ready()
            self._look_after(watch)
        finally:
            self._stop_all()
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._selector.close()
            wake_read.close()
            wake_write.close()

    def say(self, text: str, name: str = "") -> None:
        """Writes log lines; a reader of the log that has gone away ends nothing."""
        prefix = f"{name:<{self._width}} | " if name else ""
        lines = "".join(f"{prefix}{line.rstrip().translate(_VISIBLE)}\n" for line in text.split("\n"))
        try:
            self._output.write(lines)
            self._output.flush()
        except OSError:
            # Also what the interpreter still has buffered goes nowhere, instead of failing at its end.
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 (a device)
                os.dup2(nowhere.fileno(), self._output.fileno())

    def _look_after(self, watch: Callable[[], bool] | None) -> None:
        next_look = time.monotonic() + _WATCH_SECONDS
        while not self._signals_seen:
            self._restart_due()
            if watch is not None and time.monotonic() >= next_look:
                watch = watch if watch() else None
                next_look = time.monotonic() + _WATCH_SECONDS
            waits = [child.restart_at for child in self.children if child.restart_at is not None]
            waits += [next_look] if watch is not None else []
            self._step(max(0.0, min(waits) - time.monotonic()) if waits else None)

    # --- start and restart ----------------------------------------------------------------------------------------
    def _start(self, child: Child) -> None:
        process = child.start(time.monotonic())
        if process.stdout is None:
            raise RuntimeError("a child was started without a pipe")
        pipe = process.stdout.fileno()
        os.set_blocking(pipe, False)
        ended = os.pidfd_open(process.pid)
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read(child, pipe))
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._reap(child, pipe, ended))

    def _start_and_wait(self, child: Child) -> None:
        self._start(child)
        ready = child.spec.ready
        deadline = time.monotonic() + child.spec.ready_seconds
        while ready is not None and not self._signals_seen and not (child.runs() and ready()):
            if time.monotonic() > deadline:
                raise SetupError(
                    f"The {child.spec.name} was not ready within {child.spec.ready_seconds:.0f} seconds; "
                    "what it said about it stands above."
                )
            self._restart_due()
            self._step(0.05)

    def _restart_due(self) -> None:
        for child in self.children:
            if child.restart_at is None or time.monotonic() < child.restart_at:
                continue
            try:
                self._start(child)
            except OSError as error:
                wait = child.crashed(time.monotonic())
                self.say(f"{child.spec.name} could not be started ({error.strerror}); trying again in {wait:g} s.")
            else:
                self.say(f"{child.spec.name} was started again.")

    # --- stop -----------------------------------------------------------------------------------------------------
    def _stop_all(self) -> None:
        self._stopping = True
        for child in self.children:
            child.restart_at = None
        for child in reversed(self.children):
            self._stop(child)

    def _stop(self, child: Child) -> None:
        """Asks politely, waits for the grace, then kills. A second signal from outside ends the waiting."""
        child.send(signal.SIGTERM)
        deadline = time.monotonic() + child.spec.grace_seconds
        while child.runs() and time.monotonic() < deadline and self._signals_seen < 2:
            self._step(min(0.2, max(0.0, deadline - time.monotonic())))
        if child.runs():
            self.say(f"{child.spec.name} did not stop in time and was killed.")
            child.send(signal.SIGKILL)
        while child.runs():
            self._step(0.2)

    # --- what comes in --------------------------------------------------------------------------------------------
    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signals_seen += 1

    def _step(self, timeout: float | None) -> None:
        for key, _events in self._selector.select(timeout):
            # The end of a child, told in the same breath, may have closed its pipe already.
            if self._selector.get_map().get(key.fileobj) is key:
                key.data()

    @staticmethod
    def _drain(wake: socket.socket) -> None:
        wake.recv(4096)

    def _read(self, child: Child, pipe: int) -> bool:
        """Passes on what the pipe holds; False when there is nothing to read for now, or ever."""
        try:
            data = os.read(pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(pipe)
            self._flush(child, pipe)
            return False
        whole, newline, rest = (self._partial.pop(pipe, b"") + data).rpartition(b"\n")
        if len(rest) > _LONGEST_LINE_BYTES:
            whole, newline, rest = whole + newline + rest, b"\n", b""
        if rest:
            self._partial[pipe] = rest
        if newline:
            self.say(whole.decode(errors="backslashreplace"), child.spec.name)
        return True

    def _flush(self, child: Child, pipe: int) -> None:
        if rest := self._partial.pop(pipe, b""):
            self.say(rest.decode(errors="backslashreplace"), child.spec.name)

    def _reap(self, child: Child, pipe: int, ended: int) -> None:
        process = child.process
        if process is None or process.poll() is None:
            return
        self._selector.unregister(ended)
        os.close(ended)
        # A process that it left behind may hold the pipe open: what is there is read, the rest is not waited for.
        while pipe in self._selector.get_map() and self._read(child, pipe):
            pass
        if pipe in self._selector.get_map():
            self._selector.unregister(pipe)
        self._flush(child, pipe)
        if process.stdout is not None:
            process.stdout.close()
        returncode = process.returncode
        if self._stopping:
            child.process = None
            return
        wait = child.crashed(time.monotonic())
        self.say(f"{child.spec.name} ended unexpectedly ({how_it_ended(returncode)}); it starts again in {wait:g} s.")
