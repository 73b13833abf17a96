"""How long a crashed child waits, and how its end is told."""

from pathlib import Path

import pytest

from storage_admin.supervisor.child import Backoff, Child, ChildSpec, how_it_ended


def child() -> Child:
    return Child(ChildSpec(name="web", argv=("true",), cwd=Path("/")), Backoff())


def test_pauses_double_from_one_second_up_to_thirty() -> None:
    crashing = child()
    assert [crashing.crashed(0.0) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_thousand_crashes_still_wait_thirty_seconds() -> None:
    assert Backoff().seconds(1000) == 30


def test_a_child_that_ran_for_a_minute_is_started_again_after_one_second() -> None:
    crashing = child()
    for _ in range(5):
        crashing.crashed(0.0)
    assert crashing.crashed(59.9) == 30
    assert crashing.crashed(60.0) == 1


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-11, "killed by SIGSEGV"), (-200, "killed by signal 200")],
)
def test_tells_an_exit_code_from_a_signal(returncode: int, words: str) -> None:
    assert how_it_ended(returncode) == words
