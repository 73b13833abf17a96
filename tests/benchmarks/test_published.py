"""The published figures are those of the articles, and are marked as such."""

import pytest

from benchmarks import profiles, published, results
from benchmarks.models import BenchmarkKind
from storage_admin.hosts.models import StoragePool

KIB, GIB = 1024, 1 << 30


def figures(kind: str, metric: str, number: int = 0) -> dict[str, float | None]:
    series = published.of_kind(kind)[number]
    return {row.name: row.median for row in series.results if row.metric == metric}


def test_cluster_sizes() -> None:
    assert figures("cluster_size", "create_seconds") == {"512": 101.889, "1K": 49.697, "64K": 19.085, "2M": 1.085}
    assert figures("cluster_size", "write_seconds") == {"512": 2.69157, "1K": 2.30576, "64K": 1.69912, "2M": 1.46358}
    assert figures("cluster_size", "write_rate") == {"512": 49.9e6, "1K": 58.2e6, "64K": 79e6, "2M": 91.7e6}


def test_the_published_rates_are_decimal_megabytes() -> None:
    seconds = figures("cluster_size", "write_seconds")
    for name, rate in figures("cluster_size", "write_rate").items():
        assert rate == pytest.approx((128 << 20) / seconds[name], rel=0.002)  # type: ignore[operator]


def test_preallocations() -> None:
    assert figures("preallocation", "create_seconds") == {
        "off": 0.312, "metadata": 0.507, "falloc": 0.015, "full": 39.402,
    }  # fmt: skip
    assert figures("preallocation", "physical_bytes") == {
        "off": 196 * KIB, "metadata": 844 * KIB, "falloc": 4 * GIB, "full": 4 * GIB,
    }  # fmt: skip
    assert figures("preallocation", "write_rate")["off"] == 729e3


@pytest.mark.django_db
def test_dd_wrote_blocks_of_4k_as_a_profile_here_does(pool: StoragePool) -> None:
    assert figures("dd", "write_rate") == {"write fdatasync 4K": pytest.approx(8_192_000_000 / 161.618)}
    for quick in (True, False):
        steps = profiles.build(pool, "dd", quick=quick).steps
        assert {"write fdatasync 4K", "read fdatasync 4K"} < {results.name_of(step["setting"]) for step in steps}


def test_both_results_of_bonnie() -> None:
    assert figures("bonnie", "seq_write_rate") == {"4G": 374_271 * KIB}
    assert figures("bonnie", "seeks") == {"4G": None}
    second = {
        metric: figures("bonnie", metric, 1)["4G"]
        for metric in ("putc_rate", "seq_write_rate", "rewrite_rate", "getc_rate", "seq_read_rate", "seeks", "putc_cpu")
    }
    assert second == {
        "putc_rate": 786 * KIB, "seq_write_rate": 17_094 * KIB, "rewrite_rate": 15_431 * KIB,
        "getc_rate": 4_662 * KIB, "seq_read_rate": 37_881 * KIB, "seeks": 548.4, "putc_cpu": 99,
    }  # fmt: skip
    assert figures("bonnie", "seq_create_rate", 1) == {"4G": 142}
    assert figures("bonnie", "seq_write_latency_seconds", 1)["4G"] == pytest.approx(15.704)
    assert figures("bonnie", "rand_delete_latency_seconds", 1)["4G"] == pytest.approx(787e-6)


@pytest.mark.django_db
@pytest.mark.parametrize("kind", ["cluster_size", "preallocation", "dd"])
def test_settings_are_named_as_those_of_runs_here(pool: StoragePool, kind: str) -> None:
    (series,) = published.of_kind(kind)
    steps = profiles.build(pool, kind, quick=False).steps
    assert {row.key for row in series.results} <= {results.key_of(step["setting"]) for step in steps}


def test_each_series_says_what_it_was_measured_on() -> None:
    every = [series for kind in BenchmarkKind.values for series in published.of_kind(kind)]
    assert len({series.key for series in every}) == len(every) == 5
    for series in every:
        assert series.title.startswith("Published")
        assert series.measured_on
        assert series.year
        assert series.results
    assert published.BOOT_FACTS.startswith("Published")
    assert "flush" in published.BOOT_FACTS
