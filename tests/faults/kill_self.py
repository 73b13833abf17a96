"""The real agent, which kills itself at the n-th step that touches the disk: ``python kill_self.py N before|after``.

With ``no-exchange`` behind that, as on NFS, whose renames take no flags; with ``journal``, only a line of the journal
is a step.

A step is a call that changes what a crash would leave behind. It says on standard error at which one it died.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from storage_admin.agent import main
from storage_admin.agent.host import space
from storage_admin.agent.swap import exchange

STEPS = ("open", "write", "fsync", "link", "rename", "unlink", "fchown", "fchmod", "setxattr")


def arm(at: int, when: str) -> None:
    """Wrap each step so that the ``at``-th one, counted over all of them, is the last."""
    count = itertools.count(1)

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if not counts(name, args) or among_claims(kwargs.get("dir_fd")):
                return call(*args, **kwargs)
            last = next(count) == at
            if last and when == "before":
                die(name, args)
            answer = call(*args, **kwargs)
            if last:
                die(name, args)
            return answer

        return step

    for name in STEPS:
        setattr(os, name, wrapped(name, getattr(os, name)))
    if "no-exchange" in sys.argv:
        for name in ("move", "exchange"):
            setattr(exchange, name, lambda *_: False)
        return
    exchange.move = wrapped("move", exchange.move)
    exchange.exchange = wrapped("exchange", exchange.exchange)


def counts(name: str, args: tuple[Any, ...]) -> bool:
    """Events to the controller and files that are only read are no steps."""
    if "journal" in sys.argv:
        return name == "write" and bytes(args[1]).startswith(b'{"step"')
    if name == "write":
        return int(args[0]) != sys.stdout.fileno()
    return name != "open" or bool(args[1] & os.O_CREAT)


def among_claims(folder: int | None) -> bool:
    """Claims on space are shared with whatever else runs now: how often they are cleared would move every step."""
    return folder is not None and os.path.realpath(f"/proc/self/fd/{folder}") == os.path.realpath(space.FOLDER)


def die(name: str, args: tuple[Any, ...]) -> None:
    """Leave no time for anything."""
    sys.stderr.write(f"killed at {name}{args[:2]!r}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    arm(int(sys.argv[1]), sys.argv[2])
    sys.exit(main.main())
