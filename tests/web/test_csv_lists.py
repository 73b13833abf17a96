"""Lists as CSV: the page's rows, true numbers, and nothing that a spreadsheet runs."""

import csv
import io
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest
from django.test import Client
from hypothesis import given
from hypothesis import strategies as some

from images.models import Image
from storage_admin import csv_export
from storage_admin.csv_export import PART, cell, csv_answer, in_parts, line, lines
from storage_admin.jobs.models import Job
from tests.benchmarks.factories import BenchmarkFactory
from tests.factories import (
    GIB,
    AlertFactory,
    GuestFactory,
    HostFactory,
    ImageFactory,
    ImageUseFactory,
    JobFactory,
    StoragePoolFactory,
)
from tests.web.conftest import Filled
from tests.working import at_most_queries

pytestmark = pytest.mark.sql

FILES = {
    "images": "/images/export.csv",
    "jobs": "/jobs/export.csv",
    "hosts": "/hosts/export.csv",
    "pools": "/pools/export.csv",
    "guests": "/guests/export.csv",
    "benchmarks": "/benchmarks/export.csv",
    "alerts": "/alerts/export.csv",
}


def rows_of(client: Client, address: str) -> list[dict[str, str]]:
    answer = client.get(address)
    assert answer.status_code == 200
    assert answer["Content-Type"] == "text/csv; charset=utf-8"
    return list(csv.DictReader(io.StringIO(answer.getvalue().decode(), newline="")))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), (0, "0"), (-5, "-5"), (1.5, "1.5"), (True, "yes"), (False, "no"), (2**62, str(2**62)),
        (datetime(2026, 11, 22, 6, 0, tzinfo=UTC), "2026-11-22T06:00:00Z"),
        (datetime(2026, 11, 22, 6, 0, tzinfo=timezone(timedelta(hours=2))), "2026-11-22T04:00:00Z"),
        (["a", "b"], "a, b"), ([], ""), (["=1"], "'=1"), ({"a": "ü"}, '{"a": "ü"}'),
        ("a\nb", "a\\nb"), ("a\x1b[31m", "a\\x1b[31m"), ("\u202egpj", "\\u202egpj"), ("\udc80", "\\udc80"), ("-", "'-"),
    ],
)  # fmt: skip
def test_a_cell_says_what_is_known_and_nothing_else(value: object, text: str) -> None:
    assert cell(value) == text


def test_a_text_stands_in_quotes_and_a_number_never() -> None:
    values = [7, -5, 1.5, True, None, "", "7", "a, b", 'say "x"', datetime(2026, 11, 22, 6, 0, tzinfo=UTC), ["a"], []]
    assert line(values) == '7,-5,1.5,yes,,,"7","a, b","say ""x""",2026-11-22T06:00:00Z,"a",\r\n'


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("x;=cmd|'/c calc'!A0", "x;'=cmd|'/c calc'!A0"), ("x; =1;@y", "x;' =1;'@y"), ('x;"=1', "x;'\"=1"),
        ("x;;+1", "x;;'+1"), ("x;\uff1d1", "x;'\uff1d1"), ("x;y=1", "x;y=1"), ("a;b; c", "a;b; c"),
    ],
)  # fmt: skip
def test_what_stands_behind_a_semicolon_is_no_formula_either(name: str, told: str) -> None:
    assert cell(name) == told


@given(some.lists(some.text("=+-@;,\"' x1\t\r\n\uff1d"), min_size=1, max_size=4))
def test_no_cell_is_a_formula_whichever_sign_separates(texts: list[str]) -> None:
    text = line([1, *texts]) + line([2, *texts])
    assert [row[1:] for row in csv.reader(io.StringIO(text, newline=""))] == [[*map(cell, texts)]] * 2
    for separator in ",;\t":
        found = [told for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) for told in row]
        assert [told for told in found if told.lstrip(" \r\n")[:1] in {*"=+-@\uff1d"}] == []


@pytest.mark.parametrize("name", FILES)
def test_the_name_of_a_file_says_what_and_when(viewer: Client, filled: Filled, name: str) -> None:
    told = viewer.get(FILES[name])["Content-Disposition"]
    assert told.startswith(f'attachment; filename="{name}-20')
    assert told.endswith('.csv"')


@pytest.mark.parametrize("name", FILES)
def test_an_empty_list_has_its_heading(viewer: Client, name: str) -> None:
    answer = viewer.get(f"{FILES[name]}?search=zzz").getvalue().decode()
    assert answer.startswith("id,")
    assert answer.count("\r\n") == 1


def test_jobs_are_exported_as_they_are_filtered(viewer: Client, filled: Filled) -> None:
    rows = rows_of(viewer, FILES["jobs"])
    assert [int(row["id"]) for row in rows] == list(Job.objects.order_by("-id").values_list("pk", flat=True))
    done = next(row for row in rows if row["state"] == "succeeded")
    assert (done["before_bytes"], done["freed_bytes"], done["held_bytes"]) == (str(4 * GIB), "0", str(4 * GIB))
    running = next(row for row in rows if row["state"] == "running")
    assert (running["freed_bytes"], running["seconds"], running["finished"]) == ("", "", "")
    assert [row["state"] for row in rows_of(viewer, f"{FILES['jobs']}?state=failed")] == ["failed"]
    assert {row["state"] for row in rows_of(viewer, f"{FILES['jobs']}?state=active")} == {"running"}


def test_pools_are_those_of_the_hosts_that_the_page_shows(viewer: Client) -> None:
    one, other = HostFactory.create(name="one"), HostFactory.create(name="other")
    for host in (one, other):
        StoragePoolFactory.create(host=host, reclaimable_bytes=None, last_scanned=None)
    row, *more = rows_of(viewer, f"{FILES['pools']}?search=other")
    assert more == []
    assert row["host"] == "other"
    assert (row["used_bytes"], row["reclaimable_bytes"], row["images"]) == (str(60 * GIB), "", "")


def test_guests_tell_their_disks(viewer: Client) -> None:
    use = ImageUseFactory.create(disk__target="vda", disk__cache="", disk__guest__name="=mail")
    GuestFactory.create(name="empty")
    row, last = sorted(rows_of(viewer, FILES["guests"]), key=lambda row: row["name"])
    assert (row["name"], row["disk_paths"], row["cache"]) == ("'=mail", use.disk.path, "not set")
    assert (last["disks"], last["disk_paths"], last["io_priority"], last["io_limits"]) == ("0", "", "", "")


def test_benchmarks_are_exported_as_they_are_filtered(viewer: Client) -> None:
    run = BenchmarkFactory.create(kind="fio")
    BenchmarkFactory.create(kind="dd", pool=run.pool)
    assert [row["id"] for row in rows_of(viewer, f"{FILES['benchmarks']}?kind=fio")] == [str(run.pk)]


def test_a_file_has_the_rows_of_all_pages_in_their_order(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_export, "PART", 7)
    pool = StoragePoolFactory.create()
    for number in range(60):
        ImageFactory.create(pool=pool, name=f"i{number % 13}.qcow2", path=f"/srv/{number}", allocated_size=number % 5)
    rows = rows_of(viewer, f"{FILES['images']}?ordering=-allocated_size")
    wanted = Image.objects.order_by("-allocated_size", "-id").values_list("pk", flat=True)
    assert [int(row["id"]) for row in rows] == list(wanted)


@pytest.mark.parametrize("name", FILES)
def test_a_file_costs_no_query_for_each_row(viewer: Client, name: str) -> None:
    pool = StoragePoolFactory.create()
    for _ in range(20):
        image = ImageFactory.create(pool=pool)
        ImageUseFactory.create(image=image)
        BenchmarkFactory.create(pool=StoragePoolFactory.create(), job=JobFactory.create(target=image))
        AlertFactory.create()
    with at_most_queries(9):
        assert len(rows_of(viewer, FILES[name])) >= 20


def test_a_row_that_is_deleted_meanwhile_is_left_out(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_export, "PART", 2)
    jobs = [JobFactory.create() for _ in range(5)]
    parts = in_parts(Job.objects.order_by("id"))
    assert [job.pk for job in next(parts)] == [jobs[0].pk, jobs[1].pk]
    jobs[2].delete()
    assert [job.pk for part in parts for job in part] == [jobs[3].pk, jobs[4].pk]


def test_any_rows_are_sent_as_they_come_and_few_are_in_memory() -> None:
    def rows() -> Iterator[dict[str, int]]:
        for number in range(50 * PART):
            yield {"number": number}

    tracemalloc.start()
    sent = sum(text.count("\r\n") for text in lines({"number": lambda row: row["number"]}, rows()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sent == 50 * PART + 1
    assert peak < 4 << 20
    answer = csv_answer("x", {"n": lambda row: row}, [1, 2])
    assert answer.getvalue() == b"n\r\n1\r\n2\r\n"


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("images", "format=docx"), ("images", "in_use=maybe"), ("orphans", "age=x"), ("jobs", "state=good"),
        ("guests", "kind=x"), ("hosts", "ordering=x"), ("alerts", "kind=x"), ("ledger", "from=soon"),
        ("benchmarks", "kind=x"),
    ],
)  # fmt: skip
def test_a_file_is_refused_where_the_page_says_what_it_ignores(viewer: Client, page: str, wrong: str) -> None:
    answer = viewer.get(f"/{page}/export.csv?{wrong}")
    assert (answer.status_code, wrong.partition("=")[0] in answer.content.decode()) == (400, True)
    assert viewer.get(f"/{page}/?{wrong}").context["ignored"] == [wrong.partition("=")[0]]


@pytest.mark.parametrize(
    "asked",
    [
        "format=raw",
        "format=subvol",
        "in_use=null",
        "orphan=unknown",
        "state=ok",
        "search=DECL",
        "max_chain_depth=1&in_use=false",
    ],
)
def test_page_file_and_rest_find_the_same_images(viewer: Client, asked: str) -> None:
    pool = StoragePoolFactory.create()
    ImageFactory.create(pool=pool, name="declared", format="qcow2", declared_format="raw", in_use=None, orphan=None)
    ImageFactory.create(pool=pool, name="found", format="raw", declared_format="")
    ImageFactory.create(pool=pool, name="other", format="raw", declared_format="qcow2", in_use=None, orphan=None)
    ImageFactory.create(pool=pool, name="folder", format="subvol", declared_format="subvol", state="missing")
    written = {line["id"] for line in rows_of(viewer, f"/images/export.csv?{asked}")}
    shown = {str(image.pk) for image in viewer.get(f"/images/?{asked}").context["rows"]}
    told = {str(row["id"]) for row in viewer.get(f"/api/v1/images/?{asked}").json()["results"]}
    assert written == shown == told
    assert 0 < len(told) < 4
