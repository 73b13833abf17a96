"""docs/lists.md says of every list what it is filtered by, and where its CSV is: held against the pages."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from django.test import Client
from django.urls import reverse

from storage_admin.accounts import saved_views
from tests.benchmarks.factories import BenchmarkFactory, SampleFactory
from tests.factories import PolicyRunFactory, WebhookFactory
from tests.web.html import tags_of
from tests.web.test_role_table import routes

DOCS = Path(__file__).parents[2] / "docs" / "lists.md"


@dataclass(frozen=True)
class Row:
    page: str
    filters: frozenset[str]
    files: tuple[str, ...]
    admins: bool


def table() -> list[Row]:
    rows = []
    for line in DOCS.read_text().splitlines():
        if line.startswith("| `/"):
            page, filters, files = (cell.strip() for cell in line.strip("|").split("|"))
            named = re.match("`([^`]*)`", filters)
            rows.append(
                Row(
                    page.split("`")[1],
                    frozenset(named[1].split()) if named else frozenset(),
                    tuple(re.findall("`([^`]*)`", files)),
                    "admins of all hosts" in page,
                )
            )
    return rows


def test_every_list_that_keeps_views_stands_there_with_its_filters() -> None:
    rows = {row.page: row for row in table()}
    kept = saved_views.pages().values()
    assert {reverse(page.name) for page in kept} == set(list(rows)[: len(kept)])
    for page in kept:
        row = rows[reverse(page.name)]
        assert row.filters | {"ordering"} == page.keys, page.name
        assert row.admins == page.everywhere, page.name
        assert row.files, page.name


def test_every_file_stands_there_once() -> None:
    files = [file for row in table() for file in row.files]
    assert sorted(files) == sorted("/" + re.sub("<[^>]*>", "{id}", at) for _, at in routes() if at.endswith(".csv"))


@pytest.mark.parametrize("row", table(), ids=lambda row: row.page)
def test_a_page_leads_to_its_files_and_to_no_other(admin: Client, row: Row) -> None:
    run, benchmark = PolicyRunFactory.create(), BenchmarkFactory.create()
    SampleFactory.create(benchmark=benchmark)
    ids = {
        "policies": (run.policy_id, run.pk),
        "benchmarks": (benchmark.pk,),
        "webhooks": (WebhookFactory.create().pk,),
    }
    mine = ids.get(row.page.split("/")[1], ())

    def address(template: str) -> str:
        return template.replace("{id}", "{}").format(*mine)

    page = admin.get(address(row.page) + (f"?ids={benchmark.pk}" if "compare" in row.page else "")).content.decode()
    links = {(found.get("href") or "").partition("?")[0] for tag, found in tags_of(page) if tag == "a"}
    assert {link for link in links if link.endswith(".csv")} == set(map(address, row.files))
