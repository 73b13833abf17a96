"""``kill -9`` of the agent while an undo copy is removed, or while a lost one's journal is cleared (fault F1)."""

from pathlib import Path

import pytest

from tests.agent.harness import ask, leftovers, undo_args
from tests.faults.scene import Scene, Work
from tests.faults.test_kills import run_to_death
from tests.faults.trials import WHEN, steps

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

COPY, JOURNAL = ".sa-j1.orig", ".sa-j1.journal"


def reclaimed(folder: Path, template: Path) -> Scene:
    """The dashboard has the job on record, with an undo copy."""
    scene = Scene(folder, template)
    scene.begin(Work("discard", "discard_undo", first="reclaim by compress"))
    return scene


@pytest.mark.parametrize("when", WHEN)
def test_a_removal_that_dies_at_any_step_leaves_the_whole_copy_or_none(
    tmp_path: Path, templates: list[Path], when: str
) -> None:
    found = set()
    for at in steps(stride=1):
        scene = reclaimed(tmp_path / str(at), templates[at % len(templates)])
        died = run_to_death("discard_undo", undo_args(scene.image), "d1", at, when)
        if died is None:
            break
        there, told = COPY in leftovers(scene.pool), scene.recover()
        print(f"step {at} {when}: {died}: {told}")
        assert told == (["kept"] if there else ["lost"])
        assert leftovers(scene.pool) == ({COPY, JOURNAL} if there else set())
        scene.verify()
        found.add(there)
        if there:
            assert ask("undo", undo_args(scene.image), job="u1")["inode"] == scene.original.st_ino
            scene.verify()
    # What becomes free is noted first, then the copy's name is taken away.
    assert found == {True, False}


@pytest.mark.parametrize("when", WHEN)
def test_a_recovery_that_dies_while_it_clears_a_lost_copy_can_be_asked_again(
    tmp_path: Path, templates: list[Path], when: str
) -> None:
    for at in steps(stride=1):
        scene = reclaimed(tmp_path / str(at), templates[at % len(templates)])
        (scene.pool / COPY).unlink()
        died = run_to_death("recover", scene.recovery_args, "r1", at, when)
        if died is None:
            break
        told = scene.recover()
        print(f"step {at} {when}: {died}: {told}")
        assert told == ["lost"]
        assert leftovers(scene.pool) == set()
        scene.verify()
    assert at > 1


@pytest.mark.parametrize("when", WHEN)
def test_a_recovery_that_dies_beside_a_copy_that_waits_never_touches_it(
    tmp_path: Path, templates: list[Path], when: str
) -> None:
    scene = reclaimed(tmp_path / "scene", templates[0])
    before = {name: (scene.pool / name).stat() for name in (COPY, JOURNAL)}
    for at in steps(stride=1):
        if run_to_death("recover", scene.recovery_args, "r1", at, when) is None:
            break
    assert scene.recover() == ["kept"]
    for name, status in before.items():
        now = (scene.pool / name).stat()
        assert (now.st_ino, now.st_mtime_ns, now.st_size) == (status.st_ino, status.st_mtime_ns, status.st_size)
    scene.verify()
