"""Numbers on pages: binary, at most three significant digits, never a zero for what is not known."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from storage_admin.web.templatetags.storage import ago, bar_scale, bytes_of, size_bar
from storage_admin.words import days, percent, ratio, seconds, seconds_span, size, span, times


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "unknown"), (0, "0 B"), (1, "1 B"), (512, "512 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"),
        (196_608, "192 KiB"), (10 * 1024**2, "10 MiB"), (1024**3 - 1, "1 GiB"), (int(41.3 * 1024**3), "41.3 GiB"),
        (214_748_364_800, "200 GiB"), (8 * 1024**4, "8 TiB"), (2**63 - 1, "8 EiB"), (-2048, "−2 KiB"),  # noqa: RUF001
    ],
)  # fmt: skip
def test_sizes(value: int | None, shown: str) -> None:
    assert size(value) == shown


def test_a_range_is_shown_only_where_its_ends_read_differently() -> None:
    assert (span(1024, 3072), span(20_971_520, 20_971_521), span(None, 5)) == ("1 KiB to 3 KiB", "", "")
    assert (seconds_span(45, 180), seconds_span(45.0, 45.2)) == ("45 s to 3 min", "")


def test_exact_bytes_stand_beside_a_rounded_size() -> None:
    assert bytes_of(214_748_364_801) == '<span title="214,748,364,801 bytes">200 GiB</span>'


def test_an_unknown_word_is_escaped() -> None:
    assert "<b>" not in bytes_of(None, "<b>")


@pytest.mark.parametrize(
    ("part", "whole", "shown"),
    [
        (None, 5, "unknown"),
        (5, None, "unknown"),
        (5, 0, "unknown"),
        (999, 1000, "99.9 %"),
        (9999, 10_000, "99.9 %"),
        (288, 1000, "28.8 %"),
        (1, 10_000, "under 0.1 %"),
        (0, 10_000, "0.0 %"),
    ],
)
def test_percents_do_not_claim_what_is_not_there_yet(part: int | None, whole: int | None, shown: str) -> None:
    assert percent(part, whole) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.9, "under a day"), (1.0, "1 day"), (1.1, "1.1 days"), (9.9, "9.9 days"), (10.0, "10 days")]
)
def test_days_have_one_decimal_where_it_is_not_0(value: float, shown: str) -> None:
    assert days(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "unknown"),
        (0.2, "0 s"),
        (45, "45 s"),
        (66, "1 min 6 s"),
        (180, "3 min"),
        (7800, "2 h 10 min"),
        (864000, "10 days"),
    ],
)
def test_durations(value: float | None, shown: str) -> None:
    assert seconds(value) == shown


def test_times_say_how_long_ago_and_when() -> None:
    assert "never" in ago(None)
    assert ">3 hours ago<" in ago(timezone.now() - timedelta(hours=3, minutes=20))
    assert ">in 2 days<" in ago(timezone.now() + timedelta(days=2, hours=1))
    assert ">in 90 days<" in ago(timezone.now() + timedelta(days=90, seconds=-20))  # what was asked for, not 89
    assert ">in 24 hours<" in ago(timezone.now() + timedelta(hours=24, seconds=-20))
    assert "2020-01-02 03:04:05 UTC" in ago(datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC))


def _bar(
    virtual: int | None, physical: int, win: int | None, scale: int | None = None, *, share: bool = False
) -> dict[str, str]:
    """The bar's lengths, each as it stands in the page and empty where it is not drawn, and its title."""
    drawn = size_bar(virtual, physical, win, scale, share=share)
    found = {name: re.search(rf'class="{name}"[^/]* width="([^"]*)"', drawn) for name in ("track", "fill", "win")}
    place = re.search(r' x="([^"]*)"', drawn)
    title = re.search("<title>([^<]*)</title>", drawn)
    every = found | {"win_x": place, "title": title}
    return {name: match.group(1) if match else "" for name, match in every.items()}


def test_the_hatch_ends_where_the_fill_ends_on_either_scale() -> None:
    bar = _bar(400, 100, 75, 400, share=True)
    assert (bar["track"], bar["fill"], bar["win_x"], bar["win"]) == ("100.00%", "25.00%", "6.25%", "18.75%")
    bar = _bar(400, 100, 75, 400)
    assert (bar["track"], bar["fill"], bar["win_x"], bar["win"]) == ("100.00%", "50.00%", "25.00%", "25.00%")


def test_a_bar_has_no_track_for_an_unknown_virtual_size_and_no_hatch_before_analysis() -> None:
    bar = _bar(None, 100, None)
    assert (bar["track"], bar["fill"], bar["win"]) == ("", "100.00%", "")
    assert bar["title"] == "virtual unknown, physical 100 B, reclaimable not analyzed yet"


def test_thin_images_of_different_sizes_have_different_bars() -> None:
    mib, gib, tib = 1 << 20, 1 << 30, 1 << 40
    tiny, small, thick = (_bar(whole, used, None)["fill"] for whole, used in (
        (3 * tib, round(6.3 * mib)), (10 * gib, 10 * mib), (10 * gib, 8 * gib)
    ))  # fmt: skip
    assert (tiny, small, thick) == ("0.14%", "3.12%", "89.44%")


def test_bars_of_a_table_share_one_scale() -> None:
    assert bar_scale([(1000, 10), (20, 2), (None, 5)]) == 1000
    assert bar_scale([(30, 10), (20, 2)]) == 30
    assert bar_scale([(30, 0)]) == 30
    assert bar_scale([]) == 0


def test_a_physical_size_beyond_the_virtual_one_stays_within_the_bar() -> None:
    bar = _bar(100, 150, 500, share=True)
    assert (bar["track"], bar["fill"], bar["win"]) == ("66.67%", "100.00%", "100.00%")


def test_only_nothing_is_promised_zero_times() -> None:
    tried = ((0, 8), (1, 10**9), (1, 500), (1, 200), (1, 3), (7, 4), (2, 1))
    assert [ratio(*one) for one in tried] == [0.0, 1e-09, 0.002, 0.01, 0.33, 1.75, 2.0]
    assert [times(ratio(*one)).removesuffix(" \N{MULTIPLICATION SIGN}") for one in tried] == [
        "0.0", "under 0.01", "under 0.01", "0.01", "0.33", "1.75", "2.0",
    ]  # fmt: skip
