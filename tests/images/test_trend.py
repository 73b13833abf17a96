"""Days until full are said where the samples carry them: true and false rates over seeded series."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from images.alert_rules.trend import Day, Forecast, forecast

GIB = 1 << 30
FREE = 100 * GIB
SERIES = 400
DOCS = Path(__file__).parents[2] / "docs" / "alerts.md"
Level = Callable[[int, int, random.Random, list[float]], float]


def _walk(step: Callable[[random.Random], float]) -> Level:
    """A series whose days add something each; the last element of ``kept`` is its level."""

    def level(_day: int, _days: int, chance: random.Random, kept: list[float]) -> float:
        kept.append((kept[-1] if kept else 0.0) + step(chance))
        return kept[-1]

    return level


def _jump(_day: int, days: int, chance: random.Random, kept: list[float]) -> float:
    if not kept:
        kept.append(chance.randrange(2, days - 2))
    return 100.0 if _day >= kept[0] else 0.0


#: What grows by 5 GiB a day in the long run, with 100 GiB free: 20 days are true.
GROWING: dict[str, Level] = {
    "evenly": lambda day, _days, _chance, _kept: 5.0 * day,
    "evenly, with noise of a day's growth on top": lambda day, _days, chance, _kept: 5.0 * day + chance.gauss(0, 5),
    "by what differs from day to day": _walk(lambda chance: max(0.0, chance.gauss(5, 3))),
    "in bursts": _walk(lambda chance: chance.expovariate(1 / 5)),
}
#: What does not grow, or grew and does no more, or in a way that nobody can carry on.
NOT_GROWING: dict[str, Level] = {
    "the same each day": lambda _day, _days, _chance, _kept: 0.0,
    "noise": lambda _day, _days, chance, _kept: chance.gauss(0, 5),
    "adds and takes at random": _walk(lambda chance: chance.gauss(0, 5)),
    "one large copy": _jump,
    "large copies now and then": _walk(lambda chance: chance.expovariate(1 / 40) if chance.random() < 0.15 else 0.0),
    "emptied each week": lambda day, _days, _chance, _kept: 10.0 * (day % 7),
    "emptied every ten days": lambda day, _days, _chance, _kept: 10.0 * (day % 10),
    "grew until a week ago": lambda day, days, _chance, _kept: 5.0 * min(day, days - 8),
}


def series(level: Level, days: int, seed: int) -> list[Day]:
    chance, kept = random.Random(seed), list[float]()
    return [Day(days - day - 0.5, (400 + level(day, days, chance, kept)) * GIB) for day in range(days)]


def said(level: Level, days: int) -> list[Forecast]:
    found = (forecast(series(level, days, seed), FREE) for seed in range(SERIES))
    return [one for one in found if one is not None]


#: In eight days nobody can see that what grew evenly is emptied on the tenth.
TOLD = [(name, days) for name in NOT_GROWING for days in (8, 14, 30) if (name, days) != ("emptied every ten days", 8)]


@pytest.mark.parametrize(("name", "days"), TOLD)
def test_of_what_does_not_grow_next_to_never_a_number_is_said(name: str, days: int) -> None:
    assert len(said(NOT_GROWING[name], days)) / SERIES <= 0.015


@pytest.mark.parametrize(
    ("name", "days", "least"),
    [
        ("evenly", 8, 1.0),
        ("evenly", 30, 1.0),
        ("evenly, with noise of a day's growth on top", 30, 0.95),
        ("by what differs from day to day", 14, 0.8),
        ("by what differs from day to day", 30, 0.95),
        ("in bursts", 30, 0.6),
    ],
)
def test_of_what_grows_a_number_is_said_and_the_truth_lies_in_its_range(name: str, days: int, least: float) -> None:
    found = said(GROWING[name], days)
    assert len(found) / SERIES >= least
    assert sum(one.low <= 20 <= one.high for one in found) / len(found) >= 0.85
    assert all(one.low <= one.days <= one.high <= 4 * one.low for one in found), "a range that says something"


def test_the_figures_of_the_documentation_are_these() -> None:
    text = DOCS.read_text()
    for name, level in (GROWING | NOT_GROWING).items():
        rates = [f"{100 * len(said(level, days)) / SERIES:.1f} %" for days in (8, 14, 30)]
        assert f"| {name} | {' | '.join(rates)} |" in text


@pytest.mark.parametrize("days", range(8))
def test_less_than_eight_days_tell_nothing(days: int) -> None:
    assert forecast(series(GROWING["evenly"], days, 0), FREE) is None


def test_old_samples_and_gaps_tell_nothing() -> None:
    days = series(GROWING["evenly"], 20, 0)
    assert forecast(days, FREE) is not None
    assert forecast([Day(day.age + 2, day.used_bytes) for day in days], FREE) is None
    assert forecast(days[:8] + days[12:], FREE) is None
    assert forecast(days[:8] + days[9:], FREE) is not None, "a day that is missing is no gap"


def test_a_growth_of_less_than_a_byte_a_day_is_none() -> None:
    assert forecast([Day(20.5 - day, 1e12 + day / 10) for day in range(20)], FREE) is None
