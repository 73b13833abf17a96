"""The agent's archive at ARCHIVE, which kills itself in the instant in which no file has the image's name.

``python kill_nameless.py ARCHIVE``: where a rename takes no flags, between the step that takes the name away from the
original and the one that gives it to the new file. With ``back`` behind that, when it is about to give it back.
"""

import os
import signal
import sys
from typing import Any

sys.path.insert(0, sys.argv[1])

from storage_admin.agent import main
from storage_admin.agent.swap import renames


def die(*_: Any) -> None:
    """Leave no time for anything."""
    os.kill(os.getpid(), signal.SIGKILL)


def taken(*_: Any) -> None:
    """As if somebody had made a file of that name just then."""
    raise FileExistsError


if "back" in sys.argv:
    setattr(renames, "link", taken)  # noqa: B010 (for type checkers it is another function)
setattr(renames, "give" if "back" in sys.argv else "link", die)
sys.exit(main.main())
