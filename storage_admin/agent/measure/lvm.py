"""LVM2's own text about a volume group, as each of its physical volumes holds it (LVM2, ``lib/format_text``)."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.measure.partitions import Read

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|#[^\n]*|[{}\[\],=]|[^\s{}\[\],="#]+')
_MOST_TEXT, _MOST_SEGMENTS = 1 << 20, 10_000
_MAGIC = b"\x20LVM2\x20x[5A%r0N*>"


@dataclass(frozen=True)
class Volume:
    """A logical volume; ``start`` is where its bytes begin on the disk, ``None`` where they are not one piece of it."""

    name: str
    size: int
    start: int | None


@dataclass(frozen=True)
class Group:
    """A volume group as one of its physical volumes tells it."""

    name: str
    volumes: tuple[Volume, ...]


def group(read: Read, at: int) -> Group | None:
    """The volume group of the physical volume that begins at that byte; ``None`` where nothing can be made of it."""
    try:
        found, own = _text(read, at)
        return _group(found, own, at)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error, StopIteration, MemoryError):
        return None


def _text(read: Read, at: int) -> tuple[str, str]:
    """The newest text, and the id of this physical volume."""
    head = read(at, 4096)
    label = next(head[sector : sector + 512] for sector in range(0, 2048, 512) if head[sector:].startswith(b"LABELONE"))
    (offset,) = struct.unpack_from("<I", label, 20)
    own = label[offset : offset + 32].decode("ascii")
    place = offset + 40
    areas: list[list[tuple[int, int]]] = [[], []]
    for kind in areas:  # of data, then of metadata; each list ends with zeros
        while True:
            start, size = struct.unpack_from("<QQ", label, place)
            place += 16
            if not start:
                break
            kind.append((start, size))
    start, size = areas[1][0]
    header = read(at + start, 512)
    if header[4:20] != _MAGIC:
        raise ValueError("no metadata")
    text_at, length, _ = struct.unpack_from("<QQI", header, 40)
    if not 512 <= text_at < size or not 0 < length <= _MOST_TEXT:
        raise ValueError("no text")
    first = min(length, size - text_at)
    whole = read(at + start + text_at, first) + (read(at + start + 512, length - first) if length > first else b"")
    return whole.split(b"\0", 1)[0].decode("ascii"), own


def _group(text: str, own: str, at: int) -> Group | None:
    sections = _parsed(text)
    name, told = next((key, value) for key, value in sections.items() if isinstance(value, dict))
    extent = _number(told["extent_size"]) * 512
    own = "-".join((own[:6], own[6:10], own[10:14], own[14:18], own[18:22], own[22:26], own[26:]))
    here = next(key for key, value in told["physical_volumes"].items() if value["id"] == own)
    begins = at + _number(told["physical_volumes"][here]["pe_start"]) * 512
    found = []
    for volume, value in told.get("logical_volumes", {}).items():
        count = _number(value["segment_count"], _MOST_SEGMENTS)
        segments = [value[f"segment{number + 1}"] for number in range(count)]
        size = sum(_number(one["extent_count"]) for one in segments) * extent
        found.append(Volume(volume, size, _start(segments, here, begins, extent)))
    return Group(name, tuple(found))


def _number(value: Any, most: int = 1 << 40) -> int:
    """A number as LVM writes it; raises ValueError for anything else, which a guest may have written there."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("no number")
    return value


def _start(segments: list[dict[str, Any]], here: str, begins: int, extent: int) -> int | None:
    """Where a volume begins that is in one piece on this disk, even if that was allocated bit by bit."""
    next_extent: int | None = None
    first: int | None = None
    for one in segments:
        if one["type"] != "striped" or one.get("stripe_count") != 1 or one["stripes"][0] != here:
            return None
        place = _number(one["stripes"][1])
        if next_extent is not None and place != next_extent:
            return None
        first, next_extent = place if first is None else first, place + one["extent_count"]
    return None if first is None else begins + first * extent


def _parsed(text: str) -> dict[str, Any]:
    tokens = [token for token in _TOKEN.findall(text) if not token.startswith("#")]
    found, rest = _section(tokens, 0, 0)
    if rest != len(tokens):
        raise ValueError("a section is not closed")
    return found


def _section(tokens: list[str], at: int, depth: int) -> tuple[dict[str, Any], int]:
    if depth > 8:
        raise ValueError("too deep")
    found: dict[str, Any] = {}
    while at < len(tokens) and tokens[at] != "}":
        name, sign = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else ""
        if sign == "{":
            found[name], at = _section(tokens, at + 2, depth + 1)
            at += 1
        elif sign == "=" and at + 2 < len(tokens):
            found[name], at = _value(tokens, at + 2)
        else:
            raise ValueError("neither a section nor a value")
    return found, at


def _value(tokens: list[str], at: int) -> tuple[Any, int]:
    if tokens[at] != "[":
        return _plain(tokens[at]), at + 1
    items, at = [], at + 1
    while tokens[at] != "]":
        if tokens[at] != ",":
            items.append(_plain(tokens[at]))
        at += 1
    return items, at + 1


def _plain(token: str) -> int | str:
    return token[1:-1] if token.startswith('"') else int(token) if token.lstrip("-").isdigit() else token
