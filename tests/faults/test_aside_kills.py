"""``kill -9`` at every step of setting an image aside, restoring and deleting it, and a guest that starts meanwhile."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.agent.aside import ASIDE, aside_args, back_args, delete_args
from tests.agent.harness import ask, at_ready, leftovers, make_image, recover_args, recovered
from tests.faults.test_kills import run_to_death
from tests.faults.trials import WHEN, Trials, steps
from tests.harness.filesystems import new_folder

pytestmark = [pytest.mark.faults, pytest.mark.qemu]
IMAGE, WAITING = "left.qcow2", {ASIDE, ".sa-j1.journal"}


class Place:
    """A pool with one image, known by inode and content."""

    def __init__(self, folder: Path) -> None:
        self.pool = new_folder(folder / "pool", parents=True)
        self.image, self.aside = make_image(self.pool / IMAGE), self.pool / ASIDE
        self.content, self.inode = self.image.read_bytes(), self.image.stat().st_ino

    def names(self) -> set[str]:
        """Which of both names lead to the image, whole; what else is there is the journal alone."""
        assert {path.name for path in self.pool.iterdir()} <= {self.image.name, *WAITING}
        found = {path.name for path in (self.image, self.aside) if path.exists() and path.stat().st_ino == self.inode}
        assert all((self.pool / name).read_bytes() == self.content for name in found)
        return found

    def settled(self) -> str:
        """The one name that it has when all is recovered; empty where it is gone."""
        names = self.names()
        assert len(names) <= 1
        assert leftovers(self.pool) == (WAITING if ASIDE in names else set())
        assert recovered(self.pool) == (["kept"] if ASIDE in names else [])
        return next(iter(names), "")


def each_death(folder: Path, verb: str, when: str) -> tuple[int, set[str]]:
    """Has an agent die at every step of a verb: at which one it got through, and which names the image then had."""
    outcomes = set()
    for at in steps():
        place, job = Place(folder / str(at)), "j1" if verb == "set_aside" else "j2"
        args = aside_args(place.image)
        if verb != "set_aside":
            ask("set_aside", args)
            args = back_args(place.image) if verb == "restore_aside" else delete_args(place.image, place.inode)
        died = run_to_death(verb, args, job, at, when)
        if died is None:
            break
        assert verb == "delete_aside" or place.names(), died
        print(f"step {at} {when}: {died}: {recovered(place.pool)}")
        outcomes.add(place.settled())
    return at, outcomes


@pytest.mark.parametrize("when", WHEN)
def test_setting_aside_that_dies_at_any_step_leaves_one_name_or_the_other(tmp_path: Path, when: str) -> None:
    at, outcomes = each_death(tmp_path, "set_aside", when)
    assert at > 8
    assert outcomes == {IMAGE, ASIDE}


@pytest.mark.parametrize(("verb", "fewest", "ended"), [("restore_aside", 6, IMAGE), ("delete_aside", 5, "")])
@pytest.mark.parametrize("when", WHEN)
def test_a_restore_or_a_deletion_that_dies_at_any_step_has_happened_or_not(
    tmp_path: Path, when: str, verb: str, fewest: int, ended: str
) -> None:
    at, outcomes = each_death(tmp_path, verb, when)
    assert at >= fewest
    assert outcomes == {ended, ASIDE}


def test_a_deletion_that_dies_is_not_taken_for_done_where_somebody_put_the_image_back(tmp_path: Path) -> None:
    outcomes = set()
    for at in steps():
        place = Place(tmp_path / str(at))
        ask("set_aside", aside_args(place.image))
        if run_to_death("delete_aside", delete_args(place.image, place.inode), "j2", at, "before") is None:
            break
        if place.aside.exists():
            place.aside.rename(place.image)
            [row] = ask("recover", recover_args(place.pool), job="r1")["recovered"]
            outcomes.add((row["job"], row["outcome"], row["put_back"]))
            assert place.image.read_bytes() == place.content
    assert outcomes == {("j1", "lost", True)}


def test_a_deletion_that_dies_says_what_it_has_freed(tmp_path: Path) -> None:
    told = set()
    for at in steps(stride=1):
        place = Place(tmp_path / str(at))
        ask("set_aside", aside_args(place.image))
        size = place.aside.stat().st_blocks * 512
        if has_another := at % 2:
            (tmp_path / f"kept{at}").hardlink_to(place.aside)
        if run_to_death("delete_aside", delete_args(place.image, place.inode), "j2", at, "after") is None:
            break
        for row in ask("recover", recover_args(place.pool), job="r1")["recovered"]:
            if row["outcome"] == "finished":
                assert row["discarded_bytes"] == (0 if has_another else size)
                told.add(row["discarded_bytes"])
    assert told


def test_a_guest_that_starts_in_that_moment_is_refused_or_wins(tmp_path: Path) -> None:
    """As for the swap: no guest on a file without its name, and none without its image. Both may give way."""
    trials = Trials("F7", "start while an image is set aside", points=20)
    for trial in trials:
        with trial:
            place = Place(trial.folder(tmp_path))
            with at_ready("set_aside", aside_args(place.image)) as agent:
                # The moment is a few milliseconds long, and a start takes about ten; on a busy machine a hundred.
                delay = f"sleep {trial.rng.uniform(0, 0.06):.4f}"
                guest = subprocess.Popen(
                    ["sh", "-c", f'{delay}; exec qemu-io -f qcow2 "$0"', place.image],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
                time.sleep(trial.rng.uniform(0, trial.rng.choice((0.05, 0.3))))
                answer = agent.go()
                said = guest.communicate(b"write -P 9 0 64k\nquit\n", timeout=60)[0]
                if "held_bytes" in answer:
                    assert b"wrote" not in said, said
                    assert place.settled() == ASIDE
                    trial.note("set aside, the guest refused")
                else:
                    assert answer["code"] == "image_in_use", answer
                    assert place.image.stat().st_ino == place.inode
                    assert leftovers(place.pool) == set()
                    if b"wrote" in said:
                        trial.note("the guest won")
                    else:
                        # It was seen while it opened the image, and met the agent's lock; its next start succeeds.
                        assert b"lock" in said, said
                        assert place.image.read_bytes() == place.content
                        trial.note("both gave way")
    if trials.all:
        assert {"set aside, the guest refused", "the guest won"} <= set(trials.tally), trials.tally
