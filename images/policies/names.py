"""The names that a policy is for."""

import re
from fnmatch import translate


class Names:
    """Shell patterns, divided by white space; those with ``!`` before them leave names out."""

    def __init__(self, patterns: str) -> None:
        """Reads a policy's patterns."""
        given = patterns.split()
        self._wanted = _any_of([one for one in given if not one.startswith("!")])
        self._unwanted = _any_of([one[1:] for one in given if one.startswith("!")])

    def match(self, name: str) -> bool:
        """Whether the policy is for what has that name."""
        if self._unwanted is not None and self._unwanted.match(name):
            return False
        return self._wanted is None or bool(self._wanted.match(name))


def _any_of(patterns: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(translate(one) for one in patterns)) if patterns else None
