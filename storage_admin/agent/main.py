"""One request, from the greeting to the answer.

Looks after the storages of a job while that works, and tells the controller which of them do not answer.

Whoever touches a storage whose server is away is held up in the kernel, and cannot even say so: the thread that works,
its tools, and whoever starts or ends one. So another process looks, and a thread that touches nothing tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from storage_admin.agent import protocol
from storage_admin.agent.folders.pools import expect, is_absolute, is_job
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.host.special_mounts import left_alone, looking
from storage_admin.agent.lifeline import AgentIO, Lifeline
from storage_admin.agent.protocol import HostError, RefusedError, Request, StoppedError, b64, refusal_of_errno, unb64

#: Seconds between two signs of life, and after which a storage without one is called silent: with what the controller
#: takes to notice, a job says so within 30 s. A server that is up and busy answers sooner.
BEAT = 3.0
SILENCE = 15.0


@contextlib.contextmanager
def sentry(args: dict[str, Any], io: AgentIO) -> Iterator[None]:
    """Tells every few seconds meanwhile, by ``storage`` events, which pools are silent.

    It tells nothing where there is no filesystem at all that could make one wait, nor of pools that are left alone.

    Args:
        args: the request's.
        io: the controller.
    """
    mounts = Mounts.of_this_machine()
    places = storages(args, mounts) if mounts.waits else {}
    if not places:
        yield
        return
    # Where a tool is started by vfork, all threads stand still while the child closes files of a silent server.
    setattr(subprocess, "_USE_VFORK", False)  # noqa: B010 (for type checkers it is not there)
    process = looking(list(places), BEAT)
    threading.Thread(target=_watch, args=(process, list(places.values()), io), name="sentry", daemon=True).start()
    try:
        yield
    finally:
        process.kill()  # one that the kernel does not let go ends when the server is back


def _watch(process: subprocess.Popen[bytes], pools: Sequence[bytes], io: AgentIO) -> None:
    if process.stdout is None:
        raise TypeError("the pipe is missing")
    now = told = time.monotonic()
    heard, pending = dict.fromkeys(range(len(pools)), now), b""
    with process.stdout as answers:
        while True:
            if select.select([answers], [], [], BEAT)[0]:
                chunk = os.read(answers.fileno(), 1 << 16)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                heard.update(dict.fromkeys(map(int, lines), time.monotonic()))
            now = time.monotonic()
            if now - told < BEAT:
                continue
            told = now
            silent = {pool for place, pool in enumerate(pools) if now - heard[place] > SILENCE} - left_alone
            try:
                io.emit(protocol.STORAGE, silent=[b64(pool) for pool in sorted(silent)])
            except StoppedError:
                return  # nobody listens any more


def storages(args: dict[str, Any], mounts: Mounts) -> dict[bytes, bytes]:
    """The folders that a request is about, whatever its verb: the path of the pool of each, by its own.

    They are the pools, and of each file its folder where that is on another filesystem than its pool.
    """
    found: dict[bytes, bytes] = {}
    unread: list[Any] = [args]
    while unread:
        one = unread.pop()
        if isinstance(one, list):
            unread += one
        elif isinstance(one, dict):
            unread += one.values()
            pool, path = _path(one.get("pool_path_b64")), _path(one.get("path_b64"))
            if pool:
                found[pool] = pool
                folder = os.path.dirname(path)
                if path and mounts.of_path(folder) != mounts.of_path(pool):
                    found.setdefault(folder, pool)
            elif path:
                found[path] = path
    return found


def _path(text: Any) -> bytes:
    """What may be a path; empty where it is none, which the verb then refuses."""
    try:
        path = unb64(text) if isinstance(text, str) else b""
    except ValueError:
        return b""
    return path if is_absolute(path) else b""


Verb = Callable[[Request, AgentIO], dict[str, Any]]

#: Verbs that are the ``run`` of a module of their name.
_OWN_MODULES = (
    "scan", "space", "folder", "analyze", "sample", "reclaim", "undo", "create", "send", "inside",
    "files", "attach", "receive", "recover", "users", "beneath", "pve", "benchmark", "needed", "reclaim_volume",
    "promote",
)  # fmt: skip
#: Those that are a function of that name in ``rewrites``.
_REWRITES = (
    "bitmaps", "check", "commit", "convert", "export", "flatten", "grow", "keys", "relink", "shrink", "sparsify",
    "to_device",
)  # fmt: skip
#: Each verb's module and function. Only the one that is asked for is loaded: all of them took most of the agent's
#: start, which a scan of a host where nothing changed waits for.
VERBS = {
    **{verb: (verb, "run") for verb in _OWN_MODULES},
    **{verb: ("rewrites", verb) for verb in _REWRITES},
    "look": ("scan", "look"),
    "exclusive": ("sample", "exclusive"),
    "discard_undo": ("undo", "discard"),
    "unpack": ("create", "unpack"),
    "from_device": ("create", "from_device"),
    "detach": ("attach", "detach"),
    "attached": ("attach", "attached"),
    "upload": ("receive", "finish"),
    "forget_upload": ("receive", "forget"),
    "occupied": ("beneath", "occupied"),
    "set_aside": ("aside", "set_aside"),
    "restore_aside": ("aside", "restore"),
    "delete_aside": ("aside", "delete"),
    "drop": ("aside", "drop"),
    "set_volume_aside": ("aside_volume", "set_aside"),
    "restore_volume": ("aside_volume", "restore"),
    "delete_volume": ("aside_volume", "delete"),
    "analyze_volume": ("reclaim_volume", "analyze"),
    "sparsify_rbd": ("rbd_image", "sparsify"),
    "flatten_rbd": ("rbd_image", "flatten"),
    "file_to_volume": ("move", "file_to_volume"),
    "volume_to_volume": ("move", "volume_to_volume"),
    "volume_to_file": ("move", "volume_to_file"),
}


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
    if not is_job(request.job):
        raise RefusedError(protocol.INVALID, "a job's id is 1 to 40 letters and digits")
    expect(request.roots)
    with sentry(request.args, lifeline):
        try:
            return load(request.verb)(request, lifeline)
        except OSError as error:  # what no verb has seen coming, as an export that is gone
            raise refusal_of_errno(error.errno) or error from error


def load(verb: str) -> Verb:
    """The function that does a verb of :data:`VERBS`."""
    module, function = VERBS[verb]
    found: Verb = getattr(importlib.import_module(f"storage_admin.agent.verbs.{module}"), function)
    return found


def own_hash() -> str:
    """The content hash of the zipapp that runs, as in its name; ``source`` where it runs from a folder."""
    if sys.argv[0].endswith(".pyz"):
        with contextlib.suppress(OSError), open(sys.argv[0], "rb") as program:
            return hashlib.sha256(program.read()).hexdigest()[:32]
    return "source"
