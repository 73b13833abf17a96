"""Shapes that stand on many pages: a card, a fact, a notice, a note, a table."""

from collections.abc import Mapping
from typing import Any

from django import template
from django.forms.utils import flatatt
from django.template.base import FilterExpression, Parser, Token
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from storage_admin.web.templatetags.icons import icon
from storage_admin.web.templatetags.storage import size_bar

register = template.Library()

#: The icon of each kind of notice.
ICONS = {"bad": "stop", "good": "check", "info": "info", "warn": "alert"}


@register.simple_block_tag
def card(content: str, title: str, sub: str = "", css: str = "", **attributes: Any) -> SafeString:
    """A card under its title: ``{% card "Log" %}…{% endcard %}``.

    Args:
        sub: stands beside the title.
        css: classes besides.
        attributes: of the element; ``data_refresh=True`` for what is shown again when jobs change.
    """
    beside = format_html('<span class="sub">{}</span>', sub) if sub else ""
    return format_html(
        '<section{}><div class="card-header"><h2>{}</h2>{}</div>{}</section>',
        as_attributes({"class": f"card {css}".strip(), **attributes}), title, beside, content,
    )  # fmt: skip


@register.simple_block_tag
def fact(content: str, word: str, css: str = "") -> SafeString:
    """A line of a list of facts (``<dl class="facts">``)."""
    return format_html("<div><dt>{}</dt><dd{}>{}</dd></div>", word, as_attributes({"class": css}), content)


@register.simple_block_tag
def facts(content: str, title: str) -> SafeString:
    """A card that is a list of facts: ``{% facts _("About") %}{% fact … %}{% endfacts %}``."""
    return _card_of("dl", "facts", title, content)


@register.simple_block_tag
def notes(content: str, title: str) -> SafeString:
    """A card that is a list of notes: ``{% notes _("How it works") %}{% note … %}{% endnotes %}``."""
    return _card_of("ul", "notes", title, content)


def _card_of(element: str, css: str, title: str, content: str) -> SafeString:
    return card(format_html('<{} class="{}">{}</{}>', element, css, content, element), title)


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
def copyable(identifier: str, text: str, css: str = "") -> SafeString:
    """Something to copy, such as a command, with the button that does."""
    return format_html(
        '<div class="{3}"><pre class="shell" id="{0}" tabindex="0">{1}</pre>'
        '<button type="button" class="btn btn-sm" data-copy="{0}">{2}</button></div>',
        identifier, text, _("Copy"), f"copy {css}".strip(),
    )  # fmt: skip


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
