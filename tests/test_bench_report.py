"""The page of `make bench`: the newest table first, earlier ones below."""

from pathlib import Path

import pytest

from tests.performance import in_place, inventory, load, report


@pytest.mark.parametrize(
    ("at_least", "took", "reached"),
    [
        (inventory.RESCAN, 1.0, True), (inventory.RESCAN, 1.01, False),
        (in_place.VERB, 144.0, True), (in_place.VERB, 145.0, False),
        (in_place.JOB, 185.0, True), (in_place.JOB, 186.0, False),
        (in_place.DISCARD, 260.0, True), (in_place.DISCARD, 261.0, False),
    ],
)  # fmt: skip
def test_what_is_asked_of_a_ratio_is_judged(at_least: float, took: float, reached: bool) -> None:
    assert report.ratio("a scan", took, "bare", 260.0, at_least).verdict == ("reached" if reached else "**missed**")


@pytest.mark.parametrize(
    ("rate", "took", "reached"), [(40, 0.19, True), (40, 0.2, False), (60, 0.29, True), (60, 0.3, False)]
)
def test_of_100_requests_95_are_held_to_the_limit_of_their_rate(rate: int, took: float, reached: bool) -> None:
    asked = load.Asked()
    for number in range(1000):
        asked.note("/images/", took if number < 980 else 30.0, "")
    row = load._judged(asked, rate, 60, load.RATES[rate])
    assert row.verdict == ("reached" if reached else "**missed**")


@pytest.mark.parametrize(("kind", "verdict"), [("ext4", ""), ("ext4 mounted with discard", "**missed**")])
def test_in_place_is_judged_where_the_disk_is_told_of_holes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, verdict: str
) -> None:
    sides = (in_place.Side(0.9, 0.9), in_place.Side(1.0, 1.0))
    monkeypatch.setattr(in_place, "_best", lambda *_: sides)
    rows = in_place._warm_and_cold(kind, tmp_path, tmp_path)
    assert [row.verdict for row in rows] == [verdict, verdict]


def _row(measured: str) -> report.Row:
    return report.Row("a list", measured, "", "", "under 1 s", reached=True)


def test_earlier_tables_stay_with_the_processor_that_they_were_measured_on(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(
        "# How fast it is\n\n**The machine.** 2 cores (Intel), 24 GiB.\n\n| work |\n| --- |\n| 9 s |\n\nNotes.\n"
    )
    report.write(page, [_row("2 s")], "2 cores (AMD), 8 GiB.", ["a note"])
    report.write(page, [_row("1 s")], "2 cores (AMD), 8 GiB.", ["a note"])
    text = page.read_text()
    places = [
        text.index(part) for part in ("| 1 s |", "- a note", "## Earlier tables", "| 2 s |", "(Intel)", "| 9 s |")
    ]
    assert places == sorted(places)
    assert (text.count("(AMD)"), text.count("a note"), text.count("| 9 s |")) == (2, 1, 1)


def test_only_the_last_few_earlier_tables_stay(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    for number in range(report.KEPT + 3):
        report.write(page, [_row(f"{number} s")], "2 cores.", [])
    assert page.read_text().count("**The machine") == report.KEPT + 1
    assert "| 1 s |" not in page.read_text()


def test_the_machine_is_told_with_its_processor(tmp_path: Path) -> None:
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    assert cpu.partition(":")[2].strip() in report.machine(tmp_path)
