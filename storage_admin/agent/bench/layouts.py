"""The kind ``formats``: the same data in files of several formats, chains and compressions, read and written.

The data is made once a run: of each 4 KiB one half is random and the other half text, so that compression has something
to do and no cluster is zero. The file ``source.raw`` holds it, and every step makes its images from that.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.bench.qemu_bench import Guest
from storage_admin.agent.bench.step import Bench, Fields, Setting, Step
from storage_admin.agent.host import space
from storage_admin.agent.protocol import INVALID, RefusedError
from storage_admin.agent.qemu import node

TOOLS = ("qemu-img",)
LAYOUTS = ("raw", "qcow2", "raw+qcow2", "qcow2+qcow2", "chain", "zlib", "zstd")
#: The file with the data.
SOURCE = "source.raw"
_DEEPEST = 64
#: Blocks of the sequential passes, unless a step says otherwise.
_SEQUENTIAL_BLOCK = 1 << 20
_TABLES_PER_CLUSTER, _CLUSTER, _TABLES = 24, 64 << 10, 4 << 20
_HALF = 2048
_TEXT = b"what a guest writes is seldom random, and often not even new. "


@dataclass(frozen=True)
class LayoutStep(Step):
    """One layout; sizes are in bytes, ``overlays`` stand above a base that holds all data."""

    setting: Setting
    layout: str
    overlays: int
    virtual_bytes: int
    data_bytes: int
    block_bytes: int
    sequential_block_bytes: int
    direct: bool

    @property
    def needed_bytes(self) -> int:
        """The source, the base, and all of the data once more where it is written over."""
        tables = -(-self.virtual_bytes // _CLUSTER) * _TABLES_PER_CLUSTER + _TABLES
        return 3 * self.data_bytes + (self.overlays + 1) * tables

    def unsupported(self, bench: Bench) -> str | None:
        """zstd is younger than zlib."""
        if self.layout == "zstd" and not node.supports_zstd(bench.io):
            return "qemu-img on this host cannot compress with zstd: left out"
        return None

    def run(self, bench: Bench) -> None:
        """Build it, read it, write to it: at random first, as what is written at random is new to an overlay then."""
        bench.scratch.clear(SOURCE)
        make_source(bench, self.data_bytes, self.virtual_bytes)
        files = self._build(bench)
        top, form = files[-1], "raw" if self.layout == "raw" else "qcow2"

        def guest() -> Guest:
            return Guest(bench, top, form, self.data_bytes, bench.past_memory(*files, direct=self.direct))

        done, seconds = guest().sequential(self.sequential_block_bytes, write=False)
        bench.rate(self.setting, "seq_read_rate", done, seconds)
        done, seconds = guest().random(self.block_bytes, write=False)
        bench.rate(self.setting, "rand_read_iops", done, seconds)
        done, seconds = guest().random(self.block_bytes, write=True)
        bench.rate(self.setting, "rand_write_iops", done, seconds)
        done, seconds = guest().sequential(self.sequential_block_bytes, write=True)
        bench.rate(self.setting, "seq_write_rate", done, seconds)
        bench.measure_scratch()
        bench.scratch.clear(SOURCE)

    def _build(self, bench: Bench) -> list[str]:
        """The chain's files, the base first; what conversion costs and what all of it occupies is told."""
        if self.layout == "raw+qcow2":
            files = [SOURCE]  # nothing writes to a base
        else:
            form = "raw" if self.layout == "raw" else "qcow2"
            files = [f"base.{form}"]
            self._convert(bench, files[0], form)
        for number in range(1, self.overlays + 1):
            below, name = files[-1], f"overlay{number}.qcow2"
            form = "raw" if below == SOURCE else "qcow2"
            # A base beside the image is named without its folder, so that no path of this process stands in it.
            bench.tool(["qemu-img", "create", "-q", "-f", "qcow2", "-b", below, "-F", form, bench.scratch.path(name)])
            files.append(name)
        bench.sample(self.setting, "physical_bytes", bench.scratch.allocated_bytes(*files))
        return files

    def _convert(self, bench: Bench, name: str, form: str) -> None:
        # Any qemu-img compresses with zlib, also one that knows no name for it.
        options = {"zlib": ["-c"], "zstd": ["-c", "-o", "compression_type=zstd"]}.get(self.layout, [])
        if bench.direct:
            options = [*options, "-t", "none", "-T", "none"]
        elif not bench.drop(SOURCE):
            bench.note("caches could not be dropped: conversions read from memory")
        files = map(bench.scratch.path, (SOURCE, name))
        started = time.monotonic()
        bench.tool(["qemu-img", "convert", "-f", "raw", "-O", form, *options, *files])
        image = bench.scratch.open(name)
        try:
            os.fsync(image)
        finally:
            os.close(image)
        bench.sample(self.setting, "convert_seconds", round(time.monotonic() - started, 4))


def make_source(bench: Bench, data_bytes: int, virtual_bytes: int) -> None:
    """The file with the data, unless an earlier step made it."""
    if SOURCE in bench.scratch.names():
        if bench.scratch.size(SOURCE) == virtual_bytes and bench.made_bytes == data_bytes:
            return
        bench.scratch.clear()
    piece = compressible(min(data_bytes, 16 << 20))
    source = bench.scratch.open(SOURCE, os.O_WRONLY | os.O_CREAT)
    try:
        for start in range(0, data_bytes, len(piece)):
            bench.io.check()
            space.watch(bench.scratch.fd, bench.reserve)
            left = memoryview(piece)[: data_bytes - start]
            while left:
                left = left[os.write(source, left) :]
            os.fdatasync(source)  # all at once in the end, nobody could stop it
        os.ftruncate(source, virtual_bytes)
        os.fsync(source)
    finally:
        os.close(source)
    bench.made_bytes = data_bytes


def compressible(size: int) -> bytes:
    """Data of which about half can be compressed away: random bytes and text in turn, 2 KiB each."""
    text = (_TEXT * (_HALF // len(_TEXT) + 1))[:_HALF]
    return b"".join(os.urandom(_HALF) + text for _ in range(-(-size // (2 * _HALF))))[:size]


def parse(steps: list[Any]) -> list[Step]:
    """Steps of ``layout``, ``depth`` (files of a ``chain``), ``virtual_bytes``, ``data_bytes``, ``block_bytes``,
    ``sequential_block_bytes`` and ``direct``.
    """
    return [_parse(raw) for raw in steps]


def _parse(raw: Any) -> LayoutStep:
    known = {"layout", "depth", "virtual_bytes", "data_bytes", "block_bytes", "sequential_block_bytes", "direct"}
    fields = Fields(raw, known)
    layout, depth = fields.word("layout", LAYOUTS), fields.number("depth", 1, _DEEPEST, 1)
    overlays = {"chain": depth - 1, "raw+qcow2": 1, "qcow2+qcow2": 1}.get(layout, 0)
    step = LayoutStep(
        setting=fields.setting(),
        layout=layout,
        overlays=overlays,
        virtual_bytes=fields.bytes("virtual_bytes"),
        data_bytes=fields.bytes("data_bytes"),
        block_bytes=fields.block("block_bytes"),
        sequential_block_bytes=fields.block("sequential_block_bytes", _SEQUENTIAL_BLOCK),
        direct=fields.get("direct", bool, True),
    )
    if not max(step.block_bytes, step.sequential_block_bytes) <= step.data_bytes <= step.virtual_bytes:
        raise RefusedError(INVALID, "a block is not larger than the data, and that not larger than the image")
    return step
