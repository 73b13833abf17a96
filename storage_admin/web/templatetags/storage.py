"""How numbers, times and states are shown: the same on every page."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from storage_admin.words import (
    UNKNOWN,
    between,
    clock,
    days,
    exact,
    percent,
    plural,
    said,
    seconds,
    seconds_span,
    size,
    span,
    words,
)

register = template.Library()

for shown in (size, span, exact, percent, seconds, seconds_span, days, between, clock, plural, words, said):
    register.filter(shown)


@register.simple_tag
def bytes_of(value: int | None, unknown: str = UNKNOWN) -> SafeString:
    """A size with its exact bytes in the title; ``unknown`` is the word where there is none."""
    if value is None:
        return format_html('<span class="quiet">{}</span>', unknown)
    return format_html('<span title="{} bytes">{}</span>', exact(value), size(value))


@register.simple_tag
def exact_bytes(value: int | None) -> SafeString:
    """A size with its exact bytes beside it."""
    beside = "" if value is None else format_html(' <span class="sub">{}</span>', exact(value))
    return format_html("{}{}", bytes_of(value), beside)


@register.simple_tag
def ago(moment: datetime | None, never: str = "never") -> SafeString:
    """How long ago, or in how long, with the exact time in the title."""
    if moment is None:
        return format_html('<span class="quiet">{}</span>', never)
    passed = (timezone.now() - moment).total_seconds()
    words = (
        "just now" if 0 <= passed < 10 else f"{_coarse(passed)} ago" if passed >= 0 else f"in {_coarse(-passed, round)}"
    )
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', moment.isoformat(), clock(moment, "%Y-%m-%d %H:%M:%S"), words
    )


@register.filter
def passed(moment: datetime | None) -> bool:
    """Whether a time is over; one that is not known is not."""
    return moment is not None and moment <= timezone.now()


def _coarse(passed: float, whole: Callable[[float], int] = int) -> str:
    """Ages are cut off, and times to come rounded: what was just given 90 days has 90, not 89."""
    for length, word in ((86400, "day"), (3600, "hour"), (60, "min")):
        if passed >= length * (2 if word == "day" else 1):
            count = whole(passed / length)
            return f"{count} {word}" if word == "min" or count == 1 else f"{count} {word}s"
    return f"{whole(passed)} s"


@register.simple_tag
def at(moment: datetime | None, shape: str = "%Y-%m-%d %H:%M") -> SafeString:
    """A time by the reader's clock, to the minute unless its shape says otherwise."""
    if moment is None:
        return format_html('<span class="quiet">{}</span>', UNKNOWN)
    return format_html('<time datetime="{}">{}</time>', moment.isoformat(), clock(moment, shape))


@register.filter
def bar_scale(sizes: Iterable[tuple[int | None, int | None]]) -> int:
    """Bytes that the whole width of each bar of a table stands for, from the virtual and physical sizes in it."""
    return max((max(virtual or 0, physical or 0) for virtual, physical in sizes), default=0)


@register.simple_tag
def size_bar(
    virtual: int | None,
    physical: int | None,
    reclaimable: int | None,
    scale: int | None = None,
    words: str = "virtual physical reclaimable",
    long: bool = False,
    share: bool = False,
) -> SafeString:
    """The one bar: virtual as the track, physical as the fill, reclaimable as the hatch at the fill's end.

    Lengths grow with the square root of the bytes, so that a few MiB can still be told from a few GiB beside TiB.

    Args:
        virtual: bytes, ``None`` where it is not known: then there is no track.
        physical: bytes.
        reclaimable: bytes, ``None`` until it was analyzed.
        scale: bytes that the bar's whole width stands for; without it, what shows this one image best.
        words: what the three are called, in the bar's title.
        share: lengths are shares of the whole instead, as of a pool's space.
    """
    whole = max(scale or 0, virtual or 0, physical or 0) or 1
    power = 1 if share else 0.5

    def length(size_bytes: int) -> float:
        return 100 * float((max(size_bytes, 0) / whole) ** power)

    fill = length(physical or 0)
    win = fill - length((physical or 0) - max(reclaimable or 0, 0))
    names = words.split()
    known = [f"{name} {size(value)}" for name, value in zip(names, (virtual, physical), strict=False)]
    known.append(f"{names[2]} {'not analyzed yet' if reclaimable is None else size(reclaimable)}")
    shown = ""
    if virtual is not None:
        shown += f'<rect class="track" width="{length(virtual):.2f}%" height="100%" rx="2"/>'
    if physical:
        shown += f'<rect class="fill" width="{fill:.2f}%" height="100%" rx="2"/>'
    if win:
        where = f'x="{fill - win:.2f}%" width="{win:.2f}%" height="100%"'
        shown += f'<rect class="win" fill="url(#sa-hatch)" {where}/>'
    title = ", ".join(known)
    return format_html(
        '<svg class="bar{}" role="img" aria-label="{}"><title>{}</title>{}</svg>',
        " long" if long else "", title, title, mark_safe(shown),  # noqa: S308 (made of numbers alone)
    )  # fmt: skip


#: Every state's word stands beside its colour.
GOOD = {"ok", "running", "succeeded", "finished", "available", "mounted"}
WARN = {
    "degraded", "paused", "modifying", "queued", "interrupted", "outside_pool", "missing", "new", "pmsuspended",
    "set_aside", "missed",
}  # fmt: skip
BAD = {
    "unreachable", "failed", "chain_broken", "chain_cycle", "format_mismatch", "unreadable", "silent", "crashed",
    "gone", "error", "changed", "not_listed",
}  # fmt: skip


@register.simple_tag
def state(value: str, label: str = "") -> SafeString:
    """A state as a word on a colour."""
    colour = "good" if value in GOOD else "warn" if value in WARN else "bad" if value in BAD else "plain"
    return format_html('<span class="chip {}">{}</span>', colour, label or value.replace("_", " "))


@register.filter
def job_colour(state_of_job: str) -> str:
    """The kind of message that a finished job's state is."""
    return {"succeeded": "good", "failed": "bad", "interrupted": "warn", "cancelled": "warn"}.get(state_of_job, "info")


@register.filter
def item(mapping: dict[Any, Any] | None, key: Any) -> Any:
    """What a mapping holds under a key, ``None`` where it holds nothing."""
    return (mapping or {}).get(key)


@register.simple_tag
def io_limits(limits: dict[str, int]) -> str:
    """A disk's limits in words, such as ``read 50.0 MiB/s, 100 writes/s``."""
    words = []
    for name, value in sorted(limits.items()):
        way, what = name.split("_")[:2]
        words.append(f"{way} {size(value)}/s" if what == "bytes" else f"{value:,} {way}s/s")
    return ", ".join(words)
