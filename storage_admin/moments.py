"""Time zones, and filters by time: dates and times in the query string, as the API and the pages take them."""

from datetime import UTC, datetime, time, timedelta
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import django_filters
from django.core.exceptions import ValidationError
from django.forms import CharField
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field

from storage_admin.given_filters import GivenFilters


@cache
def zones() -> tuple[str, ...]:
    """The names of all time zones, UTC first."""
    return ("UTC", *sorted(available_timezones() - {"UTC", "localtime", "Factory"}))


def zone_named(name: str) -> ZoneInfo | None:
    """The time zone of that name; ``None`` where there is none, whatever a stranger gives as a name."""
    return ZoneInfo(name) if name in zones() else None


class MomentField(CharField):
    """A time in UTC: of a date its first moment, or the first one after it.

    What names no zone is of the current one, which is UTC unless a page has set another.

    Args:
        after: whether a date stands for the moment after its end.
    """

    def __init__(self, *, after: bool = False, **options: Any) -> None:
        super().__init__(**({"max_length": 40} | options))
        self.after = after

    def clean(self, value: Any) -> Any:
        text = super().clean(value)
        if not text:
            return None
        try:
            day = parse_date(text)
            if day is None:
                moment = parse_datetime(text)
            else:
                moment = datetime.combine(day + timedelta(days=1 if self.after else 0), time())
            if moment is not None:
                zone = moment.tzinfo or timezone.get_current_timezone()
                return moment.replace(tzinfo=zone).astimezone(UTC)
        except (ValueError, OverflowError):
            pass
        raise ValidationError(_("Give a date such as 2026-11-22, or a time such as 2026-11-22T14:00:00Z."))


class MomentFilter(django_filters.Filter):  # type: ignore[misc]  # an untyped library
    """From or up to a time."""

    field_class = MomentField


def period_filters(column: str) -> type[django_filters.FilterSet]:
    """Filters ``from`` and ``to`` of a time. Made by hand, as ``from`` is a word of the language.

    Args:
        column: the time that they are of.
    """
    since = _("A date, or a time in ISO 8601; UTC where it names no zone.")
    until = _("A date, or a time in ISO 8601; UTC where it names no zone. A date is included.")
    filters = {
        "from": _told(MomentFilter(field_name=column, lookup_expr="gte", label=since)),
        "to": _told(MomentFilter(field_name=column, lookup_expr="lt", after=True, label=until)),
    }
    return type("PeriodFilters", (GivenFilters,), filters)


def _told(one: MomentFilter) -> MomentFilter:
    """The same, with its type for the API's schema: of a column that a query works out, none can be guessed."""
    extend_schema_field({"type": "string", "description": one.label})(one)
    return one
