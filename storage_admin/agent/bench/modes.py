"""The kind ``modes``: requests to a raw file in each cache mode and by each way of asynchronous I/O that QEMU has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from storage_admin.agent.bench.layouts import SOURCE, make_source
from storage_admin.agent.bench.qemu_bench import Guest
from storage_admin.agent.bench.step import Bench, Fields, Setting, Step
from storage_admin.agent.protocol import INVALID, HostError, RefusedError

TOOLS = ("qemu-img",)
CACHES, IO = ("none", "directsync", "writeback", "writethrough"), ("native", "io_uring", "threads")
#: The cache modes that go past this host's memory; the kernel's own asynchronous I/O needs one of them.
_DIRECT = frozenset({"none", "directsync"})
_SEQUENTIAL_BLOCK = 1 << 20


@dataclass(frozen=True)
class ModeStep(Step):
    """One pair of modes; sizes are in bytes."""

    setting: Setting
    cache: str
    io: str
    data_bytes: int
    block_bytes: int

    @property
    def needed_bytes(self) -> int:
        """The one file that all steps work on."""
        return self.data_bytes

    def unsupported(self, bench: Bench) -> str | None:
        """Not every filesystem knows direct I/O."""
        if self.cache in _DIRECT and not bench.direct:
            return f"this filesystem does not support direct I/O: cache={self.cache} was left out"
        return None

    def run(self, bench: Bench) -> None:
        """Read and write at random, then from end to end."""
        make_source(bench, self.data_bytes, self.data_bytes)
        try:
            self._guest(bench).probe()
        except HostError as error:
            if self.io == "threads":
                raise
            bench.note(f"QEMU or the kernel of this host cannot use {self.io}, which was left out: {error.detail}")
            return
        for metric, write in (("rand_read_iops", False), ("rand_write_iops", True)):
            done, seconds = self._guest(bench).random(self.block_bytes, write=write)
            bench.rate(self.setting, metric, done, seconds)
        for metric, write in (("seq_read_rate", False), ("seq_write_rate", True)):
            done, seconds = self._guest(bench).sequential(_SEQUENTIAL_BLOCK, write=write)
            bench.rate(self.setting, metric, done, seconds)

    def _guest(self, bench: Bench) -> Guest:
        direct = self.cache in _DIRECT
        if direct:
            bench.past_memory(SOURCE, direct=True)
        else:
            bench.through_cache(SOURCE)
        return Guest(bench, SOURCE, "raw", self.data_bytes, direct, cache=self.cache, io=self.io)


def parse(steps: list[Any]) -> list[Step]:
    """Steps of ``cache``, ``io``, ``data_bytes`` and ``block_bytes``."""
    return [_parse(Fields(raw, {"cache", "io", "data_bytes", "block_bytes"})) for raw in steps]


def _parse(fields: Fields) -> ModeStep:
    step = ModeStep(
        setting=fields.setting(),
        cache=fields.word("cache", CACHES),
        io=fields.word("io", IO),
        data_bytes=fields.bytes("data_bytes"),
        block_bytes=fields.block("block_bytes"),
    )
    if step.io == "native" and step.cache not in _DIRECT:
        raise RefusedError(INVALID, "io native needs cache none or directsync")
    if not max(step.block_bytes, _SEQUENTIAL_BLOCK) <= step.data_bytes:
        raise RefusedError(INVALID, "a block is not larger than the data")
    return step
