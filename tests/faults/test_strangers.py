"""Somebody who asks nobody for a lock writes into the image, or puts a file in its place, while that is swapped.

He may come at any step. What he was told was written is in the file that has the name afterwards, or in none that he
found; a file that he moved there has the name. Nothing of his is under a name of the job's own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage_admin.agent.protocol import READY, REFUSALS
from tests.agent.aside import ASIDE, aside_args, back_args, delete_args
from tests.agent.harness import Agent, ask, leftovers, reclaim_args, recover_args, undo_args
from tests.agent.test_replace import replace_args
from tests.faults.trials import Trial, Trials

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

DRIVER = str(Path(__file__).with_name("attacked.py"))
#: Steps after ``go``: those of a swap that is finished, and those of what only moves or removes a name.
STEPS, FEW_STEPS = 25, 10
#: From here on nothing is looked at any more but what the moment itself is about.
AIMED = 12
MARK, PLACE = b"PRECIOUS", 1 << 16

#: Waits for a byte, and then acts. What he was told: the inode that he wrote to, or why not.
WRITER = """
import os, sys
open(sys.argv[1], "rb").read(1)
try:
    fd = os.open(sys.argv[2], os.O_RDWR)
    found = os.fstat(fd).st_ino
    os.pwrite(fd, b"PRECIOUS", 1 << 16)
    os.close(fd)
    print(found, flush=True)
except OSError as error:
    print(error.strerror, flush=True)
"""
#: The same, so that neither size nor time of the file tells of it afterwards.
HIDER = WRITER.replace(
    "    os.close(fd)\n", "    os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))\n    os.close(fd)\n"
).replace("    found = os.fstat(fd).st_ino\n", "    before = os.fstat(fd)\n    found = before.st_ino\n")
MOVER = """
import os, sys
open(sys.argv[1], "rb").read(1)
os.rename(sys.argv[2] + ".restored", sys.argv[2])
print("moved", flush=True)
"""


class Place:
    """A pool with a raw image, half of it zeros, and what is done to it."""

    def __init__(self, folder: Path, work: str) -> None:
        self.pool = folder / "pool"
        self.pool.mkdir(parents=True)
        self.image, self.converted = self.pool / "vm.raw", self.pool / "vm.qcow2"
        self.image.write_bytes((b"x" * 65536 + bytes(65536)) * 8)
        self.target = self.image
        #: What the work warned of.
        self.warned: list[str] = []
        hours = 0 if work.endswith("without undo") else 24
        reclaim = reclaim_args(self.image, format="raw", method="copy", undo_hours=hours)
        replace = replace_args(self.image, form="qcow2", source="raw")
        self.verb, self.args, self.job = "reclaim", reclaim, "j1"
        if work == "undo":
            assert ask("reclaim", reclaim)["swapped"]
            self.verb, self.args, self.job = "undo", undo_args(self.image), "u1"
        elif work == "undo of a conversion":
            assert ask("convert", replace)["swapped"]
            self.verb, self.args, self.job = "undo", undo_args(self.converted), "u1"
            self.target = self.converted
        elif work == "conversion":
            self.verb, self.args = "convert", replace
        elif work == "removal of an undo copy":
            assert ask("reclaim", reclaim)["swapped"]
            self.verb, self.args, self.job = "discard_undo", undo_args(self.image), "d1"
            self.target = self.pool / ".sa-j1.orig"
        elif work == "set aside":
            self.verb, self.args = "set_aside", aside_args(self.image)
        elif work in {"restore", "delete"}:
            args = back_args(self.image) if work == "restore" else delete_args(self.image, self.image.stat().st_ino)
            assert ask("set_aside", aside_args(self.image))["held_bytes"]
            self.verb, self.args, self.job, self.target = f"{work}_aside", args, "j2", self.pool / ASIDE

    def attacked(
        self, trial: Trial, attacker: str, *without: str, first: int = 1, steps: int = STEPS
    ) -> tuple[str, dict[str, object]]:
        """Runs the work with a stranger at a random step, and what recovers it: what he says, and the answer."""
        trigger = self.pool.parent / "trigger"
        os.mkfifo(trigger)
        stranger = subprocess.Popen(
            [sys.executable, "-c", attacker, trigger, self.target], stdout=subprocess.PIPE, text=True
        )
        at = trial.rng.randrange(first, steps)
        waits = self.verb != "discard_undo"
        how = [*without, *(() if waits else ("at-once",))]
        with Agent([sys.executable, DRIVER, str(at), str(trigger), *how]) as agent:
            agent.request(self.verb, self.args, self.job)
            if waits:
                agent.until(READY)
                agent.say("go", generation=1)
            answer = agent.answer(go=False)
            self.warned = [event["text"] for event in agent.events if event.get("level") == "warning"]
            trial.note(agent.stderr().partition("(")[0].strip() or "came too late")
        said = stranger.communicate(timeout=20)[0].strip()
        trial.note(f"step {at}", "refused" if "code" in answer else "done")
        # Twice: the second time there is nothing to do.
        for job in ("r1", "r2"):
            ask("recover", recover_args(self.pool), job=job)
        return said, answer


def marked(path: Path) -> bool:
    """Whether what the stranger has written is in that file."""
    return path.read_bytes()[PLACE:][: len(MARK)] == MARK


WORKS = ["reclaim", "reclaim without undo", "conversion", "undo", "undo of a conversion"]


@pytest.mark.parametrize("work", WORKS)
def test_what_somebody_writes_in_the_moment_of_a_swap_is_in_the_image(tmp_path: Path, work: str) -> None:
    trials = Trials("strangers", f"a write in the moment of a swap: {work}", part=1 / 10)
    for trial in trials:
        with trial:
            place = Place(trial.folder(tmp_path), work)
            said, answer = place.attacked(trial, WRITER)
            if said.isdigit():
                assert place.target.stat().st_ino == int(said), (answer, leftovers(place.pool))
                assert marked(place.target)
            trial.note("written" if said.isdigit() else said)


@pytest.mark.parametrize("work", WORKS)
def test_a_file_that_somebody_puts_in_the_images_place_in_the_moment_of_a_swap_stays_there(
    tmp_path: Path, work: str
) -> None:
    trials = Trials("strangers", f"a file in the image's place in the moment of a swap: {work}", part=1 / 10)
    for trial in trials:
        with trial:
            place = Place(trial.folder(tmp_path), work)
            restored = Path(f"{place.target}.restored")
            restored.write_bytes(b"restored" * 10_000)
            inode = restored.stat().st_ino
            said, answer = place.attacked(trial, MOVER)
            if said == "moved":
                assert place.target.stat().st_ino == inode, (answer, leftovers(place.pool))
                assert place.target.read_bytes() == b"restored" * 10_000
            trial.note(said)


@pytest.mark.parametrize("work", ["set aside", "restore", "delete", "removal of an undo copy"])
def test_what_somebody_writes_when_a_file_is_about_to_lose_its_name_is_found(tmp_path: Path, work: str) -> None:
    trials = Trials("strangers", f"a write while a name goes: {work}", part=1 / 10)
    for trial in trials:
        with trial:
            place = Place(trial.folder(tmp_path), work)
            said, answer = place.attacked(trial, WRITER, steps=FEW_STEPS)
            if said.isdigit():
                found = [path for path in place.pool.iterdir() if path.stat().st_ino == int(said)]
                # Nothing is hidden that he found under the image's name.
                assert found in ([place.image], [place.target]), (answer, leftovers(place.pool))
                assert marked(found[0])
            trial.note("written" if said.isdigit() else said)


@pytest.mark.parametrize("attacker", [WRITER, HIDER], ids=["writes", "sets the times back"])
@pytest.mark.parametrize("without", ["no-door", "no-exchange"])
def test_a_write_where_a_host_lacks_a_means_is_in_the_image_or_counted(
    tmp_path: Path, without: str, attacker: str
) -> None:
    """Without the door, one that sets the times back may be lost: docs/safety.md, 2.1, says how many of 50."""
    how = "sets the times back" if attacker == HIDER else "writes"
    trials = Trials("strangers less", f"a write in the moment of a swap: {without}, {how}")
    for trial in trials:
        with trial:
            work = trial.rng.choice(["reclaim", "reclaim without undo", "undo"])
            place = Place(trial.folder(tmp_path), work)
            before = place.image.stat().st_ino
            said, answer = place.attacked(trial, attacker, without, first=AIMED)
            now = place.image.stat().st_ino
            # What the row will say is so, and where nobody could be held back, it says that as well.
            if answer.get("code") in REFUSALS:
                assert now == before
            else:  # done, or both files are used: then the answer says that
                assert now == answer.get("inode", now) != before
                assert bool(place.warned) == (without == "no-door")
            trial.note(work)
            if said.isdigit() and not (marked(place.image) and int(said) == now):
                kept = place.pool / ".sa-j1.orig"
                trial.note(f"lost: in {'undo copy' if kept.exists() and marked(kept) else 'no file'}")
                # Whoever leaves a trace of it is seen, and with the door everybody is.
                assert (without, attacker) == ("no-door", HIDER), answer
            else:
                trial.note("written" if said.isdigit() else said)
