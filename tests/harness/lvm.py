"""A stand-in for LVM's tools whose volume groups are lines of a file: they can be made, renamed, tagged and removed.

A volume that is active may have a device: a loop device on a file of its own, where its line says ``file``. What it
answers is as `tests/machines` holds the real ones to; a program of each tool's name, which leads here, is put
in front of the path (:func:`install`).
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

TOOLS = ("lvs", "vgs", "lvchange", "lvrename", "lvremove", "lvcreate", "dmsetup")
#: What the tools tell of a thick volume of a group that is this machine's alone, as of one that is not active.
VOLUME = {
    "lv_layout": "linear", "lv_role": "public", "lv_parent": "", "lv_size": "25165824", "data_percent": "",
    "metadata_percent": "", "lv_metadata_size": "", "origin": "", "origin_size": "", "pool_lv": "", "lv_active": "",
    "lv_device_open": "", "lv_health_status": "", "lv_dm_path": "", "lv_tags": "", "lv_attr": "-wi-------",
    "lv_autoactivation": "enabled", "vg_uuid": "g1",
}  # fmt: skip
GROUP = {
    "vg_uuid": "g1", "vg_size": "1065353216", "vg_free": "830472192", "vg_shared": "", "vg_clustered": "",
    "vg_lock_type": "", "vg_systemid": "", "vg_tags": "", "vg_exported": "", "vg_partial": "", "pv_name": "",
    "seg_monitor": "",
}  # fmt: skip


#: Bytes that LVM gives at a time.
EXTENT = 4 << 20


class Lvm:
    """The machine's groups, volumes and disks, in a folder; ``thin`` is what the kernel tells of thin pools."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.json"

    def install(self, **lines: Any) -> None:
        """Puts the tools into the folder, with that state.

        Args:
            lines: ``vg`` and ``lv``, each a list of lines; ``thin``: of ``dmsetup status``; ``dies``: a tool,
                after whose call whoever called it is killed, but for the first ``spared`` of them; ``fails``: one that
            does nothing, in the same way; ``hangs``: one that does its work, once, and does not end for a minute.
        """
        self._file.parent.mkdir(exist_ok=True)
        self.write(lines)
        for tool in TOOLS:
            program = self._file.parent / tool
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} {tool} {self._file} "$@"\n')
            program.chmod(0o755)

    @property
    def folder(self) -> Path:
        return self._file.parent

    def read(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._file.read_text())
        return state

    def write(self, state: dict[str, Any]) -> None:
        self._file.write_text(json.dumps(state))

    def let_go(self) -> None:
        """Takes all devices away."""
        for line in self.read()["lv"]:
            _activate(line, active=False)

    def volumes(self) -> dict[str, dict[str, str]]:
        """The lines of the volumes, by their names."""
        return {one["lv_name"]: one for one in self.read()["lv"]}


def _run(tool: str, state: Lvm, words: list[str]) -> int:
    told = state.read()
    if told.get("fails") == tool:
        spared = told.get("spared", 0)
        if not spared:
            return 5
        told["spared"] = spared - 1
        state.write(told)
    if tool in ("lvs", "vgs"):
        kind = tool.removesuffix("s")
        print(json.dumps({"report": [{kind: told[kind]}]}))
    elif tool == "dmsetup":
        # Of a volume that was made, a tenth of its first 12 MiB.
        print("0 24576 thin 2456 24575" if "--target" not in words else told["thin"])
    elif tool == "lvcreate":
        _create(told, words, state)
    elif tool == "lvrename":
        group, before, after = words[-3:]
        if any((one["vg_name"], one["lv_name"]) == (group, after) for one in told["lv"]):
            return 5
        line = _one(told, f"{group}/{before}")
        line["lv_name"] = after
        if "file" in line and line["lv_active"]:
            _link(line).parent.joinpath(before).rename(_link(line))
    elif tool == "lvremove":
        line = _one(told, words[-1])
        _activate(line, active=False)
        told["lv"].remove(line)
    else:
        _change(_one(told, words[-1]), words)
    state.write(told)
    _end(tool, told, state)
    return 0


def _end(tool: str, told: dict[str, Any], state: Lvm) -> None:
    """What happens once it has done its work."""
    if told.get("hangs") == tool:
        state.write(told | {"hangs": ""})
        time.sleep(60)
    if told.get("dies") == tool and told.get("spared", 0):
        state.write(told | {"spared": told["spared"] - 1})
    elif told.get("dies") == tool:
        state.write(told | {"dies": ""})
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.5)


def _one(told: dict[str, Any], path: str) -> dict[str, str]:
    [found] = [one for one in told["lv"] if f"{one['vg_name']}/{one['lv_name']}" == path]
    line: dict[str, str] = found
    return line


def _change(line: dict[str, str], words: list[str]) -> None:
    given = dict(pairwise(words))
    line["lv_tags"] = given.get("--addtag", "" if "--deltag" in given else line["lv_tags"])
    if "--setautoactivation" in given:
        line["lv_autoactivation"] = "enabled" if given["--setautoactivation"] == "y" else ""
    if "-an" in words or "-ay" in words:
        _activate(line, active="-ay" in words)


def _create(told: dict[str, Any], words: list[str], state: Lvm) -> None:
    """A thick volume or a thin one, of whole extents of 4 MiB, with a device."""
    given = dict(pairwise(words))
    size = -(-int(given.get("-L", given.get("-V", "")).rstrip("b")) // EXTENT) * EXTENT
    own = f"id-{len(told['lv'])}-{time.monotonic_ns()}"
    line = VOLUME | {"lv_name": given["-n"], "vg_name": words[-1], "lv_uuid": own, "lv_size": str(size)}
    if "--thinpool" in given:
        line |= {"pool_lv": given["--thinpool"], "lv_layout": "thin,sparse", "data_percent": "10.00"}
    file = state.folder / own
    # What a thick volume gets is what somebody has left there.
    file.write_bytes(b"" if "--thinpool" in given else b"old" * (size // 3 + 1))
    os.truncate(file, size)
    told["lv"].append(line | {"file": str(file)})
    _change(told["lv"][-1], [*words, "-ay"])


def _link(line: dict[str, str]) -> Path:
    return Path("/dev", line["vg_name"], line["lv_name"])


def _activate(line: dict[str, str], *, active: bool) -> None:
    link = _link(line)
    if "file" in line and active and not line["lv_active"]:
        told = subprocess.run(["losetup", "--find", "--show", line["file"]], check=True, capture_output=True, text=True)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(told.stdout.strip())
    elif "file" in line and not active and line["lv_active"]:
        # Unlike a device of LVM, this one is used again.
        subprocess.run(["blockdev", "--setrw", link.readlink()], check=True)
        subprocess.run(["losetup", "--detach", link.readlink()], check=True)
        link.unlink()
    line["lv_active"] = "active" if active else ""


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1], Lvm(Path(sys.argv[2]).parent), sys.argv[3:]))
