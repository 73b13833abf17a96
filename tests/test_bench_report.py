"""The page of `make bench`: the newest table first, earlier ones below."""

from pathlib import Path

from tests.performance import report


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
