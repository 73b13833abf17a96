"""The ledger's page: sums, charts with their tables, lines; what is held stands apart; the same as CSV."""

import csv
import io
import json
import re

import pytest
from django.test import Client

from storage_admin.hosts import registration
from tests.factories import GIB, HostFactory, ImageFactory
from tests.ledger.rows import NOON, freed, held
from tests.web.html import inline_code, text_of
from tests.working import ADMIN, at_most_queries

pytestmark = pytest.mark.sql


def page(client: Client, query: str = "") -> str:
    answer = client.get(f"/ledger/{query}")
    assert answer.status_code == 200
    return answer.content.decode()


def test_what_is_free_and_what_is_held_are_told_apart(viewer: Client) -> None:
    done = freed(5 * GIB, 2 * GIB, ImageFactory.create(name="done.qcow2"))
    waits = held(7 * GIB, GIB, ImageFactory.create(name="waits.qcow2"))
    text = text_of(page(viewer))
    assert "Held by undo copies 7 GiB in 1 undo copy; once expired, the jobs will have freed 6 GiB" in text
    assert "Net space freed 3 GiB by 1 job" in text
    assert f"{done.pk} · Reclaim" in text
    assert f"{waits.pk} · Reclaim" not in text
    apart = text_of(page(viewer, "?held=true"))
    assert "Net space freed 3 GiB by 1 job" in apart
    assert f"{waits.pk} · Reclaim" in apart
    assert f"{done.pk} · Reclaim" not in apart


def test_what_was_taken_is_shown_as_such(viewer: Client) -> None:
    freed(0, 3 * GIB, kind="convert")
    held(GIB, 3 * GIB)
    text = text_of(page(viewer))
    assert "Consumed 3 GiB" in text
    assert "the jobs will have consumed 2 GiB" in text


def test_an_empty_ledger_says_how_a_line_gets_there(viewer: Client) -> None:
    assert "No space freed yet" in text_of(page(viewer))
    assert "No undo copies" in text_of(page(viewer, "?held=true"))
    freed(2, 1, created_by="ada")
    assert "No entries match your filters" in text_of(page(viewer, "?by=nobody"))


def test_charts_are_drawn_from_data_and_stand_as_tables(viewer: Client) -> None:
    for number in range(2):
        freed((5 + number) * GIB, GIB, at=NOON)
    html = page(viewer)
    assert inline_code(html) == []
    drawn = [json.loads(found) for found in re.findall(r'type="application/json">(.*?)</script>', html)]
    assert drawn[0]["data"]["labels"] == ["2026-11"]
    assert drawn[0]["data"]["datasets"][0]["data"] == [9 * GIB]
    assert "By host as a table" in text_of(html)


def test_filters_stand_in_the_address_and_what_makes_no_sense_is_named(viewer: Client) -> None:
    mine = freed(5, 1, ImageFactory.create(name="mine.qcow2"), NOON, created_by="policy Nights")
    freed(5, 1, ImageFactory.create(name="other.qcow2"), NOON)
    html = page(viewer, f"?policy=Nights&image={mine.target_id}&from=2026-11-01&to=2026-11-30&kind=reclaim")
    assert "mine.qcow2" in html
    assert "other.qcow2" not in html
    for kept in ('value="Nights"', 'name="from" type="date" value="2026-11-01"', 'value="reclaim" selected'):
        assert kept in html
    assert "Ignored invalid filters: from, host" in text_of(page(viewer, "?host=99&from=soon"))


def test_htmx_gets_the_sums_and_lines_alone(viewer: Client) -> None:
    freed(5, 1)
    part = viewer.get("/ledger/", headers={"HX-Request": "true"}).content.decode()
    assert "<html" not in part
    assert "Held by undo copies" in part


def test_names_that_strangers_chose_are_only_names(viewer: Client) -> None:
    name = "<script>alert(1)</script>.qcow2"
    freed(5, 1, ImageFactory.create(name=name, pool__name=name, pool__host__name=name), created_by=name)
    freed(5, 1)
    assert inline_code(page(viewer)) == []
    assert name not in page(viewer)


def test_a_host_that_was_removed_is_named_without_a_link(viewer: Client) -> None:
    host = HostFactory.create(kind="ssh", name="Old one")
    job = freed(5, 1, ImageFactory.create(pool__host=host))
    registration.remove_host(ADMIN, host)
    html = page(viewer)
    assert "Old one, removed" in text_of(html)
    assert f"/jobs/{job.pk}/" not in html


def test_the_csv_has_every_line_as_it_is_filtered(viewer: Client) -> None:
    done = freed(5 * GIB, 2 * GIB, created_by="=cmd()")
    waits = held(7 * GIB, GIB)
    answer = viewer.get("/ledger/export.csv?ordering=id").getvalue().decode()
    first, second = csv.DictReader(io.StringIO(answer, newline=""))
    assert (first["job"], first["freed_bytes"], first["by"]) == (str(done.pk), str(3 * GIB), "'=cmd()")
    assert (second["job"], second["freed_bytes"], second["held_bytes"]) == (str(waits.pk), "0", str(7 * GIB))
    assert second["freed_at"] == ""
    only = viewer.get("/ledger/export.csv?held=true").getvalue().decode()
    assert only.count("\r\n") == 2


@pytest.mark.parametrize("query", ["", "?held=true", "?ordering=-freed_bytes&kind=reclaim&by=admin"])
def test_the_page_stays_within_its_budget(viewer: Client, query: str) -> None:
    for _ in range(30):
        freed(5, 1)
        held()
    with at_most_queries(18):
        page(viewer, query)
