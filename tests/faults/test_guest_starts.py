"""A guest starts while an image is reclaimed: it wins, and not one of its writes is lost (fault F7)."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.host import locking
from tests.agent.harness import Agent, Writer, ask, at_stage, leftovers, make_image, qemu_io, reclaim_args, write
from tests.faults.scene import Scene, Work
from tests.faults.test_kills import all_ways, listen
from tests.faults.test_strangers import DRIVER, STEPS
from tests.faults.trials import Trials
from tests.harness.filesystems import new_file
from tests.working import create

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

PATTERN = 0xC3


def holds_the_pattern(path: Path, offset: str, length: str, form: str = "qcow2") -> bool:
    command = f"read -P {PATTERN} {offset} {length}"
    done = subprocess.run(["qemu-io", "-r", "-f", form, "-c", command, path], capture_output=True, check=True)
    return b"Pattern verification failed" not in done.stdout


@pytest.fixture
def noise(tmp_path: Path) -> str:
    """Writes into an image what makes its copy take seconds."""
    return f"write -s {new_file(tmp_path / 'noise', random.Random(1).randbytes(4 << 20))} 0 4M"


@pytest.fixture
def slow_image(pool: Path, noise: str) -> Iterator[Path]:
    """An image whose copy takes seconds."""
    path = make_image(pool / "vm.qcow2", "16M")
    qemu_io(path, noise)
    yield path
    assert leftovers(pool) == set()


def test_a_guest_can_start_while_the_copy_is_made_and_the_job_gives_way(slow_image: Path) -> None:
    args = reclaim_args(slow_image, bandwidth_bytes_sec=1 << 20)
    with at_stage("copying", "reclaim", args) as agent, Writer(slow_image) as guest:
        assert not guest.refused, guest.said
        guest.write(PATTERN, "10M", "1M")
        asked = time.monotonic()
        answer = agent.answer()
        assert answer.get("code") in {"image_in_use", "stale_plan"}, answer
        assert time.monotonic() - asked < 5
    assert holds_the_pattern(slow_image, "10M", "1M")


def test_a_guest_that_has_started_written_and_stopped_meanwhile_is_noticed(slow_image: Path) -> None:
    with at_stage("copying", "reclaim", reclaim_args(slow_image, bandwidth_bytes_sec=1 << 20)) as agent:
        write(slow_image, PATTERN, "10M", "1M")
        answer = agent.answer()
    assert answer.get("code") in {"image_in_use", "stale_plan"}, answer
    assert holds_the_pattern(slow_image, "10M", "1M")


def test_a_guest_that_only_reads_wins_as_well(slow_image: Path) -> None:
    args = reclaim_args(slow_image, bandwidth_bytes_sec=1 << 20)
    with at_stage("copying", "reclaim", args) as agent, Writer(slow_image, read_only=True):
        assert agent.answer().get("code") == "image_in_use"


def test_a_writer_of_the_base_stops_the_work_on_its_overlay_or_is_refused(pool: Path, noise: str) -> None:
    base = make_image(pool / "base.qcow2", "16M")
    overlay = create(pool / "vm.qcow2", base=base)
    qemu_io(overlay, noise)
    with at_stage("copying", "reclaim", reclaim_args(overlay, base, bandwidth_bytes_sec=1 << 20)) as agent:
        wrote = subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write 0 64k", base], capture_output=True)
        answer = agent.answer()
    if wrote.returncode == 0:
        assert answer.get("code") in {"image_in_use", "stale_plan"}
        assert leftovers(pool) == set()
    else:
        # The copy has the base open as well: whoever wants to write to what overlays stand on is told no, and the
        # work, which nothing has disturbed, is done.
        assert b"lock" in wrote.stderr
        assert "before_bytes" in answer  # a result


def test_a_guest_that_starts_at_a_random_moment_loses_no_write(
    tmp_path: Path, by_format: dict[str, list[Path]]
) -> None:
    """Whoever wins, the guest's write is in the image that has its name; or the guest was refused."""
    trials = Trials("F7", "a guest starts while an image is rewritten")
    ways = all_ways(tmp_path, by_format, random.Random(trials.outcome.seed))
    for trial in trials:
        with trial:
            template, name = ways[trial.number % len(ways)]
            scene = Scene(trial.folder(tmp_path), template)
            trial.note(f"{name} of {scene.form}")
            trial.note(start_a_guest(trial.rng, scene, scene.work(name)))
            scene.recover()
            assert leftovers(scene.pool) <= {".sa-j1.journal", ".sa-j1.orig"}
    assert not trials.all or len(trials.numbers) < 10 or any(note.startswith("started") for note in trials.tally)


def start_a_guest(rng: random.Random, scene: Scene, work: Work) -> str:
    """Starts a guest on the image at a random moment of a work, and has it write; tells how it went."""
    request, before = scene.begin(work), scene.there.stat().st_ino
    with Agent() as agent:
        agent.request(*request())
        if work.swaps and rng.random() < 0.6:
            # Around the swap, where it is tight.
            agent.until("ready")
            agent.say(protocol.GO, generation=1)
            time.sleep(rng.uniform(0, 0.9))
        else:
            listen(agent, time.monotonic() + rng.uniform(0, work.seconds + 0.2))
        image = scene.there
        with Writer(image, image.suffix[1:]) as guest:
            if not guest.refused:
                guest.write(PATTERN, "7M", "256k")
            listen(agent, time.monotonic() + 30)
    swapped = scene.there.stat().st_ino != before
    outcome = f"{'refused' if guest.refused else 'started'}, {'swapped' if swapped else 'not swapped'}"
    # A guest was started by the name that the image had in that moment; what has that name now has its writes.
    if not guest.refused:
        assert image.exists(), f"{outcome}: the image that a guest has written to is gone"
        assert holds_the_pattern(image, "7M", "256k", image.suffix[1:]), outcome
    return outcome


#: A guest of a hypervisor that takes no image locks, as Proxmox VE's: waits for a byte, starts, writes and runs on.
LOCKLESS = """
import os, subprocess, sys
open(sys.argv[1], "rb").read(1)
image = "driver=qcow2,file.driver=file,file.locking=off,file.filename=" + sys.argv[2]
command = ["qemu-io", "--image-opts", image, "-c", "write -P 195 7M 64k", "-c", "flush", "-c", "sleep 1500"]
print(subprocess.run(command, capture_output=True, text=True).stdout)
"""


@pytest.mark.parametrize("work", ["reclaim by copy", "undo of a reclaim"])
def test_no_guest_without_locks_is_left_on_a_file_that_has_lost_its_name(
    tmp_path: Path, templates: list[Path], work: str
) -> None:
    trials = Trials("F7", f"a guest without locks starts in the moment of: {work}", part=1 / 4)
    for trial in trials:
        with trial:
            scene = Scene(trial.folder(tmp_path), templates[trial.number % len(templates)])
            request, trigger = scene.begin(scene.work(work)), tmp_path / f"trigger{trial.number}"
            os.mkfifo(trigger)
            command = [sys.executable, "-c", LOCKLESS, str(trigger), str(scene.image)]
            guest = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            at = str(trial.rng.randrange(1, STEPS))
            answer = ask(*request(), command=[sys.executable, DRIVER, at, str(trigger)])
            said = guest.communicate(timeout=60)[0]
            scene.recover()
            trial.note("refused" if "code" in answer else "done", "wrote" if "wrote" in said else "did not start")
            assert "wrote" not in said or holds_the_pattern(scene.image, "7M", "64k"), (said, answer)
    assert not trials.all or len(trials.numbers) < 5 or "wrote" in trials.tally


def test_the_locks_end_with_the_job(tmp_path: Path, templates: list[Path]) -> None:
    scene = Scene(tmp_path / "scene", templates[0])
    assert ask("reclaim", reclaim_args(scene.image))["swapped"]
    with scene.image.open("rb") as image:
        assert locking.locked_bytes(image.fileno()) == []
    with Writer(scene.image) as guest:
        assert not guest.refused
