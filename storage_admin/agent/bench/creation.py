"""The kinds ``preallocation`` and ``cluster_size``: a new qcow2 image, and what a guest's first writes into it cost."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.bench.qemu_bench import Guest
from storage_admin.agent.bench.step import Bench, Fields, Setting, Step
from storage_admin.agent.protocol import INVALID, RefusedError
from storage_admin.agent.qemu import node

TOOLS = ("qemu-img",)
_FILE = "new.qcow2"
_PREALLOCATED = frozenset({"falloc", "full"})
_SMALLEST_CLUSTER, _LARGEST_CLUSTER = 512, 2 << 20
#: Extended L2 entries (qcow2 specification, of that name) want clusters of at least 32 sectors; since qemu 5.2.
_SMALLEST_EXTENDED, _EXTENDED_SINCE = 16 << 10, (5, 2)
#: Bytes of tables for a cluster: an extended L2 entry of 16 and a reference count of 2, with room for their own tables.
_TABLES_PER_CLUSTER, _TABLES = 24, 1 << 20


@dataclass(frozen=True)
class CreationStep(Step):
    """One image; sizes are in bytes."""

    setting: Setting
    preallocation: str
    cluster_bytes: int
    extended_l2: bool
    virtual_bytes: int
    write_bytes: int
    block_bytes: int

    @property
    def needed_bytes(self) -> int:
        """All that the image may become."""
        data = self.virtual_bytes if self.preallocation in _PREALLOCATED else self.write_bytes + self.cluster_bytes
        described = self.virtual_bytes if self.preallocation != "off" else self.write_bytes
        # The L1 table has 8 bytes for each cluster of L2 entries, which are 8 bytes each (specification, "L1 table").
        l1_table = 64 * self.virtual_bytes // self.cluster_bytes**2
        tables = -(-described // self.cluster_bytes) * _TABLES_PER_CLUSTER + 2 * l1_table
        return data + tables + 16 * self.cluster_bytes + _TABLES

    def unsupported(self, bench: Bench) -> str | None:
        """An old qemu-img knows no extended L2 entries."""
        if self.extended_l2 and node.version(bench.io) < _EXTENDED_SINCE:
            return "extended L2 entries need qemu-img 5.2 or newer on this host: left out"
        return None

    def run(self, bench: Bench) -> None:
        """Create it, look what it occupies, write into it."""
        bench.scratch.clear()
        options = [f"preallocation={self.preallocation}", f"cluster_size={self.cluster_bytes}"]
        options += ["extended_l2=on"] if self.extended_l2 else []
        argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", ",".join(options), bench.scratch.path(_FILE)]
        started = time.monotonic()
        bench.tool([*argv, str(self.virtual_bytes)])
        image = bench.scratch.open(_FILE)
        try:
            os.fsync(image)
            bench.sample(self.setting, "create_seconds", round(time.monotonic() - started, 4))
            bench.sample(self.setting, "physical_bytes", os.fstat(image).st_blocks * 512)
        finally:
            os.close(image)
        direct = bench.past_cache(direct=True)
        done, seconds = Guest(bench, _FILE, "qcow2", self.write_bytes, direct).sequential(self.block_bytes, write=True)
        bench.took(self.setting, "write_seconds", seconds)
        bench.rate(self.setting, "write_rate", done, seconds)
        bench.measure_scratch()
        bench.scratch.clear()


def parse(steps: list[Any]) -> list[Step]:
    """Steps of ``preallocation``, ``cluster_bytes``, ``extended_l2``, ``virtual_bytes``, ``write_bytes`` and
    ``block_bytes``.
    """
    return [_parse(raw) for raw in steps]


def _parse(raw: Any) -> CreationStep:
    known = {"preallocation", "cluster_bytes", "extended_l2", "virtual_bytes", "write_bytes", "block_bytes"}
    fields = Fields(raw, known)
    step = CreationStep(
        setting=fields.setting(),
        preallocation=fields.word("preallocation", ("off", "metadata", "falloc", "full"), "off"),
        cluster_bytes=fields.number("cluster_bytes", _SMALLEST_CLUSTER, _LARGEST_CLUSTER, 64 << 10),
        extended_l2=fields.get("extended_l2", bool, False),
        virtual_bytes=fields.bytes("virtual_bytes"),
        write_bytes=fields.bytes("write_bytes"),
        block_bytes=fields.block("block_bytes"),
    )
    if step.cluster_bytes & (step.cluster_bytes - 1):
        raise RefusedError(INVALID, "cluster_bytes is a power of two")
    if step.extended_l2 and step.cluster_bytes < _SMALLEST_EXTENDED:
        raise RefusedError(INVALID, f"extended L2 entries want clusters of {_SMALLEST_EXTENDED} bytes or more")
    if not step.block_bytes <= step.write_bytes <= step.virtual_bytes:
        raise RefusedError(INVALID, "a block is not larger than what is written, and that not larger than the image")
    return step
