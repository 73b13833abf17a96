"""``kill -9`` at every step of a conversion that takes its image's place, and of its undo."""

from pathlib import Path

import pytest

from tests.agent.harness import ask, kept, leftovers, make_image, qemu_img, reads_as, recovered, undo_args, write
from tests.agent.test_replace import KEPT, replace_args
from tests.faults.test_kills import run_to_death
from tests.faults.trials import WHEN, steps
from tests.harness.filesystems import new_folder

pytestmark = [pytest.mark.faults, pytest.mark.qemu]


class Place:
    """A pool with one image; its original is known by inode and content."""

    def __init__(self, folder: Path) -> None:
        self.pool = new_folder(folder / "pool", parents=True)
        self.old, self.new = make_image(self.pool / "vm.qcow2"), self.pool / "vm.raw"
        self.before, self.inode = kept(self.old, folder), self.old.stat().st_ino

    def recover(self) -> list[str]:
        return recovered(self.pool)

    def whole(self) -> bool:
        """Whether at least one of both names leads to a whole image."""
        return any(
            path.exists() and reads_as(self.before, path, "qcow2", form)
            for path, form in ((self.old, "qcow2"), (self.new, "raw"))
        )

    def replaced(self) -> bool:
        """Whether the new one is there; exactly one of both is, and it is whole."""
        assert self.old.exists() != self.new.exists()
        assert self.whole()
        there = self.new if self.new.exists() else self.old
        assert there.stat().st_nlink == 1
        return self.new.exists()


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("undo_hours", [24.0, 0.0])
def test_one_that_dies_at_any_step_leaves_the_original_or_the_result(
    tmp_path: Path, when: str, undo_hours: float
) -> None:
    outcomes = set()
    for at in steps():
        place = Place(tmp_path / str(at))
        died = run_to_death("convert", replace_args(place.old, form="raw", undo_hours=undo_hours), "j1", at, when)
        if died is None:
            break
        assert place.whole(), died
        print(f"step {at} {when}: {died}: {place.recover()}")
        outcomes.add(place.replaced())
        assert leftovers(place.pool) == (KEPT if place.replaced() and undo_hours else set()), died
        if place.replaced() and undo_hours:
            assert ask("undo", undo_args(place.new), job="u1").get("inode") == place.inode
            assert not place.replaced()
    assert at > 17
    assert outcomes == {True, False}


@pytest.mark.parametrize("when", WHEN)
def test_an_undo_that_dies_at_any_step_leaves_the_original_or_the_result(tmp_path: Path, when: str) -> None:
    outcomes = set()
    for at in steps():
        place = Place(tmp_path / str(at))
        assert ask("convert", replace_args(place.old, form="raw"))["swapped"]
        died = run_to_death("undo", undo_args(place.new), "u1", at, when)
        if died is None:
            break
        assert place.whole(), died
        print(f"step {at} {when}: {died}: {place.recover()}")
        outcomes.add(place.replaced())
        assert leftovers(place.pool) == (KEPT if place.replaced() else set()), died
        if place.replaced():
            assert ask("undo", undo_args(place.new), job="u2")["inode"] == place.inode
    assert outcomes == {True, False}


@pytest.mark.parametrize("which", ["old", "new"])
def test_what_is_written_between_a_kill_and_the_recovery_is_kept(tmp_path: Path, which: str) -> None:
    """Both names lead to whole images for a moment: whichever somebody writes to, what was written stays."""
    seen = set()
    for at in steps(14, stride=1):
        place = Place(tmp_path / str(at))
        died = run_to_death("convert", replace_args(place.old, form="raw"), "j1", at, "after")
        if died is None:
            break
        path, form = (place.old, "qcow2") if which == "old" else (place.new, "raw")
        if not (place.old.exists() and place.new.exists()):
            continue
        write(path, 0x5A, "7M", "64k", form)
        written = tmp_path / f"written{at}.qcow2"
        qemu_img("convert", "-f", form, "-O", "qcow2", path, written)
        outcomes = place.recover()
        assert reads_as(written, path, "qcow2", form), (died, outcomes)
        seen.add(outcomes[0])
        assert outcomes[0] == ("failed" if which == "old" else "finished")
    assert seen
