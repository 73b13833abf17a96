"""What may stand on a command line: a container's id and a priority."""

import re

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import INVALID, RefusedError

#: Numbers up to OpenVZ 6; OpenVZ 7 has UUIDs as well. 0 is the host itself.
_CTID = re.compile(r"[1-9][0-9]{0,9}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_PRIORITY = re.compile(r"[0-7]")


def is_ctid(text: str) -> bool:
    """Whether a container can be called that."""
    return _CTID.fullmatch(text) is not None


def checked_ctid(ctid: str) -> str:
    """The id of a container.

    Raises:
        RefusedError: ``invalid``.
    """
    if not is_ctid(ctid):
        raise RefusedError(
            INVALID, _("{ctid!a} is not a container ID. Enter a number or a UUID.").format(ctid=ctid[:60])
        )
    return ctid


def checked_priority(priority: int | str) -> int:
    """A priority, 0 (least of the disks' time) to 7.

    vzctl itself takes nothing for 0.

    Raises:
        RefusedError: ``invalid``.
    """
    if not _PRIORITY.fullmatch(str(priority)):
        sentence = _("{priority!a} is not an I/O priority. Enter a whole number from 0 to 7.")
        raise RefusedError(INVALID, sentence.format(priority=str(priority)[:60]))
    return int(priority)
