"""The states of a host's domains as they change, without asking again and again: see ``events.py``."""

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Generator, Iterator
from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError
from storage_admin.hosts import ssh
from storage_admin.hosts.libvirt.process import command
from storage_admin.hosts.libvirt.uri import reached
from storage_admin.hosts.models import Host

#: Seconds until the first line.
FIRST_LINE = 20.0
CHUNK = 1 << 16


def changes(host: Host, tick: float = 0.5) -> Generator[dict[str, str] | None]:
    """The states of all domains by uid, whenever one changes; ``None`` every ``tick`` seconds in between.

    Close it (``contextlib.closing``): the connection and its process last as long as it does.

    Raises:
        HostError: there is no libvirt, it does not answer, or the connection has ended.
    """
    with reached(host) as uri, _started(uri) as process:
        for line in _lines(process, tick):
            yield None if line is None else _states(line)
    raise HostError(_("libvirt closed the connection."))


def _states(line: bytes) -> dict[str, str]:
    told: dict[str, Any] = json.loads(line)
    if "error" in told:
        raise HostError(_("libvirt does not answer: {error}").format(error=told["error"]))
    return {str(uid): str(state) for uid, state in told["states"].items()}


def _lines(process: "subprocess.Popen[bytes]", tick: float) -> Iterator[bytes | None]:
    if process.stdout is None:
        raise TypeError("the libvirt watcher has no pipe for its output")
    descriptor, rest, deadline = process.stdout.fileno(), b"", time.monotonic() + FIRST_LINE
    told = False
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(tick):
                if not told and time.monotonic() > deadline:
                    raise HostError(_("libvirt did not answer within {seconds:.0f} s.").format(seconds=FIRST_LINE))
                yield None
                continue
            chunk = os.read(descriptor, CHUNK)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            told = told or bool(lines)
            yield from lines


@contextlib.contextmanager
def _started(uri: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        command(uri, "events"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        cwd=settings.BASE_DIR,
    )  # fmt: skip
    try:
        yield process
    finally:
        ssh.end(process)
