"""The real agent, which lets a stranger act at the n-th step after ``go``: ``attacked.py N TRIGGER [without …]``.

A step is a call that looks at who uses a file, or changes what is on the disk. Before it, the agent writes a byte into
TRIGGER, a pipe, and gives whoever waits there a moment. Without waiting for him: he may wait for the agent himself.
"""

import ctypes
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from storage_admin.agent import lifeline, main
from storage_admin.agent.host import locking, open_gate
from storage_admin.agent.swap import exchange, fence

#: Seconds that the stranger gets: he needs well under a millisecond once he runs.
HEAD_START = 0.02


def arm(at: int, trigger: str, *, at_once: bool) -> None:
    """Wrap each step so that the ``at``-th one after ``go`` is the one; ``at_once`` for verbs that wait for none."""
    pipe = os.open(trigger, os.O_RDWR)  # which does not wait for a stranger who never comes
    count = itertools.count(1)
    went = [at_once] * at_once

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if went and next(count) == at:
                os.write(pipe, b"x")
                time.sleep(HEAD_START)
                sys.stderr.write(f"attacked at {call.__name__}{args[:3]!r}\n")
            return call(*args, **kwargs)

        return step

    wait = lifeline.Lifeline.wait_for_go

    def wait_for_go(*args: Any, **kwargs: Any) -> None:
        wait(*args, **kwargs)
        went.append(True)

    lifeline.Lifeline.wait_for_go = wait_for_go  # type: ignore[method-assign]
    for module, names in (
        (os, ("link", "rename", "unlink", "fsync", "fchmod")),
        (locking, ("opener", "user", "locked_bytes")),
        (exchange, ("exchange", "move")),
    ):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, wrapped(getattr(module, name)))


def without_doors() -> None:
    """As on a host whose kernel lets nobody keep a door."""

    def fanotify_init(*_: Any) -> int:
        ctypes.set_errno(1)
        return -1

    open_gate._LIBC = type("NoFanotify", (), {"fanotify_init": staticmethod(fanotify_init)})()


def without_exchange() -> None:
    """As on NFS, whose renames take no flags."""
    for name in ("move", "exchange"):
        setattr(exchange, name, lambda *_: False)


if __name__ == "__main__":
    if "no-door" in sys.argv[3:]:
        without_doors()
    if "proxmox" in sys.argv[3:]:
        fence.PVE_FOLDER = "/etc"
    if "no-exchange" in sys.argv[3:]:
        without_exchange()
    arm(int(sys.argv[1]), sys.argv[2], at_once="at-once" in sys.argv[3:])
    sys.exit(main.main())
