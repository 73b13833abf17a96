"""The figures of the fault tests, and how their trials are counted and repeated."""

import json
from pathlib import Path

import pytest

from tests.faults import trials
from tests.faults.figures import FIGURES, NIGHTLY, trials_of
from tests.faults.trials import Trials


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What other runs write and are told does not mix with this."""
    for name in (NIGHTLY, "STORAGE_ADMIN_SEED", "STORAGE_ADMIN_TRIAL", *(one.variable for one in FIGURES.values())):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(trials, "RECORDS", tmp_path / "faults" / "run.jsonl")
    return tmp_path / "faults" / "run.jsonl"


def test_a_night_has_more_trials_and_a_variable_sets_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (trials_of("F1"), trials_of("F1", 1 / 6), trials_of("F11", 1 / 100)) == (30, 5, 1)
    monkeypatch.setenv(NIGHTLY, "1")
    assert (trials_of("F1"), trials_of("F9"), trials_of("F14")) == (3000, 10_000, 500)
    monkeypatch.setenv("STORAGE_ADMIN_KILLS", "7")
    assert trials_of("F1") == 7


def run(monkeypatch: pytest.MonkeyPatch, bad: set[int], **how: int) -> tuple[Trials, list[float], str]:
    """Ten trials of which some fail: the trials, a random number of each, and what the test fails with."""
    monkeypatch.setenv("STORAGE_ADMIN_LINES", "10")
    tried, numbers, said = Trials("F13", "something", **how), [], ""
    try:
        for trial in tried:
            with trial:
                numbers.append(trial.rng.random())
                trial.note("odd" if trial.number % 2 else "even")
                assert trial.number not in bad, "it did not hold"
    except AssertionError as error:
        said = str(error)
    return tried, numbers, said


def test_a_trial_that_fails_does_not_end_the_others_and_says_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, records: Path
) -> None:
    tried, numbers, said = run(monkeypatch, {3, 4})
    assert (tried.outcome.held, tried.outcome.failed, len(numbers)) == (8, [3, 4], 10)
    assert (
        f"STORAGE_ADMIN_SEED={tried.outcome.seed} STORAGE_ADMIN_TRIAL=4 pytest 'tests/faults/test_figures.py::" in said
    )
    assert "trial 3 (odd) failed: it did not hold" in said
    begun, ended = [json.loads(line) for line in records.read_text().splitlines()]
    assert (begun["event"], begun["seed"], begun["planned"]) == ("begun", tried.outcome.seed, 10)
    assert (ended["event"], ended["held"], ended["failed"]) == ("ended", 8, [3, 4])
    assert ended["tally"] == {"odd": 5, "even": 5}
    monkeypatch.setenv("STORAGE_ADMIN_SEED", str(tried.outcome.seed))
    monkeypatch.setenv("STORAGE_ADMIN_TRIAL", "4")
    again, once, said = run(monkeypatch, {4})
    assert (again.outcome.planned, again.all, once) == (1, False, [numbers[4]])
    assert "trial 4 (even) failed" in said


def test_what_goes_on_failing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, numbers, said = run(monkeypatch, set(range(10)), patience=2)
    assert (len(numbers), tried.outcome.held, said.count("once more")) == (2, 0, 2)


def test_a_trial_may_count_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, numbers, said = run(monkeypatch, {1}, worth=5)
    assert (len(numbers), tried.outcome.planned, tried.outcome.held) == (2, 10, 5)
    assert said


def test_the_folder_of_a_trial_stays_only_where_it_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make_folders() -> None:
        for trial in Trials("F13", "something"):
            with trial:
                trial.folder(tmp_path).mkdir()
                assert trial.number == 0

    monkeypatch.setenv("STORAGE_ADMIN_LINES", "2")
    with pytest.raises(AssertionError, match="trial 1"):
        make_folders()
    assert not (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


def test_the_table_names_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, {9})
    (line,) = trials.figures_table(trials.recorded())[1:]
    assert line.split()[:3] == ["F13", "10", "9"]
    assert line.endswith("something  FAILED: trials 9")
