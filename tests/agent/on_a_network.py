"""The real agent as if its files were on a network, and on each of two machines (``here``, ``there``) one of them ran.

Nobody holds up who opens a file; the one here sees no processes of others, the one there none of these agents.
"""

import sys
from pathlib import Path

from storage_admin.agent import main
from storage_admin.agent.host import locking
from storage_admin.agent.host.open_gate import Doors
from storage_admin.agent.swap import moment


class Open(Doors):
    """None are shut."""

    def __init__(self, *_: int | None) -> None:
        self._going = self._coming = None


def is_one(pid: str) -> bool:
    """Whether a process is such an agent."""
    return __file__.rpartition("/")[2].partition(".")[0] in Path(f"/proc/{pid}/cmdline").read_text()


if __name__ == "__main__":
    if sys.argv.pop(1) == "here":
        vars(moment)["Doors"] = Open
        vars(locking)["_process"] = lambda files, unseen: None
    else:
        vars(locking)["is_fellow"] = is_one
        vars(locking)["only_reads"] = lambda *_: True
    sys.exit(main.main())
