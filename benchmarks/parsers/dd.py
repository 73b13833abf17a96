"""What GNU dd says when it ends, in the locale C: ``N bytes (…) copied, T s, R``.

The rate is worked out from bytes and seconds: dd rounds its own to two digits.
"""

import re

from django.utils.translation import gettext as _

from benchmarks.parsers.readings import TOO_QUICK, Reading, UnreadableError, quoted

_COPIED = re.compile(
    r"^(\d{1,19}) bytes? (?:\([^()\n]{1,60}\) )?copied, (\d{1,12}(?:\.\d{1,12})?(?:e[+-]\d{1,3})?) s, ",
    re.ASCII | re.MULTILINE,
)


def parse(text: str, mode: str) -> list[Reading]:
    """Rate and time of one run.

    Args:
        mode: ``write`` or ``read``, which names the metrics.

    Raises:
        UnreadableError: the line is not there, or nothing was copied.
    """
    found = _COPIED.findall(text)
    if not found:
        raise UnreadableError(_("dd did not report how much it copied: {text}.").format(text=quoted(text)))
    copied, seconds = int(found[-1][0]), float(found[-1][1])
    if not copied:
        raise UnreadableError(_("dd copied nothing."))
    if not seconds:
        return [Reading(f"{mode}_rate", "B/s", None, TOO_QUICK)]
    return [Reading(f"{mode}_rate", "B/s", copied / seconds), Reading(f"{mode}_seconds", "s", seconds)]
