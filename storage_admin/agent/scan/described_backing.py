"""Files that a header may mean where it does not name a plain one: ``json:{…}``, ``file:name``, ``nbd://host/name``.

Nothing is opened by such a name. It is only asked whether it may mean an image that is about to lose its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_NESTED = 8


def names_in(name: str) -> set[str]:
    """The paths, or file names, that a description may mean; more than it does mean, never less.

    Args:
        name: as it stands in the header; display form or decoded.
    """
    return set(_names(name, _NESTED))


def _names(name: str, deeper: int) -> Iterator[str]:
    if not deeper:
        return
    if name.startswith("json:"):
        try:
            yield from _strings(json.loads(name[5:]), deeper - 1)
        except (ValueError, RecursionError):
            # qemu would not understand it either, or it does not travel as it stands there.
            yield from filter(None, re.split(r'["/:,{}]', name))
        return
    yield name
    while ":" in name:
        name = name.partition(":")[2]
        yield name


def _strings(value: Any, deeper: int) -> Iterator[str]:
    if isinstance(value, str):
        yield from _names(value, deeper)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one, deeper)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one, deeper)
