"""The images page: its state is the address bar's."""

import pytest
from django.test import Client

from images.models import Image
from tests.factories import GIB, ImageFactory, StoragePoolFactory
from tests.web.conftest import Filled
from tests.web.html import flat, tags_of, text_of

pytestmark = pytest.mark.sql

HTMX = {"HX-Request": "true"}


def names(page: str) -> list[str]:
    """The images of the table, in order."""
    links = [found["href"] or "" for tag, found in tags_of(page) if tag == "a" and found.get("class") == "name"]
    ids = [int(link.split("/")[2]) for link in links if link.startswith("/images/")]
    found = Image.objects.in_bulk(ids)
    return [found[pk].name for pk in ids]


@pytest.fixture
def three() -> list[Image]:
    pool = StoragePoolFactory.create()
    return [
        ImageFactory.create(pool=pool, name="a.qcow2", allocated_size=3 * GIB, virtual_size=9 * GIB, in_use=None),
        ImageFactory.create(
            pool=pool, name="b.raw", allocated_size=5 * GIB, virtual_size=6 * GIB, format="raw", declared_format="raw",
            reclaimable_bytes=GIB, orphan=True,
        ),
        ImageFactory.create(
            pool=pool, name="c.img", allocated_size=GIB, virtual_size=None, declared_format="", state="unreadable",
            in_use=True, chain_depth=4,
        ),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("in_use", "true", "yes"), ("in_use", "unknown", "unknown"), ("orphan", "false", "no"),
        ("min_reclaimable", "1", "any known"), ("min_reclaimable", "77", "77 bytes"), ("state", "ok", "ok"),
        ("format", "raw", "raw"),
    ],
)  # fmt: skip
def test_a_filter_shows_what_was_chosen(viewer: Client, three: list[Image], name: str, value: str, word: str) -> None:
    page = viewer.get("/images/", {name: value}).content.decode()
    options = page.partition(f' id="{name}"')[2].partition(">")[2].partition("</select>")[0]
    chosen = [found.get("value") for tag, found in tags_of(options) if tag == "option" and "selected" in found]
    assert chosen == [value]
    assert text_of(options).startswith("any ")
    assert word in text_of(options)


def test_htmx_gets_the_table_alone_and_history_the_page(viewer: Client, three: list[Image]) -> None:
    fragment = viewer.get("/images/?search=b", headers=HTMX).content.decode()
    assert "<html" not in fragment
    assert names(fragment) == ["b.raw"]
    restored = viewer.get("/images/", headers=HTMX | {"HX-History-Restore-Request": "true"}).content.decode()
    assert "<html" in restored


def test_links_of_the_table_keep_the_filters(viewer: Client, three: list[Image]) -> None:
    page = viewer.get("/images/?format=qcow2&ordering=name").content.decode()
    sorts = [found["href"] for tag, found in tags_of(page) if tag == "a" and "ordering=" in (found.get("href") or "")]
    assert "?format=qcow2&ordering=-name" in sorts
    assert all("format=qcow2" in (link or "") for link in sorts)


def test_pages_are_cut_at_fifty(viewer: Client) -> None:
    pool = StoragePoolFactory.create()
    for number in range(53):
        ImageFactory.create(pool=pool, name=f"i{number:02}.qcow2")
    page = viewer.get("/images/?ordering=name&page=2").content.decode()
    assert names(page) == ["i50.qcow2", "i51.qcow2", "i52.qcow2"]
    assert "51–53 of 53" in text_of(page)  # noqa: RUF001
    assert names(viewer.get("/images/?ordering=name&page=999").content.decode()) == names(page)


def test_what_is_not_known_is_never_zero(viewer: Client) -> None:
    ImageFactory.create(name="x.img", virtual_size=None, in_use=None, declared_format="", format="qcow2")
    text = text_of(viewer.get("/images/"))
    assert "not analyzed" in text
    assert "undeclared detected: qcow2" in text
    assert " 0 B" not in text


def test_analyzes_the_selected_images_and_says_what_was_refused(operator: Client, filled: Filled) -> None:
    refused = ImageFactory.create(pool=filled.pool, declared_format="")
    chosen = {"image": [filled.image.pk, refused.pk, 10**22, "x"], "next": "/images/?search=vm"}
    answer = operator.post("/images/analyze/", chosen, follow=True)
    assert answer.redirect_chain == [("/images/?search=vm", 302)]
    text = text_of(answer)
    assert "1 queued for analysis" in text
    assert "1 refused" in text
    assert filled.host.jobs.filter(kind="analyze").count() == 1


def test_never_sends_somebody_elsewhere(operator: Client, filled: Filled) -> None:
    answer = operator.post("/images/analyze/", {"next": "https://example.org/"})
    assert answer["Location"] == "/images/"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "renamed.raw"}, "renamed.raw"), ({"path": "/srv/elsewhere/b.raw"}, 'title="/srv/elsewhere/b.raw"'),
        ({"allocated_size": 7 * GIB}, ">7 GiB<"), ({"virtual_size": 8 * GIB}, ">8 GiB<"),
        ({"reclaimable_bytes": 2 * GIB}, ">2 GiB<"), ({"chain_depth": 12}, ">12<"),
        ({"overlays_count": 4}, "4 overlays"),
        ({"state": "unreadable"}, "unavailable"), ({"orphan": False}, ""), ({"in_use": True}, ">in use<"),
        ({"declared_format": ""}, "undeclared"), ({"declared_format": "vmdk"}, ">vmdk<"),
    ],
)  # fmt: skip
def test_a_line_that_was_shown_before_shows_what_changed_since(
    viewer: Client, three: list[Image], change: dict[str, object], said: str
) -> None:
    def line() -> str:
        page = flat(viewer.get("/images/"))
        return next(part for part in page.split("<tr>") if f'href="/images/{three[1].pk}/"' in part)

    before = line()
    Image.every.filter(pk=three[1].pk).update(**change)
    after = line()
    assert after != before
    assert said in after
    assert not said or said not in before
