"""What was measured, as one table on the screen and in docs/performance.md."""

import os
import platform
import re
import sqlite3
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        work: what was done.
        took: how it was, with its unit.
        against: what it stands beside, measured in the same run; empty for a limit alone.
        figure: the number that is judged: a ratio, a count, seconds.
        wanted: what it must reach, in words.
        reached: whether it does.
    """

    work: str
    took: str
    against: str
    figure: str
    wanted: str
    reached: bool

    @property
    def verdict(self) -> str:
        """Whether it reached what was wanted, in a word; empty where nothing was."""
        if not self.wanted:
            return ""
        return "reached" if self.reached else "**missed**"


def ratio(work: str, took: float, against: str, other: float, at_least: float) -> Row:
    """A row that says how many times faster ``took`` seconds are than ``other`` seconds."""
    times = other / took
    return Row(
        work, seconds(took), f"{against}: {seconds(other)}", f"{times:.1f} times faster",
        f"at least {at_least:g} times", times >= at_least,
    )  # fmt: skip


def seconds(value: float) -> str:
    """A duration in the unit that reads best."""
    if value < 0.1:
        return f"{value * 1000:.1f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = ("work", "measured", "beside it, in the same run", "result", "wanted", "")
    lines = [head, ("---",) * len(head)]
    lines += [(row.work, row.took, row.against, row.figure, row.wanted, row.verdict) for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine(folder: Path) -> str:
    """The machine, in a sentence or two; ``folder`` is where the images of the run were."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    qemu = re.search(r"version (\S+)", _said("qemu-img", "--version"))
    filesystem = _said("stat", "-f", "-c", "%T", str(folder)).strip()
    return (
        f"{os.cpu_count()} cores ({cpu.group(1).strip() if cpu else platform.machine()}), {memory:.0f} GiB of memory, "
        f"Linux {platform.release()}, {filesystem}; Python {platform.python_version()}, "
        f"qemu-img {qemu.group(1) if qemu else 'unknown'}, SQLite {sqlite3.sqlite_version}."
    )


#: So many earlier tables stay on the page.
KEPT = 5
#: A machine, the day where one stands beside it, and the table under it.
_TABLE = re.compile(r"^(\*\*The machine[^*]*\*\* .*\n\n(?:\|.*\n)+)", re.MULTILINE)


def write(path: Path, rows: Sequence[Row], where: str, notes: Sequence[str]) -> None:
    """Writes the page for docs. The tables that were on it, of other machines or earlier versions, stay below."""
    earlier = _TABLE.findall(path.read_text())[:KEPT] if path.is_file() else []
    text = [
        "# How fast it is",
        "",
        "Printed by `make bench`, all in one run on one machine; what is compared was measured side by side.",
        "",
        f"**The machine, {datetime.now(UTC):%Y-%m-%d}.** {where}",
        "",
        table(rows),
        "",
        "How it was measured:",
        "",
        *(f"- {note}" for note in notes),
    ]
    if earlier:
        text += ["", "## Earlier tables", "", "Of earlier versions or other machines, the newest first.", ""]
        text += ["\n".join(table for table in earlier).rstrip("\n")]
    path.write_text("\n".join(text) + "\n")


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
