"""Forms: their fields, buttons that are forms of their own, and what is wrong with one, whoever has found it."""

from collections.abc import Iterable, Mapping
from typing import Any

from django import template
from django.forms import BaseForm
from django.shortcuts import resolve_url
from django.template.context import RequestContext
from django.template.defaulttags import CsrfTokenNode
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from storage_admin.web.forms import Wrong, wrong_of
from storage_admin.web.templatetags.parts import as_attributes

register = template.Library()


@register.inclusion_tag("fragments/wrong.html", takes_context=True)
def wrong(context: RequestContext, page: str, *args: Any, title: str = "") -> dict[str, Any]:
    """What is wrong with the form that is sent to that page, where it was just refused; else nothing.

    Args:
        page: its address, or the name of its URL, which ``args`` belong to.
    """
    request: Any = context["request"]
    return {
        "error": wrong_of(request) if request.path == resolve_url(page, *args) else None,
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


@register.simple_tag(takes_context=True)
def press(context: RequestContext, word: str, page: str, *args: Any, css: str = "", **attributes: Any) -> SafeString:
    """A button that does something at once: a form of its own, ``{% press _("Scan now") "host_scan" host.pk %}``.

    Args:
        page: the name of the URL that it is sent to, which ``args`` belong to.
        css: classes besides.
        attributes: of the button; ``back`` is where to go afterwards, ``disabled`` a condition.
    """
    back = attributes.pop("back", "")
    attributes |= {"class": f"btn {css}".strip(), "disabled": bool(attributes.get("disabled"))}
    return format_html(
        '<form method="post" action="{}">{}{}<button{}>{}</button></form>',
        reverse(page, args=args), CsrfTokenNode().render(context),
        format_html('<input type="hidden" name="next" value="{}">', back) if back else "",
        as_attributes(attributes), word,
    )  # fmt: skip


@register.simple_tag
def field(name: str, label: str, value: Any = None, hint: str = "", css: str = "", **attributes: Any) -> SafeString:
    """A line of text in a form, with its label and its hint.

    Args:
        name: in the form; its id as well, unless ``id`` is given.
        css: classes of what holds all of them.
        attributes: of the input; ``_`` in a name stands for ``-``.
    """
    about = _described({"class": "form-control", "name": name, "value": value, "id": name, **attributes}, hint)
    return _labelled(format_html("<input{}>", as_attributes(about)), about["id"], label, hint, css)


@register.simple_block_tag
def choose(content: str, name: str, label: str, hint: str = "", css: str = "", **attributes: Any) -> SafeString:
    """A choice between the options of its content (``{% option … %}``), else as ``field``."""
    about = _described({"class": "form-select", "id": name, "name": name, **attributes}, hint)
    return _labelled(format_html("<select{}>{}</select>", as_attributes(about), content), about["id"], label, hint, css)


def _described(about: dict[str, Any], hint: str) -> dict[str, Any]:
    return about | ({"aria_describedby": f"{about['id']}-hint"} if hint else {})


def _labelled(element: str, identifier: str, label: str, hint: str, css: str) -> SafeString:
    shown = format_html('<div class="hint" id="{}-hint">{}</div>', identifier, hint) if hint else ""
    return format_html(
        '<div{}><label for="{}">{}</label>{}{}</div>', as_attributes({"class": css}), identifier, label, element, shown
    )


@register.simple_tag
def option(value: Any, word: str, chosen: Any = None) -> SafeString:
    """An option of a choice, where ``chosen`` is the value of the one that is chosen."""
    about = as_attributes({"selected": str(value) == str(chosen)})
    return format_html('<option value="{}"{}>{}</option>', value, about, word)


@register.simple_tag
def select(
    name: str, label: str, options: Iterable[Any], chosen: Any = None, first: str = "", longest: int = 0, **about: Any
) -> SafeString:
    """A choice from a list.

    Args:
        options: each a word, a value and its word, or with its value, its word, and whether it is chosen.
        chosen: the value that is, for options that do not tell.
        first: what chooses none.
        longest: after how many characters a word is cut off; 0 for never.
        about: as of ``choose``.
    """
    told = [_told(one, chosen) for one in options]
    lines = format_html_join(
        "", "<option{}>{}</option>",
        (
            (as_attributes({"value": value, "selected": bool(is_chosen)}), _cut(word, longest))
            for value, word, is_chosen in ([("", first, False)] if first else []) + told
        ),
    )  # fmt: skip
    return choose(lines, name, label, **about)


def _told(one: Any, chosen: Any) -> tuple[Any, str, bool]:
    if isinstance(one, str):
        return None, one, one == chosen
    if isinstance(one, Mapping):
        return one["value"], str(one["word"]), one["chosen"]
    value, word, *is_chosen = one
    return value, str(word), is_chosen[0] if is_chosen else str(value) == str(chosen)


def _cut(word: str, longest: int) -> str:
    """A word that is not too long is sent as it is: cutting composes characters, and a path is another one then."""
    return Truncator(word).chars(longest) if longest else word


@register.simple_tag
def pick(name: str, label: str, options: Iterable[Any], *, first: str = "", **about: Any) -> SafeString:
    """A choice in the filters of a list, as ``select``; what leaves it open is "any" unless given."""
    return select(name, label, options, first=first or _("any"), **about)


@register.simple_tag
def search(label: str, values: Mapping[str, str], **attributes: Any) -> SafeString:
    """The words that a list is searched for, in its filters."""
    return field("search", label, values.get("search", ""), css="grow", type="search", **attributes)


@register.simple_tag
def period(label: str, values: Mapping[str, str]) -> SafeString:
    """From and to in the filters of a list: days, or what else stands in the address, by the reader's clock."""
    zone = timezone.get_current_timezone_name()
    ends = [
        field(name, word, value, type="text" if len(value) > len("2026-11-24") else "date")
        for name, word in (("from", f"{label} ({zone})"), ("to", _("to")))
        for value in (values.get(name, ""),)
    ]
    return format_html('{}{}<input type="hidden" name="zone" value="{}">', *ends, zone)


@register.simple_tag
def checkbox(name: str, label: str, checked: Any = False, **attributes: Any) -> SafeString:
    """A checkbox with its label."""
    about = {"class": "form-check-input", "type": "checkbox", "id": name, "name": name, **attributes}
    return format_html(
        '<div class="check"><input{}><label for="{}">{}</label></div>',
        as_attributes({**about, "checked": bool(checked)}), about["id"], label,
    )  # fmt: skip


@register.simple_tag
def to_confirm(wanted: str, identifier: str, **attributes: Any) -> SafeString:
    """What has to be typed to confirm something that cannot be undone."""
    label = _("Type “{wanted}” to confirm").format(wanted=wanted)
    return field("confirm", label, id=identifier, autocomplete="off", required=True, **attributes)
