"""Every page, for everybody who may see it, with and without rows."""

from collections.abc import Callable

import pytest
from django.template.loader import render_to_string
from django.test import Client

from tests.factories import HostFactory
from tests.web.conftest import ADMIN_PAGES, Filled
from tests.web.html import inline_code, labels_of, tags_of, text_of

pytestmark = pytest.mark.sql

LISTS = ["/", "/images/", "/orphans/", "/hosts/", "/guests/", "/jobs/", "/ledger/", "/password/"]


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_renders_with_rows_and_runs_no_inline_code(
    browser_of: Callable[[str], Client], filled: Filled, role: str
) -> None:
    client = browser_of(role)
    for address in filled.pages() + (ADMIN_PAGES if role == "admin" else []):
        answer = client.get(address)
        assert answer.status_code == 200, address
        page = answer.content.decode()
        assert inline_code(page) == [], address
        assert "script-src 'self'" in answer["Content-Security-Policy"], address
        assert "unsafe" not in answer["Content-Security-Policy"], address


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_renders_without_rows_and_says_how_to_fill_it(browser_of: Callable[[str], Client], role: str) -> None:
    client = browser_of(role)
    for address in LISTS + (ADMIN_PAGES if role == "admin" else []):
        answer = client.get(address)
        assert answer.status_code == 200, address
        assert inline_code(answer) == [], address
    assert "manage.py demo" in client.get("/images/").content.decode()
    assert "manage.py demo" in client.get("/").content.decode()


def test_every_id_stands_once_and_every_label_names_one(admin: Client, filled: Filled) -> None:
    for address in filled.pages() + ADMIN_PAGES:
        assert labels_of(admin.get(address)) == ([], []), address


def test_every_button_of_every_page_posts_a_csrf_token(admin: Client, filled: Filled) -> None:
    for address in filled.pages() + ADMIN_PAGES:
        tags = tags_of(admin.get(address))
        posting = [found for tag, found in tags if tag == "form" and found.get("method") == "post"]
        tokens = [found for tag, found in tags if found.get("name") == "csrfmiddlewaretoken"]
        assert len(tokens) == len(posting) >= 1, address


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_admin_pages_are_refused_with_a_sentence(browser_of: Callable[[str], Client], role: str) -> None:
    client = browser_of(role)
    for address in ADMIN_PAGES:
        answer = client.get(address)
        assert answer.status_code == 403, address
        assert "This needs the role admin" in answer.content.decode()
        assert f'href="{address}"' not in client.get("/").content.decode()


@pytest.mark.parametrize(
    "address", ["/images/999/", "/images/999/reclaim/", "/jobs/999/", "/pools/999/", "/nothing/", f"/images/{10**25}/"]
)
def test_what_is_not_there_has_a_page_that_says_so(viewer: Client, address: str) -> None:
    answer = viewer.get(address)
    assert answer.status_code == 404
    assert "Not found" in text_of(answer)


def test_a_host_that_was_never_scanned_has_no_zeros(viewer: Client) -> None:
    host = HostFactory.create(last_seen=None, capabilities={})
    host.pools.create(name="images", path="/srv/images", path_bytes=b"/srv/images", path_key="x")
    text = text_of(viewer.get("/hosts/"))
    assert "0 B" not in text
    assert "never seen" in text
    assert "missing" not in text


def test_a_page_and_its_fragment_are_cached_apart(viewer: Client) -> None:
    assert "HX-Request" in viewer.get("/images/")["Vary"]


def test_a_bad_request_does_not_blame_the_role() -> None:
    # As Django shows what it refuses before any view: without a sentence.
    assert "role" not in text_of(render_to_string("400.html"))
    assert "role" in text_of(render_to_string("403.html"))
