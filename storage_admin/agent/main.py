"""One request, from the greeting to the answer."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import signal
import sys
from typing import Any, Callable

from storage_admin.agent import protocol
from storage_admin.agent.folders import roots
from storage_admin.agent.lifeline import AgentIO, Lifeline
from storage_admin.agent.protocol import HostError, RefusedError, Request, StoppedError
from storage_admin.agent.sentry import Sentry

Verb = Callable[[Request, AgentIO], dict[str, Any]]

#: Each verb's module and function. Only the one that is asked for is loaded: all of them took most of the agent's
#: start, which a scan of a host where nothing changed waits for.
VERBS = {
    "scan": ("scan", "run"),
    "look": ("scan", "look"),
    "folder": ("folder", "run"),
    "analyze": ("analyze", "run"),
    "sample": ("sample", "run"),
    "reclaim": ("reclaim", "run"),
    "undo": ("undo", "run"),
    "discard_undo": ("undo", "discard"),
    "flatten": ("flatten", "run"),
    "check": ("check", "run"),
    "convert": ("convert", "run"),
    "recover": ("recover", "run"),
    "users": ("users", "run"),
    "pve": ("pve", "run"),
    "benchmark": ("benchmark", "run"),
    "set_aside": ("aside", "set_aside"),
    "restore_aside": ("aside", "restore"),
    "delete_aside": ("aside", "delete"),
}

_JOB = re.compile(r"[0-9a-zA-Z]{1,40}")


def main() -> int:
    """Greet, read one request, do it, answer; or be the relay to libvirt's read-only socket, where that is asked for.

    Returns:
        0 whenever an answer was given and taken, whatever it says; 1 where nobody took it.
    """
    if sys.argv[1:] == [protocol.RELAY]:
        return int(importlib.import_module("storage_admin.agent.relay").main(own_hash()))
    # Somebody who opens an image while a lease on it is asked for makes the kernel say so; that must not end the agent.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    lifeline = Lifeline(sys.stdin.fileno(), sys.stdout.fileno())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: lifeline.stop(protocol.INTERRUPTED, f"the agent got signal {got}"))
    try:
        lifeline.emit(
            protocol.HELLO,
            protocol=protocol.VERSION,
            hash=own_hash(),
            uid=os.geteuid(),
            python=".".join(map(str, sys.version_info[:3])),
        )
        result = answer(lifeline)
    except StoppedError as stopped:
        taken = lifeline.farewell(protocol.ERROR, code=stopped.code, detail=stopped.detail)
    except (RefusedError, HostError) as error:
        taken = lifeline.farewell(protocol.ERROR, code=error.code, detail=error.detail)
    except Exception as bug:  # noqa: BLE001 - whatever else it is, it is a bug, and it is shown as one
        import traceback  # noqa: PLC0415 (seldom needed, and slow to load)

        lifeline.farewell(protocol.LOG, text=traceback.format_exc(), level="error")
        taken = lifeline.farewell(protocol.ERROR, code=protocol.BUG, detail=f"{type(bug).__name__}: {bug}")
    else:
        taken = lifeline.farewell(protocol.RESULT, data=result)
    return 0 if taken else 1


def answer(lifeline: Lifeline) -> dict[str, Any]:
    """Read the request and run its verb.

    Returns:
        The verb's result.
    """
    try:
        request = lifeline.read_request()
    except ValueError as error:
        raise RefusedError(protocol.INVALID, str(error)) from error
    if request.verb not in VERBS:
        raise RefusedError(protocol.INVALID, f"this agent knows no verb {request.verb!r}")
    if not _JOB.fullmatch(request.job):
        raise RefusedError(protocol.INVALID, "a job's id is 1 to 40 letters and digits")
    roots.expect(request.roots)
    with Sentry(request.args, lifeline):
        return load(request.verb)(request, lifeline)


def load(verb: str) -> Verb:
    """The function that does a verb of :data:`VERBS`."""
    module, function = VERBS[verb]
    found: Verb = getattr(importlib.import_module(f"storage_admin.agent.verbs.{module}"), function)
    return found


def own_hash() -> str:
    """The content hash of the zipapp that runs, as in its name; ``source`` where it runs from a folder."""
    try:
        with open(sys.argv[0], "rb") as program:
            content = program.read()
    except OSError:
        return "source"
    if not sys.argv[0].endswith(".pyz"):
        return "source"
    return hashlib.sha256(content).hexdigest()[:32]
