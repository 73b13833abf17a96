"""When a policy's windows open and close: a cron expression in a time zone, and a length.

The fields of the expression are read as wall-clock time. Where clocks are put forward, a time that does not exist is
taken to be the first one that does: 02:30 on such a night is 03:00. Where they are put back, a time that exists twice
counts once, the first time. So there is one window for each due time, never two; and none only where a clock change
has left so little of it that nothing could begin.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, pairwise
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from storage_admin.errors import InvalidError, of_fields
from storage_admin.moments import zones
from storage_admin.words import Translatable

_EXAMPLE = _("such as “0 22 * * 1-5” (at 22:00 from Monday to Friday)")
_NO_DAY = _("No such day occurs within fifty years. Choose another time.")
_NO_ZONE = _("This time zone does not exist. Enter a name such as Europe/Berlin, or UTC.")
#: So many windows are looked at to find one that is too short: the repeats of a week by the minute are not counted.
_LOOKED_AT = 200
#: No clock change leaves out more than a day (Samoa's did, when it changed the side of the date line).
_LONGEST_GAP_MINUTES = 26 * 60


@dataclass(frozen=True)
class Window:
    """From when to when jobs may run; both in UTC.

    Args:
        last_start: from when on nothing new begins.
    """

    opens: datetime
    last_start: datetime
    closes: datetime


@dataclass(frozen=True)
class Schedule:
    """When windows open, and how long they are.

    Args:
        cron: five fields.
        timezone: a name of the IANA database, such as ``Europe/Berlin``.
        window_minutes: the length, where the next window does not open before.
        quiet_minutes: at its end, in which nothing new begins.
    """

    cron: str
    timezone: str
    window_minutes: int
    quiet_minutes: int

    def windows(self, after: datetime) -> Iterator[Window]:
        """The windows that open after a time and in which something may begin; none overlaps the next."""
        for window in self._all(after):
            # Shorter than it was asked for and all quiet: clocks went forward in it.
            if window.last_start > window.opens or window.closes - window.opens == self._length:
                yield window

    def next(self, after: datetime, count: int = 5) -> list[Window]:
        """The windows that open next."""
        return list(islice(self.windows(after), count))

    def opened(self, after: datetime, until: datetime) -> Iterator[Window]:
        """The windows that opened after one time and not after another."""
        for window in self.windows(after):
            if window.opens > until:
                return
            yield window

    def by_hand(self, now: datetime) -> Window:
        """A window that somebody opens now."""
        return self._window(now, None)

    def check(self, now: datetime) -> None:
        """Whether windows open at all, and jobs can begin in them.

        Whatever the season: of an expression that makes sense, a clock change may take a single window away.

        Raises:
            InvalidError: by field, what is wrong and what to do.
        """
        zone = _parsed(self.cron, self.timezone)
        if self.timezone not in zones():
            raise _wrong("timezone", _NO_ZONE)
        wall = replace(self, timezone="UTC")  # as its clocks would show it if they were never changed
        seen = list(islice(wall._all(now.astimezone(zone).replace(tzinfo=UTC)), _LOOKED_AT))
        if not seen:
            raise _wrong("cron", _NO_DAY)
        shortest = min(seen, key=lambda window: window.closes - window.opens)
        if shortest.last_start <= shortest.opens:
            minutes = (shortest.closes - shortest.opens) // timedelta(minutes=1)
            detail = gettext(
                "The window that opens at {opens:%Y-%m-%d %H:%M} lasts {minutes} minutes. No job starts in its "
                "last {quiet} minutes, so no job could start at all."
            ).format(opens=shortest.opens, minutes=minutes, quiet=self.quiet_minutes)
            raise _wrong("quiet_minutes", detail)

    @property
    def _length(self) -> timedelta:
        return timedelta(minutes=self.window_minutes)

    def _all(self, after: datetime) -> Iterator[Window]:
        for opens, following in pairwise(openings(self.cron, self.timezone, after)):
            yield self._window(opens, following)

    def _window(self, opens: datetime, following: datetime | None) -> Window:
        closes = opens + self._length
        closes = min(closes, following) if following else closes
        return Window(opens, closes - timedelta(minutes=self.quiet_minutes), closes)


def openings(cron: str, timezone: str, after: datetime) -> Iterator[datetime]:
    """The times in UTC at which windows open, later than ``after``, each once and in order.

    Raises:
        InvalidError: the expression or the zone cannot be read.
    """
    zone = _parsed(cron, timezone)
    last = after
    # Without a zone: what does not exist or exists twice is decided here, for all expressions in the same way.
    for wall in CronSim(cron, after.astimezone(zone).replace(tzinfo=None)):
        opens = _exists(wall, zone)
        if opens > last:
            last = opens
            yield opens


@lru_cache(maxsize=256)
def _parsed(cron: str, timezone: str) -> ZoneInfo:
    fields = cron.split()
    if len(fields) != 5:
        told = gettext("Enter five fields (minute, hour, day of the month, month, day of the week), {example}.")
        raise _wrong("cron", told.format(example=_EXAMPLE))
    if (what := _unreadable(cron)) is not None:
        if what == "day-of-month" and _unreadable(f"0 0 {fields[2]} * *") is None:
            raise _wrong("cron", _NO_DAY)  # it can be read, but none of the months has that day
        told = gettext("The {what} field is not valid. Enter five fields {example}.")
        raise _wrong("cron", told.format(what=what, example=_EXAMPLE))
    try:
        return ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise _wrong("timezone", _NO_ZONE) from None


def _unreadable(cron: str) -> str | None:
    """What the field is called that cannot be read; ``None`` where each can."""
    try:
        CronSim(cron, datetime(2000, 1, 1))  # noqa: DTZ001 (only to read the expression)
    except CronSimError as error:
        return str(error).lower().removeprefix("bad ")
    return None


def _wrong(field: str, detail: Translatable) -> InvalidError:
    return of_fields({field: str(detail)})


def _exists(wall: datetime, zone: ZoneInfo) -> datetime:
    """A wall-clock time in UTC: the first of two, and of one that does not exist the first that does after it."""
    for _minute in range(_LONGEST_GAP_MINUTES):
        moment = wall.replace(tzinfo=zone).astimezone(UTC)
        if moment.astimezone(zone).replace(tzinfo=None, fold=0) == wall:
            return moment
        wall += timedelta(minutes=1)
    raise AssertionError(f"no time exists near {wall} in {zone.key}")
