"""How numbers, times and states are shown: the same on every page."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop, ngettext_lazy

from storage_admin.words import (
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
    times,
    words,
)

register = template.Library()

for shown in (size, span, exact, percent, times, seconds, seconds_span, days, between, clock, plural, words, said):
    register.filter(shown)


@register.simple_tag
def bytes_of(value: int | None, unknown: str = "") -> SafeString:
    """A size with its exact bytes in the title; ``unknown`` is the word where there is none."""
    if value is None:
        return format_html('<span class="quiet">{}</span>', unknown or _("unknown"))
    return format_html('<span title="{}">{}</span>', _("{count} bytes").format(count=exact(value)), size(value))


@register.simple_tag
def exact_bytes(value: int | None) -> SafeString:
    """A size with its exact bytes beside it."""
    beside = "" if value is None else format_html(' <span class="sub">{}</span>', exact(value))
    return format_html("{}{}", bytes_of(value), beside)


@register.simple_tag
def ago(moment: datetime | None, never: str = "") -> SafeString:
    """How long ago, or in how long, with the exact time in the title."""
    if moment is None:
        return format_html('<span class="quiet">{}</span>', never or _("never"))
    passed = (timezone.now() - moment).total_seconds()
    if passed < 0:
        words = _("in {time}").format(time=_coarse(-passed, round))
    else:
        words = _("just now") if passed < 10 else _("{time} ago").format(time=_coarse(passed))
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', moment.isoformat(), clock(moment, "%Y-%m-%d %H:%M:%S"), words
    )


@register.filter
def passed(moment: datetime | None) -> bool:
    """Whether a time is over; one that is not known is not."""
    return moment is not None and moment <= timezone.now()


#: From how many seconds on a unit of so many is counted in. Here, as a lazy plural takes a millisecond to make.
_AGES = (
    (2 * 86400, 86400, ngettext_lazy("%d day", "%d days")),
    (3600, 3600, ngettext_lazy("%d hour", "%d hours")),
    (60, 60, ngettext_lazy("%d min", "%d min")),
)


def _coarse(passed: float, whole: Callable[[float], int] = int) -> str:
    """Ages are cut off, and times to come rounded: what was just given 90 days has 90, not 89."""
    for least, length, counted in _AGES:
        if passed >= least:
            return str(counted % whole(passed / length))
    return _("%d s") % whole(passed)


@register.simple_tag
def at(moment: datetime | None, shape: str = "%Y-%m-%d %H:%M", unknown: str = "") -> SafeString:
    """A time by the reader's clock, to the minute unless its shape says otherwise."""
    if moment is None:
        return format_html('<span class="quiet">{}</span>', unknown or _("unknown"))
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
    words: str = "",
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
        words: what the three are called, in the bar's title; ``virtual,physical,reclaimable`` unless given.
        share: lengths are shares of the whole instead, as of a pool's space.
    """
    whole = max(scale or 0, virtual or 0, physical or 0) or 1
    power = 1 if share else 0.5

    def length(size_bytes: int) -> float:
        return 100 * float((max(size_bytes, 0) / whole) ** power)

    fill = length(physical or 0)
    win = fill - length((physical or 0) - max(reclaimable or 0, 0))
    names = (words or _("virtual,physical,reclaimable")).split(",")
    known = [f"{name} {size(value)}" for name, value in zip(names, (virtual, physical), strict=False)]
    known.append(f"{names[2]} {_('not analyzed yet') if reclaimable is None else size(reclaimable)}")
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
GOOD = {
    gettext_noop("ok"), gettext_noop("running"), gettext_noop("succeeded"), gettext_noop("finished"),
    gettext_noop("available"), gettext_noop("mounted"),
}  # fmt: skip
WARN = {
    gettext_noop("degraded"), gettext_noop("paused"), gettext_noop("modifying"), gettext_noop("queued"),
    gettext_noop("interrupted"), gettext_noop("outside pool"), gettext_noop("missing"), gettext_noop("new"),
    gettext_noop("pmsuspended"), gettext_noop("set aside"), gettext_noop("missed"), gettext_noop("merged"),
}  # fmt: skip
BAD = {
    gettext_noop("unreachable"), gettext_noop("failed"), gettext_noop("chain broken"), gettext_noop("chain cycle"),
    gettext_noop("format mismatch"), gettext_noop("unreadable"), gettext_noop("silent"), gettext_noop("crashed"),
    gettext_noop("gone"), gettext_noop("error"), gettext_noop("changed"), gettext_noop("not listed"),
}  # fmt: skip


@register.simple_tag
def state(value: str, label: str = "") -> SafeString:
    """A state as a word on a colour."""
    word = value.replace("_", " ")
    colour = "good" if word in GOOD else "warn" if word in WARN else "bad" if word in BAD else "plain"
    return format_html('<span class="chip {}">{}</span>', colour, label or (_(word) if word else ""))


@register.filter
def job_colour(state_of_job: str) -> str:
    """The kind of message that a finished job's state is."""
    return {"succeeded": "good", "failed": "bad", "interrupted": "warn", "cancelled": "warn"}.get(state_of_job, "info")


@register.filter
def item(mapping: dict[Any, Any] | None, key: Any) -> Any:
    """What a mapping holds under a key, ``None`` where it holds nothing."""
    return (mapping or {}).get(key)


LIMITS = {
    "read_bytes_sec": gettext_lazy("read {value}/s"), "write_bytes_sec": gettext_lazy("write {value}/s"),
    "total_bytes_sec": gettext_lazy("total {value}/s"), "total_iops_sec": gettext_lazy("{value} totals/s"),
    "read_iops_sec": gettext_lazy("{value} reads/s"), "write_iops_sec": gettext_lazy("{value} writes/s"),
}  # fmt: skip


@register.simple_tag
def io_limits(limits: dict[str, int]) -> str:
    """A disk's limits in words, such as ``read 50.0 MiB/s, 100 writes/s``."""
    return ", ".join(
        str(LIMITS.get(name, f"{name} {{value}}")).format(value=size(value) if "_bytes_" in name else exact(value))
        for name, value in sorted(limits.items())
    )
