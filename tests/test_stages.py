"""How ``make test`` counts, and that it never calls a failure a success."""

import signal
import sys
import time
from pathlib import Path

import pytest

from tests import stages
from tests.stage_runs import Outcome, Stage, run


def pytest_stage(folder: Path, source: str) -> Stage:
    """A stage that runs real pytest over one file, without the project's settings."""
    (folder / "test_it.py").write_text(source)
    plain = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", str(stages.BIN / "pytest"))
    argv = (*plain, "-q", "-p", "no:cacheprovider", "-c", "/dev/null")
    return Stage("it", (*argv, "--rootdir", str(folder), str(folder / "test_it.py")), pytest=True)


def run_one(stage: Stage) -> Outcome:
    (outcome,) = run([stage])
    return outcome


def counts(outcome: Outcome) -> tuple[int, int]:
    return outcome.passed, outcome.failed


@pytest.mark.parametrize(
    ("source", "expected", "note"),
    [
        ("def test_a(): pass\ndef test_b(): pass\n", (2, 0), ""),
        ("def test_a(): pass\ndef test_b(): assert False\n", (1, 1), ""),
        ("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no')\n", (1, 1), "1 skipped"),
        ("import pytest\n@pytest.fixture\ndef f(): 1/0\ndef test_a(f): pass\n", (0, 1), ""),
        ("import nothing_of_that_name\n", (0, 1), ""),
        ("", (0, 1), "no test was found"),
        ("import os\ndef test_a(): os._exit(0)\n", (0, 1), "pytest ended with exit code 0"),
        ("import os\ndef test_a(): os.kill(os.getpid(), 9)\n", (0, 1), "pytest ended with exit code -9"),
    ],
    ids=["all pass", "one fails", "a skip", "a broken fixture", "a broken import", "nothing", "silent exit", "killed"],
)
def test_counts_what_pytest_reports(tmp_path: Path, source: str, expected: tuple[int, int], note: str) -> None:
    outcome = run_one(pytest_stage(tmp_path, source))
    assert counts(outcome) == expected
    assert outcome.note == note


@pytest.mark.parametrize(("code", "expected"), [(0, (1, 0)), (1, (0, 1)), (7, (0, 1))])
def test_a_tool_counts_as_one(code: int, expected: tuple[int, int]) -> None:
    assert counts(run_one(Stage("tool", (sys.executable, "-c", f"raise SystemExit({code})")))) == expected


def test_a_stage_that_does_not_end_is_killed_with_all_it_started_and_counts_as_failed(tmp_path: Path) -> None:
    late = tmp_path / "late"
    outcome = run_one(Stage("slow", ("sh", "-c", f"(sleep 2; touch {late}) & wait"), limit_seconds=0.5))
    assert counts(outcome) == (0, 1)
    assert outcome.note == "did not end within 0 s"
    assert outcome.seconds < 1.9
    time.sleep(2)
    assert not late.exists()


def test_a_stage_hears_the_signals_that_its_starter_ignores() -> None:
    asked = "import signal, sys; sys.exit(signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert counts(run_one(Stage("signals", (sys.executable, "-c", asked)))) == (1, 0)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_tool_that_is_not_there_counts_as_failed() -> None:
    assert counts(run_one(Stage("gone", ("/nonexistent/tool",)))) == (0, 1)


def test_goes_on_after_a_failure_and_ends_with_the_sum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = Stage("bad", ("false",)), Stage("good", ("true",))
    monkeypatch.setattr(stages, "STAGES", (bad, good, good))
    assert stages.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 1 failed"
    monkeypatch.setattr(stages, "STAGES", (good,))
    assert stages.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed"


def test_stages_beside_each_other_run_at_once_with_a_libvirt_each_and_are_told_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each waits for the other's file, and neither sees what the other puts where libvirt's sockets are."""
    script = """
        touch {folder}/{own}
        for _ in $(seq 100); do test -e {folder}/{other} && break; sleep 0.1; done
        echo "{own}: $(ls -A /run/libvirt)"
        touch /run/libvirt/{own}
        for _ in $(seq 100); do test -e {folder}/{other}.there && break; touch {folder}/{own}.there; sleep 0.1; done
        echo "{own}: $(ls -A /run/libvirt)"
        touch {folder}/{own}.there
        test {own} = a
    """
    names = (("a", "b"), ("b", "a"))
    both = [
        Stage(own, ("sh", "-c", script.format(folder=tmp_path, own=own, other=other)), beside="pair")
        for own, other in names
    ]
    monkeypatch.setattr(stages, "STAGES", (*both, Stage("after", ("echo", "after"))))
    assert stages.main([]) == 1
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("a:", "b:", "after"))]
    assert lines[:5] == ["a: ", "a: a", "b: ", "b: b", "after"]
    assert not Path("/run/libvirt/a").exists()


def test_an_unknown_stage_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert stages.main(["unti"]) == 2
    assert "There is no stage unti" in capsys.readouterr().out


def test_what_the_shell_has_set_does_not_reach_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://somebody@else/theirs")
    monkeypatch.setenv("STORAGE_ADMIN_DATA_DIR", "/srv/real")
    script = "import os; raise SystemExit('DATABASE_URL' in os.environ or 'STORAGE_ADMIN_DATA_DIR' in os.environ)"
    assert counts(run_one(Stage("clean", (sys.executable, "-c", script)))) == (1, 0)


@pytest.mark.parametrize("marker", ["qemu", "services", "guest", "browser", "faults", ""])
def test_every_test_runs_in_exactly_one_stage_on_sqlite(marker: str) -> None:
    """Whatever single marker a test has."""
    on_sqlite = [stage for stage in stages.STAGES if stage.pytest and stage.database == "sqlite"]
    chosen = [stage.name for stage in on_sqlite if _runs(stage, marker)]
    assert len(chosen) == 1, chosen


def test_what_needs_two_machines_runs_at_night_alone() -> None:
    for stage in (*stages.STAGES, stages.NIGHT):
        if stage.pytest:
            assert _runs(stage, "machines") == (stage is stages.NIGHT), stage.name


def _runs(stage: Stage, marker: str) -> bool:
    """Whether a stage runs what has this marker alone."""
    expression = stage.argv[stage.argv.index("-m") + 1]
    return bool(eval(expression, {"__builtins__": {}}, {name: name == marker for name in (*ALL_MARKERS, "")}))


ALL_MARKERS = ("qemu", "services", "guest", "browser", "faults", "fuzz", "machines")
