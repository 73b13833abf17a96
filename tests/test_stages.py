"""How the tiers of tests count, that none calls a failure a success, and that the night leaves nothing out."""

import re
import shutil
import sys
import tempfile
import time
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests import long, stage_runs, stages
from tests.faults.figures import NIGHTLY
from tests.harness.processes import wait_until
from tests.stage_runs import ROOT, Outcome, Stage, run


def pytest_stage(folder: Path, source: str) -> Stage:
    """A stage that runs real pytest over one file, without the project's settings."""
    (folder / "test_it.py").write_text(source)
    plain = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", str(stages.BIN / "pytest"))
    argv = (*plain, "-q", "-p", "no:cacheprovider", "-c", "/dev/null")
    return Stage("it", (*argv, "--rootdir", str(folder), str(folder / "test_it.py")), pytest=True)


#: How pytest is told here to end a test that hangs.
OURS = [
    (name, str(value).lower())
    for name, value in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"].items()
    if name.startswith("faulthandler_")
]


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


def test_says_at_the_end_which_tests_failed_and_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = "def test_a(): pass\ndef test_b(): assert 1 == 2, 'not\\nyet'\n"
    monkeypatch.setattr(stages, "TIERS", {"test": (pytest_stage(tmp_path, source), Stage("fine", ("true",)))})
    assert stages.main([]) == 1
    *_, line, total = capfd.readouterr().out.splitlines()
    assert line == "it: test_it::test_b: AssertionError: not"
    assert total == "2 passed, 1 failed"


@pytest.mark.parametrize(("code", "expected"), [(0, (1, 0)), (1, (0, 1)), (7, (0, 1))])
def test_a_tool_counts_as_one(code: int, expected: tuple[int, int]) -> None:
    assert counts(run_one(Stage("tool", (sys.executable, "-c", f"raise SystemExit({code})")))) == expected


HANGS = "import time\ndef waits(): time.sleep(60)\ndef test_a(): waits()\n"


def test_of_a_stage_that_hangs_it_is_said_where_its_test_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_runs, "ROOT", tmp_path)
    hangs = pytest_stage(tmp_path, HANGS)
    hangs = replace(hangs, argv=(*hangs.argv, "-p", "faulthandler", "-o", "faulthandler_timeout=1"), limit_seconds=10)
    __, outcome = run([Stage("fine", ("true",), pytest=True), hangs])
    assert [line.rpartition(" in ")[2] for line in outcome.bad[:2]] == ["waits", "test_a"]


def test_a_test_that_hangs_fails_by_its_name_and_ends_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage_runs, "ROOT", tmp_path)
    stage = pytest_stage(tmp_path, HANGS)
    for number in range(12):
        (tmp_path / f"test_{'a' if number < 6 else 'z'}{number}.py").write_text("def test_it(): pass\n")
    ours = [f"-o{name}={value}" for name, value in (*OURS, ("faulthandler_timeout", "5"))]
    (whole,) = (one for one in stages.TIERS["test"] if one.name == "tests")
    spread = whole.argv[whole.argv.index("--dist") : whole.argv.index("-p")]
    argv = (*stage.argv[:-1], str(tmp_path), "-p", "xdist.plugin", "-n", "2", *spread, *ours)
    outcome = run_one(replace(stage, argv=argv, limit_seconds=60))
    assert outcome.seconds < 50
    failed, *stands = outcome.bad
    assert "test_a" in failed
    assert capfd.readouterr().out.count("Timeout (") == 1, "it is shown, and kept"
    assert [line.rpartition(" in ")[2] for line in stands[:2]] == ["waits", "test_a"]


def test_a_stage_that_does_not_end_is_killed_with_all_it_started_and_counts_as_failed(tmp_path: Path) -> None:
    late = tmp_path / "late"
    outcome = run_one(Stage("slow", ("sh", "-c", f"(sleep 2; touch {late}) & wait"), limit_seconds=0.5))
    assert counts(outcome) == (0, 1)
    assert outcome.note == "did not end within 0 s"
    assert outcome.seconds < 1.9
    time.sleep(2)
    assert not late.exists()


def test_goes_on_after_a_failure_and_ends_with_the_sum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = Stage("bad", ("false",)), Stage("good", ("true",))
    monkeypatch.setattr(stages, "TIERS", {"test": (bad, good, Stage("fine", ("true",)))})
    assert stages.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 1 failed"
    monkeypatch.setattr(stages, "TIERS", {"test": (good,)})
    assert stages.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed"


def test_a_night_that_was_cut_off_goes_on_where_it_was_at_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = ["first"]
    monkeypatch.setattr(stages, "PASSED", tmp_path / "passed")
    monkeypatch.setattr(stages, "_commit", lambda: commits[-1])
    ran = tmp_path / "ran"
    note = ("sh", "-c", f"echo >> {ran}")
    good, bad = Stage("good", note), Stage("bad", (*note[:2], f"{note[2]}; false"))
    monkeypatch.setattr(stages, "TIERS", {"night": (good, bad)})

    def runs() -> int:
        return len(ran.read_text()) if ran.exists() else 0

    assert (stages.main(["night"], go_on=True), runs()) == (1, 2)
    assert (stages.main(["night"], go_on=True), runs()) == (1, 3), "what failed is run again, what passed is not"
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed"
    assert (stages.main(["night"]), runs()) == (1, 5), "without the wish all is run"
    commits.append("second")
    assert (stages.main(["night"], go_on=True), runs()) == (1, 7)
    commits.append("")
    assert (stages.main(["night"], go_on=True), runs()) == (1, 9), "files that are in no commit are tested anew"
    assert (stages.main(["night"], go_on=True), runs()) == (1, 11)


@pytest.mark.night
def test_of_a_stage_that_was_cut_off_only_those_tests_are_run_that_have_not_passed(tmp_path: Path) -> None:
    """Real pytest with the project's own hooks, in processes beside each other; the second test kills the first run."""
    tests = Path(tempfile.mkdtemp(dir=ROOT / "tests", prefix="cut_off_"))
    broken = tmp_path / "broken"
    broken.touch()
    (tests / "test_cut_off.py").write_text(f"""
import os, pathlib, signal, time
def test_a(): pathlib.Path("{tmp_path}/ran").open("a").write("a")
def test_b():
    pathlib.Path("{tmp_path}/ran").open("a").write("b")
    if pathlib.Path("{broken}").exists():
        while not pathlib.Path("{tmp_path}/passed/it").exists(): time.sleep(0.05)
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
""")
    argv = (str(stages.BIN / "pytest"), "-n", "1", "-p", "no:cacheprovider", str(tests))
    stage = Stage("it", argv, pytest=True, passed=tmp_path / "passed" / "it")
    try:
        assert run_one(stage).failed
        broken.unlink()
        assert counts(run_one(stage)) == (2, 0)
        assert (tmp_path / "ran").read_text() == "abb"
        assert counts(run_one(stage)) == (2, 0)
        assert (tmp_path / "ran").read_text() == "abb"
    finally:
        shutil.rmtree(tests)


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
    monkeypatch.setattr(stages, "TIERS", {"test": (*both, Stage("after", ("echo", "after")))})
    assert stages.main([]) == 1
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("a:", "b:", "after"))]
    assert lines[:5] == ["a: ", "a: a", "b: ", "b: b", "after"]
    assert not Path("/run/libvirt/a").exists()


def test_a_stage_that_is_cut_off_takes_along_what_it_has_started_in_sessions_of_their_own(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; one = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(one.pid)); time.sleep(600)"
    )
    assert run_one(Stage("it", (sys.executable, "-c", script, str(tmp_path / "pid")), limit_seconds=3)).failed
    pid = int((tmp_path / "pid").read_text())
    wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 30, "it ends"
    )


def test_a_stage_is_left_out_where_what_it_needs_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    known = [replace(Stage(f"it is {there}", ("echo",)), where=partial(bool, there)) for there in (True, False)]
    monkeypatch.setattr(stages, "TIERS", {"test": tuple(known)})
    assert stages.main([]) == 0
    assert re.findall("=== it is (True|False)", capfd.readouterr().out) == ["True"]


def test_what_the_shell_has_set_does_not_reach_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://somebody@else/theirs")
    monkeypatch.setenv("STORAGE_ADMIN_DATA_DIR", "/srv/real")
    script = "import os; raise SystemExit('DATABASE_URL' in os.environ or 'STORAGE_ADMIN_DATA_DIR' in os.environ)"
    assert counts(run_one(Stage("clean", (sys.executable, "-c", script)))) == (1, 0)


MARKERS = ("qemu", "services", "guest", "browser", "faults", "fuzz", "machines", "night", "sql", "database")
#: Stages that run some tests a second time.
NEXT_DEBIAN = {stages.ON_DEBIAN_13.name, stages.VOLUMES_ON_DEBIAN_13.name}
#: What a test may be.
KINDS = [[], *([one] for one in MARKERS[:6]), ["guest", "browser"], ["night"], ["machines", "night"]]


@pytest.mark.parametrize("markers", KINDS, ids="+".join)
def test_every_test_runs_once_on_sqlite_before_a_merge_or_only_at_night(markers: list[str]) -> None:
    before, at_night = (
        [
            stage.name
            for stage in stages.TIERS[tier]
            if runs(stage, markers)
            and not (of_dashboards(stage) or stage.name in NEXT_DEBIAN or is_another_part(stage))
        ]
        for tier in ("test", "night")
    )
    assert (len(before), len(at_night)) == (0 if "night" in markers else 1, 1)


def of_dashboards(stage: Stage) -> bool:
    return any(word.startswith("tests/e2e") for word in stage.argv)


def is_another_part(stage: Stage) -> bool:
    return stage.name.endswith((" 2", " 3"))


@pytest.mark.parametrize("tier", ["test", "night"])
@pytest.mark.parametrize(("of", "marker", "parts"), [("guests", "guest", 3), ("browser", "browser", 2)])
def test_every_file_of_what_runs_in_parts_is_in_one_of_them(tier: str, of: str, marker: str, parts: int) -> None:
    found = [stage for stage in stages.TIERS[tier] if stage.name[:-2].removeprefix("all ") == of]
    files = [
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("test_*.py")
        if f"pytest.mark.{marker}" in path.read_text()
    ]
    wanted = {str(path) for path in files if (path.parts[1] == "e2e") == (of == "browser")}
    given = [word for stage in found for word in stage.argv if word.endswith(".py")]
    assert (len(found), len(given), set(given)) == (parts, len(wanted), wanted)


def test_the_quick_check_takes_only_what_needs_python_alone() -> None:
    chosen = [markers for markers in KINDS if any(runs(stage, markers) for stage in stages.TIERS["check"])]
    assert chosen == [[]]


def test_of_what_touches_the_database_a_part_and_at_night_all_is_on_postgresql() -> None:
    for tier, chosen in (("test", ["sql", "database"]), ("night", ["database"])):
        assert [runs(one, chosen) for one in stages.TIERS[tier] if one.database == "postgresql"] == [True]


def test_only_a_night_takes_the_figures_of_a_night() -> None:
    for tier, found in stages.TIERS.items():
        for stage in found:
            assert (f"{NIGHTLY}=1" in stage.argv) == (tier == "night" and stage.group != "lint"), stage.name
    assert NIGHTLY in stage_runs.FOREIGN


def runs(stage: Stage, markers: list[str]) -> bool:
    """Whether a stage runs what has these markers, on PostgreSQL if they ask for it, else on SQLite."""
    if not stage.pytest or (stage.database == "postgresql") != ("database" in markers):
        return False
    expression = stage.argv[len(stage.argv) - stage.argv[::-1].index("-m")]
    return bool(eval(expression, {"__builtins__": {}}, {name: name in markers for name in MARKERS}))


NIGHT_WORDS = re.compile(
    r"pytest\.mark\.(night|machines)|\b(Trials|trials_of)\((?!.*points=)|\b(night\(\)|WHEN|TRIED|steps\()|mark\.sampled"
)


def test_what_only_the_night_sees_is_listed() -> None:
    """Files that mark something with `night`, or have more trials in a night, are those of tests/night.md."""
    listed = re.findall(r"^\| `(\S+\.py)` \|", (ROOT / "tests/night.md").read_text(), re.MULTILINE)
    ours = {Path(__file__), ROOT / "tests/faults/test_figures.py"}
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if NIGHT_WORDS.search(path.read_text())]
    assert listed == sorted(str(path.relative_to(ROOT / "tests")) for path in found if path not in ours)


def test_the_list_of_long_tests_names_tests_that_are_there() -> None:
    for file, names in long.listed().items():
        source = (ROOT / "tests" / file).read_text()
        assert names.keys() - {"runTest"} <= set(re.findall(r"^(?:    )?def (test_\w+)\(", source, re.MULTILINE)), file


def test_of_the_long_tests_of_a_file_the_first_one_stays_before_a_merge() -> None:
    a = {"short": [0.2], "far_too_long": [80.0], "first": [4.0], "second": [3.0]}
    assert long.chosen({"a.py": a, "b.py": {"only": [30.0]}, "c.py": {"short": [0.3]}}) == {
        "a.py": ["far_too_long", "second"]
    }
    assert long.chosen({"d.py": {"only": [70.0]}, "faults/e.py": {"only": [70.0]}}) == {"d.py": ["only"]}
    assert long.chosen({file: {"one": [9.0, 9.0], "two": [9.0]} for file in long.WHOLE}) == {}


def test_of_the_cases_of_a_long_test_some_run_before_a_merge() -> None:
    cases = {"first": [1.0, 1.0, 1.0, 1.0], "second": [0.1, 0.2, 3.0], "short": [0.1, 0.1]}
    assert long.chosen({"a.py": cases}) == {"a.py": ["first/2", "second"]}
    assert long.chosen({"faults/a.py": cases}) == {"faults/a.py": ["second"]}
