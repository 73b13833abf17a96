"""Which parser reads which tool."""

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _

from benchmarks.parsers import bonnie, dd, fio
from benchmarks.parsers.readings import Reading, UnreadableError


def read(tool: str, text: str, setting: Mapping[str, Any]) -> list[Reading]:
    """A tool's output as figures.

    Args:
        setting: of the step: dd's ``mode``, fio's ``rw``.

    Raises:
        UnreadableError: it is not what that tool prints.
    """
    match tool:
        case "dd":
            return dd.parse(text, "read" if setting.get("mode") == "read" else "write")
        case "fio":
            return fio.parse(text, str(setting.get("rw", "")))
        case "bonnie++":
            return [reading for run in bonnie.parse(text) for reading in run.readings]
        case _:
            raise UnreadableError(_("The output of the tool {tool!r} is not supported.").format(tool=tool[:40]))
