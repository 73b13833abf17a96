"""Filters of the list of jobs, for the API and the page alike."""

from typing import Any

import django_filters
from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _

from storage_admin.given_filters import Order, YesOrNo, in_order
from storage_admin.hosts.filters import HostFilter, WholeNumberFilter
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job
from storage_admin.moments import period_filters

#: Beside the states of a job: queued or running.
ACTIVE = "active"

#: By what the page of jobs can be ordered beside their ids, and the columns that this means.
ORDERINGS = {"kind": "kind", "state": "state", "on": "target_label", "by": "created_by"}


class JobFilters(period_filters("created")):  # type: ignore[misc]  # an untyped library
    """``from`` and ``to`` are of when a job was asked for."""

    state = django_filters.ChoiceFilter(
        choices=[(ACTIVE, _("queued or running")), *Job.State.choices], method="by_state"
    )
    kind = django_filters.ChoiceFilter(choices=lambda: kinds.titles().items())
    active = YesOrNo(method="by_activity", label=_("Queued or running."))
    host = HostFilter()
    image = WholeNumberFilter(method="by_target")
    pool = WholeNumberFilter(method="by_target")
    guest = WholeNumberFilter(method="by_target")
    by = django_filters.CharFilter(
        field_name="created_by",
        lookup_expr="icontains",
        max_length=150,
        label=_("Part of the name of the user, token or policy that requested it."),
    )
    search = django_filters.CharFilter(
        field_name="target_label", lookup_expr="icontains", max_length=1100, label=_("Part of the target's name.")
    )

    def by_state(self, rows: QuerySet[Job], _name: str, value: str) -> QuerySet[Job]:
        return rows.filter(state__in=Job.ACTIVE) if value == ACTIVE else rows.filter(state=value)

    def by_activity(self, rows: QuerySet[Job], _name: str, value: str) -> QuerySet[Job]:
        return rows.filter(state__in=Job.ACTIVE) if value == "true" else rows.exclude(state__in=Job.ACTIVE)

    def by_target(self, rows: QuerySet[Job], name: str, value: Any) -> QuerySet[Job]:
        return rows.filter(target_kind=name, target_id=value)


class JobListFilters(JobFilters):
    """The same with an order; the API pages by cursor, along the ids alone."""

    ordering = Order(("id", *ORDERINGS))

    def by_order(self, rows: QuerySet[Job], _name: str, value: str) -> QuerySet[Job]:
        return in_order(rows, ORDERINGS | {"id": "id"}, value)
