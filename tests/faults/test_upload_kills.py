"""Agents that take an upload are killed at any moment, and so is the one that gives it its name: no byte is lost."""

import hashlib
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.protocol import b64
from tests.agent.harness import Agent, ask, leftovers
from tests.agent.test_receive import place, receive_args
from tests.chance import night, seed
from tests.faults.test_full_disk import disk, fill
from tests.faults.test_kills import run_to_death
from tests.faults.test_power_cuts import Power, power
from tests.faults.trials import WHEN, Trials, steps
from tests.harness.filesystems import new_folder

__all__ = ["disk", "power"]

MIB = 1 << 20
SIZE = 72 * MIB + 12_345
#: Of agents: an upload that none of them dies in counts for nothing, as there are many on a quick machine.
DEATHS = 100 if night() else 3

pytestmark = pytest.mark.faults


def content(chance: random.Random) -> bytes:
    """Random runs between zeros, a different beginning of each MiB."""
    parts = [chance.randbytes(64 << 10) + bytes(MIB - (64 << 10)) for _ in range(SIZE // MIB + 1)]
    return b"".join(parts)[:SIZE]


def send(agent: Agent, pool: Path, data: bytes, offset: int) -> int:
    """Sends what is missing; how much of it counts, whether the agent lived or not."""
    return [offset, *sending(agent, pool, data, offset)][-1]


def sending(agent: Agent, pool: Path, data: bytes, offset: int) -> Iterator[int]:
    """The same, told after each event."""
    at = there = offset
    agent.request("receive", receive_args(pool, len(data), offset))
    while (event := agent.next()) is not None:
        if event["event"] == protocol.MORE:
            agent.say(protocol.DATA, b64=b64(data[at : at + MIB]))
            at += MIB
        if event["event"] == protocol.KEPT:
            there = event["offset"]
        if event["event"] == protocol.RESULT:
            there = int(event["data"]["offset"])
        assert event["event"] != protocol.ERROR, event
        yield there
        if event["event"] == protocol.RESULT:
            return


def finishing(pool: Path, data: bytes, inode: int | None = None) -> dict[str, Any]:
    return {"target": place(pool), "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "inode": inode}


def test_every_byte_is_there_whenever_an_agent_dies(tmp_path: Path) -> None:
    pool = new_folder(tmp_path / "pool")
    chance = random.Random(seed())
    deaths = 0
    while deaths < DEATHS:
        data, offset, began = content(chance), 0, time.monotonic()
        while offset < len(data):
            with Agent() as agent:
                death = threading.Timer(chance.uniform(0.05, 2.0), agent.process.kill)
                death.start()
                there = send(agent, pool, data, offset)
                death.cancel()
            deaths += there < len(data)
            assert there >= offset
            offset = there
            assert not offset or (pool / ".sa-j1.part").read_bytes()[:offset] == data[:offset]
            assert time.monotonic() < began + 120, "it never gets anywhere"
        assert "code" not in ask("upload", finishing(pool, data))
        made = pool / "new.raw"
        assert (made.read_bytes() == data, made.stat().st_nlink, leftovers(pool)) == (True, 1, set())
        made.unlink()


@pytest.mark.parametrize("when", WHEN)
def test_whatever_step_the_last_agent_dies_at_the_next_one_ends_it(tmp_path: Path, when: str) -> None:
    data, named = content(random.Random(seed()))[: 2 * MIB], set()
    for at in steps(stride=1):
        pool = new_folder(tmp_path / str(at))
        with Agent() as agent:
            assert send(agent, pool, data, 0) == len(data)
        inode = (pool / ".sa-j1.part").stat().st_ino
        died = run_to_death("upload", finishing(pool, data), "j1", at, when)
        made = pool / "new.raw"
        assert not made.exists() or made.read_bytes() == data
        if died is None:
            break
        named.add(made.exists())
        assert ask("upload", finishing(pool, data, inode))["inode"] == inode
        assert (made.read_bytes() == data, made.stat().st_nlink, leftovers(pool)) == (True, 1, set())
    assert named == ({True, False} if when == "before" else {True})


def test_after_a_power_cut_all_is_there_that_counted(power: Power) -> None:
    trials = Trials("F2", "power cuts while a file is uploaded", points=50 if night() else 3)
    for trial in trials:
        with trial:
            data, there, began = content(trial.rng), 0, time.monotonic()
            with power.on(256) as folder:
                pool = new_folder(folder / "pool")
                subprocess.run(["sync", "-f", folder], check=True)
                moment = began + trial.rng.uniform(0.3, 2.0)
                with Agent() as agent:
                    for counted in sending(agent, pool, data, 0):
                        there = counted
                        if time.monotonic() > moment:
                            break
                    power.goes()
                    agent.process.kill()
            with power.on_again():
                trial.note("nothing" if not there else "all" if there == len(data) else "a part")
                assert ((pool / ".sa-j1.part").read_bytes()[:there] if there else b"") == data[:there]
                with Agent() as agent:
                    assert send(agent, pool, data, there) == len(data)
                assert "code" not in ask("upload", finishing(pool, data))
                assert (pool / "new.raw").read_bytes() == data


def test_a_disk_that_is_full_takes_the_rest_when_there_is_room(tmp_path: Path, disk: Path) -> None:
    pool, data = new_folder(disk / "pool"), random.Random(seed()).randbytes(4 * MIB)
    asked = receive_args(pool, len(data))
    ballast = fill(disk, MIB)
    assert ask("receive", asked)["code"] == "not_enough_space"  # refused before a byte is asked for
    ballast.unlink()
    with Agent() as agent:
        agent.request("receive", asked)
        agent.until(protocol.MORE)
        ballast = fill(disk, MIB)
        for at in range(0, len(data), MIB):
            agent.say(protocol.DATA, b64=b64(data[at : at + MIB]))
            event = agent.next()
            assert event is not None
            if event["event"] == protocol.ERROR:
                assert event["code"] == "not_enough_space"
                break
        else:
            raise AssertionError("all of it found room")
    ballast.unlink()
    with Agent() as agent:
        assert send(agent, pool, data, 0) == len(data)
    assert "code" not in ask("upload", finishing(pool, data))
    assert (pool / "new.raw").read_bytes() == data
