"""What a browser with a strict content security policy would refuse to run, and other facts about a page."""

import re
from collections import Counter
from html.parser import HTMLParser
from typing import cast

from django.http import HttpResponse, HttpResponseBase

#: Attributes whose value a browser, or htmx, goes to.
FOLLOWED = {"href", "src", "action", "formaction", "data", "srcdoc", "xlink:href", "hx-get", "hx-post"}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._script: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "style" or "style" in found:
            self.inline.append(f"style on <{tag}>")
        self.inline += [f"{name} on <{tag}>" for name in found if name.startswith(("on", "hx-on"))]
        self.inline += [
            f"{name}={value}"
            for name, value in attrs
            if name in FOLLOWED and (value or "").strip().lower().startswith(("javascript:", "data:", "vbscript:"))
        ]
        self._script = found if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._script is not None and data.strip() and self._script.get("type") != "application/json":
            self.inline.append(f"script {data.strip()[:40]}")


#: A page as its source, or as the answer with it.
Page = str | HttpResponseBase


def inline_code(page: Page) -> list[str]:
    """Every inline script, style or handler of a page."""
    return _read(page).inline


def tags_of(page: Page) -> list[tuple[str, dict[str, str | None]]]:
    """Every tag that a browser would see, with its attributes."""
    return _read(page).tags


def labels_of(page: Page) -> tuple[list[str | None], list[str | None]]:
    """Every id that stands more than once, and every one that a label names and nothing has."""
    ids = Counter(found["id"] for _, found in tags_of(page) if "id" in found)
    named = {found["for"] for tag, found in tags_of(page) if tag == "label"}
    return [one for one, times in ids.items() if times > 1], [one for one in named if one not in ids]


def errors_of(page: Page) -> list[str]:
    """Names of the fields that a page tells to be wrong, in its order."""
    return [found["data-error-of"] or "" for _, found in tags_of(page) if "data-error-of" in found]


def text_of(page: Page) -> str:
    """The text of a page, spaces folded."""
    return " ".join(" ".join(_read(page).text).split())


def flat(page: Page) -> str:
    """A page's source without the white space that only lays it out: none beside a tag, one space elsewhere."""
    return re.sub(r"(?<=>) | (?=<)", "", " ".join(_source(page).split()))


def _source(page: Page) -> str:
    return page if isinstance(page, str) else cast("HttpResponse", page).content.decode()


def _read(page: Page) -> _Reader:
    reader = _Reader()
    reader.feed(_source(page))
    reader.close()
    return reader
