"""What runs in a machine while a volume is worked on: the agent's verb, who starts meanwhile, who kills it."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, "/root/agent.pyz")
GO = Path("/root/go")
CHUNK, BLOCK, FIRST, CHUNKS = 1 << 16, 1 << 12, 64, 160
#: What somebody has written: when, where and what.
Written = list[tuple[float, int, str]]
COUNTS = """#!/bin/sh
count=$(($(cat /root/count) + 1)); echo $count >/root/count
[ "$count before" != "$(cat /root/dies)" ] || { kill -KILL $PPID; sleep 1; }
lvm ${0##*/} "$@"; code=$?
[ "$count after" != "$(cat /root/dies)" ] || { kill -KILL $PPID; sleep 1; }
exit $code
"""


class Says:
    """A controller that says go, and notes when."""

    def wait_for_go(self, *_: Any, **__: Any) -> None:
        GO.write_text(repr(time.monotonic()))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def tool(line: str) -> str:
    return subprocess.run(["sh", "-ec", line], stdout=subprocess.PIPE, text=True, check=True).stdout


def tries(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True).returncode == 0


def place(name: str) -> dict[str, Any]:
    group_id, own_id = tool(f"lvs --noheadings -o vg_uuid,lv_uuid vg/{name}").split()
    return {"backend": "lvm", "group": "vg", "group_id": group_id, "name": name, "id": own_id, "idle_io": False}


def reclaim(name: str, job: str) -> str:
    return ask("reclaim_volume", job, place(name))


def move(name: str, job: str, pool: str) -> str:
    """Onto a new volume ``moved``."""
    wanted = {"backend": "lvm", "group": "vg", "group_id": place(name)["group_id"], "name": "moved", "pool": pool}
    return ask("volume_to_volume", job, place(name) | {"volume": wanted, "reserve": {"percent": 0.0, "bytes": 0}})


def ask(verb: str, job: str, args: dict[str, Any]) -> str:
    """The code with which a verb ends; ``killed`` where somebody did that."""
    from storage_admin.agent.main import load  # noqa: PLC0415 (from the archive)
    from storage_admin.agent.protocol import HostError, RefusedError, Request  # noqa: PLC0415

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            load(verb)(Request(verb, job, 1, args, {}), Says())
            os.write(write, b"done")
        except (RefusedError, HostError) as error:
            os.write(write, error.code.encode())
            print(f"{job}: {error.code}: {error.detail}", file=sys.stderr, flush=True)
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    said = os.read(read, 99).decode()
    os.close(read)
    return "killed" if os.WIFSIGNALED(status) else said


def recover(job: str = "") -> list[Any]:
    """What a recovery says of that job."""
    from storage_admin.agent.protocol import Request  # noqa: PLC0415
    from storage_admin.agent.verbs import recover as verb  # noqa: PLC0415

    told = verb.run(Request("recover", "r1", 1, {"pools": []}, {}), Says())
    return [row["outcome"] for row in told["recovered"] if row["job"] == job]


def zeros(name: str) -> None:
    write = f"dd if=/dev/zero of=/dev/vg/{name} bs={CHUNK} seek={FIRST} count={CHUNKS} oflag=direct conv=notrunc"
    tool(f"udevadm settle; lvchange -ay -K vg/{name}; udevadm settle; {write} status=none; udevadm settle")


def stranger(name: str, stop: Path, path: str) -> Written:
    """Starts again and again as a guest does: activates the volume by its name, and writes. What, where and when."""
    written = Written()
    while not stop.exists():
        time.sleep(random.uniform(0, 1.5))
        if not tries("lvchange", "-ay", "-K", f"vg/{name}") and "by-id" not in path:
            continue
        try:
            disk = os.open(path, os.O_RDWR)
        except OSError:
            continue
        place, block = CHUNK * random.randrange(FIRST, FIRST + CHUNKS) + BLOCK * random.randrange(16), os.urandom(BLOCK)
        with contextlib.suppress(OSError):  # what can only be read by now
            os.pwrite(disk, block, place)
            os.fsync(disk)
            written.append((time.monotonic(), place, block.hex()))
        time.sleep(random.uniform(0, 0.3))
        with contextlib.suppress(OSError):
            os.close(disk)
        tries("lvchange", "-an", f"vg/{name}")
    return written


@contextlib.contextmanager
def beside(works: Callable[[Path], Written]) -> Iterator[Written]:
    """Somebody is at work in a process of his own, until there is the file that he gets; what he has written is in the
    list afterwards.
    """
    stop, written = Path("/root/stop"), Written()
    stop.unlink(missing_ok=True)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, json.dumps(works(stop)).encode())
        os._exit(0)
    os.close(write)
    time.sleep(random.uniform(0, 2))
    yield written
    stop.touch()
    with os.fdopen(read, "rb") as pipe:
        written += json.loads(pipe.read())
    os.waitpid(child, 0)


def race(name: str, count: str) -> None:
    """Says how each of so many reclaims ended, how many writes there were meanwhile, and how many of them are lost."""
    for number in range(int(count)):
        zeros(name)
        tries("lvchange", "-an", f"vg/{name}")
        with beside(lambda stop: stranger(name, stop, f"/dev/vg/{name}")) as written:
            end = reclaim(name, f"j{number}")
        tool(f"udevadm settle; lvchange -ay -K vg/{name}; udevadm settle")
        print(json.dumps([end, len(written), missing(f"/dev/vg/{name}", written)]), flush=True)


class Codes(Says):
    """Of the commands that ran, how each ended."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def command(self, _: list[str], code: int) -> None:
        self.codes.append(code)


def pools(failures: str) -> None:
    """How many thin pools are told of each time, until dmsetup has ended so often as failed, for a device went away.

    That device's turn comes after 100 others. There is no udev meanwhile, for it would open them all.
    """
    from storage_admin.agent.host import lvm  # noqa: PLC0415 (from the archive)

    many = [f"a{number}" for number in range(100)]
    table = ";".join(f"{name},,,rw,0 8 zero" for name in many)
    tool(f"systemctl stop 'systemd-udevd*'; dmsetup create --noudevsync --concise '{table}'")

    def passes_by(stop: Path) -> Written:
        while not stop.exists():
            tries("dmsetup", "create", "--noudevsync", "zz", "--table", "0 8 zero")
            tries("dmsetup", "remove", "--noudevsync", "zz")
        return []

    io: Any = Codes()
    told = []
    with beside(passes_by):
        while len(io.codes) - io.codes.count(0) < int(failures):
            told.append(len(lvm.thin_pools(io)))
    tool(f"dmsetup remove --noudevsync --retry {' '.join(many)}; systemctl start systemd-udevd; udevadm settle")
    print(json.dumps([sorted(set(told)), len(told)]))


LISTED = "udevadm settle; lvs --noheadings -o lv_name,lv_autoactivation,lv_tags,lv_active vg"


LVM = ("lvchange", "lvrename", "lvcreate", "lvremove")


def counted(calls: int, tools: tuple[str, ...] = LVM, counts: str = COUNTS) -> Iterator[tuple[int, str, str]]:
    """Each of so many calls that change something, in whose place the one who makes it dies, before or after it."""
    for one in tools:
        Path(f"/usr/sbin/{one}").rename(f"/usr/sbin/{one}.real")
        Path(f"/usr/sbin/{one}").write_text(counts)
        Path(f"/usr/sbin/{one}").chmod(0o755)
    alive()
    for step in range(1, calls + 2):
        for when in ("before", "after"):
            yield step, when, f"{step} {when}"
            alive()
    for one in tools:
        Path(f"/usr/sbin/{one}.real").rename(f"/usr/sbin/{one}")


def alive(dies: str = "none") -> None:
    """Who calls one of these tools from now on dies there."""
    Path("/root/count").write_text("0")
    Path("/root/dies").write_text(dies)


def deaths(name: str, calls: str) -> None:
    """The agent dies right before and right after each of so many calls that change the group, and is recovered."""
    for step, when, dies in counted(int(calls)):
        zeros(name)
        before, digest = tool(LISTED), tool(f"sha256sum < /dev/vg/{name}")
        alive(dies)
        end = reclaim(name, f"d{step}{when}")
        alive()
        devices = tool("dmsetup ls | grep -c storage-admin || true").strip()
        recover()
        left = tool("dmsetup ls | grep -c storage-admin || true").strip()
        same = tool(LISTED) == before and tool(f"sha256sum < /dev/vg/{name}") == digest
        print(json.dumps([step, when, end, devices, left, same]), flush=True)


def listed() -> list[list[str]]:
    """Without what is active: an event of udev may activate any volume of a group that has changed."""
    return [line.split() for line in tool(LISTED.replace(",lv_active", "")).splitlines()]


def moves(name: str, pool: str, calls: str) -> None:
    """The same of a move: how it ended, what a recovery says, whether the volume is as before, and what was made."""
    for step, when, dies in counted(int(calls)):
        before, digest = listed(), tool(f"sha256sum < /dev/vg/{name}")
        alive(dies)
        end = move(name, f"d{step}{when}", pool)
        alive()
        said = recover(f"d{step}{when}")
        made = [line[1:] for line in listed() if line[0] == "moved"]
        there = tool("sha256sum < /dev/vg/moved") == digest if made else None
        tool("lvremove -q -y vg/moved" if made else "true")
        same = listed() == before and tool(f"sha256sum < /dev/vg/{name}") == digest
        print(json.dumps([step, when, end, said, same, made, there]), flush=True)


def move_race(name: str, pool: str, count: str) -> None:
    """Moves while somebody starts again and again as a guest does, by the name or by the id of the volume: how each
    ended, how many writes there were, how many of them the volume has lost, and how many the moved one.
    """
    own_id = place(name)["id"]
    link = tool(f"lvchange -ay -K vg/{name}; udevadm settle; find -L /dev/disk/by-id -samefile /dev/vg/{name}")
    by_id = next(line for line in link.split() if line.endswith(own_id.replace("-", "")))
    for number in range(int(count)):
        path = by_id if number % 2 else f"/dev/vg/{name}"
        with beside(partial(stranger, name, path=path)) as written:
            end = move(name, f"m{number}", pool)
        tool(f"udevadm settle; lvchange -ay -K vg/{name}; udevadm settle")
        lost = [missing(f"/dev/vg/{name}", written), 0]
        if end == "done":  # what is written to the volume that has its name again, the moved one has not
            lost[1] = missing("/dev/vg/moved", [one for one in written if one[0] < float(GO.read_text())])
            tool("lvremove -q -y vg/moved")
        print(json.dumps([end, len(written), *lost]), flush=True)


def missing(path: str, written: Written) -> int:
    """How many blocks are not there as they were written last."""
    last = {at: bytes.fromhex(block) for _, at, block in written}
    with Path(path).open("rb") as disk:
        return sum(os.pread(disk.fileno(), BLOCK, at) != block for at, block in last.items())


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    programs: dict[str, Any] = {
        "race": race, "pools": pools, "deaths": deaths, "moves": moves, "move_race": move_race,
    }  # fmt: skip
    programs[sys.argv[1]](*sys.argv[2:])
