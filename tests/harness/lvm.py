"""A stand-in for LVM's tools whose volume groups are lines of a file: they can be renamed, tagged and removed.

What it answers is as `tests/machines` holds the real ones to; a program of each tool's name, which leads here, is put
in front of the path (:func:`install`).
"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

TOOLS = ("lvs", "vgs", "pvs", "lvchange", "lvrename", "lvremove", "dmsetup")
#: What the tools tell of a thick volume of a group that is this machine's alone, as of one that is not active.
VOLUME = {
    "lv_layout": "linear", "lv_role": "public", "lv_parent": "", "lv_size": "25165824", "data_percent": "",
    "metadata_percent": "", "lv_metadata_size": "", "origin": "", "origin_size": "", "pool_lv": "", "lv_active": "",
    "lv_device_open": "", "lv_health_status": "", "lv_dm_path": "", "lv_tags": "", "lv_attr": "-wi-------",
    "lv_autoactivation": "enabled", "vg_uuid": "g1",
}  # fmt: skip
GROUP = {
    "vg_uuid": "g1", "vg_size": "1065353216", "vg_free": "830472192", "vg_shared": "", "vg_clustered": "",
    "vg_lock_type": "", "vg_systemid": "", "vg_tags": "", "vg_exported": "", "vg_partial": "", "seg_monitor": "",
}  # fmt: skip


class Lvm:
    """The machine's groups, volumes and disks, in a folder; ``thin`` is what the kernel tells of thin pools."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.json"

    def install(self, **lines: Any) -> None:
        """Puts the tools into the folder, with that state.

        Args:
            lines: ``vg``, ``lv`` and ``pv``, each a list of lines; ``thin``: of ``dmsetup status``.
        """
        self._file.parent.mkdir(exist_ok=True)
        self.write(lines)
        for tool in TOOLS:
            program = self._file.parent / tool
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} {tool} {self._file} "$@"\n')
            program.chmod(0o755)

    def read(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._file.read_text())
        return state

    def write(self, state: dict[str, Any]) -> None:
        self._file.write_text(json.dumps(state))

    def volumes(self) -> dict[str, dict[str, str]]:
        """The lines of the volumes, by their names."""
        return {one["lv_name"]: one for one in self.read()["lv"]}


def _run(tool: str, state: Lvm, words: list[str]) -> int:
    told = state.read()
    if tool in ("lvs", "vgs", "pvs"):
        kind = tool.removesuffix("s")
        print(json.dumps({"report": [{kind: told[kind]}]}))
    elif tool == "dmsetup":
        print(told["thin"])
    elif tool == "lvrename":
        group, before, after = words[-3:]
        if any(one["lv_name"] == after for one in told["lv"]):
            return 5
        _one(told, f"{group}/{before}")["lv_name"] = after
    elif tool == "lvremove":
        told["lv"].remove(_one(told, words[-1]))
    else:
        _change(_one(told, words[-1]), words)
    state.write(told)
    return 0


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
        line["lv_active"] = "active" if "-ay" in words else ""


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1], Lvm(Path(sys.argv[2]).parent), sys.argv[3:]))
