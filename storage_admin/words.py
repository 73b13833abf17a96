"""Sizes, counts, durations and times in words: the same on every page, in every plan and log."""

from collections.abc import Callable
from datetime import datetime
from math import floor
from typing import TYPE_CHECKING, Any, TypeAlias

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.utils.translation.trans_real import catalog

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise

#: A text that is translated when it is shown, or stays as it is.
Translatable: TypeAlias = "str | _StrPromise"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
UNKNOWN = gettext_noop("unknown")
MINUS = "\N{MINUS SIGN}"


def size(value: int | None) -> str:
    """Bytes in binary units with up to three significant digits; ``unknown`` for ``None``."""
    if value is None:
        return _(UNKNOWN)
    amount, unit = abs(float(value)), 0
    while unit < len(UNITS) - 1 and float(_digits(amount)) >= 1024:
        amount, unit = amount / 1024, unit + 1
    return f"{MINUS if value < 0 else ''}{_digits(amount)} {UNITS[unit]}"


def _digits(amount: float) -> str:
    places = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
    text = f"{amount:.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


def span(low: int | None, high: int | None) -> str:
    """``1 GiB to 3 GiB``, in bytes; empty where an end is unknown, or both read alike."""
    return _span(low, high, size)


def seconds_span(low: float | None, high: float | None) -> str:
    """``45 s to 3 min``, as :func:`span`."""
    return _span(low, high, seconds)


def _span(low: Any, high: Any, word: Callable[[Any], str]) -> str:
    ends = () if low is None or high is None else (word(low), word(high))
    return _(" to ").join(ends) if len(set(ends)) > 1 else ""


def exact(value: int | None) -> str:
    """A count with its thousands apart; ``unknown`` for ``None``."""
    return _(UNKNOWN) if value is None else f"{value:,}"


def percent(part: float | None, whole: float | None) -> str:
    """``part`` of ``whole``, rounded down to one decimal; ``unknown`` without both. Only nothing reads as 0.0 %."""
    if part is None or not whole:
        return _(UNKNOWN)
    told = tenths(100 * part / whole)
    return _("under 0.1 %") if part > 0 and not told else f"{told} %"


def ratio(part: float, whole: float) -> float:
    """``part`` of ``whole``, to hundredths; of less than one, its first digit: only nothing is 0."""
    told = part / whole
    return round(told, 2) or float(f"{told:.0e}")


def times(value: float) -> str:
    """A :func:`ratio` with its sign."""
    return f"{value if value >= 0.01 or not value else _('under 0.01')} \N{MULTIPLICATION SIGN}"


def tenths(value: float) -> float:
    """A number of percent rounded down to one decimal: nothing reads as full too early."""
    return floor(10 * value) / 10


def seconds(value: float | None) -> str:
    """A duration: ``45 s``, ``3 min``, ``2 h 10 min``; ``unknown`` for ``None``."""
    if value is None:
        return _(UNKNOWN)
    left = round(value)
    if left < 60:
        return f"{left} s"
    minutes = left // 60
    if minutes < 60:
        return f"{minutes} min" if left % 60 == 0 or minutes >= 10 else f"{minutes} min {left % 60} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return _("{days} days").format(days=hours // 24)


def days(value: float) -> str:
    """A number of days to one decimal, as the range of a forecast has it: else it could lie outside of that."""
    shown = round(value, 1)
    return _("under a day") if value < 1 else plural(int(shown) if shown.is_integer() else shown, _("day,days"))


def between(started: datetime | None, finished: datetime | None) -> str:
    """How long something took, in words."""
    if started is None or finished is None:
        return _(UNKNOWN)
    return seconds((finished - started).total_seconds())


def clock(moment: datetime, shape: str = "%Y-%m-%d %H:%M") -> str:
    """A time in the reader's zone (UTC outside of pages), with that zone's abbreviation, or how far it is ahead of UTC
    where its abbreviation is only a number.
    """
    try:
        here = timezone.localtime(moment)
    except OverflowError:
        here = moment  # a day from the end of the calendar, such as a token that never expires has
    zone = here.tzname() or ""
    return f"{here:{shape}} {zone if zone.isalpha() else here.isoformat()[-6:]}"


def plural(count: float, words: str) -> str:
    """A count with its word: ``plural(3, "image,images")`` is ``3 images``.

    A translation of ``image,images`` has as many words as its language has forms, in the order of ``Plural-Forms``.
    """
    forms = words.split(",")
    form_of = getattr(catalog(), "plural", lambda number: int(number != 1))  # none where translations are switched off
    number = int(count) if count % 1 == 0 else 0  # half an hour has the form of no hours
    return f"{count:,} {forms[min(form_of(number), len(forms) - 1)]}"


def words(name: str) -> str:
    """An option's name as words."""
    return name.replace("_", " ")


def said(value: Any) -> str:
    """An option's value in words."""
    if value is None:
        return _("not set")
    return (_("yes") if value else _("no")) if isinstance(value, bool) else str(value)
