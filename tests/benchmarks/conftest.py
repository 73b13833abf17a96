"""Pools on this machine and pools that are only rows, and runs with the figures that a test wants."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import Benchmark, Sample
from benchmarks.steps import GIB
from storage_admin.hosts.models import StoragePool
from tests.api.conftest import client_of, operator, viewer  # noqa: F401 (clients for each role, here too)
from tests.factories import BenchmarkFactory, HostFactory, StoragePoolFactory
from tests.working import scan, this_machine

ALL_TOOLS = {"qemu-img": True, "fio": True, "bonnie++": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, which a pool is made of."""
    (tmp_path / "pool").mkdir()
    return tmp_path / "pool"


@pytest.fixture
def here(db: None, folder: Path) -> StoragePool:
    """A real, scanned pool on this machine."""
    host = this_machine(folder)
    scan(host)
    return StoragePool.objects.select_related("host").get(host=host)


@pytest.fixture
def pool(db: None) -> StoragePool:
    """A row: 100 GiB with 40 GiB free, on a host with 8 GiB of memory and all tools."""
    host = HostFactory.create(
        slug="mine", capabilities={"qemu_img": "7.2.22", "zstd": True, "tools": ALL_TOOLS, "memory_bytes": 8 * GIB}
    )
    return StoragePoolFactory.create(host=host, name="fast")


@pytest.fixture
def measured() -> Callable[..., Benchmark]:
    """``measured(pool, {"64K": [1, 2, 3]})``: a run of cluster sizes whose write rates these are."""

    def make(pool: StoragePool, rates: dict[str, list[float | None]], **columns: Any) -> Benchmark:
        run = BenchmarkFactory.create(pool=pool, **({"kind": "cluster_size"} | columns))
        for size, values in rates.items():
            for number, value in enumerate(values, 1):
                Sample.objects.create(
                    benchmark=run, setting={"cluster_size": size}, metric="write_rate", unit="B/s", value=value,
                    repetition=number,
                )  # fmt: skip
        return run

    return make
