"""Pools on this machine and pools that are only rows, and runs with the figures that a test wants."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from benchmarks.models import Benchmark
from benchmarks.steps import GIB
from storage_admin.hosts.models import StoragePool
from tests.api.conftest import client_of, operator, viewer  # noqa: F401 (clients for each role, here too)
from tests.benchmarks.factories import BenchmarkFactory, SampleFactory, WatchFactory
from tests.factories import HostFactory, StoragePoolFactory
from tests.working import scanned_machine

Measured = Callable[..., Benchmark]
ALL_TOOLS = {"qemu-img": True, "fio": True, "bonnie++": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, which a pool is made of."""
    (tmp_path / "pool").mkdir()
    return tmp_path / "pool"


@pytest.fixture
def here(db: None, folder: Path) -> StoragePool:
    """A real, scanned pool on this machine."""
    host = scanned_machine(folder)
    return StoragePool.objects.select_related("host").get(host=host)


@pytest.fixture
def pool(db: None) -> StoragePool:
    """A row: 100 GiB with 40 GiB free, on a host with 8 GiB of memory and all tools."""
    host = HostFactory.create(
        slug="mine", capabilities={"qemu_img": "7.2.22", "zstd": True, "tools": ALL_TOOLS, "memory_bytes": 8 * GIB}
    )
    return StoragePoolFactory.create(host=host, name="fast")


@pytest.fixture
def measured() -> Measured:
    """``measured(pool, {"64K": [1, 2, 3]})``: a run of cluster sizes whose write rates these are."""

    def make(pool: StoragePool, rates: dict[str, list[float | None]], **columns: Any) -> Benchmark:
        run = BenchmarkFactory.create(pool=pool, **({"kind": "cluster_size"} | columns))
        for size, values in rates.items():
            for number, value in enumerate(values, 1):
                SampleFactory.create(benchmark=run, setting={"cluster_size": size}, value=value, repetition=number)
        return run

    return make


def page_of(client: Client, address: str, status: int = 200) -> str:
    answer = client.get(address)
    assert answer.status_code == status, f"{address}: {answer.status_code}"
    return answer.content.decode()


@pytest.fixture
def filled(pool: StoragePool, measured: Measured) -> list[str]:
    """Addresses of pages with rows on them: a history with a drop, pasted lines, a watch."""
    measured(pool, {"64K": [100e6, 101e6], "2M": [150e6, 151e6]})
    drop = {
        "metric": "write_rate", "unit": "B/s", "setting": {"cluster_size": "64K"}, "value": 50e6, "usual": 100e6,
        "usual_worst": 90e6, "ratio": 2.0, "runs": 4,
    }  # fmt: skip
    environment = {
        "kernel": "6.1.0", "machine": "x86_64", "memory_bytes": 8 * GIB, "filesystem": "ext4", "load": [0.5, 0.1, 0.0],
        "tools": {"qemu-img": "7.2.22", "fio": None}, "device": {"disk": "vda", "model": None, "rotational": True},
    }  # fmt: skip
    run = measured(
        pool, {"64K": [50e6, 51e6], "2M": [150e6, 151e6]}, regressions=[drop], environment=environment,
        environment_after={"load": [1.5]}, notes=["Caches could not be dropped."], caches="not dropped",
    )  # fmt: skip
    pasted = BenchmarkFactory.create(pool=None, source="pasted", kind="bonnie", label="old-box")
    SampleFactory.create(benchmark=pasted, setting={"size": "4G"}, metric="seq_read_rate", value=None, note="too quick")
    WatchFactory.create(pool=pool, problem="The pool was full.")
    return [
        "/benchmarks/", f"/benchmarks/?pool={pool.pk}&kind=cluster_size", "/benchmarks/start/",
        f"/benchmarks/start/?pool={pool.pk}&kind=fio",
        f"/benchmarks/{run.pk}/", f"/benchmarks/{pasted.pk}/", f"/benchmarks/compare/?ids={run.pk},{pasted.pk}",
        "/benchmarks/compare/", f"/benchmarks/pools/{pool.pk}/", f"/jobs/{run.job_id}/", f"/pools/{pool.pk}/",
    ]  # fmt: skip
