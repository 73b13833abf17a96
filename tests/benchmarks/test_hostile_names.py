"""Names are chosen by strangers: on the pages of benchmarks they are text, and in a CSV no formula."""

import pytest

from benchmarks.models import Benchmark, Watch
from storage_admin.hosts.models import StoragePool
from tests.benchmarks.conftest import page_of
from tests.benchmarks.factories import BenchmarkFactory, SampleFactory
from tests.chance import night
from tests.web.html import inline_code, tags_of
from tests.web.test_hostile_names import PAYLOADS
from tests.working import client_as

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


def shape(page: str) -> list[tuple[str, frozenset[str]]]:
    return [(tag, frozenset(found)) for tag, found in tags_of(page)]


def named(name: str) -> None:
    StoragePool.objects.update(name=name[:200])
    drop = Benchmark.objects.exclude(regressions=[]).get()
    drop.regressions[0]["setting"] = {"cluster_size": name}
    Benchmark.objects.filter(pk=drop.pk).update(regressions=drop.regressions)
    Benchmark.objects.update(
        label=name, notes=[name], created_by=name[:150],
        environment={"kernel": name, "filesystem": name, "load": [1], "tools": {name: name}, "device": {"disk": name}},
    )  # fmt: skip
    for run in Benchmark.objects.all():
        run.samples.filter(setting__cluster_size="64K").update(setting={"cluster_size": name})
        run.samples.filter(value=None).update(note=name[:200])
    Watch.objects.update(problem=name, created_by=name[:150])


def test_names_are_text_on_every_page(filled: list[str]) -> None:
    admin = client_as(role="admin")
    named("plain")
    pages = [address for address in filled if not address.startswith("/pools/")]
    harmless = {address: shape(page_of(admin, address)) for address in pages}
    for payload in PAYLOADS if night() else PAYLOADS[::8]:
        named(payload)
        for address in pages:
            page = page_of(admin, address)
            assert inline_code(page) == [], (address, payload)
            assert shape(page) == harmless[address], (address, payload)


def test_a_setting_in_a_csv_is_no_formula(pool: StoragePool) -> None:
    run = BenchmarkFactory.create(pool=pool)
    SampleFactory.create(benchmark=run, setting={"size": "=cmd|' /C calc'!A0"})
    assert "'=cmd" in page_of(client_as(role="viewer"), f"/benchmarks/{run.pk}/results.csv")
