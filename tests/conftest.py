"""For all tests: their order, and the markers that they do not give themselves."""

import os
import re
import signal
import sys
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import long
from tests.chance import RUN, night
from tests.passed import KEEP, Keeper, passed

os.environ.setdefault(RUN, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}")

# How long an example takes says something of the machine, not of the code.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("merge", hypothesis.settings.get_profile("patient"), derandomize=True)
hypothesis.settings.load_profile("patient" if night() else "merge")

pytest_plugins = ["tests.harness.fixtures", "tests.working", "tests.images.far"]

#: What takes minutes begins first: a process that began it last would be at work when the others have nothing left.
_LONGEST = (
    "tests/faults/test_kills.py", "tests/faults/test_database_away.py", "tests/nights/test_nights.py",
    "tests/faults/test_replace_kills.py", "tests/faults/test_services_fail.py", "tests/faults/test_cancels.py",
    "tests/faults/test_linked_clone_kills.py", "tests/faults/test_aside_kills.py",
    "tests/agent/test_hostile_images_every_verb.py", "tests/agent/test_bombs_every_verb.py",
)  # fmt: skip
_DATABASE_FIXTURES = {"db", "transactional_db", "live_server", "django_db_reset_sequences", "live_worker"}


class _SaysAtOnce:
    """Prints what failed as soon as it failed: a night takes hours."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.pluginmanager.getplugin("terminalreporter")
            terminal.write_line(f"\n{report.nodeid} ({report.when}) failed:\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    # Who takes a lease on a file is sent this when another process opens it, and would end. An agent sees to it itself:
    # a handler, unlike SIG_IGN, does not reach what is started.
    signal.signal(signal.SIGIO, lambda *_: None)
    if hasattr(config, "workerinput"):
        return
    if night():
        config.pluginmanager.register(_SaysAtOnce(config))
    if kept := os.environ.get(KEEP):
        config.pluginmanager.register(Keeper(Path(kept)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--files-with", metavar="REGEX", help="read only files in which this stands")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that cannot hold what a stage is for are not imported: that would cost it half a minute."""
    wanted = config.getoption("--files-with")
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if wanted and is_test and not re.search(wanted, collection_path.read_text()) else None


def _uses_database(item: pytest.Item) -> bool:
    marked = item.get_closest_marker("django_db") is not None
    return marked or not _DATABASE_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Marks what is tried at random, touches the database, or waits for the night. The longest files come first; what
    passed before is left out.
    """
    cases: Counter[str] = Counter()
    only_at_night = long.listed()
    for item in items:
        file, __, test = item.nodeid.removeprefix("tests/").partition("::")
        name = test.rpartition("::")[2].partition("[")[0]
        stride = only_at_night.get(file, {}).get(name, 1)
        if (sampled := item.get_closest_marker("sampled")) is not None:
            stride *= sampled.args[0]
        case = cases[f"{file} {test.partition('[')[0]}"]
        if stride == long.NEVER or case % stride:
            item.add_marker("night")
        cases[f"{file} {test.partition('[')[0]}"] += 1
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("fuzz")
        if _uses_database(item):
            item.add_marker("database")
    # All processes of this run begin with the same tests, however late.
    if before := passed(Path(os.environ[KEEP]), but=os.environ[RUN]) if KEEP in os.environ else {}:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
        items[:] = [item for item in items if item.nodeid not in before]
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """A heart that a test's job has started ends before the test's database does: it would beat into the next one's."""
    # Not imported here: that needs Django, which is set up later than this file is read.
    module = sys.modules.get("storage_admin.jobs.routing")
    heart: Any = module.heart if module is not None else None
    if heart is not None and heart._thread is not None:
        heart._stopped.set()
        heart._thread.join(30)
        heart._thread = None
    # Else no job of a later test would be run.
    stopping = getattr(sys.modules.get("storage_admin.jobs.runner"), "stopping", None)
    if isinstance(stopping, threading.Event):
        stopping.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Each fault's figure, what held and the seed; the same stands in a file."""
    from tests.faults.trials import RECORDS, figures_table, recorded  # noqa: PLC0415 - it needs the run's name

    if outcomes := recorded():
        terminalreporter.section("trials of faults")
        for line in figures_table(outcomes):
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"written to {RECORDS.relative_to(RECORDS.parents[2])}")
