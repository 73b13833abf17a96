"""Outputs of each tool and version against the figures in them, and against what is no such output."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parsers import bonnie, dd, fio
from benchmarks.parsers.reading import read
from benchmarks.parsers.readings import Reading, UnreadableError

DATA = Path(__file__).parent.parent / "data" / "benchmarks"
KIB = 1024


def text_of(name: str) -> str:
    return (DATA / name).read_text()


def by_name(readings: "list[Reading] | tuple[Reading, ...]") -> dict[str, Reading]:
    return {reading.metric: reading for reading in readings}


def only(name: str) -> dict[str, Reading]:
    (run,) = bonnie.parse(text_of(name))
    return by_name(run.readings)


def test_the_published_line_of_1_96_says_what_the_article_says() -> None:
    found = only("bonnie-1.96.csv")
    assert (found["seq_write_rate"].value, found["seq_write_cpu"].value) == (374_271 * KIB, 39)
    assert found["rewrite_rate"].value == 214_541 * KIB
    assert (found["seq_read_rate"].value, found["seq_read_cpu"].value) == (392_015 * KIB, 17)
    assert (found["seeks"].value, found["seeks"].note) == (None, "too quick to measure")
    assert (found["seeks_cpu"].value, found["seeks_cpu"].note) == (None, "too quick to measure")
    assert found["seq_write_latency_seconds"].value == pytest.approx(0.167)
    assert found["rewrite_latency_seconds"].value == pytest.approx(0.089125)
    assert found["seq_read_latency_seconds"].value == pytest.approx(0.052047)
    assert found["seeks_latency_seconds"].value == pytest.approx(0.004766)
    assert "putc_rate" not in found
    assert "getc_latency_seconds" not in found


def test_1_97_has_characters_in_the_eighth_field_and_small_files() -> None:
    found = only("bonnie-1.97.csv")
    assert (found["putc_rate"].value, found["putc_cpu"].value) == (905 * KIB, 99)
    assert found["getc_rate"].value == 2311 * KIB
    assert (found["seeks"].value, found["seeks"].unit) == (312.5, "1/s")
    assert (found["seq_create_rate"].value, found["seq_create_rate"].unit) == (8213, "1/s")
    assert found["seq_stat_rate"].value is None
    assert found["rand_delete_rate"].value == 12_207
    assert found["rand_delete_latency_seconds"].value == pytest.approx(701e-6)


def test_1_98_has_the_asked_seeks_before_its_figures() -> None:
    found = only("bonnie-1.98.csv")
    assert found["seq_write_rate"].value == 512_345 * KIB
    assert found["seeks"].value == 1834
    assert found["rewrite_latency_seconds"].value == 2
    assert 8192 * KIB not in [reading.value for reading in found.values()]


def test_2_00_writes_format_1_98() -> None:
    (run,) = bonnie.parse(text_of("bonnie-2.00a.csv"))
    assert (run.format_version, run.version, run.size) == ("1.98", "2.00a", "3G")
    found = by_name(run.readings)
    assert found["seq_write_rate"].value == 745_887 * KIB
    assert found["seq_read_rate"].value == 5_010_269 * KIB
    assert (found["seeks"].value, found["seeks_cpu"].value) == (7962, 32)
    assert found["seeks_latency_seconds"].value == pytest.approx(0.032102)


def test_two_tests_with_the_heading_that_lacks_two_columns_are_two_runs() -> None:
    runs = bonnie.parse(text_of("bonnie-2.00a-two-tests.csv"))
    assert [by_name(run.readings)["putc_rate"].value for run in runs] == [1571 * KIB, 1227 * KIB]
    assert [by_name(run.readings)["getc_rate"].value for run in runs] == [2133 * KIB, 3041 * KIB]
    assert [run.files for run in runs] == ["1", "1"]
    assert by_name(runs[0].readings)["rand_delete_latency_seconds"].value == pytest.approx(0.004413)


def test_what_was_too_quick_is_no_zero() -> None:
    found = only("bonnie-2.00a-too-quick.csv")
    rates = [reading for name, reading in found.items() if name.endswith("_rate") or name == "seeks"]
    assert {(reading.value, reading.note) for reading in rates} == {(None, "too quick to measure")}
    assert found["seq_write_latency_seconds"].value == pytest.approx(0.004086)


@pytest.mark.parametrize("name", ["bonnie-2.00a.csv", "bonnie-1.98.csv"])
def test_bonnies_own_reader_gives_the_same_throughput(name: str) -> None:
    # It prints K/s with up to four digits, then MiB and GiB: 728m stands for 745887 K/s.
    shown = subprocess.run(["bon_csv2txt"], input=text_of(name), capture_output=True, text=True, check=True).stdout
    fields = text_of(name).strip().split(",")
    line = next(line for line in shown.splitlines() if line.startswith(fields[2]))
    printed = [_kib(word) for word in re.findall(r"(?<![:\w])(\d+(?:\.\d+)?[kmg]?)(?!\S)", line)]
    found = only(name)
    told = [found[metric].value for metric in ("seq_write_rate", "rewrite_rate", "seq_read_rate")]
    for value in told:
        assert value is not None
        assert any(number == pytest.approx(value / KIB, rel=0.06) for number in printed), (value, line)


def _kib(word: str) -> float:
    factor = {"k": 1, "m": KIB, "g": KIB**2}.get(word[-1])
    return float(word[:-1]) * factor if factor else float(word)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no result line"),
        ("\n\n", "no result line"),
        ("TEST,4G,1,2,3", "“TEST”, which is not a supported format version"),
        ("1.03e,1", "not a supported format version"),
        (text_of("bonnie-1.96.csv").strip()[:-3], "45 fields, but format 1.96 has 48"),
        (text_of("bonnie-1.96.csv").replace("374271", "37x271"), "“37x271” is not a valid value for put_block"),
        (text_of("bonnie-1.96.csv").replace("374271", "-1"), "“-1” is not a valid value"),
        (text_of("bonnie-1.96.csv").replace("374271", "nan"), "“nan” is not a valid value"),
        (text_of("bonnie-1.96.csv").replace("167ms", "167m"), "“167m” is not a valid latency"),
        (text_of("bonnie-1.98.csv").replace("1.98", "1.97", 1), "50 fields, but format 1.97 has 48"),
        (text_of("bonnie-1.96.csv") + "rubbish", "Line 2 begins with “rubbish”"),
    ],
)
def test_a_broken_line_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UnreadableError, match=re.escape(sentence)):
        bonnie.parse(text)


def test_dd_is_read_from_bytes_and_seconds() -> None:
    found = by_name(dd.parse(text_of("dd-9.1-write.txt"), "write"))
    assert found["write_rate"].value == pytest.approx(67_108_864 / 0.390652)
    assert found["write_seconds"].value == pytest.approx(0.390652)
    assert by_name(dd.parse(text_of("dd-9.1-read.txt"), "read"))["read_rate"].unit == "B/s"


@pytest.mark.parametrize(
    ("line", "copied", "seconds"),
    [
        ("512 bytes copied, 5.1e-05 s, 10.0 MB/s", 512, 5.1e-05),
        ("1 byte copied, 0.5 s, 0.0 kB/s", 1, 0.5),
        ("8192000000 bytes (8.2 GB) copied, 161.618 s, 50.7 MB/s", 8_192_000_000, 161.618),
    ],
)
def test_dd_of_other_sizes_and_ages(line: str, copied: int, seconds: float) -> None:
    assert by_name(dd.parse(line, "read"))["read_rate"].value == pytest.approx(copied / seconds)


def test_dd_that_was_too_quick_is_no_infinity() -> None:
    (reading,) = dd.parse("512 bytes copied, 0 s, Infinity B/s", "write")
    assert (reading.metric, reading.value, reading.note) == ("write_rate", None, "too quick to measure")


@pytest.mark.parametrize(
    "text", ["", "dd: failed to open", "0 bytes copied, 0.1 s, 0.0 kB/s", "1024 bytes copied, soon, 1 B/s"]
)
def test_dd_without_a_result_is_one_sentence(text: str) -> None:
    with pytest.raises(UnreadableError, match=r"^dd "):
        dd.parse(text, "write")


@pytest.mark.parametrize(
    ("rw", "metric", "key"),
    [
        ("read", "seq_read_rate", "bw_bytes"), ("write", "seq_write_rate", "bw_bytes"),
        ("randread", "rand_read_iops", "iops"), ("randwrite", "rand_write_iops", "iops"),
    ],
)  # fmt: skip
def test_fio_says_rate_or_operations_and_latencies(rw: str, metric: str, key: str) -> None:
    text = text_of(f"fio-3.33-{rw}.json")
    part = json.loads(text)["jobs"][0][rw.removeprefix("rand")]
    found = by_name(fio.parse(text, rw))
    assert set(found) == {metric, "latency_p50_seconds", "latency_p95_seconds", "latency_p99_seconds"}
    assert found[metric].value == pytest.approx(part[key])
    assert found[metric].value > 0  # type: ignore[operator]
    nanoseconds = part["clat_ns"]["percentile"]
    assert found["latency_p99_seconds"].value == pytest.approx(nanoseconds["99.000000"] / 1e9)
    assert found["latency_p50_seconds"].value <= found["latency_p99_seconds"].value  # type: ignore[operator]


def test_fio_mixed_tells_its_two_directions_apart() -> None:
    readings = fio.parse(text_of("fio-3.33-randrw.json"), "randrw")
    operations = [(one.metric, one.setting["direction"]) for one in readings if "latency" not in one.metric]
    assert operations == [("rand_read_iops", "read"), ("rand_write_iops", "write")]
    assert {one.setting["direction"] for one in readings if one.metric == "latency_p95_seconds"} == {"read", "write"}


def test_fios_jobs_count_together() -> None:
    text = text_of("fio-3.33-two-jobs.json")
    parts = [job["read"] for job in json.loads(text)["jobs"]]
    assert len(parts) == 2
    found = by_name(fio.parse(text, "randread"))
    assert found["rand_read_iops"].value == pytest.approx(parts[0]["iops"] + parts[1]["iops"])
    slowest = max(part["clat_ns"]["percentile"]["95.000000"] for part in parts)
    assert found["latency_p95_seconds"].value == pytest.approx(slowest / 1e9)


def test_fio_that_did_nothing_has_no_figure() -> None:
    (reading,) = fio.parse(text_of("fio-3.33-read.json"), "write")
    assert (reading.value, reading.note) == (None, "no operation completed in the time")


def test_fios_warnings_before_its_answer_are_passed_over() -> None:
    text = "fio: this platform does not support process shared mutexes\n" + text_of("fio-3.33-read.json")
    assert fio.parse(text, "read") == fio.parse(text_of("fio-3.33-read.json"), "read")


def broken(change: Callable[[dict[str, object]], object]) -> str:
    told = json.loads(text_of("fio-3.33-read.json"))
    change(told)
    return json.dumps(told)


@pytest.mark.parametrize(
    "text",
    [
        "", "fio: pid=0, err=28/file:filesetup.c", "[1, 2]", "{", '{"jobs": []}', '{"jobs": [1]}', "{" * 100_000,
        broken(lambda told: told.pop("jobs")),
        broken(lambda told: told["jobs"][0].update(error=28)),  # type: ignore[index]
        broken(lambda told: told["jobs"][0].pop("read")),  # type: ignore[index]
        broken(lambda told: told["jobs"][0]["read"].update(bw_bytes="many")),  # type: ignore[index]
        broken(lambda told: told["jobs"][0]["read"].update(bw_bytes=float("inf"))),  # type: ignore[index]
        broken(lambda told: told["jobs"][0]["read"]["clat_ns"]["percentile"].update({"50.000000": -1})),  # type: ignore[index]
    ],
)  # fmt: skip
def test_fio_that_failed_or_was_cut_is_one_sentence(text: str) -> None:
    with pytest.raises(UnreadableError, match=r"^fio") as caught:
        fio.parse(text, "read")
    assert "\n" not in caught.value.detail
    assert len(caught.value.detail) < 200


@pytest.mark.parametrize("tool", ["dd", "fio", "bonnie++"])
@given(text=st.text(max_size=300))
def test_no_text_breaks_a_parser(tool: str, text: str) -> None:
    try:
        readings = read(tool, text, {"mode": "write", "rw": "randrw"})
    except UnreadableError as error:
        assert error.detail.endswith((".", "?"))  # noqa: PT017 (it need not be raised)
    else:
        assert all(reading.value is None or reading.value >= 0 for reading in readings)


@given(cut=st.integers(0, 10_000), name=st.sampled_from(sorted(path.name for path in DATA.glob("[bf]*.[cj]*"))))
def test_no_cut_or_doubled_output_breaks_a_parser(cut: int, name: str) -> None:
    text = text_of(name)
    tool = "fio" if name.startswith("fio") else "bonnie++"
    for piece in (text[: cut % len(text)], text[cut % len(text) :], text + text):
        try:
            read(tool, piece, {"rw": "randrw"})
        except UnreadableError as error:
            assert error.detail  # noqa: PT017 (what else it does is no failure)


def test_an_unknown_tool_is_one_sentence() -> None:
    with pytest.raises(UnreadableError, match="is not supported"):
        read("iozone", "1", {})
