"""Filters of lists of alerts and deliveries, for the API and the pages alike."""

import django_filters
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _

from storage_admin.events.models import Alert, Delivery
from storage_admin.events.services import KINDS
from storage_admin.given_filters import GivenFilters

STATES = (
    ("open", "open"),
    ("closed", "closed"),
    ("acknowledged", _("open and acknowledged")),
    ("new", _("open and not acknowledged")),
)
CONDITIONS = {
    "open": Q(closed=None),
    "closed": Q(closed__isnull=False),
    "acknowledged": Q(closed=None, acknowledged__isnull=False),
    "new": Q(closed=None, acknowledged=None),
}


class AlertFilters(GivenFilters):
    """Filters and search of the list of alerts."""

    state = django_filters.ChoiceFilter(choices=STATES, method="by_state")
    kind = django_filters.ChoiceFilter(choices=list(KINDS.items()))
    severity = django_filters.ChoiceFilter(choices=Alert.Severity.choices)
    host = django_filters.CharFilter(max_length=50, label=_("Slug of a host."))
    search = django_filters.CharFilter(method="by_text", max_length=200, label=_("Part of the title or detail."))
    ordering = django_filters.OrderingFilter(fields=("id", "opened", "closed", "updated", "kind", "severity", "host"))

    def by_state(self, rows: QuerySet[Alert], _name: str, value: str) -> QuerySet[Alert]:
        return rows.filter(CONDITIONS[value])

    def by_text(self, rows: QuerySet[Alert], _name: str, value: str) -> QuerySet[Alert]:
        return rows.filter(Q(title__icontains=value) | Q(detail__icontains=value))


class DeliveryFilters(GivenFilters):
    """Filters of the list of deliveries."""

    state = django_filters.ChoiceFilter(choices=Delivery.State.choices)
    event = django_filters.CharFilter(field_name="event__name", max_length=40, label=_("Name of an event."))
