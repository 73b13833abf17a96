"""What is wrong with a form, as ``fragments/wrong.html`` shows it, whoever has found it."""

from typing import Any

from django import template
from django.forms import BaseForm
from django.template.context import RequestContext
from django.utils.translation import gettext as _

from storage_admin.web.forms import Wrong, wrong_of

register = template.Library()


@register.inclusion_tag("fragments/wrong.html", takes_context=True)
def wrong(context: RequestContext, address: str, title: str = "") -> dict[str, Any]:
    """What is wrong with the form that is sent to that address, where it was just refused; else nothing."""
    request: Any = context["request"]
    return {
        "error": wrong_of(request) if request.path == address else None,
        "title": title or _("Nothing was changed."),
    }


@register.inclusion_tag("fragments/wrong.html")
def wrong_in(form: BaseForm) -> dict[str, Any]:
    """The same of a form of Django."""
    found: dict[str, str] = {}
    for name, texts in form.errors.items():
        shown = "" if name not in form.fields or form.fields[name].widget.is_hidden else form.add_prefix(name)
        found[shown] = " ".join([found.get(shown, ""), *map(str, texts)]).strip()
    return {"error": Wrong("", found) if found else None}
