"""A pool that got slower is noticed; one that is only as restless as ever is not."""

import math
import random
from typing import Any

import pytest

from benchmarks import regression, results
from benchmarks.regression import drop_of
from benchmarks.results import Result
from storage_admin.events.models import Alert
from storage_admin.hosts.models import StoragePool
from tests.benchmarks.conftest import Measured
from tests.benchmarks.factories import BenchmarkFactory
from tests.factories import StoragePoolFactory

pytestmark = pytest.mark.sql

MB = 1e6


def of(value: float, spread: float = 0.0, metric: str = "write_rate", unit: str = "B/s") -> Result:
    return Result(metric, unit, {"a": "b"}, value, value - spread, value + spread, 3)


def test_less_than_usual_is_a_drop_and_more_is_none() -> None:
    before = [of(value) for value in (100, 102, 98, 101)]
    drop = drop_of(of(60), before)
    assert drop is not None
    assert (drop.value, drop.usual, drop.ratio, drop.runs) == (60, 100.5, 1.675, 4)
    assert drop_of(of(95), before) is None
    assert drop_of(of(200), before) is None


def test_of_times_and_latencies_more_is_a_drop() -> None:
    before = [of(value, metric="create_seconds", unit="s") for value in (1.0, 1.02, 0.98)]
    assert drop_of(of(2.0, metric="create_seconds", unit="s"), before) is not None
    assert drop_of(of(0.2, metric="create_seconds", unit="s"), before) is None


def test_where_runs_differ_much_much_is_usual() -> None:
    restless = [of(value) for value in (100, 160, 80, 140, 70)]
    assert drop_of(of(60), restless) is None
    assert drop_of(of(60), [of(value) for value in (100, 101, 99, 100, 102)]) is not None


def test_where_a_run_spreads_within_itself_its_spread_is_usual() -> None:
    assert drop_of(of(75), [of(value, spread=40) for value in (100, 101, 99)]) is None
    assert drop_of(of(75), [of(value, spread=2) for value in (100, 101, 99)]) is not None


def test_one_disturbed_run_before_does_not_hide_a_drop() -> None:
    assert drop_of(of(60), [of(value) for value in (100, 10, 101, 99, 100)]) is not None


def test_too_few_runs_and_sizes_and_shares_tell_nothing() -> None:
    assert drop_of(of(1), [of(100), of(100)]) is None
    for metric, unit in (("physical_bytes", "B"), ("seq_write_cpu", "%"), ("seeks_latency_seconds", "s")):
        assert drop_of(of(1000, metric=metric, unit=unit), [of(1, metric=metric, unit=unit)] * 5) is None


SERIES, LENGTH = 200, 20
#: Standard deviations between runs and within one, the most figures that may be marked, and the least part of all
#: drops by 30 % that have to be found: on a pool that is quiet, one with some guests at work, and one that is never
#: the same.
NOISE = [(0.02, 0.02, 0.001, 0.999), (0.05, 0.05, 0.015, 0.88), (0.15, 0.10, 0.015, 0.1)]


def restless(chance: random.Random, level: float, between: float, within: float) -> Result:
    """A run of three repetitions."""
    base = level * math.exp(chance.gauss(0, between))
    values = sorted(base * math.exp(chance.gauss(0, within)) for _ in range(3))
    return Result("write_rate", "B/s", {"a": "b"}, values[1], values[0], values[2], 3)


@pytest.mark.parametrize(("between", "within", "most", "least"), NOISE)
def test_of_many_series_of_noise_few_runs_are_marked_and_a_real_drop_is_found(
    between: float, within: float, most: float, least: float
) -> None:
    chance = random.Random(10)
    marked = found = judged = 0
    early = [0, 0]
    for _ in range(SERIES):
        runs = [restless(chance, 100, between, within) for _ in range(LENGTH)]
        for number in range(regression.FEWEST, LENGTH):
            before = runs[max(0, number - regression.LOOKED_BACK) : number]
            wrong = drop_of(runs[number], before) is not None
            judged, marked = judged + 1, marked + wrong
            if number < regression.ENOUGH:
                early = [early[0] + 1, early[1] + wrong]
            found += drop_of(restless(chance, 70, between, within), before) is not None
    print(f"{marked / judged:.4f} marked, with few runs before {early[1] / early[0]:.4f}; {found / judged:.3f} found")
    assert marked / judged <= most
    assert early[1] / early[0] <= 0.03
    assert found / judged >= least


@pytest.mark.django_db
def test_a_run_is_measured_against_earlier_ones_of_the_same_steps_on_the_same_pool(
    pool: StoragePool, measured: Measured
) -> None:
    for _ in range(3):
        measured(pool, {"64K": [100 * MB, 102 * MB, 98 * MB], "4K": [50 * MB] * 3})
    measured(StoragePoolFactory.create(), {"64K": [1]})
    measured(pool, {"64K": [1]}, profile_key="other steps")
    measured(pool, {"64K": [1]}, finished=None)
    now = measured(pool, {"64K": [70 * MB, 71 * MB, 69 * MB], "4K": [49 * MB] * 3})
    (drop,) = regression.found_in(now)
    assert (drop["metric"], drop["setting"], drop["runs"]) == ("write_rate", {"cluster_size": "64K"}, 3)
    assert drop["ratio"] == pytest.approx(100 / 70, rel=0.01)
    assert results.of(now)[0].median == drop["value"]


@pytest.mark.django_db
def test_a_first_run_and_a_pasted_one_are_no_regression(pool: StoragePool, measured: Measured) -> None:
    more: dict[str, Any] = {"pool": None, "job": None, "host": None, "source": "pasted", "profile_key": ""}
    assert regression.found_in(measured(pool, {"64K": [1]})) == []
    assert regression.found_in(BenchmarkFactory.create(**more)) == []


def test_a_drop_is_an_alert_until_a_run_is_as_usual_again(pool: StoragePool, measured: Measured) -> None:
    def ended(rate: float) -> None:
        run = measured(pool, {"1M": [rate]})
        run.regressions = regression.found_in(run)
        regression.tell_regressions(run)

    for rate in (100 * MB, 101 * MB, 99 * MB, 100 * MB, 60 * MB):
        ended(rate)
    alert = Alert.objects.get(closed=None)
    assert (alert.kind, alert.target_id, alert.host) == ("benchmark_regression", pool.pk, pool.host.slug)
    assert alert.title == f"{pool} is slower than before (cluster size)"
    assert "usually 95.4 MiB/s" in alert.detail
    ended(99 * MB)
    assert not Alert.objects.filter(closed=None).exists()
