"""The kind ``bonnie``: bonnie++, whose line of comma separated values is sent for the controller to read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.bench.step import Bench, Fields, Setting, Step

TOOLS = ("bonnie++",)
_MIB = 1 << 20
#: Files of bonnie++'s second half come in lots of so many; each is empty and takes an inode and a name.
_LOT, _FILE_BYTES = 1024, 1024


@dataclass(frozen=True)
class BonnieStep(Step):
    """One run of bonnie++; ``files`` counts in lots of 1024."""

    setting: Setting
    size_bytes: int
    memory_bytes: int
    files: int
    fast: bool
    unbuffered: bool

    @property
    def needed_bytes(self) -> int:
        """The test file, and the small ones."""
        return self.size_bytes + self.files * _LOT * _FILE_BYTES

    def run(self, bench: Bench) -> None:
        """Run it in the scratch folder."""
        bench.through_memory(
            f"bonnie++ reads through the cache: its file has {self.size_bytes >> 20} MiB, and it was run for "
            f"{self.memory_bytes >> 20} MiB of memory (-r)"
        )
        bench.scratch.clear()
        argv = [
            *("bonnie++", "-d", bench.scratch.folder, "-s", str(self.size_bytes // _MIB), "-n", str(self.files)),
            *("-r", str(self.memory_bytes // _MIB), "-m", bench.job, "-x", "1", "-q"),
            *(["-f"] if self.fast else []),
            *(["-b"] if self.unbuffered else []),
            # It wants to be told that it may run as root. Nobody else can reach the folder.
            *(["-u", "root"] if os.geteuid() == 0 else []),
        ]
        said = bytearray()
        bench.tool(argv, output=said)
        bench.output("bonnie++", self.setting, bytes(said))


def parse(steps: list[Any]) -> list[Step]:
    """Steps of ``size_bytes``, ``memory_bytes``, ``files`` (lots of 1024), ``fast`` and ``unbuffered``."""
    return [_parse(Fields(raw, {"size_bytes", "memory_bytes", "files", "fast", "unbuffered"})) for raw in steps]


def _parse(fields: Fields) -> BonnieStep:
    return BonnieStep(
        setting=fields.setting(),
        size_bytes=fields.number("size_bytes", _MIB, 1 << 46),
        memory_bytes=fields.number("memory_bytes", _MIB, 1 << 46),
        files=fields.number("files", 0, 1024, 0),
        fast=fields.get("fast", bool, True),
        unbuffered=fields.get("unbuffered", bool, False),
    )
