"""A controller that takes notes, for verbs that are called directly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from storage_admin.agent.protocol import CANCELLED, Request, StoppedError, b64, unb64


class RecordingIO:
    """An AgentIO that keeps every event.

    Args:
        on_check: called by each :meth:`check`; may raise.
    """

    def __init__(self, on_check: Callable[[], None] | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.checks = 0
        self._on_check = on_check

    def emit(self, kind: str, /, **fields: Any) -> None:
        self.events.append(json.loads(json.dumps({"event": kind, **fields})))

    def emit_raw(self, line: bytes) -> None:
        assert line.endswith(b"\n")
        self.events.append(json.loads(line))

    def progress(self, stage: str, done: int, total: int | None, message: str = "") -> None:
        self.emit("progress", stage=stage, done=done, total=total, message=message)

    def log(self, text: str, level: str = "info") -> None:
        self.emit("log", text=text, level=level)

    def command(self, argv: Sequence[str], exit_code: int | None) -> None:
        self.emit("command", argv=list(argv), exit_code=exit_code)

    def check(self) -> None:
        self.checks += 1
        if self._on_check is not None:
            self._on_check()

    def wait_for_go(self, generation: int, **made: int | str) -> None:
        raise AssertionError("this verb replaces nothing")

    def take_data(self) -> bytes:
        raise AssertionError("this verb takes no file")

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        (event,) = self.all(kind)
        return event

    def images(self) -> dict[bytes, dict[str, Any]]:
        """The images that were told, by the name of their file."""
        return {unb64(event["path_b64"]).rpartition(b"/")[2]: event for event in self.all("image")}


class GoIO(RecordingIO):
    """A controller that says ``go``."""

    def wait_for_go(self, generation: int, **made: int | str) -> None:
        """At once."""


def cancel() -> None:
    """What a check raises once the controller has cancelled the job."""
    raise StoppedError(CANCELLED, "cancelled")


def request(verb: str, **args: Any) -> Request:
    return Request(verb, "job1", 1, args)


def encoded(path: Path | bytes) -> str:
    return b64(path if isinstance(path, bytes) else bytes(path))
