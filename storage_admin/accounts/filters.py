"""Filters of the audit trail, the same for the page, the API and the CSV."""

from typing import Any

import django_filters
from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from django.forms import CharField, GenericIPAddressField
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts.models import AuditEntry
from storage_admin.moments import period_filters

LONGEST = 200


class PlainText(CharField):
    """A text that every database can look for."""

    def clean(self, value: Any) -> Any:
        if "\0" in str(value or ""):
            raise ValidationError(gettext("NUL characters are not allowed."))
        return super().clean(value)


class TextFilter(django_filters.CharFilter):  # type: ignore[misc]  # an untyped library
    """By a part of a text; small and capital letters are the same."""

    field_class = PlainText

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"lookup_expr": "icontains", "max_length": LONGEST} | options))


class AddressFilter(django_filters.Filter):  # type: ignore[misc]  # an untyped library
    """By an IP address."""

    field_class = GenericIPAddressField


class AuditFilters(period_filters("at")):  # type: ignore[misc]  # an untyped library
    """``search`` looks into who, what and on what."""

    search = TextFilter(method="search_for", label=_("Part of the user, action or target."))
    who = TextFilter(label=_("Part of the name of the user, token or policy."))
    what = TextFilter(label=_("Part of the action, such as “token created”."))
    target = TextFilter(label=_("Part of the target."))
    refused = django_filters.TypedChoiceFilter(
        choices=(("true", "refused"), ("false", "done")), coerce=lambda text: text == "true",
        label=_("Whether the request was refused."),
    )  # fmt: skip
    address = AddressFilter(label=_("IP address that the request came from."))

    class Meta:
        model = AuditEntry
        fields: tuple[str, ...] = ()

    def search_for(self, rows: QuerySet[AuditEntry], _name: str, text: str) -> QuerySet[AuditEntry]:
        """Entries with the text in one of three columns."""
        return rows.filter(Q(who__icontains=text) | Q(what__icontains=text) | Q(target__icontains=text))
