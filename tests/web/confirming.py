"""Confirming a plan as a browser does: what is posted is what the page had shown."""

from collections.abc import Mapping
from typing import Any

from django.test import Client

from tests.web.html import Page, tags_of


def hidden(page: Page) -> dict[str, str]:
    return {
        found["name"] or "": found.get("value") or ""
        for tag, found in tags_of(page)
        if tag == "input" and found.get("type") == "hidden" and found.get("name") not in {None, "next"}
    }


def planned(page: Page) -> dict[str, str]:
    """What Confirm sends beside the form's own fields; empty where a page has no such button."""
    return {name: value for name, value in hidden(page).items() if name in {"key", "planned"}}


def confirm(client: Client, address: str, form: Mapping[str, Any]) -> Any:
    """Has a form's plan shown, and confirms it; the answer to that."""
    shown = planned(client.post(address, {**form, "show": "1"}).content.decode())
    return client.post(address, {**form, **shown, **({"confirmed": "1"} if "confirmed" in form else {})})
