"""The kind ``fio``: one workload of fio a step, whose JSON is sent for the controller to read.

The file stays between steps that want the same one: what is read was written by fio itself, with random data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from storage_admin.agent.bench.step import Bench, Fields, Setting, Step
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, RefusedError

TOOLS = ("fio",)
_ENGINE, _PLAIN_ENGINE = "libaio", "psync"
_WORKLOADS = ("read", "write", "randread", "randwrite", "randrw")


@dataclass(frozen=True)
class FioStep(Step):
    """One workload: each of ``jobs`` has a file of its own, all together of ``size_bytes``."""

    setting: Setting
    rw: str
    block_bytes: int
    size_bytes: int
    seconds: int
    iodepth: int
    jobs: int
    direct: bool

    @property
    def needed_bytes(self) -> int:
        """The files; those of another size make room for them."""
        return self.size_bytes

    @property
    def _share(self) -> int:
        return self.size_bytes // self.jobs // self.block_bytes * self.block_bytes

    def run(self, bench: Bench) -> None:
        """Run it; a read lays out its file first, where it is not there yet."""
        self._keep_what_fits(bench)
        is_direct = bench.past_cache(direct=self.direct)
        engine = _engine(bench) if is_direct else _PLAIN_ENGINE
        if self.iodepth > 1 and engine == _PLAIN_ENGINE:
            bench.note("without direct asynchronous I/O, fio has only one request in flight, whatever the queue depth")
        if not is_direct:
            bench.emptied_by_tool("fio reads through the cache, from which it drops its files before each step")
        argv = [
            *("fio", "--name=sa", f"--directory={bench.scratch.folder}", f"--rw={self.rw}", f"--bs={self.block_bytes}"),
            *(f"--size={self._share}", f"--numjobs={self.jobs}", f"--ioengine={engine}", f"--iodepth={self.iodepth}"),
            *(f"--direct={int(is_direct)}", f"--runtime={self.seconds}"),
            # A second pass through the cache would measure the cache.
            *(["--time_based"] if is_direct else []),
            *([] if self.rw in {"read", "randread"} else ["--end_fsync=1"]),
            # Threads end with the process; processes that it started would go on.
            *("--refill_buffers", "--thread", "--group_reporting", "--eta=never", "--output-format=json"),
        ]
        said = bytearray()
        bench.tool(argv, output=said)
        bench.output("fio", self.setting, bytes(said))

    def _keep_what_fits(self, bench: Bench) -> None:
        """Remove files of earlier steps that this one does not use as they are (fio names them by job and number)."""
        wanted = {f"sa.{number}.0" for number in range(self.jobs)}
        fitting = {name for name in wanted & set(bench.scratch.names()) if bench.scratch.size(name) == self._share}
        bench.scratch.clear(*fitting)


def _engine(bench: Bench) -> str:
    """The engine that has many requests in flight, where this fio was built with it; asked once a run."""
    if not bench.fio_engine:
        known = tools.run(["fio", "--enghelp"], bench.io).stdout.split()
        bench.fio_engine = _ENGINE if _ENGINE.encode() in known else _PLAIN_ENGINE
    return bench.fio_engine


def parse(steps: list[Any]) -> list[Step]:
    """Steps of ``rw``, ``block_bytes``, ``size_bytes`` (of all jobs), ``seconds``, ``iodepth``, ``jobs`` and
    ``direct``.
    """
    return [_parse(raw) for raw in steps]


def _parse(raw: Any) -> FioStep:
    fields = Fields(raw, {"rw", "block_bytes", "size_bytes", "seconds", "iodepth", "jobs", "direct"})
    step = FioStep(
        setting=fields.setting(),
        rw=fields.word("rw", _WORKLOADS),
        block_bytes=fields.block("block_bytes"),
        size_bytes=fields.bytes("size_bytes"),
        seconds=fields.number("seconds", 1, 3600),
        iodepth=fields.number("iodepth", 1, 1024, 1),
        jobs=fields.number("jobs", 1, 64, 1),
        direct=fields.get("direct", bool, True),
    )
    if step.size_bytes < step.block_bytes * step.jobs:
        raise RefusedError(INVALID, "size_bytes holds at least one block for each job")
    return step
