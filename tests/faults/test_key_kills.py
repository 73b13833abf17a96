"""Agents that change the passphrases of an image die at any step: it is encrypted as before, or as it should be."""

from pathlib import Path

import pytest

from tests.agent.harness import ask, leftovers, recover_args
from tests.agent.test_keys import BOTH, FIRST, SECOND, args_for, content, fill, made, opens
from tests.faults.test_full_disk import disk
from tests.faults.test_full_disk import fill as fill_disk
from tests.faults.test_kills import run_to_death
from tests.faults.trials import WHEN, steps
from tests.harness.filesystems import new_folder

__all__ = ["disk"]

pytestmark = [pytest.mark.faults, pytest.mark.qemu]


@pytest.mark.parametrize("when", WHEN)
def test_whatever_step_it_dies_at_the_image_opens(tmp_path: Path, when: str) -> None:
    outcomes = set()
    for at in steps():
        pool = new_folder(tmp_path / str(at) / "pool", parents=True)
        path = made(pool, "qcow2")
        fill(path, "qcow2", FIRST)
        before = content(path, "qcow2", FIRST)
        died = run_to_death("keys", args_for(path, "qcow2", secrets=BOTH, undo_hours=0), "j1", at, when)
        if died is None:
            break
        ask("recover", recover_args(pool), job="r1")
        outcomes.add(opens(path, "qcow2", SECOND))
        assert content(path, "qcow2", FIRST) == before, died
        assert leftovers(pool) == set()
    assert False in outcomes


def test_a_full_disk_changes_nothing(disk: Path) -> None:
    path = made(new_folder(disk / "here" / "pool", parents=True), "qcow2")
    before = path.read_bytes()
    ballast = fill_disk(disk, 1 << 20)
    assert ask("keys", args_for(path, "qcow2", secrets=BOTH))["code"] == "not_enough_space"
    ballast.unlink()
    assert (path.read_bytes() == before, leftovers(path.parent)) == (True, set())
