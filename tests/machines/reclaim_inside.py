"""What runs in a machine while zeros of a thin volume go back: the agent's verb, who starts meanwhile, who kills it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, "/root/agent.pyz")
CHUNK, BLOCK, FIRST, CHUNKS = 1 << 16, 1 << 12, 64, 160
COUNTS = """#!/bin/sh
count=$(($(cat /root/count) + 1)); echo $count >/root/count
[ "$count before" != "$(cat /root/dies)" ] || { kill -KILL $PPID; sleep 1; }
lvm ${0##*/} "$@"; code=$?
[ "$count after" != "$(cat /root/dies)" ] || { kill -KILL $PPID; sleep 1; }
exit $code
"""


class Says:
    """A controller that says go."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def tool(line: str) -> str:
    return subprocess.run(["sh", "-ec", line], capture_output=True, text=True, check=True).stdout


def tries(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True).returncode == 0


def reclaim(name: str, job: str) -> str:
    """The code with which the verb ends; ``killed`` where somebody did that."""
    from storage_admin.agent.protocol import HostError, RefusedError, Request  # noqa: PLC0415 (from the archive)
    from storage_admin.agent.verbs import reclaim_volume  # noqa: PLC0415

    group_id, own_id = tool(f"lvs --noheadings -o vg_uuid,lv_uuid vg/{name}").split()
    args = {"backend": "lvm", "group": "vg", "group_id": group_id, "name": name, "id": own_id, "idle_io": False}
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            reclaim_volume.run(Request("reclaim_volume", job, 1, args, {}), Says())
            os.write(write, b"done")
        except (RefusedError, HostError) as error:
            os.write(write, error.code.encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    said = os.read(read, 99).decode()
    os.close(read)
    return "killed" if os.WIFSIGNALED(status) else said


def recover() -> None:
    from storage_admin.agent.protocol import Request  # noqa: PLC0415
    from storage_admin.agent.verbs import recover as verb  # noqa: PLC0415

    verb.run(Request("recover", "r1", 1, {"pools": []}, {}), Says())


def zeros(name: str) -> None:
    write = f"dd if=/dev/zero of=/dev/vg/{name} bs={CHUNK} seek={FIRST} count={CHUNKS} oflag=direct conv=notrunc"
    tool(f"udevadm settle; lvchange -ay -K vg/{name}; udevadm settle; {write} status=none; udevadm settle")


def stranger(name: str, stop: Path) -> dict[int, bytes]:
    """Starts again and again as a guest does: activates the volume by its name, and writes. What it wrote, by place."""
    written, path = dict[int, bytes](), f"/dev/vg/{name}"
    while not stop.exists():
        time.sleep(random.uniform(0, 1.5))
        if not tries("lvchange", "-ay", "-K", f"vg/{name}"):
            continue
        try:
            disk = os.open(path, os.O_RDWR)
        except OSError:
            continue
        place, block = CHUNK * random.randrange(FIRST, FIRST + CHUNKS) + BLOCK * random.randrange(16), os.urandom(BLOCK)
        os.pwrite(disk, block, place)
        os.fsync(disk)
        time.sleep(random.uniform(0, 0.3))
        os.close(disk)
        written[place] = block
        tries("lvchange", "-an", f"vg/{name}")
    return written


def race(name: str, count: str) -> None:
    """Says how each of so many reclaims ended, how many writes there were meanwhile, and how many of them are lost."""
    stop = Path("/root/stop")
    for number in range(int(count)):
        zeros(name)
        tries("lvchange", "-an", f"vg/{name}")
        stop.unlink(missing_ok=True)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, json.dumps({at: block.hex() for at, block in stranger(name, stop).items()}).encode())
            os._exit(0)
        os.close(write)
        time.sleep(random.uniform(0, 2))
        end = reclaim(name, f"j{number}")
        stop.touch()
        with os.fdopen(read, "rb") as pipe:
            written = {int(at): bytes.fromhex(block) for at, block in json.loads(pipe.read()).items()}
        os.waitpid(child, 0)
        tool(f"udevadm settle; lvchange -ay -K vg/{name}; udevadm settle")
        with Path(f"/dev/vg/{name}").open("rb") as disk:
            lost = sum(os.pread(disk.fileno(), BLOCK, at) != block for at, block in written.items())
        print(json.dumps([end, len(written), lost]), flush=True)


def deaths(name: str, calls: str) -> None:
    """The agent dies right before and right after each of so many calls that change the group, and is recovered."""
    for one in ("lvchange", "lvrename"):
        Path(f"/usr/sbin/{one}").rename(f"/usr/sbin/{one}.real")
        Path(f"/usr/sbin/{one}").write_text(COUNTS)
        Path(f"/usr/sbin/{one}").chmod(0o755)
    listed = "udevadm settle; lvs --noheadings -o lv_name,lv_autoactivation,lv_tags,lv_active vg"
    for step in range(1, int(calls) + 2):
        for when in ("before", "after"):
            Path("/root/dies").write_text("none")
            Path("/root/count").write_text("0")
            zeros(name)
            before, digest = tool(listed), tool(f"sha256sum < /dev/vg/{name}")
            Path("/root/count").write_text("0")
            Path("/root/dies").write_text(f"{step} {when}")
            end = reclaim(name, f"d{step}{when}")
            Path("/root/dies").write_text("none")
            devices = tool("dmsetup ls | grep -c storage-admin || true").strip()
            recover()
            left = tool("dmsetup ls | grep -c storage-admin || true").strip()
            same = tool(listed) == before and tool(f"sha256sum < /dev/vg/{name}") == digest
            print(json.dumps([step, when, end, devices, left, same]), flush=True)
    for one in ("lvchange", "lvrename"):
        Path(f"/usr/sbin/{one}.real").rename(f"/usr/sbin/{one}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    programs: dict[str, Any] = {"race": race, "deaths": deaths}
    programs[sys.argv[1]](*sys.argv[2:])
