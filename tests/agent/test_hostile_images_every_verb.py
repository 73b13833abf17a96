"""Images that lead elsewhere or lie: whatever is asked of the agent, nothing outside of the pool is opened."""

import os
import random
import time
from pathlib import Path

import pytest

from storage_admin.agent.protocol import CANCELLED, b64
from tests.agent.batch import NO_APPLIANCE
from tests.agent.bombs import bombs
from tests.agent.every_verb import (
    CLEAN,
    NEVER_DONE,
    READS,
    REWRITES,
    TRIED,
    UNDOES,
    Answer,
    Crew,
    pool_request,
    request,
)
from tests.agent.hostile import Hostile, all_images, qcow2
from tests.agent.stranger import CANARY, NO_FILES, Scene, fingerprints
from tests.agent.test_files import left
from tests.agent.tracing import Trace
from tests.chance import night, seed

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

IMAGES = 250
#: Of the hostile images and bombs that no look at the header stops, so many come before a real appliance.
REACH = 20 if night() else 1
#: Seconds that they may take there, and until they have ended once they are told to.
TOLD_TO_STOP, STOPS_WITHIN = 240.0, 20.0
#: Taking a replacement back looks at names and journals only, so that not every image has to go through it.
EACH_OF_SO_MANY_IS_UNDONE = 3


def test_no_hostile_image_leads_any_verb_out_of_the_pool(tmp_path: Path) -> None:
    chance, began = random.Random(seed()), time.monotonic()
    scene = Scene(tmp_path)
    images = all_images(chance, scene.outside, scene.scratch, IMAGES)
    placed = [(bytes(scene.place(number, image)), image.form) for number, image in enumerate(images)]
    with Crew(tmp_path / "trace") as crew:
        for number, (path, form) in enumerate(placed):
            is_undone = number % EACH_OF_SO_MANY_IS_UNDONE == 0
            scene.each(crew, path, form, hows=[how for how in TRIED if is_undone or how not in UNDOES])
        scene.whole_pool(crew, placed)
    scene.report(f"{len(images)} images", began)
    scene.check_outside(tmp_path / "trace")
    # Not all of it is refused: what is sound is worked on, so that tools have been at work on strangers' files.
    assert {how for how in TRIED if not scene.outcomes[how].get("done")} <= NEVER_DONE


def test_hostile_images_that_come_as_far_as_the_appliance_end_there(tmp_path: Path) -> None:
    """The appliance, the program that serves it the disk, and libguestfs open nothing of the host."""
    chance, began = random.Random(seed()), time.monotonic()
    scene = Scene(tmp_path)
    images = all_images(chance, scene.outside, scene.scratch, IMAGES)
    placed = [(bytes(scene.place(number, image)), image.form) for number, image in enumerate(images)]
    for number, bomb in enumerate(bombs(scene.scratch), len(images)):
        image = scene.place(number, Hostile(bomb.what, bomb.form, b""))
        bomb.write(image)
        placed.append((bytes(image), bomb.form))
    with Crew() as crew:
        reached = [one for one in placed if _asked(scene, crew, "look at files", *one).detail == NO_APPLIANCE]
    print(f"{len(reached)} of {len(placed)} come as far as the appliance")
    assert len(reached) >= REACH
    # Where there is none yet, or packages were installed since, it is made first, of files from all over the system.
    with Crew(limit_seconds=TOLD_TO_STOP, appliance=True) as crew:
        _asked(scene, crew, "look at files", *reached[0])
    with Crew(tmp_path / "trace", limit_seconds=TOLD_TO_STOP, appliance=True) as crew:
        for path, form in chance.sample(reached, REACH):
            before = fingerprints(Path(os.fsdecode(path)).parent)
            for how in ("look at files", "trim"):
                answer = _asked(scene, crew, how, path, form)
                print(f"{os.fsdecode(path)} {how}: {answer.code or 'done'} {answer.detail} ({answer.seconds:.0f} s)")
                assert answer.code in CLEAN | {"", CANCELLED}, answer.detail
                assert answer.seconds < TOLD_TO_STOP + STOPS_WITHIN
                assert CANARY.decode() not in answer.text()
                assert left(Path(os.fsdecode(path)), crew.pid) == []
            assert fingerprints(Path(os.fsdecode(path)).parent) == before
    scene.report(f"{REACH} images", began)
    scene.check_outside(tmp_path / "trace", appliance=True)
    assert {"qemu-storage-daemon", "unshare", "setpriv"} <= Trace.read(tmp_path / "trace").started, "they were watched"


def _asked(scene: Scene, crew: Crew, how: str, path: bytes, form: str) -> Answer:
    verb, args = request(how, path, scene.pool, form)
    return crew.ask(verb, args)


def test_what_is_no_file_is_not_even_opened(tmp_path: Path) -> None:
    """To open a device, or a pipe that somebody waits at, does something to what is behind it."""
    scene = Scene(tmp_path)
    image = scene.place(0, Hostile("sound", "qcow2", qcow2()))
    with Crew(tmp_path / "trace") as crew:
        for name in sorted(NO_FILES):
            path = image.parent / os.fsdecode(name)
            status = path.stat()
            place = {"path_b64": b64(bytes(path)), "dev": status.st_dev, "inode": status.st_ino}
            times = {"file_size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
            for how in (*READS, *REWRITES):
                verb, args = request(how, bytes(image), scene.pool, "qcow2")
                described = place if how in READS else {**place, **times}
                described = {"base": args["base"] | described} if verb == "create" else described
                assert crew.ask(verb, {**args, **described}).code == "outside_pool", (how, name)
        assert crew.ask("scan", pool_request("scan", scene.pool)).code == ""
    scene.check_outside(tmp_path / "trace")
