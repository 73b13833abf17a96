"""Work that no scene has dies at any step, or has no room: the image reads as before, a new file is whole or none."""

import gzip
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage_admin.agent import protocol
from tests.agent import test_bitmaps, test_from_device, test_keys, test_relink, test_shrink, test_unpack
from tests.agent.harness import Agent, ask, image_info, kept, leftovers, make_image, qemu_img, reads_as, recover_args
from tests.chance import night, seed
from tests.faults.test_full_disk import disk
from tests.faults.test_full_disk import fill as fill_disk
from tests.faults.test_kills import listen, run_to_death, tools_of
from tests.faults.test_power_cuts import Power, cut_after, power
from tests.faults.trials import WHEN, steps
from tests.harness.filesystems import loop_device, new_folder

__all__ = ["disk", "power"]

pytestmark = [pytest.mark.faults, pytest.mark.qemu]
MIB = 1 << 20


@dataclass
class Case:
    """What is asked of an agent.

    Args:
        whole: whether an image is there that reads as it should; of a new one also whether there is none.
        done: whether the work came to its end.
    """

    verb: str
    args: dict[str, Any]
    whole: Callable[[], bool]
    done: Callable[[], bool]


MakeCase = Callable[[Path, ExitStack], Case]


def bitmaps(pool: Path, stack: ExitStack) -> Case:
    path = make_image(pool / "vm.qcow2")
    before = kept(path, pool.parent)
    qemu_img("bitmap", "--add", path, "one")
    args = test_bitmaps.args_for(path, "one") | {"undo_hours": 0.0}
    return Case("bitmaps", args, lambda: reads_as(path, before), lambda: not test_bitmaps.bitmaps(path))


def relink(pool: Path, stack: ExitStack) -> Case:
    base, path = test_relink.pair(pool)
    before = kept(path, pool.parent)
    moved = base.rename(pool / "moved.qcow2")

    def done() -> bool:
        return b"moved.qcow2" in qemu_img("info", "-U", "--output=json", path)

    def whole() -> bool:
        if done():
            return reads_as(path, before)
        moved.rename(base)
        try:
            return reads_as(path, before)
        finally:
            base.rename(moved)

    return Case("relink", test_relink.args_for(path, moved) | {"undo_hours": 0.0}, whole, done)


def unpack(pool: Path, stack: ExitStack) -> Case:
    before = make_image(pool.parent / "before.qcow2")
    packed, new = pool / "disk.gz", pool / "new.qcow2"
    packed.write_bytes(gzip.compress(before.read_bytes()))
    return Case("unpack", test_unpack.args_for(packed), lambda: not new.exists() or reads_as(new, before), new.exists)


def from_device(pool: Path, stack: ExitStack) -> Case:
    behind, before, new = pool.parent / "behind.raw", pool.parent / "before.qcow2", pool / "new.qcow2"
    make_image(before)
    qemu_img("convert", "-O", "raw", before, behind)
    args = test_from_device.args_for(stack.enter_context(loop_device(behind)), pool)
    return Case("from_device", args, lambda: not new.exists() or reads_as(new, before), new.exists)


def shrink(pool: Path, stack: ExitStack) -> Case:
    path = pool / "vm.qcow2"
    raw = test_shrink.disk(pool.parent / "vm.raw", test_shrink.GPT, 64 * MIB)
    qemu_img("convert", "-f", "raw", "-O", "qcow2", raw, path)
    parts = raw.read_bytes()[MIB : 31 * MIB]

    def whole() -> bool:
        return test_shrink.content(path, "qcow2")[MIB : 31 * MIB] == parts

    def done() -> bool:
        return int(image_info(path)["virtual-size"]) < 64 * MIB

    return Case("shrink", test_shrink.args_for(path, None, "qcow2") | {"undo_hours": 0.0}, whole, done)


def keys(pool: Path, stack: ExitStack) -> Case:
    path = test_keys.made(pool, "qcow2")
    test_keys.fill(path, "qcow2", test_keys.FIRST)
    before = test_keys.content(path, "qcow2", test_keys.FIRST)
    args = test_keys.args_for(path, "qcow2", secrets=test_keys.BOTH, undo_hours=0.0)
    return Case(
        "keys", args, lambda: test_keys.content(path, "qcow2", test_keys.FIRST) == before,
        lambda: test_keys.opens(path, "qcow2", test_keys.SECOND),
    )  # fmt: skip


#: The first deaths of keys are in test_key_kills.
STEPPED = (bitmaps, relink, shrink, unpack, from_device)
CASES = (*STEPPED, keys)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("case", STEPPED)
def test_whatever_step_it_dies_at_everything_is_whole(tmp_path: Path, case: MakeCase, when: str) -> None:
    outcomes = set()
    for at in steps():
        pool = new_folder(tmp_path / str(at) / "pool", parents=True)
        with ExitStack() as stack:
            asked = case(pool, stack)
            died = run_to_death(asked.verb, asked.args, "j1", at, when)
            if died is None:
                assert asked.done()
                break
            ask("recover", recover_args(pool), job="r1")
            assert asked.whole(), died
            assert leftovers(pool) == set(), died
            outcomes.add(asked.done())
    assert False in outcomes


@pytest.mark.parametrize("case", [case for case in STEPPED if case is not relink])  # whose base has no room there
def test_a_full_disk_changes_nothing(disk: Path, case: MakeCase) -> None:
    pool = new_folder(disk / "here" / "pool", parents=True)
    with ExitStack() as stack:
        asked = case(pool, stack)
        there = {one: one.read_bytes() for one in pool.iterdir()}
        ballast = fill_disk(disk, 256 << 10)
        # The bound that the plan gives is wrong, so that the disk itself says stop.
        more = {"predicted_high": 1} if "undo_hours" in asked.args else {}
        assert ask(asked.verb, asked.args | more)["code"] == "not_enough_space"
        ballast.unlink()
        assert asked.whole()
        assert {one: one.read_bytes() for one in pool.iterdir()} == there


@pytest.mark.parametrize("case", CASES)
def test_a_cancel_at_a_random_moment_leaves_everything_whole(tmp_path: Path, case: MakeCase) -> None:
    chance = random.Random(seed())
    for trial in range(20 if night() else 2):
        pool = new_folder(tmp_path / str(trial) / "pool", parents=True)
        with ExitStack() as stack:
            asked = case(pool, stack)
            with Agent() as agent:
                agent.request(asked.verb, asked.args)
                listen(agent, time.monotonic() + chance.uniform(0, 1))
                tools = tools_of(agent)
                agent.say(protocol.CANCEL)
                listen(agent, time.monotonic() + 20, go=False)
                agent.process.wait(20)
            assert psutil.wait_procs(tools, timeout=1)[1] == []
            assert (asked.whole(), leftovers(pool)) == (True, set()), trial


@pytest.mark.parametrize("case", CASES)
def test_a_power_cut_leaves_everything_whole(power: Power, case: MakeCase) -> None:
    chance = random.Random(seed())
    for trial in range(20 if night() else 1):
        with power.on(512) as folder, ExitStack() as stack:
            pool = new_folder(folder / "pool")
            asked = case(pool, stack)
            subprocess.run(["sync", "-f", pool], check=True)
            cut_after(chance.uniform(0.05, 1), power, asked.verb, asked.args)
        with power.on_again():
            ask("recover", recover_args(pool), job="r1")
            assert (asked.whole(), leftovers(pool)) == (True, set()), trial
