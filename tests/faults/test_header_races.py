"""An image's owner rewrites its header between the agent's look and qemu's: no file of root's is read or written."""

from pathlib import Path

import pytest

from tests.agent.every_verb import Crew
from tests.faults.header_races import Ground
from tests.faults.trials import Trials

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

WAYS = [
    ("reclaim copy", "alone.qcow2"), ("reclaim copy", "alone.vmdk"), ("flatten rebase", "overlay.qcow2"),
    ("flatten convert", "overlay.qcow2"), ("convert", "alone.qcow2"), ("convert", "alone.vmdk"),
    ("check all", "alone.qcow2"), ("check leaks", "overlay.qcow2"), ("check none", "alone.qcow2"),
    ("analyze full", "alone.vmdk"),
]  # fmt: skip


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("header-races"))


@pytest.mark.parametrize(("how", "name"), WAYS)
def test_a_header_that_changes_meanwhile_leads_to_no_file_of_roots(
    tmp_path: Path, ground: Ground, how: str, name: str
) -> None:
    trials = Trials("headers", f"{how} of {name}", part=1 / len(WAYS))
    with Crew() as crew:
        for trial in trials:
            with trial:
                trial.note(ground.race(crew, trial.rng, tmp_path / f"pool{trial.number}", how, name))
