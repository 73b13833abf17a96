"""How a guest says that it is up: by words on its serial console, or by its guest agent."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError

URI = "qemu:///system"
#: Seconds between two looks at the consoles, and between two questions to guest agents.
_LOOK, _ASK = 0.02, 0.5
#: Seconds between the first guest that is let go and the last one.
_LET_GO = 10.0
_CHUNK = 1 << 16
#: Of what guests said last, so much is kept for a sentence.
_TOLD = 200
#: "guest-ping" of the QEMU guest agent protocol answers an empty object.
_PING = '{"execute":"guest-ping"}'
_ANSWERED = re.compile(rb"<([^<>]+)>\s*\{\"return\":\s*\{\}\}")


class AllUpError(Exception):
    """Every guest is up: what keeps the connection may end."""


class Silent:
    """The controller, for what needs not be logged.

    Args:
        heard: whether it may still stop the work; not where that is already being stopped.
    """

    def __init__(self, io: AgentIO, *, heard: bool = False) -> None:
        self.emit, self.emit_raw, self.progress = io.emit, io.emit_raw, io.progress
        self.log, self.wait_for_go, self.take_data = io.log, io.wait_for_go, io.take_data
        self._check = io.check if heard else None

    def check(self) -> None:
        """Go on, unless the controller says otherwise."""
        if self._check is not None:
            self._check()

    def command(self, argv: Sequence[str], exit_code: int | None) -> None:
        """Say nothing."""


class Up:
    """When each of several guests came up.

    Args:
        guests: what each is known by here.
        seconds: that all may take.
    """

    def __init__(self, guests: Sequence[str], seconds: float) -> None:
        self.since: float | None = None
        self._resumed, self._limit = 0, seconds
        self._order = list(guests)
        self._up: dict[str, float] = {}

    def let_go(self, guests: int) -> None:
        """So many run by now."""
        if guests and self.since is None:
            self.since = time.monotonic()
        self._resumed = guests

    def look(self) -> None:
        """Call it often; raises AllUpError once all are up, HostError when that takes too long."""
        if len(self._up) == len(self._order):
            raise AllUpError
        if self.since is None:
            return
        late = len(self._order) - self._resumed
        if late and time.monotonic() - self.since > _LET_GO:
            raise HostError(f"libvirt did not start {late} of {len(self._order)} guests")
        if time.monotonic() - self.since > self._limit:
            late = len(self._order) - len(self._up)
            raise HostError(f"{late} of {len(self._order)} guests {self._missing()} within {self._limit:.0f} s")

    def seconds(self) -> list[float]:
        """How long each took."""
        begin = self.since if self.since is not None else 0.0
        return [self._up[guest] - begin for guest in self._order]

    def close(self) -> None:
        """Look no more."""

    def _missing(self) -> str:
        raise NotImplementedError


class Consoles(Up):
    """Looks at files that serial consoles write to, every few milliseconds, in a thread: the main one is at virsh.

    Args:
        guests: paths of their consoles.
        pattern: what they show once they are up.
    """

    def __init__(self, guests: Sequence[str], seconds: float, pattern: bytes) -> None:
        super().__init__(guests, seconds)
        self._pattern = pattern
        self._waiting = dict.fromkeys(guests, (0, b""))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _missing(self) -> str:
        shown = next(iter(self._waiting.values()))[1][-_TOLD:].decode("utf-8", "replace").strip()
        pattern = self._pattern.decode("utf-8", "replace")
        return f"did not show {pattern!r} on their serial console (last output of one of them: {shown!r})"

    def _watch(self) -> None:
        while not self._over.wait(_LOOK):
            for path in list(self._waiting):
                self._read(path)

    def _read(self, path: str) -> None:
        offset, rest = self._waiting[path]
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size < offset:
                    offset = 0  # virtlogd has begun a new file
                file.seek(offset)
                read = file.read(_CHUNK)
        except OSError:
            return
        seen = rest + read
        if self._pattern in seen:
            self._up[path] = time.monotonic()
            del self._waiting[path]
        elif read:
            self._waiting[path] = (offset + len(read), seen[-max(len(self._pattern), _TOLD) :])


class Agents(Up):
    """Asks the guests' agents twice a second; a guest is up once its agent has answered.

    Args:
        guests: names of the domains.
    """

    def __init__(self, guests: Sequence[str], seconds: float, io: AgentIO) -> None:
        super().__init__(guests, seconds)
        self._io = Silent(io, heard=True)
        self._asked, self._why = 0.0, "nobody was asked"

    def look(self) -> None:
        """As :meth:`Up.look`."""
        if self._resumed == len(self._order) and time.monotonic() - self._asked > _ASK:
            self._ask()
            self._asked = time.monotonic()
        super().look()

    def _ask(self) -> None:
        """One question to each that has not answered; those that are not there yet are passed over at once."""
        left = [name for name in self._order if name not in self._up]
        script = [f"echo <{name}>; qemu-agent-command {name} '{_PING}' --timeout 2" for name in left]
        said = bytearray()

        def on_output(chunk: bytes) -> None:
            said.extend(chunk)
            for match in _ANSWERED.finditer(said):
                self._up.setdefault(match[1].decode("ascii"), time.monotonic())

        asked = ["stdbuf", "-oL", "virsh", "-q", "-c", URI, "; ".join(script)]
        done = tools.run(asked, self._io, limits=None, on_output=on_output)
        if errors := done.stderr.decode("utf-8", "replace").split("\n"):
            self._why = next((line for line in reversed(errors) if line.strip()), self._why)[-_TOLD:]

    def _missing(self) -> str:
        return f"got no answer from their guest agent (last message of virsh about one of them: {self._why!r})"
