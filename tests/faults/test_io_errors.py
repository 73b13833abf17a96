"""The disk answers with errors (fault F5), or the image is corrupt before anything is done (fault F6).

Errors come from qemu's own ``blkdebug``: a ``qemu-img`` that stands first in the agent's PATH puts it between qemu and
the image's file, and starts the real one.
"""

import json
import os
import random
import shutil
import struct
import sys
from pathlib import Path

import pytest

from tests.agent.harness import Agent, leftovers, qemu_img, stamp
from tests.faults.scene import Scene, seed

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

ERRORS = int(os.environ.get("STORAGE_ADMIN_IO_ERRORS", "20"))

WRAPPER = """#!{python}
import json, os, sys
rule = json.load(open("{rule}"))
def broken(options):
    if isinstance(options, dict):
        if options.get("driver") == "file" and os.readlink(options["filename"]).endswith(rule["file"]):
            return {{"driver": "blkdebug", "image": options, "inject-error": [rule["error"]]}}
        return {{name: broken(value) for name, value in options.items()}}
    return options
words = sys.argv[1:]
if words and words[0] in rule["subcommands"]:
    words = ["json:" + json.dumps(broken(json.loads(w[5:]))) if w.startswith("json:") else w for w in words]
os.execv("{real}", ["qemu-img", *words])
"""


@pytest.fixture
def broken_tools(tmp_path: Path) -> Path:
    """A folder for PATH with that ``qemu-img``."""
    folder = tmp_path / "tools"
    folder.mkdir()
    wrapper = folder / "qemu-img"
    rule = folder / "rule.json"
    wrapper.write_text(WRAPPER.format(python=sys.executable, real=shutil.which("qemu-img"), rule=rule))
    wrapper.chmod(0o755)
    return folder


def test_an_error_of_the_disk_fails_the_job_and_the_image_stands(
    tmp_path: Path, all_templates: list[Path], broken_tools: Path
) -> None:
    start = seed()
    print(f"STORAGE_ADMIN_SEED={start}")
    tally: dict[str, int] = {}
    for trial in range(ERRORS):
        rng = random.Random(f"{start}-{trial}")
        scene = Scene(tmp_path / str(trial), rng.choice(all_templates))
        verb, own = rng.choice(scene.works())
        subcommand = rng.choice(["convert", "compare", "rebase"] if verb == "flatten" else ["convert", "compare"])
        name = rng.choice([scene.image.name, ".sa-j1.new"])
        sector = sector_with_data(rng, scene.pool / name if (scene.pool / name).exists() else scene.image)
        error = {"event": "none", "iotype": "read", "errno": 5, "once": False, "sector": sector}
        rule = {"file": name, "subcommands": [subcommand], "error": error}
        (broken_tools / "rule.json").write_text(json.dumps(rule))
        with Agent(env={"PATH": f"{broken_tools}:{os.environ['PATH']}"}) as agent:
            agent.request(verb, scene.args(**own))
            answer = agent.answer()
        what = answer.get("code", "done")
        print(answer.get("detail"))
        tally[what] = tally.get(what, 0) + 1
        assert what in {"done", "tool_failed", "dirty_or_corrupt"}, (trial, start, answer)
        replaced = what == "done" and answer["swapped"] and verb != "convert"
        assert scene.swapped == replaced, (trial, start, answer)
        if what != "done":
            assert leftovers(scene.pool) == set(), (trial, start, answer)
        assert not any("--salvage" in str(event) for event in agent.events)
        scene.verify()
    print(f"errors of the disk: {tally}")
    assert ERRORS < 10 or tally.get("tool_failed", 0) > 0


def sector_with_data(rng: random.Random, path: Path) -> int:
    """A sector of a file that is no hole."""
    with path.open("rb") as file:
        end = os.lseek(file.fileno(), 0, os.SEEK_HOLE)  # of the first stretch of data
    return rng.randrange(min(end, path.stat().st_size) // 512)


@pytest.mark.parametrize("work", range(6))
def test_a_corrupt_image_is_refused_and_left_as_it_is(tmp_path: Path, all_templates: list[Path], work: int) -> None:
    scene = Scene(tmp_path / "scene", all_templates[3])
    with scene.image.open("r+b") as file:
        file.seek(40)
        (l1,) = struct.unpack(">Q", file.read(8))
        file.seek(l1)
        (l2,) = struct.unpack(">Q", file.read(8))
        file.seek((l2 & 0x00FFFFFFFFFFFE00) + 8)
        (entry,) = struct.unpack(">Q", file.read(8))
        file.seek((l2 & 0x00FFFFFFFFFFFE00) + 16)
        file.write(struct.pack(">Q", entry | 1 << 63))  # two guest clusters in one place, counted once
    before = stamp(scene.image), scene.image.read_bytes()
    verbs = [one for one in scene.works() if one[1].get("repair") != "all"]
    verb, own = verbs[work % len(verbs)]
    with Agent() as agent:
        agent.request(verb, scene.args(**own))
        assert agent.answer()["code"] == "dirty_or_corrupt"
    assert (stamp(scene.image), scene.image.read_bytes()) == before
    assert leftovers(scene.pool) == set()
    with Agent() as agent:
        agent.request("check", scene.args(repair="all"), "j2")
        assert agent.answer()["swapped"]
    assert b"No errors" in qemu_img("check", "-f", "qcow2", scene.image)
