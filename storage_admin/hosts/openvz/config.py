r"""A container's configuration (``<ctid>.conf``): lines ``KEY="value"``, read as vzctl reads them. Bytes in, bytes out.

vzctl 4.11 (``parse_line``, ``parse_ioprio``, ``vps_parse_config``): a backslash is dropped and what follows it kept;
blanks before a key and at a line's end do not count; ``#`` begins a comment only at a line's beginning; a value in
quotes ends at the line's last quote; an empty one counts as 0; of several lines the last one counts, but one that is no
number is passed over, and a number outside 0 to 7 takes back what stood before it.
"""

import re
from dataclasses import dataclass

from storage_admin.hosts.names import display

PRIORITY = b"IOPRIO"
LOWEST, HIGHEST = 0, 7

_BLANKS = b" \t\n\r\v\f"
#: What ``strtol(3)`` takes whole.
_NUMBER = re.compile(rb"[ \t\n\r\v\f]*([+-]?)0*([0-9]*)")
_LARGEST_INT = 2**31 - 1
#: A line whose value can be changed without touching anything else of it.
_QUOTED = re.compile(rb'(\s*IOPRIO=")[^"\\\0]*("[^"\\\0]*)')
_BARE = re.compile(rb"(\s*IOPRIO=)[^\"'\\\0\s]*(\s*)")


@dataclass(frozen=True)
class Recorded:
    """What a configuration says of the I/O priority.

    Args:
        lines: each line that sets it, in order, control characters shown; more than one is a mistake that works.
        priority: what vzctl makes of them; ``None`` where it is not set.
    """

    lines: tuple[str, ...]
    priority: int | None

    @property
    def words(self) -> str:
        """For a sentence."""
        return "not set" if self.priority is None else str(self.priority)


def recorded(content: bytes) -> Recorded:
    """What a configuration says of the I/O priority."""
    lines = tuple(display(line.strip(_BLANKS)) for line in _lines(content) if _key(line) == PRIORITY)
    return Recorded(lines, _priority(content))


def value(content: bytes, key: bytes) -> bytes | None:
    """The last value of a key; ``None`` where no line sets it."""
    values = [found for line in _read(content) if _key(line) == key and (found := _value(line)) is not None]
    return values[-1] if values else None


def without_priority(content: bytes) -> list[bytes]:
    """All lines but those that set the I/O priority, without their ends."""
    return [line.removesuffix(b"\n") for line in _lines(content) if _key(line) != PRIORITY]


def with_priority(content: bytes, priority: int) -> bytes:
    """The configuration with another I/O priority.

    Every line that sets it says the new value afterwards, so that readers of the first one and of the last one agree;
    where none does, one is added at the end. Quotes and all other bytes stay.

    Args:
        priority: 0 to 7.
    """
    lines = _lines(content)
    ours = [_key(line) == PRIORITY for line in lines]
    new = b"".join(_rewritten(line, priority) if mine else line for line, mine in zip(lines, ours, strict=True))
    if any(ours):
        return new if new.endswith(b"\n") or not ours[-1] else new + b"\n"
    end = b"\n" if content and not content.endswith(b"\n") else b""
    return content + end + b'%s="%d"\n' % (PRIORITY, priority)


def _lines(content: bytes) -> list[bytes]:
    """With their ends."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def _read(content: bytes) -> list[bytes]:
    """As vzctl's buffer gives them."""
    return _lines(content) if b"\n" in content else [content[:-1], content[-1:]]


def _plain(line: bytes) -> bytes:
    """A line after what C and vzctl's backslashes take away."""
    text = re.sub(rb"\\(.?)", rb"\1", line.partition(b"\0")[0], flags=re.DOTALL)
    return text.lstrip(_BLANKS).rstrip(_BLANKS)


def _key(line: bytes) -> bytes | None:
    text = _plain(line)
    return None if text.startswith(b"#") or b"=" not in text else text.partition(b"=")[0]


def _value(line: bytes) -> bytes | None:
    text = _plain(line).partition(b"=")[2]
    if not text.startswith(b'"'):
        return text
    inner, quote, _ = text[1:].rpartition(b'"')
    return inner if quote else None


def _priority(content: bytes) -> int | None:
    found: int | None = None
    for line in _read(content):
        text = _value(line) if _key(line) == PRIORITY else None
        number = None if text is None else _number(text)
        if number is not None:
            found = number if LOWEST <= number <= HIGHEST else None
    return found


def _number(text: bytes) -> int | None:
    if not text:
        return 0
    match = _NUMBER.fullmatch(text)
    if match is None or not text[-1:].isdigit() or len(match[2]) > 10:
        return None
    number = int(match[1] + (match[2] or b"0"))
    return number if -_LARGEST_INT - 1 <= number <= _LARGEST_INT else None


def _rewritten(line: bytes, priority: int) -> bytes:
    digit = b"%d" % priority
    for form in (_QUOTED, _BARE):
        match = form.fullmatch(line)
        if match is not None:
            return match[1] + digit + match[2]
    before = line[: len(line) - len(line.lstrip(_BLANKS))]
    after = line[len(line.rstrip(_BLANKS)) :]
    return before + PRIORITY + b'="' + digit + b'"' + after
