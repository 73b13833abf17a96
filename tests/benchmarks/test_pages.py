"""The pages of benchmarks: who may do what, what they show, and that names are text."""

import csv
import html
import io
import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from benchmarks.models import Benchmark
from benchmarks.steps import MIB
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job
from tests.benchmarks.conftest import Measured, page_of
from tests.benchmarks.factories import BenchmarkFactory, SampleFactory
from tests.factories import JobFactory, StoragePoolFactory
from tests.web.confirming import confirm, planned
from tests.web.html import inline_code, tags_of, text_of
from tests.working import at_most_queries, client_as

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

LINE = (
    "1.96,1.96,old-box,1,1387339401,4G,,,,374271,39,214541,19,,,392015,17,+++++,+++,,,,,,,,,,,,,,,,,,,167ms,89125us,,"
    "52047us,4766us,,,,,,"
)
START = "/benchmarks/start/"


@pytest.fixture
def viewer() -> Client:
    return client_as(role="viewer")


@pytest.fixture
def operator() -> Client:
    return client_as(role="operator", username="the-operator")


def said(client: Client, address: str) -> str:
    return text_of(page_of(client, address))


def chart_of(page: str, chart: str) -> dict[str, Any]:
    """The configuration that the browser draws."""
    found = re.search(rf'<script id="{chart}" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found, f"{chart} is not on the page"
    config: dict[str, Any] = json.loads(found[1])
    return config


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_every_page_opens_runs_no_inline_code_and_names_what_it_labels(filled: list[str], role: str) -> None:
    client = client_as(role=role)
    for address in [*filled, *(["/benchmarks/paste/"] if role != "viewer" else [])]:
        page = page_of(client, address)
        tags = tags_of(page)
        ids = [found["id"] for _, found in tags if "id" in found]
        assert inline_code(page) == [], address
        assert len(ids) == len(set(ids)), address
        assert {found["for"] for tag, found in tags if tag == "label"} <= set(ids), address
        posting = [found for tag, found in tags if tag == "form" and found.get("method") == "post"]
        assert len([1 for _, found in tags if found.get("name") == "csrfmiddlewaretoken"]) == len(posting), address


def test_the_cost_follows_the_options_and_is_said_before_the_start(operator: Client, pool: StoragePool) -> None:
    small = f"{START}?pool={pool.pk}&kind=preallocation&size_mib=32&repetitions=2"
    text = said(operator, small)
    # Four images are filled with 32 MiB, one of them is written full with 128 MiB first, all of it twice.
    for words in ("Writes about 512 MiB", "4, each 2 times", "waits for them to finish"):
        assert words in text, words
    assert "Writes about 1 GiB" in said(operator, small.replace("repetitions=2", "repetitions=4"))
    assert "both slow each other down" in said(operator, f"{small}&alongside=true")
    fragment = operator.get(small, headers={"hx-request": "true"}).content.decode()
    assert "<html" not in fragment
    assert "Start Preallocation" in text_of(fragment)


def test_what_the_form_says_is_started_once(operator: Client, pool: StoragePool) -> None:
    form: dict[str, Any] = {
        "pool": pool.pk, "kind": "fio", "quick": "false", "repetitions": "2", "size_mib": "64", "seconds": "3",
        "alongside": "true",
    }  # fmt: skip
    form |= planned(operator.get(START, form).content.decode())
    first, second = operator.post(START, form), operator.post(START, form)
    run = Benchmark.objects.get()
    assert first["Location"] == second["Location"] == f"/benchmarks/{run.pk}/"
    assert (run.kind, run.quick, run.pool, run.created_by) == ("fio", False, pool, "the-operator")
    wanted = {"repetitions": 2, "size_bytes": 64 * MIB, "seconds": 3, "alongside": True}
    assert wanted.items() <= run.options.items()


def test_what_cannot_be_used_is_said_and_starts_nothing(operator: Client, pool: StoragePool) -> None:
    for field, value in (("repetitions", "99"), ("repetitions", "many"), ("size_mib", "0"), ("size_mib", "9" * 30)):
        form = {"pool": str(pool.pk), "kind": "dd", field: value}
        assert operator.post(START, form).status_code == 409, value
        page = operator.get(START, form)
        assert page.status_code == 200
        assert "No plan." in text_of(page.content.decode()), value
    assert operator.post(START, {"pool": 999, "kind": "dd"}).status_code == 404
    assert "Pool not found, or no access" in said(operator, f"{START}?pool=999")
    assert not Job.objects.exists()


def test_a_missing_tool_is_named_with_its_package_and_refused(operator: Client, pool: StoragePool) -> None:
    pool.host.capabilities["tools"] = {"qemu-img": True, "fio": False, "bonnie++": False}
    pool.host.save()
    text = said(operator, f"{START}?pool={pool.pk}&kind=fio")
    for words in ("needs bonnie++", "(tool_missing)", "Install fio there"):
        assert words in text, words
    confirm(operator, START, {"pool": pool.pk, "kind": "fio"})
    assert not Job.objects.exists()


def test_a_run_shows_its_figures_as_chart_table_csv_and_advice(
    viewer: Client, pool: StoragePool, measured: Measured
) -> None:
    run = measured(pool, {"64K": [100e6, 110e6, 105e6], "2M": [200e6, 210e6, 205e6]})
    page = page_of(viewer, f"/benchmarks/{run.pk}/")
    config = chart_of(page, "chart-write_rate")
    mine, reference = config["data"]["datasets"]
    assert dict(zip(config["data"]["labels"], mine["data"], strict=True))["2M"] == 205e6
    assert mine["spread"][config["data"]["labels"].index("64K")] == [100e6, 110e6]
    assert (mine["published"], reference["published"]) == (False, True)
    text = text_of(page)
    for words in ("2M writes 2.0 times faster than 64K", "196 MiB/s", "one measurement each"):
        assert words in text, words

    answer = viewer.get(f"/benchmarks/{run.pk}/results.csv")
    rows = list(csv.DictReader(io.StringIO(answer.content.decode())))
    assert answer["Content-Type"].startswith("text/csv")
    assert [(row["setting"], float(row["median"])) for row in rows] == [("64K", 105e6), ("2M", 205e6)]


def test_figures_that_a_published_one_would_dwarf_are_drawn_on_a_logarithmic_axis(
    viewer: Client, pool: StoragePool, measured: Measured
) -> None:
    slow, fast = measured(pool, {"64K": [5e6]}), measured(pool, {"64K": [500e6]})
    page = page_of(viewer, f"/benchmarks/{slow.pk}/")
    assert chart_of(page, "chart-write_rate")["options"]["scales"]["y"] == {"type": "logarithmic"}
    assert "Write rate, logarithmic" in text_of(page)
    for address in (f"/benchmarks/{slow.pk}/?published=0", f"/benchmarks/{fast.pk}/"):
        assert "logarithmic" not in page_of(viewer, address)


@pytest.mark.parametrize(("rate", "logarithmic"), [(30e6, False), (200e6, False), (800e6, True), (5e9, True)])
def test_published_bars_are_never_too_low_to_be_read(
    viewer: Client, pool: StoragePool, measured: Measured, rate: float, logarithmic: bool
) -> None:
    run = measured(pool, {"64K": [rate]})
    page = page_of(viewer, f"/benchmarks/{run.pk}/")
    assert (chart_of(page, "chart-write_rate")["options"]["scales"]["y"].get("type") == "logarithmic") == logarithmic


def test_a_run_tells_what_it_was_measured_on_and_what_dropped(viewer: Client, filled: list[str]) -> None:
    run = Benchmark.objects.exclude(regressions=[]).get()
    text = said(viewer, f"/benchmarks/{run.pk}/")
    for words in (
        "0.50 in the last minute", "1.50 in the last minute", "ext4", "vda, rotating", "qemu-img 7.2.22", "not dropped",
        "Caches could not be dropped.", "Slower than usual", "2.00 \N{MULTIPLICATION SIGN}",
    ):  # fmt: skip
        assert words in text, words
    assert "1 regression" in said(viewer, "/benchmarks/")


def test_an_environment_of_nonsense_breaks_no_page(viewer: Client, pool: StoragePool) -> None:
    odd = {"kernel": 3, "load": ["x"], "tools": [1], "device": "vda", "memory_bytes": True, "cpus": "<b>"}
    run = BenchmarkFactory.create(pool=pool, environment=odd, environment_after={"load": {}})
    assert "Unknown." in said(viewer, f"/benchmarks/{run.pk}/")


def test_what_was_too_quick_to_measure_has_no_chart_of_published_figures_alone(
    viewer: Client, pool: StoragePool
) -> None:
    run = BenchmarkFactory.create(pool=pool, kind="bonnie")
    for metric, value in (("seq_read_rate", None), ("seq_write_rate", 5e8), ("seq_read_cpu", 4.0)):
        SampleFactory.create(benchmark=run, setting={"size": "4G"}, metric=metric, value=value, note="too quick")
    page = page_of(viewer, f"/benchmarks/{run.pk}/")
    assert chart_of(page, "chart-seq_write_rate")
    assert "chart-seq_read_rate" not in page
    assert "Sequential read, processor" in text_of(page)


def test_figures_come_while_it_works_and_the_page_rests_afterwards(viewer: Client, pool: StoragePool) -> None:
    job = JobFactory.create(target=pool, kind="benchmark", state="running", progress=12.0, stage="cluster_size")
    run = BenchmarkFactory.create(pool=pool, kind="cluster_size", job=job, finished=None)
    page = page_of(viewer, f"/benchmarks/{run.pk}/")
    assert "No results yet: they appear as each step finishes." in text_of(page)
    asks = [str(found["hx-get"]) for _, found in tags_of(page) if "hx-get" in found]
    asks = [address for address in asks if address.startswith("/benchmarks/")]
    assert len(asks) == 2
    for address in asks:
        assert viewer.get(address, headers={"hx-request": "true"}).status_code == 204
    SampleFactory.create(benchmark=run, setting={"cluster_size": "64K"}, value=5.0)
    fragment = next(address for address in asks if "figures" in address)
    answer = viewer.get(fragment, headers={"hx-request": "true"}).content.decode()
    assert chart_of(answer, "chart-write_rate")["data"]["datasets"][0]["data"][2] == 5.0
    assert 'id="aside" hx-swap-oob="true"' in answer

    Job.objects.filter(pk=job.pk).update(state="failed", finished=timezone.now(), error_code="cancelled")
    page = page_of(viewer, f"/benchmarks/{run.pk}/")
    assert "hx-trigger" not in page.split('id="status"')[1]
    assert "figures are partial and give no recommendation" in text_of(page)


def test_runs_are_compared_in_the_order_asked_for(viewer: Client, pool: StoragePool, measured: Measured) -> None:
    other = StoragePoolFactory.create(host=pool.host, name="slow")
    first = measured(pool, {"64K": [100.0]}, caches="dropped")
    second = measured(other, {"64K": [50.0], "4K": [10.0]}, caches="not dropped")
    page = page_of(viewer, f"/benchmarks/compare/?ids={second.pk}&ids={first.pk}&published=0")
    config = chart_of(page, "chart-write_rate")
    slow, fast = config["data"]["datasets"]
    assert config["data"]["labels"] == ["4K", "64K"]
    assert (slow["data"], fast["data"]) == ([10.0, 50.0], [None, 100.0])
    assert "slow" in slow["label"]
    assert "fast" in fast["label"]
    assert "The runs handled caches differently" in text_of(page)
    SampleFactory.create(benchmark=first, setting={"cluster_size": "64K"}, metric="create_seconds", unit="s", value=1.0)
    page = page_of(viewer, f"/benchmarks/compare/?ids={second.pk},{first.pk}&published=0")
    (alone,) = chart_of(page, "chart-create_seconds")["data"]["datasets"]
    assert alone["colour"] == fast["colour"] != slow["colour"]


def test_a_comparison_is_a_csv_with_whose_each_figure_is(viewer: Client, pool: StoragePool, measured: Measured) -> None:
    other = StoragePoolFactory.create(name="=slow")
    first, second = measured(pool, {"64K": [1.5, 2.5]}, caches="direct"), measured(other, {"2M": [0.5]})
    page = page_of(viewer, f"/benchmarks/compare/?ids={second.pk},{first.pk}&published=0")
    (address,) = re.findall(r'href="(/benchmarks/compare\.csv[^"]*)"', page)
    answer = viewer.get(html.unescape(address))
    assert "attachment" in answer["Content-Disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.content.decode())))
    assert [(row["run"], row["pool"], row["setting"], row["median"], row["min"], row["max"]) for row in rows] == [
        (str(second.pk), "'=slow", "2M", "0.5", "0.5", "0.5"), (str(first.pk), "fast", "64K", "2.0", "1.5", "2.5"),
    ]  # fmt: skip
    assert (rows[1]["host"], rows[1]["caches"], rows[1]["unit"]) == ("Host mine", "direct", "B/s")
    with_published = viewer.get(f"/benchmarks/compare.csv?ids={first.pk}").content.decode()
    assert '"published","one Samsung SSD' in with_published
    assert viewer.get("/benchmarks/compare.csv?ids=x").status_code == 400
    assert viewer.get("/benchmarks/compare.csv?ids=9").status_code == 404


@pytest.mark.parametrize(
    ("ids", "status", "words"),
    [
        ("x", 400, "Enter run numbers, separated by commas"),
        ("1;2", 400, "Enter run numbers, separated by commas"),
        ("9" * 30, 400, "Enter run numbers, separated by commas"),
        ("1,2,3,4,5,6,7,8,9,10,11,12,13", 400, "At most 12 runs"),
        ("9", 404, "Not found"),
    ],
)
def test_what_cannot_be_compared_is_said(viewer: Client, ids: str, status: int, words: str) -> None:
    assert words in text_of(page_of(viewer, f"/benchmarks/compare/?ids={ids}", status))


def test_one_profile_is_followed_over_time(viewer: Client, pool: StoragePool, measured: Measured) -> None:
    for days, rate in ((3, 100.0), (2, 110.0), (1, 40.0)):
        measured(pool, {"64K": [rate]}, created=timezone.now() - timedelta(days=days))
    measured(pool, {"64K": [7.0]}, profile_key="other sizes")
    address = f"/benchmarks/pools/{pool.pk}/"
    assert "Only one run of these steps so far" in said(viewer, address)
    page = page_of(viewer, f"{address}?profile=the%20same%20steps")
    (line,) = chart_of(page, "history-write_rate")["data"]["datasets"]
    assert [point["y"] for point in line["data"]] == [100.0, 110.0, 40.0]
    assert "Cluster size, quick 3 runs" in text_of(page)
    assert text_of(page).count("too few earlier runs") == 3
    measured(pool, {"64K": [105.0]})
    page = text_of(page_of(viewer, f"{address}?profile=the%20same%20steps"))
    assert (page.count("too few earlier runs"), page.count("no regression")) == (3, 1)


def test_pasted_lines_become_a_run_and_broken_ones_stay_in_the_form(operator: Client) -> None:
    answer = operator.post("/benchmarks/paste/", {"text": "nonsense <b>"})
    assert answer.status_code == 400
    assert "Nothing was saved." in text_of(answer.content.decode())
    assert "nonsense &lt;b&gt;</textarea>" in answer.content.decode()
    assert not Benchmark.objects.exists()

    run = Benchmark.objects.get(pk=int(operator.post("/benchmarks/paste/", {"text": LINE})["Location"].split("/")[2]))
    text = said(operator, f"/benchmarks/{run.pk}/")
    for words in ("bonnie++ of old-box", "too quick to measure", "Pasted: the measured machine is unknown"):
        assert words in text, words


def test_a_list_of_many_runs_costs_few_queries(viewer: Client, pool: StoragePool) -> None:
    for _ in range(30):
        BenchmarkFactory.create(pool=pool)
    with at_most_queries(16):
        page_of(viewer, "/benchmarks/")
