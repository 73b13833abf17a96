"""An image is dug in place, and is killed, stopped or disturbed by a guest meanwhile (faults F1 and F7)."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agent.harness import Agent, Writer, link, qemu_img, same_content
from tests.agent.test_in_place import AGENT
from tests.faults.test_kills import listen
from tests.faults.trials import Trials

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

MIB = 1 << 20
SIZE = 24 * MIB
#: Bytes a second: an image takes a quarter of a second to half of one.
SPEEDS = [48 * MIB, 64 * MIB, 96 * MIB]
PATTERN = 0xC3

#: A program that knows no image lock: it opens, writes to many places, syncs.
PLAIN_WRITER = (
    "import os, sys\n"
    "fd = os.open(sys.argv[1], os.O_RDWR)\n"
    "for at in sys.argv[2:]: os.pwrite(fd, bytes([0xC3]) * 5000, int(at))\n"
    "os.fsync(fd)"
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By format, an image of noise and of much larger stretches of zeros, all of them on the disk."""
    folder = tmp_path_factory.mktemp("originals")
    raw, qcow2 = folder / "vm.raw", folder / "vm.qcow2"
    rng = random.Random(11)
    with raw.open("wb") as file:
        while file.tell() < SIZE:
            file.write(rng.randbytes(rng.choice([4096, 65536])))
            file.write(bytes(rng.choice([4096, 65536, MIB])))
        file.truncate(SIZE)
    qemu_img("convert", "-S", "0", "-f", "raw", "-O", "qcow2", raw, qcow2)
    return {"raw": raw, "qcow2": qcow2}


class Pool:
    """A pool with one image in it, and a copy elsewhere."""

    def __init__(self, folder: Path, original: Path) -> None:
        self.form = original.suffix[1:]
        self.folder = folder
        folder.mkdir()
        self.image = folder / original.name
        self.copy = folder.with_name(f"{folder.name}-copy{original.suffix}")
        for target in (self.image, self.copy):
            subprocess.run(["cp", "--sparse=never", original, target], check=True)
        self.before = self.image.stat()

    def begin(self, agent: Agent, bandwidth: int) -> None:
        """Has an agent work on it, until it digs."""
        agent.request("in_place", {"image": link(self.image, form=self.form), "chain": [], "bandwidth": bandwidth})
        agent.until("progress", stage="digging")

    def verify(self) -> None:
        """The image reads as the copy, is sound and free, and nothing is left beside it."""
        assert same_content(self.image, self.copy, self.form)
        if self.form == "qcow2":
            assert b"No errors" in qemu_img("check", "-f", "qcow2", self.image)
        assert [path.name for path in self.folder.iterdir()] == [self.image.name]
        assert self.image.stat().st_size == self.copy.stat().st_size
        with Writer(self.image, self.form) as guest:
            assert not guest.refused

    @property
    def freed(self) -> int:
        return (self.before.st_blocks - self.image.stat().st_blocks) * 512

    def remove(self) -> None:
        self.image.unlink()
        self.copy.unlink()


def test_kills_at_random_moments_change_no_byte(tmp_path: Path, originals: dict[str, Path]) -> None:
    trials, freed = Trials("F1", "kills while holes are dug", part=1 / 12), []
    for trial in trials:
        with trial:
            pool = Pool(tmp_path / str(trial.number), originals[trial.rng.choice(["raw", "qcow2"])])
            with Agent(AGENT) as agent:
                pool.begin(agent, trial.rng.choice(SPEEDS))
                listen(agent, time.monotonic() + trial.rng.uniform(0, 0.4))
                os.kill(agent.process.pid, signal.SIGKILL)
            freed.append(round(pool.freed / MIB))
            trial.note(f"{freed[-1]} MiB freed before")
            pool.verify()
            pool.remove()
    # Some were killed in the midst of it.
    assert not trials.all or len(freed) < 20 or len(set(freed)) > 3


@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_a_guest_that_starts_at_a_random_moment_is_not_refused_and_loses_no_write(
    tmp_path: Path, originals: dict[str, Path], form: str
) -> None:
    trials = Trials("F7", f"a guest starts while holes are dug into a {form} image")
    for trial in trials:
        with trial:
            rng, pool = trial.rng, Pool(tmp_path / str(trial.number), originals[form])
            writes = [f"write -P {PATTERN} {rng.randrange(SIZE // 512 - 100) * 512} 20k" for _ in range(60)]
            commands = [word for write in writes for word in ("-c", write)]
            with Agent(AGENT) as agent:
                pool.begin(agent, rng.choice(SPEEDS))
                answered = listen(agent, time.monotonic() + rng.uniform(0, 0.4))
                asked = time.monotonic()
                done = subprocess.run(["qemu-io", "-f", form, *commands, pool.image], capture_output=True)
                assert done.returncode == 0, repr(done.stderr)
                assert done.stdout.count(b"wrote ") == len(writes)
                assert time.monotonic() - asked < 2
                listen(agent, time.monotonic() + 20)
            subprocess.run(["qemu-io", "-f", form, *commands, pool.copy], capture_output=True, check=True)
            trial.note("after it" if answered else "while it dug")
            pool.verify()
            pool.remove()
    assert not trials.all or len(trials.numbers) < 20 or trials.tally["while it dug"] > 3


def test_a_program_without_locks_that_writes_at_a_random_moment_loses_nothing(
    tmp_path: Path, originals: dict[str, Path]
) -> None:
    """As a container behind a loop device would: a raw image on which no lock is ever seen."""
    for trial in Trials("F7", "a program without locks writes while holes are dug"):
        with trial:
            rng, pool = trial.rng, Pool(tmp_path / str(trial.number), originals["raw"])
            places = [str(rng.randrange(SIZE - 5000)) for _ in range(200)]
            with Agent(AGENT) as agent:
                pool.begin(agent, rng.choice(SPEEDS))
                for part in range(0, len(places), 50):
                    listen(agent, time.monotonic() + rng.uniform(0, 0.08))
                    some = places[part : part + 50]
                    subprocess.run([sys.executable, "-c", PLAIN_WRITER, pool.image, *some], check=True)
                listen(agent, time.monotonic() + 20)
            subprocess.run([sys.executable, "-c", PLAIN_WRITER, pool.copy, *places], check=True)
            pool.verify()
            pool.remove()


def test_an_agent_that_is_stopped_in_the_midst_of_it_does_not_dig_under_a_guest(
    tmp_path: Path, originals: dict[str, Path]
) -> None:
    """Whoever opens the image waits for the agent to go on, or to die."""
    for end in (signal.SIGCONT, signal.SIGKILL):
        pool = Pool(tmp_path / end.name, originals["raw"])
        with Agent(AGENT) as agent:
            pool.begin(agent, 32 * MIB)
            os.kill(agent.process.pid, signal.SIGSTOP)
            places = [str(at) for at in range(0, SIZE - 5000, 100_000)]
            writer = subprocess.Popen([sys.executable, "-c", PLAIN_WRITER, pool.image, *places])
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(0.5)
            os.kill(agent.process.pid, end)
            assert writer.wait(20) == 0
            listen(agent, time.monotonic() + 20)
        subprocess.run([sys.executable, "-c", PLAIN_WRITER, pool.copy, *places], check=True)
        pool.verify()
