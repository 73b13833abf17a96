"""The ledger's charts, configured for Chart.js and drawn by ``storage_admin/js/charts.js``; each has its table."""

from collections.abc import Sequence
from typing import Any

from django.utils.translation import gettext as _

from images.ledger.selectors import Sums
from images.ledger.sums import OfMonth, Summary
from storage_admin.charts import Chart, told_apart
from storage_admin.words import size

#: The last months, and the hosts and pools with the most, that a chart shows; the table beside it has all.
MONTHS, NAMES = 24, 12
WON_COLOUR, TAKEN_COLOUR = "--sa-fill", "--sa-chart-2"


def charts_of(summary: Summary) -> list[Chart]:
    """Freed and taken by month, and by host and pool where there are several; none where all is held."""
    if not summary.months:
        return []
    months = in_a_row(summary.months)
    found = [_chart("ledger-months", _("By month (UTC)"), _("Month (UTC)"), months, months[-MONTHS:], broad=True)]
    hosts = [(host.name or "unknown", host.sums) for host in summary.hosts]
    pools = [(f"{pool.host} / {pool.name or 'unknown'}", pool.sums) for pool in summary.pools]
    for name, title, head, rows in (
        ("ledger-hosts", _("By host"), _("Host"), hosts),
        ("ledger-pools", _("By pool"), _("Pool"), pools),
    ):
        if len(rows) > 1:
            # Two of one name stand beside each other, and not as one.
            most = rows[:NAMES]
            drawn = list(zip(told_apart(label for label, __ in most), [sums for __, sums in most], strict=True))
            found.append(_chart(name, title, head, rows, drawn))
    return found


def in_a_row(months: Sequence[OfMonth]) -> list[tuple[str, Sums]]:
    """The months from the first to the last, also those in which nothing happened."""
    known = {month.month: month.sums for month in months}
    year, month = (int(part) for part in months[0].month.split("-"))
    rows = []
    while (name := f"{year:04}-{month:02}") <= months[-1].month:
        rows.append((name, known.get(name, Sums())))
        year, month = (year, month + 1) if month < 12 else (year + 1, 1)
    return rows


def _chart(
    name: str, title: str, head: str, rows: Sequence[tuple[str, Sums]], drawn: Sequence[tuple[str, Sums]], *,
    broad: bool = False,
) -> Chart:  # fmt: skip
    sets = [_dataset("Freed", WON_COLOUR, [sums.won_bytes for __, sums in drawn])]
    if any(sums.taken_bytes for __, sums in drawn):
        sets.append(_dataset("Consumed", TAKEN_COLOUR, [-sums.taken_bytes for __, sums in drawn]))
    axes = {"x": {"type": "category", "stacked": True}, "y": {"beginAtZero": True, "stacked": True}}
    labels = [label for label, __ in drawn]
    config = {"type": "bar", "unit": "B", "data": {"labels": labels, "datasets": sets}, "options": {"scales": axes}}
    heads = (head, "Freed", "Consumed", "Net", "Held by undo copies", "Jobs")
    return Chart(name, title, config, heads, tuple(_row(label, sums) for label, sums in rows), broad)


def _dataset(label: str, colour: str, values: list[int]) -> dict[str, Any]:
    return {"label": label, "data": values, "colour": colour}


def _row(label: str, sums: Sums) -> tuple[str, ...]:
    amounts = (sums.won_bytes, -sums.taken_bytes, sums.freed_bytes, sums.held_bytes)
    return (label, *(size(amount) for amount in amounts), f"{sums.jobs_count:,}")
