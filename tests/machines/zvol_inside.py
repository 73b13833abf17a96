"""What runs in a machine while a volume of ZFS is moved: who kills the agent, and who opens the volume meanwhile."""

import contextlib
import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.machines.volume_inside import GO, Written, alive, ask, beside, counted, missing, recover, tool

GROUP, OTHER = "tank/data", "tank/other"
DEVICES, MOVED = f"/dev/zvol/{GROUP}", f"/dev/zvol/{OTHER}/moved"
BLOCK = 1 << 12
#: Only of commands that change something. One that dies before a command has never called it.
COUNTS = """#!/bin/sh
case $1 in set | create | rename | inherit | destroy) ;; *) exec /usr/sbin/zfs.real "$@" ;; esac
count=$(($(cat /root/count) + 1)); echo $count >/root/count
[ "$count before" != "$(cat /root/dies)" ] || { kill -KILL $PPID; exit 9; }
/usr/sbin/zfs.real "$@"; code=$?
[ "$count after" != "$(cat /root/dies)" ] || { kill -KILL $PPID; sleep 1; }
exit $code
"""
LISTED = "udevadm settle; zfs get -Hp -r -t filesystem,volume -o name,property,value,source guid,volmode,{} tank"


def listed() -> list[str]:
    """All that a job may change of the datasets."""
    return tool(LISTED.format("storage-admin:aside")).splitlines()


def digest(path: str) -> str:
    return tool(f"udevadm settle; sha256sum < {path}")


def move(name: str, job: str) -> str:
    """Onto a new volume ``moved`` in another dataset."""
    pool, own = tool(f"zpool get -Ho value guid tank; zfs get -Hpo value guid {GROUP}/{name}").split()
    place = {"backend": "zfs", "group": GROUP, "group_id": pool, "name": name, "id": own, "idle_io": False}
    wanted = {"backend": "zfs", "group": OTHER, "group_id": pool, "name": "moved", "pool": ""}
    return ask("volume_to_volume", job, place | {"volume": wanted, "reserve": {"percent": 0.0, "bytes": 0}})


def moves(name: str, calls: str) -> None:
    """Of each death how the move ended, what a recovery says, whether all is as before, and what was made."""
    for step, when, dies in counted(int(calls), ("zfs",), COUNTS):
        before, content = listed(), digest(f"{DEVICES}/{name}")
        alive(dies)
        end = move(name, f"d{step}{when}")
        alive()
        said = recover(f"d{step}{when}")
        made = [line.split("\t")[1:] for line in listed() if line.startswith(f"{OTHER}/moved\t")]
        there = digest(MOVED) == content if made else None
        tool(f"zfs destroy {OTHER}/moved" if made else "true")
        same = listed() == before and digest(f"{DEVICES}/{name}") == content
        print(json.dumps([step, when, end, said, same, made[1:], there]), flush=True)


def stranger(path: str, stop: Path) -> Written:
    """Opens the volume again and again as a guest does that starts, and writes. What, where and when."""
    written = Written()
    while not stop.exists():
        time.sleep(random.uniform(0, 4))
        try:
            disk = os.open(path, os.O_RDWR)
        except OSError:
            continue
        place, block = BLOCK * random.randrange(1024, 2048), os.urandom(BLOCK)
        with contextlib.suppress(OSError):  # what can only be read by now
            os.pwrite(disk, block, place)
            os.fsync(disk)
            written.append((time.monotonic(), place, block.hex()))
        time.sleep(random.uniform(0, 0.3))
        with contextlib.suppress(OSError):
            os.close(disk)
    return written


def race(name: str, count: str) -> None:
    """Moves while somebody opens the volume again and again, by its name or by the number of its device: how each
    ended, how many writes there were, how many of them the volume has lost, and how many the moved one.
    """
    path = f"{DEVICES}/{name}"
    for number in range(int(count)):
        tool("udevadm settle")
        with beside(partial(stranger, str(Path(path).resolve()) if number % 2 else path)) as written:
            end = move(name, f"m{number}")
        tool("udevadm settle")
        lost = [missing(path, written), 0]
        if end == "done":  # what is written to the volume that has its name again, the moved one has not
            lost[1] = missing(MOVED, [one for one in written if one[0] < float(GO.read_text())])
            tool(f"zfs destroy {OTHER}/moved")
        print(json.dumps([end, len(written), *lost]), flush=True)


if __name__ == "__main__":
    programs: dict[str, Any] = {"moves": moves, "race": race}
    programs[sys.argv[1]](*sys.argv[2:])
