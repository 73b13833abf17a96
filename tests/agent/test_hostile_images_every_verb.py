"""Images that lead elsewhere or lie: whatever is asked of the agent, nothing outside of the pool is opened."""

import os
import random
import time
from pathlib import Path

import pytest

from storage_admin.agent.protocol import b64
from tests.agent.every_verb import NEVER_DONE, READS, REWRITES, TRIED, UNDOES, Crew, pool_request, request
from tests.agent.hostile import Hostile, all_images, qcow2
from tests.agent.stranger import NO_FILES, Scene
from tests.chance import seed

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

IMAGES = 250
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
    assert all(scene.outcomes[how].get("done") for how in TRIED if how not in NEVER_DONE)


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
