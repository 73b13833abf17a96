"""Median and spread, and what is said to be better than what: only what can be told apart."""

import csv
import io
import random
import re
from typing import Any

import pytest

from benchmarks import advice, figures, results
from benchmarks.models import Sample
from benchmarks.results import Result
from storage_admin.hosts.models import StoragePool
from tests.benchmarks.conftest import Measured
from tests.benchmarks.factories import BenchmarkFactory, SampleFactory

MB = 1_000_000.0


def row(setting: dict[str, Any], *values: float, metric: str = "write_rate", unit: str = "B/s") -> Result:
    """Two values are the least and the largest of three."""
    told = (*values, sum(values) / 2) if len(values) == 2 else values
    samples = [Sample(setting=setting, metric=metric, unit=unit, value=value) for value in told]
    return results.summed(samples)[0]


def sized(size: str, *values: float, **more: str) -> Result:
    return row({"cluster_size": size}, *(value * MB for value in values), **more)


def sentence(kind: str, rows: list[Result]) -> str:
    return " ".join(one.sentence for one in advice.of(kind, rows, "fast"))


@pytest.mark.django_db
def test_results_are_median_and_spread_in_the_order_of_the_steps(pool: StoragePool, measured: Measured) -> None:
    run = measured(pool, {"64K": [30, 10, 20], "4K": [5, None, 7], "512": [None, None, None]})
    found = results.of(run)
    assert [(one.name, one.median, one.min, one.max, one.repetitions) for one in found] == [
        ("64K", 20, 10, 30, 3),
        ("4K", 6, 5, 7, 2),
        ("512", None, None, None, 0),
    ]


def test_a_setting_is_the_same_in_whatever_order_it_names_its_parts() -> None:
    samples = [
        Sample(setting=setting, metric="m", unit="s", value=1.0)
        for setting in ({"rw": "read", "depth": 4}, {"depth": 4, "rw": "read"})
    ]
    (found,) = results.summed(samples)
    assert (found.repetitions, found.name) == (2, "read depth 4")


def test_the_table_has_every_figure_in_full_and_no_formula() -> None:
    rows = [row({"size": "=1+1"}, 1 / 3), Result("seeks", "1/s", {"size": "4G"}, None, None, None, 0, "too quick")]
    told = list(csv.reader(io.StringIO(results.table(rows))))
    assert told[0] == ["setting", "metric", "unit", "median", "min", "max", "repetitions", "note"]
    assert told[1][0] == "'=1+1"
    assert float(told[1][3]) == 1 / 3
    assert told[2] == ["4G", "seeks", "1/s", "", "", "", "0", "too quick"]


def test_what_is_faster_is_said_with_its_numbers() -> None:
    told = sentence(
        "cluster_size", [sized("4K", 100, 101, 99), sized("64K", 200, 210, 205), sized("2M", 290, 300, 310)]
    )
    assert told.startswith("On fast, 2M writes 1.5 times faster than 64K (286 MiB/s vs. 196 MiB/s)")
    assert "4K is the slowest (95.4 MiB/s)" in told


def test_the_usual_one_is_advised_where_it_is_as_good_as_the_best() -> None:
    told = sentence(
        "cluster_size", [sized("4K", 100, 101, 99), sized("64K", 140, 139, 141), sized("2M", 138, 150, 139)]
    )
    assert told.startswith("On fast, 64K writes 1.4 times faster than 4K")
    assert "compared with 2M, there is no measurable difference" in told


def test_spreads_that_overlap_are_no_difference() -> None:
    told = advice.of("cluster_size", [sized("4K", 100, 140, 120), sized("64K", 110, 150, 130)], "fast")
    assert [(one.measurable, "no measurable difference" in one.sentence) for one in told] == [(False, True)]
    assert told[0].sentence.endswith(
        "between the fastest, 64K (median 124 MiB/s), and the slowest, 4K (114 MiB/s), and their ranges overlap."
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"cluster_size": "128K", "extended_l2": "on"}, "128K extended L2"),
        ({"layout": "chain", "depth": 5, "block": "4K"}, "chain 4K depth 5"),
        ({"layout": "raw", "guests": 4}, "raw guests 4"),
        ({"rw": "randrw", "block": "4K", "depth": 16, "direction": "read"}, "random mixed 4K depth 16 read"),
        ({"mode": "write", "sync": "direct", "block": "1M"}, "write direct 1M"),
    ],
)
def test_a_setting_is_named_the_same_by_every_database(pool: StoragePool, setting: dict[str, Any], name: str) -> None:
    run = BenchmarkFactory.create(pool=pool)
    for told in (setting, dict(reversed(setting.items()))):
        SampleFactory.create(benchmark=run, setting=told)
    (row,) = results.of(run)
    assert (row.name, row.repetitions) == (name, 2)


@pytest.mark.parametrize("repetitions", [1, 2])
def test_one_or_two_repetitions_show_nothing(repetitions: int) -> None:
    rows = [Result("write_rate", "B/s", {"cluster_size": size}, value, value, value, repetitions)
            for size, value in (("4K", 1.0), ("64K", 500.0))]  # fmt: skip
    (told,) = advice.of("cluster_size", rows, "fast")
    assert not told.measurable
    assert "fewer than 3 repetitions" in told.sentence
    assert "Run the benchmark with more repetitions" in told.sentence


def test_of_three_repetitions_the_gap_is_wider_than_either_spread_as_a_ratio() -> None:
    near = advice.of("cluster_size", [sized("4K", 100, 105, 110), sized("64K", 112, 115, 120)], "fast")
    far = advice.of("cluster_size", [sized("4K", 100, 105, 110), sized("64K", 122, 125, 133)], "fast")
    assert [one.measurable for one in near + far] == [False, True]
    five = advice.of("cluster_size", [sized("4K", *range(100, 105)), sized("64K", *range(106, 111))], "fast")
    assert [one.measurable for one in five] == [True]


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize(("low", "high"), [((9084, 13327), (49188, 90700)), ((60, 100), (170, 260))])
def test_what_is_several_times_as_fast_differs_however_far_the_faster_one_spreads(
    low: tuple[float, float], high: tuple[float, float], factor: float
) -> None:
    slow, fast = (row({"a": values[0]}, *(value * factor for value in values)) for values in (low, high))
    assert high[1] - high[0] > high[0] - low[1], "it is told apart by ratios alone"
    assert figures.differ(slow, fast)
    assert figures.differ(fast, slow)


def test_nothing_at_all_differs_from_something_and_what_fell_to_nothing_once_does_not() -> None:
    nothing, something, unsteady = (row({"a": name}, *values) for name, values in
                                    (("b", (0, 0, 0)), ("c", (5, 6, 7)), ("d", (0, 0, 4))))  # fmt: skip
    assert not figures.differ(nothing, something), "of 0 there is no ratio"
    assert not figures.differ(unsteady, something)


def test_ranges_that_do_not_overlap_are_not_said_to() -> None:
    (told,) = advice.of("cluster_size", [sized("4K", 100, 105, 110), sized("64K", 112, 115, 120)], "fast")
    assert "overlap" not in told.sentence
    assert told.sentence.endswith("too close for 3 repetitions: run the benchmark with 5 or more.")
    (told,) = advice.of("fio", [at(1, 100, 0.05), at(32, 115, 0.05)], "fast")
    assert not told.measurable
    assert "overlap" not in told.sentence


@pytest.mark.parametrize(("repetitions", "most"), [(3, 0.03), (5, 0.03)])
def test_noise_alone_is_seldom_called_a_difference(repetitions: int, most: float) -> None:
    chance = random.Random(5)
    trials = 1000
    wrong = 0
    for _ in range(trials):
        rows = [sized(size, *(chance.gauss(100, 3) for _ in range(repetitions))) for size in ("512", "4K", "64K", "2M")]
        wrong += any(one.measurable for one in advice.of("cluster_size", rows, "fast"))
    assert wrong / trials <= most, wrong


DEPTHS = {1: 8120, 4: 15000, 16: 25300, 64: 25400}


def at(depth: int, value: float, spread: float = 0.01, **more: Any) -> Result:
    kind: dict[str, Any] = {"metric": "rand_read_iops", "unit": "1/s"} | more
    return row({"rw": "randread", "block": "4K", "depth": depth}, value * (1 - spread), value * (1 + spread), **kind)


def test_up_to_which_depth_it_pays_is_said_and_what_it_costs() -> None:
    slow: dict[str, Any] = {"metric": "latency_p99_seconds", "unit": "s"}
    rows = [at(depth, value) for depth, value in DEPTHS.items()]
    rows += [at(depth, 0.0002 * depth, **slow) for depth in DEPTHS]
    (told,) = advice.of("fio", rows, "fast")
    assert told.topic == "Queue depth, random reads"
    assert told.sentence == (
        "On fast, random reads of 4K are 3.1 times faster at depth 16 than at depth 1 (25,300 a second vs. 8,120 a "
        "second), and 99 of 100 requests complete within 3.2 ms instead of 200 µs; compared with depth 64, there is no "
        "measurable difference."
    )


def test_depths_that_gain_nothing_or_lose_are_said() -> None:
    (even,) = advice.of("fio", [at(depth, 8000 + depth, 0.05) for depth in DEPTHS], "fast")
    assert not even.measurable
    assert even.sentence == (
        "On fast, there is no measurable difference between depths 1, 4, 16 and 64 for random reads of 4K: "
        "medians of 8,001 a second to 8,064 a second, and their ranges overlap."
    )
    (falling,) = advice.of("fio", [at(1, 1000), at(4, 4000), at(64, 2000)], "fast")
    assert falling.sentence.endswith("at depth 4 than at depth 1 (4,000 a second vs. 1,000 a second); 64 is slower "
                                     "(2,000 a second).")  # fmt: skip
    (backwards,) = advice.of("fio", [at(1, 4000), at(64, 1000)], "fast")
    assert backwards.sentence == (
        "On fast, random reads of 4K reach 4,000 a second at depth 1; 64 is slower (1,000 a second)."
    )
    (two,) = advice.of("fio", [at(1, 100), at(32, 400, 0.9)], "fast")
    assert not two.measurable


def test_a_depth_that_is_several_times_as_fast_is_advised_and_none_is_called_enough() -> None:
    for metric, doing in (("rand_write_iops", "writes"), ("rand_read_iops", "reads")):
        kind = {"metric": metric, "unit": "1/s"}
        rows = [row({"rw": doing, "block": "4K", "depth": depth}, *values, **kind)
                for depth, values in ((1, (9084, 12000, 13327)), (32, (49188, 60000, 90700)))]  # fmt: skip
        (told,) = advice.of("fio", rows, "fast")
        assert told.measurable
        assert f"random {doing} of 4K are 5.0 times faster at depth 32 than at depth 1" in told.sentence


def test_a_depth_between_that_varies_is_not_advised_in_place_of_one_that_is_faster_for_sure() -> None:
    (told,) = advice.of("fio", [at(1, 100), at(4, 250, 0.65), at(64, 400)], "fast")
    assert "are 4.0 times faster at depth 64 than at depth 1" in told.sentence
    assert "compared with depth 4, there is no measurable difference" in told.sentence


@pytest.mark.parametrize("seed", range(20))
def test_no_sentence_says_what_its_figures_do_not(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        depths = sorted(chance.sample((1, 2, 4, 8, 16, 32, 64), chance.randint(2, 5)))
        level, noise, many = [chance.uniform(50, 5000) for _ in depths], chance.uniform(0, 0.9), chance.choice((3, 5))
        rows = [row({"rw": "randread", "block": "4K", "depth": depth},
                    *(value * chance.uniform(1 - noise, 1 + noise) for _ in range(many)),
                    metric="rand_read_iops", unit="1/s")
                for depth, value in zip(depths, level, strict=True)]  # fmt: skip
        (told,) = advice.of("fio", rows, "fast")
        apart = [(one, other) for one in rows for other in rows if figures.differ(one, other)]
        assert told.measurable == bool(apart)
        assert "enough" not in told.sentence
        assert ("overlap" in told.sentence) == all(figures.overlap(one, other) for one in rows for other in rows)
        if found := re.search(r"at depth (\d+) than at depth (\d+)", told.sentence):
            high, low = (next(one for one in rows if one.setting["depth"] == int(depth)) for depth in found.groups())
            assert figures.differ(low, high)
            assert figures.value_of(low) < figures.value_of(high)


def test_both_directions_of_a_mixture_and_each_kind_have_a_sentence_of_their_own() -> None:
    rows = [at(1, 100), at(4, 300), *(at(depth, 100 * depth, metric="rand_write_iops") for depth in (1, 4))]
    assert [one.topic for one in advice.of("fio", rows, "fast")] == [
        "Queue depth, random reads", "Queue depth, random writes",
    ]  # fmt: skip
    assert advice.of("fio", rows[:1], "fast") == []


def test_ways_of_dd_are_named_in_words() -> None:
    def wrote(sync: str, *values: float) -> Result:
        return row({"mode": "write", "sync": sync, "block": "1M"}, *(value * MB for value in values))

    told = sentence("dd", [wrote("direct", 100, 101), wrote("fdatasync", 200, 202)])
    assert told.startswith("On fast, cached I/O 1M writes 2.0 times faster than direct I/O 1M (")


def test_what_the_faster_one_costs_is_said_or_that_it_costs_nothing() -> None:
    rates = [sized("64K", 100, 101), sized("2M", 200, 201)]
    created = {"metric": "create_seconds", "unit": "s"}
    slow = [row({"cluster_size": "64K"}, 0.1, 0.11, **created), row({"cluster_size": "2M"}, 0.5, 0.6, **created)]
    assert "it takes 550 ms instead of 105 ms to create" in sentence("cluster_size", rates + slow)
    assert "creat" not in sentence("cluster_size", rates + slow[:1])
    sizes = {"metric": "physical_bytes", "unit": "B"}
    small, large = (row({"cluster_size": "64K"}, 1 << 20, **sizes), row({"cluster_size": "2M"}, 1 << 30, **sizes))
    told = sentence("cluster_size", [*rates, small, large])
    assert "takes 1 GiB instead of 1 MiB when new" in told.replace("1.00", "1")
    quick = [row({"cluster_size": size}, 0.1, 0.11, **created) for size in ("64K", "2M")]
    even = [row({"cluster_size": size}, 200 << 10, **sizes) for size in ("64K", "2M")]
    assert sentence("cluster_size", rates + quick + even).endswith("; creating it takes no more time or space.")


def test_formats_have_a_sentence_for_layouts_chains_and_compression() -> None:
    def reads(layout: str, *values: float, metric: str = "rand_read_iops", **more: int) -> Result:
        return row({"layout": layout} | more, *values, metric=metric, unit="1/s")

    rows = [
        reads("raw", 2000, 2001), reads("qcow2", 1000, 1001), reads("raw+qcow2", 1000, 999.5),
        reads("chain", 500, 501, depth=5),
        *(reads(name, value, value + 1, metric="seq_read_rate") for name, value in (("qcow2", 900), ("zlib", 300))),
    ]  # fmt: skip
    told = {one.topic: one.sentence for one in advice.of("formats", rows, "fast")}
    assert told["Layout, random reads"].startswith(
        "On fast, raw does random reads 2.0 times faster than qcow2 (2,000 a"
    )
    assert "2.0 times faster than chain depth 5" in told["Chain depth"]
    assert "qcow2 reads 3.0 times faster than zlib" in told["Compression at read time"]


def test_each_block_size_has_its_own_sentence() -> None:
    rows = [
        row({"layout": layout, "block": block}, value, value + 1, metric="rand_read_iops", unit="1/s")
        for block, factor in (("4K", 10), ("64K", 1))
        for layout, value in (("raw", 200 * factor), ("qcow2", 100 * factor))
    ]
    told = [one.topic for one in advice.of("formats", rows, "fast") if "reads" in one.topic]
    assert told == ["Layout, random reads, 4K", "Layout, random reads, 64K"]


def test_nothing_is_said_without_figures() -> None:
    assert advice.of("cluster_size", [], "fast") == []
    assert advice.of("bonnie", [row({"size": "4G"}, 1, 2, metric="seq_write_rate")], "fast") == []


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0000854, "s", "85.4 µs"), (0.0123, "s", "12.3 ms"), (1.46358, "s", "1.46 s"), (184.23, "s", "184 s"),
        (8123.4, "1/s", "8,123 a second"), (0.5, "1/s", "0.5 a second"), (1.5 * 2**30, "B", "1.5 GiB"),
        (39, "%", "39 %"),
    ],
)  # fmt: skip
def test_figures_are_written_with_their_units(value: float, unit: str, text: str) -> None:
    assert figures.written(value, unit).replace("1.50", "1.5") == text
