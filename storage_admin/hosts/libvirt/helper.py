"""What every program that asks libvirt shares. Such a program is a process of its own, because a libvirtd that hangs
would hang the thread that asks it, and a thread cannot be given up.

It is started as ``python -m storage_admin.hosts.libvirt.NAME URI`` (``process.py``), reads its request as JSON from
standard input where it takes one, answers with JSON on standard output, and dies with the thread that started it.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import libvirt

from storage_admin.hosts.libvirt.disks import ContradictedError

_PR_SET_PDEATHSIG = 1


def prepare() -> None:
    """Call it first: nothing but answers is printed, and a worker that is killed leaves nothing behind."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    libvirt.registerErrorHandler(lambda *_: None, None)  # its default prints to standard error


def say(answer: dict[str, Any]) -> None:
    """One document, as a line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def answer(work: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
    """Says what ``work`` returns for a connection and a request, or what is against it: ``contradiction`` where the
    domain is not what the request takes it for, else libvirt's ``error``; ``gone`` where the line to it broke.
    """
    _say_answer(lambda: work(libvirt.open(sys.argv[1]), json.load(sys.stdin)))


def tell(work: Callable[[Any], dict[str, Any]]) -> None:
    """The same of a connection that only reads, without a request."""
    _say_answer(lambda: work(libvirt.openReadOnly(sys.argv[1])))


def refuse_late(request: dict[str, Any]) -> None:
    """Raises ContradictedError after ``until`` (seconds since the epoch): whoever asked does not wait any more."""
    if time.time() > request["until"]:
        raise ContradictedError("libvirt took too long to respond")


def runs(domain: Any) -> bool:
    """Whether a domain runs; one that is gone since it was listed does not."""
    try:
        return bool(domain.isActive())
    except libvirt.libvirtError:
        return False


def _say_answer(work: Callable[[], dict[str, Any]]) -> None:
    prepare()
    try:
        say(work())
    except ContradictedError as error:
        say({"contradiction": str(error)})
    except libvirt.libvirtError as error:
        say({"error": str(error), "gone": error.get_error_domain() == libvirt.VIR_FROM_RPC})
