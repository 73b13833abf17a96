"""Shapes that stand on many pages: a card, a fact, a notice, a note, a field of a form."""

from collections.abc import Iterable, Mapping
from typing import Any

from django import template
from django.forms.utils import flatatt
from django.template.base import FilterExpression, Parser, Token
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from storage_admin.web.templatetags.icons import icon
from storage_admin.web.templatetags.storage import size_bar

register = template.Library()

#: The icon of each kind of notice.
ICONS = {"bad": "stop", "good": "check", "info": "info", "warn": "alert"}


@register.simple_block_tag
def card(content: str, title: str) -> SafeString:
    """A card under its title: ``{% card "Log" %}…{% endcard %}``."""
    return format_html(
        '<section class="card"><div class="card-header"><h2>{}</h2></div>{}</section>', title, content
    )  # fmt: skip


@register.simple_block_tag
def fact(content: str, word: str, css: str = "") -> SafeString:
    """A line of a list of facts (``<dl class="facts">``)."""
    return format_html("<div><dt>{}</dt><dd{}>{}</dd></div>", word, as_attributes({"class": css}), content)


@register.simple_block_tag
def note(content: str, title: str) -> SafeString:
    """A line of a list of notes (``<ul class="notes">``): a title, and what is to be said about it."""
    return format_html('<li><div><b>{}</b><div class="sub">{}</div></div></li>', title, content)


@register.simple_block_tag
def notice(content: str, kind: str, css: str = "", shape: str = "", **attributes: Any) -> SafeString:
    """A sentence on a colour, with an icon.

    Args:
        kind: ``bad``, ``good``, ``info`` or ``warn``.
        css: classes besides.
        shape: an icon other than the kind's own.
        attributes: of the element.
    """
    attributes = {"class": f"say {kind} {css}".strip(), **attributes}
    return format_html("<div{}>{}<div>{}</div></div>", as_attributes(attributes), icon(shape or ICONS[kind]), content)


@register.simple_tag
def refusal_code(code: str) -> SafeString:
    """The code of a refusal, in small print: the sentence before it says the same to people."""
    return format_html('<span class="sub" data-code="{}">({})</span>', code, code)


@register.simple_block_tag
def empty_page(content: str, title: str, **attributes: Any) -> SafeString:
    """What stands where a list has no rows: that, and how it gets some."""
    return format_html(
        '<div{}><h2>{}</h2><p>{}</p></div>', as_attributes({"class": "empty-page", **attributes}), title, content
    )  # fmt: skip


def head(word: str, classes: str = "", sort: str = "") -> SafeString:
    """The top of a column.

    Args:
        classes: of its cell; ``unseen`` is a word that is only read out.
        sort: ``ascending``, ``descending`` or empty.
    """
    if classes == "unseen":
        return head(format_html('<span class="visually-hidden">{}</span>', word))
    about = as_attributes({"class": classes.replace(".", " "), "aria_sort": sort})
    return format_html('<th scope="col"{}>{}</th>', about, word)


class Heads(template.Node):
    """The tops of the columns of a table, for ``sheet``; those without a word are left out."""

    def __init__(self, words: list[tuple[str, FilterExpression]], name: str) -> None:
        """Takes classes and word of each, and the name that the template has for them."""
        self._words = words
        self._name = name

    def render(self, context: template.Context) -> str:
        words = ((classes, word.resolve(context)) for classes, word in self._words)
        made = format_html_join("", "{}", ((head(word, classes),) for classes, word in words if word))
        if not self._name:
            return made
        context[self._name] = made
        return ""


@register.tag
def heads(parser: Parser, token: Token) -> Heads:
    """The heads of a table: ``{% heads _("Name") n=_("Size") act=can_admin|then:_("Action") as columns %}``.

    A class stands before its word, several with dots between them.
    """
    __, *bits = token.split_contents()
    name = bits.pop() if bits[-2:-1] == ["as"] else ""
    parts = [bit.rpartition("=") for bit in (bits[:-1] if name else bits)]
    return Heads([(classes, parser.compile_filter(word)) for classes, __, word in parts], name)


@register.filter
def then(condition: Any, word: str) -> str:
    """A word under a condition, else nothing."""
    return word if condition else ""


@register.simple_block_tag
def sheet(content: str, name: str, *columns: str, css: str = "") -> SafeString:
    """A table that scrolls by itself where the window is too narrow for it.

    ``{% heads _("Name") n=_("Size") as columns %}{% sheet _("Files") columns %}…{% endsheet %}``

    Args:
        content: its rows; all of the table where no columns are given.
        columns: what ``heads`` makes.
        css: classes besides.
    """
    if columns:
        tops = format_html_join("", "{}", ((head,) for head in columns))
        content = format_html("<thead><tr>{}</tr></thead><tbody>{}</tbody>", tops, content)
    return format_html(
        '<div class="wide" tabindex="0" role="region" aria-label="{}"><table class="{}">{}</table></div>',
        name, f"sheet {css}".strip(), content,
    )  # fmt: skip


@register.simple_tag
def field(name: str, label: str, value: Any = None, hint: str = "", **attributes: Any) -> SafeString:
    """A line of text in a form, with its label and its hint.

    Args:
        name: in the form; its id as well, unless ``id`` is given.
        attributes: of the input; ``_`` in a name stands for ``-``.
    """
    about = {"id": name, **attributes}
    if hint:
        about["aria_describedby"] = f"{about['id']}-hint"
    shown = format_html('<div class="hint" id="{}-hint">{}</div>', about["id"], hint) if hint else ""
    return format_html(
        '<div><label for="{}">{}</label><input{}>{}</div>',
        about["id"], label, as_attributes({"class": "form-control", "name": name, "value": value, **about}), shown,
    )  # fmt: skip


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
def pick(name: str, label: str, options: Iterable[Mapping[str, Any]], first: str = "") -> SafeString:
    """A choice in the filters of a list.

    Args:
        options: each with its value, its word, and whether it is chosen.
        first: what leaves it open, "any" unless given.
    """
    lines = format_html_join(
        "", '<option value="{}"{}>{}</option>',
        ((one["value"], as_attributes({"selected": bool(one["chosen"])}), one["word"]) for one in options),
    )  # fmt: skip
    return format_html(
        '<div><label for="{0}">{1}</label><select class="form-select" id="{0}" name="{0}">'
        '<option value="">{2}</option>{3}</select></div>',
        name, label, first or _("any"), lines,
    )  # fmt: skip


@register.simple_tag
def pool_bar(pool: Any, *, long: bool = False) -> SafeString:
    """How much of a pool is used, as a share of what can be, and how much of that is reclaimable."""
    return size_bar(
        pool.usable_bytes, pool.used_bytes, pool.reclaimable_bytes, pool.usable_bytes, _("usable,used,reclaimable"),
        long=long, share=True,
    )  # fmt: skip


@register.inclusion_tag("fragments/live.html")
def live(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a page that asks for itself again while something goes on."""
    return part


@register.simple_tag
def address_of(kind: str, identifier: int) -> str:
    """The page of an image, a pool or a job; that of all hosts for anything else."""
    return reverse(kind, args=[identifier]) if kind in ("image", "pool", "job") else reverse("hosts")


def as_attributes(given: Mapping[str, Any]) -> SafeString:
    """Attributes of an element, without those that are empty."""
    shown = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    return flatatt({name: value for name, value in shown.items() if value != "" or name == "value"})
