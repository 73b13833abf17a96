"""What every program that asks libvirt shares. Such a program is a process of its own, because a libvirtd that hangs
would hang the thread that asks it, and a thread cannot be given up.

It is started as ``python -m storage_admin.hosts.libvirt.NAME URI ...`` (``process.py``), answers with JSON
on standard output, and dies with the thread that started it.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import libvirt

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


def answer(work: Callable[[], dict[str, Any]]) -> None:
    """Says what ``work`` returns, or what libvirt said against it; ``gone`` where the line to it broke."""
    prepare()
    try:
        say(work())
    except libvirt.libvirtError as error:
        say({"error": str(error), "gone": error.get_error_domain() == libvirt.VIR_FROM_RPC})
