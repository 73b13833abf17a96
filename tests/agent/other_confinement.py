"""The real agent, whose tools are confined in another way than this host can.

The argument says how: ``namespaces`` or ``nothing``, as on a host that has no better; ``open``, for tools that are
scripts and need other programs.
"""

import sys
from collections.abc import Sequence

from storage_admin.agent import main
from storage_admin.agent.programs import confined, tools
from storage_admin.agent.programs.confined import Confinement, Files


class Open(Confinement):
    """Does nothing in the tool's process."""

    def __init__(self, files: Files, programs: Sequence[str]) -> None:
        pass

    def enter(self) -> None:
        pass

    def close(self) -> None:
        pass


if __name__ == "__main__":
    how = sys.argv.pop(1)
    if how == "open":
        vars(tools)["Confinement"] = Open
    else:
        vars(confined)["means"] = lambda: confined.NAMESPACES if how == "namespaces" else None
    sys.exit(main.main())
