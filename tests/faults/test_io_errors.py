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
from typing import Any

import pytest

from tests.agent.harness import UNCONFINED, ask, heard, leftovers, number_at, overwrite, qemu_img, stamp
from tests.agent.test_estimate_leaks import l2_table
from tests.faults.scene import Scene, Work
from tests.faults.trials import Trials
from tests.harness.filesystems import new_folder, new_program

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

WRAPPER = """#!{python}
import json, os, sys
rule = json.load(open("{rule}"))
def broken(options):
    if isinstance(options, dict):
        if options.get("driver") == "file" and os.readlink(options["filename"]).endswith(rule["file"]):
            return {{"driver": "blkdebug", "image": options, "inject-error": [rule["error"]]}}
        return {{name: broken(value) for name, value in options.items()}}
    return options
def through(word):
    options = json.loads(word[5:]) if word.startswith("json:") else None
    # Another file stays named as it was, to the letter: the agent compares it with what the header says then.
    return word if broken(options) == options else "json:" + json.dumps(broken(options))
words = sys.argv[1:]
if words and words[0] in rule["subcommands"]:
    words = [through(word) for word in words]
os.execv("{real}", ["qemu-img", *words])
"""


@pytest.fixture
def broken_tools(tmp_path: Path) -> Path:
    """A folder for PATH with that ``qemu-img``."""
    folder = new_folder(tmp_path / "tools")
    wrapper = folder / "qemu-img"
    rule = folder / "rule.json"
    new_program(wrapper, WRAPPER.format(python=sys.executable, real=shutil.which("qemu-img"), rule=rule))
    return folder


def test_an_error_of_the_disk_fails_the_job_and_the_image_stands(
    tmp_path: Path, all_templates: list[Path], broken_tools: Path
) -> None:
    trials = Trials("F5", "errors of the disk while an image is rewritten")
    for trial in trials:
        with trial:
            scene = Scene(trial.folder(tmp_path), trial.rng.choice(all_templates))
            # These have qemu read the image.
            work = trial.rng.choice([one for one in scene.works() if not one.in_place and not one.first])
            trial.note(f"{work.name} of {scene.form}")
            request = scene.begin(work)
            (broken_tools / "rule.json").write_text(json.dumps(an_error(trial.rng, scene, work)))
            path = f"{broken_tools}:{os.environ['PATH']}"
            answer, events = heard(*request(), command=UNCONFINED, env={"PATH": path})
            what = str(answer.get("code", "done"))
            trial.note(what)
            assert what in {"done", "tool_failed", "dirty_or_corrupt"}, answer
            assert scene.swapped == (work.swaps and what == "done" and answer["swapped"]), answer
            if what != "done":
                assert leftovers(scene.pool) == set(), answer
                assert not list(scene.pool.glob("converted.*"))
            assert "--salvage" not in str(events)
            scene.verify()
    assert not trials.all or len(trials.numbers) < 10 or trials.tally["tool_failed"] > 0


def an_error(rng: random.Random, scene: Scene, work: Work) -> dict[str, Any]:
    """Where qemu's reads are to fail: in which file, in which of its sectors, for which of its commands."""
    commands = ["convert", "compare", "check"]
    if work.verb == "flatten":
        commands.append("rebase")
    name = rng.choice([scene.image.name, ".sa-j1.new"])
    error = {"event": "none", "iotype": "read", "errno": 5, "once": False}
    error["sector"] = sector_with_data(rng, scene.image)
    return {"file": name, "subcommands": [rng.choice(commands)], "error": error}


def sector_with_data(rng: random.Random, path: Path) -> int:
    """A sector of a file that is no hole."""
    with path.open("rb") as file:
        end = os.lseek(file.fileno(), 0, os.SEEK_HOLE)  # of the first stretch of data
    return rng.randrange(min(end, path.stat().st_size) // 512)


def corrupt_qcow2(path: Path) -> None:
    """Two guest clusters in one place, which is counted once."""
    entry = number_at(path, ">Q", l2_table(path) + 8)
    overwrite(path, l2_table(path) + 16, struct.pack(">Q", entry | 1 << 63))


def corrupt_vdi(path: Path) -> None:
    """Two guest blocks in one place."""
    blocks = number_at(path, "<I", 340)
    overwrite(path, blocks + 4, struct.pack("<I", number_at(path, "<I", blocks)))


def corrupt_vmdk(path: Path) -> None:
    """A grain behind the end of the file."""
    directory = number_at(path, "<Q", 56) * 512
    overwrite(path, number_at(path, "<I", directory) * 512, struct.pack("<I", 1 << 24))


@pytest.mark.parametrize("form", ["qcow2", "vdi", "vmdk"])
def test_a_corrupt_image_is_refused_whatever_is_asked_and_left_as_it_is(
    tmp_path: Path, by_format: dict[str, list[Path]], form: str
) -> None:
    template = by_format[form][-1]
    # A new overlay reads nothing of its base but the header.
    wanted = [
        work.name for work in Scene(tmp_path / "look", template).works() if not work.first and work.verb != "create"
    ]
    trials = Trials("F6", f"a corrupt {form} image is refused", points=len(wanted))
    for trial in trials:
        with trial:
            scene = Scene(trial.folder(tmp_path), template)
            {"qcow2": corrupt_qcow2, "vdi": corrupt_vdi, "vmdk": corrupt_vmdk}[form](scene.image)
            before = stamp(scene.image), scene.image.read_bytes()
            work = scene.work(wanted[trial.number])
            trial.note(work.name)
            answer = ask(*scene.begin(work)())
            if work.own.get("repair") == "all":
                # Asked for by that name, it is mended, on a copy.
                assert answer["swapped"], answer
                assert leftovers(scene.pool) == {".sa-j1.journal", ".sa-j1.orig"}
                assert b"No errors" in qemu_img("check", "-f", form, scene.image)
            else:
                # Of a vmdk, qemu-img's check tells no number of errors: it only fails.
                assert answer.get("code") == ("tool_failed" if form == "vmdk" else "dirty_or_corrupt"), answer
                assert leftovers(scene.pool) == set()
                assert (stamp(scene.image), scene.image.read_bytes()) == before
                assert not list(scene.pool.glob("converted.*"))
