"""The kind ``dd``: one file, written and read from end to end.

Random data comes out of memory: a piece of 32 MiB, made once, is spliced into a pipe again and again, from which dd
reads as fast as from a file in the cache. dd's own words are sent, for the controller to read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.bench.step import Bench, Fields, Setting, Step
from storage_admin.agent.protocol import INVALID, RefusedError

TOOLS = ("dd",)
_FILE = "dd.data"
_PIECE_BYTES = 32 << 20
_PIPE_BYTES = 1 << 20
# linux/fcntl.h; Python's fcntl has a name for it since 3.10.
_SET_PIPE_SIZE = 1031


@dataclass(frozen=True)
class DdStep(Step):
    """One call of dd; a read reads what the write before it left."""

    setting: Setting
    mode: str
    block_bytes: int
    count: int
    direct: bool
    random: bool

    @property
    def needed_bytes(self) -> int:
        """The file; what the write before left makes room for it."""
        return self.block_bytes * self.count

    def run(self, bench: Bench) -> None:
        """Write the file anew, or read it past the cache."""
        if self.mode == "read":
            flags = ["iflag=direct"] if bench.past_memory(_FILE, direct=self.direct) else []
            argv = ["dd", f"if={bench.scratch.path(_FILE)}", "of=/dev/null", *self._size(), *flags]
            bench.output("dd", self.setting, bench.tool(argv))
            return
        bench.scratch.clear()
        os.close(bench.scratch.open(_FILE, os.O_WRONLY | os.O_CREAT))
        is_direct = bench.past_cache(direct=self.direct)
        target = [f"of={bench.scratch.path(_FILE)}", *self._size(), "oflag=direct" if is_direct else "conv=fdatasync"]
        if not self.random:
            bench.output("dd", self.setting, bench.tool(["dd", "if=/dev/zero", *target]))
            return
        with random_data() as source:
            argv = ["dd", f"if=/proc/self/fd/{source}", "iflag=fullblock", *target]
            bench.output("dd", self.setting, bench.tool(argv, pass_fds=[source]))

    def _size(self) -> list[str]:
        return [f"bs={self.block_bytes}", f"count={self.count}"]


def parse(steps: list[Any]) -> list[Step]:
    """Steps of ``mode``, ``block_bytes``, ``count``, ``sync`` (fdatasync or direct), ``data`` (random or zero)."""
    found: list[Step] = []
    written = 0
    for raw in steps:
        fields = Fields(raw, {"mode", "block_bytes", "count", "sync", "data"})
        step = DdStep(
            setting=fields.setting(),
            mode=fields.word("mode", ("write", "read")),
            block_bytes=fields.block("block_bytes"),
            count=fields.number("count", 1, 1 << 34),
            direct=fields.word("sync", ("fdatasync", "direct")) == "direct",
            random=fields.word("data", ("random", "zero"), "random") == "random",
        )
        if step.mode == "write":
            written = step.needed_bytes
        elif step.needed_bytes > written:
            raise RefusedError(INVALID, "dd reads what a write before it left, and not more than that")
        found.append(step)
    return found


@contextlib.contextmanager
def random_data() -> Iterator[int]:
    """The reading end of a pipe that random data comes out of without end."""
    piece = os.memfd_create("random", os.MFD_CLOEXEC)
    try:
        for _ in range(_PIECE_BYTES >> 20):
            os.write(piece, os.urandom(1 << 20))
        source, drain = os.pipe()
        with contextlib.suppress(OSError):  # a user without root may be over his share of pipes
            fcntl.fcntl(drain, _SET_PIPE_SIZE, _PIPE_BYTES)
        feeder = threading.Thread(target=_feed, args=(piece, drain), name="random data", daemon=True)
        feeder.start()
        try:
            yield source
        finally:
            os.close(source)  # the feeder finds its pipe broken, and ends
            feeder.join()
    finally:
        os.close(piece)


def _feed(piece: int, drain: int) -> None:
    """Send a file of memory into a pipe over and over, until nobody reads any more."""
    splices = True
    try:
        while True:
            offset = 0
            while offset < _PIECE_BYTES:
                if splices:
                    try:
                        offset += os.sendfile(drain, piece, offset, _PIECE_BYTES - offset)
                        continue
                    except OSError as error:
                        if error.errno != errno.EINVAL:
                            raise
                        splices = False  # this kernel sends no file into a pipe
                offset += os.write(drain, os.pread(piece, _PIPE_BYTES, offset))
    except BrokenPipeError:
        return
    finally:
        os.close(drain)
