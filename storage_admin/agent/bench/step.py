"""What the kinds of benchmark have in common: a step as it travels, and what it does its work with.

A kind is a module of this package with two names: ``TOOLS``, the programs that it needs, and ``parse``, which takes all
steps of a request, each an object of typed fields, and gives a :class:`Step` for each or refuses with ``invalid``.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Union

from storage_admin.agent import protocol
from storage_admin.agent.bench import caches
from storage_admin.agent.folders.scratch import Scratch
from storage_admin.agent.host import space
from storage_admin.agent.host.space import Others, SpaceClaim
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError

Setting = dict[str, Union[str, int, bool]]

#: What is measured, and in which unit.
UNITS = {
    "create_seconds": "s",
    "convert_seconds": "s",
    "write_seconds": "s",
    "physical_bytes": "B",
    "boot_seconds": "s",
    "boot_all_seconds": "s",
    **dict.fromkeys(("write_rate", "read_rate", "seq_write_rate", "seq_read_rate"), "B/s"),
    **dict.fromkeys(("rand_write_iops", "rand_read_iops"), "1/s"),
    **dict.fromkeys(("latency_p50_seconds", "latency_p95_seconds", "latency_p99_seconds"), "s"),
}
#: How reads went past this host's memory; the last that applies stands in the result.
DIRECT, DROPPED, NOT_DROPPED = "direct", "dropped", "not dropped"
#: Longest text of a tool that is sent.
OUTPUT_BYTES = 256 * 1024
#: Seconds between two looks at the space, while a tool works.
_WATCH_INTERVAL = 0.5
#: Seconds below which a tool that counts in milliseconds says nothing.
_QUICKEST, _TOO_QUICK = 0.005, "too quick to measure"
_SECTOR = 512
_LARGEST = 1 << 46
_LARGEST_BLOCK = 64 << 20
_KEY = re.compile(r"[a-z0-9_]{1,40}")
_MOST_KEYS, _LONGEST_WORD = 20, 100


@dataclass
class Bench:
    """What a step does its work with, and what it tells.

    Args:
        io: the controller.
        scratch: where all files are.
        reserve: what has to stay free on the filesystem.
        others: what other jobs there may still write.
        filesystem: its type.
        job: the job's id.
        claim: what it may still write itself.
        idle_io: whether tools are to give way to everybody else.
        direct: whether the filesystem takes ``O_DIRECT``.
    """

    io: AgentIO
    scratch: Scratch
    reserve: space.Reserve
    others: Others
    filesystem: str | None
    job: str
    claim: SpaceClaim
    idle_io: bool = False
    direct: bool = True
    repetition: int = 1
    scratch_bytes_at_most: int = 0
    #: What a file that stays between steps holds.
    made_bytes: int = 0
    #: How fio is to make its requests; empty until it was asked.
    fio_engine: str = ""
    _cache_use: set[str] = field(default_factory=set)
    _noted: set[str] = field(default_factory=set)
    _looked: float = 0.0
    #: What the scratch folder may hold at most while a step is done.
    _may_hold: int = 0

    @property
    def caches(self) -> str:
        """How reads went past this host's memory: the worst of it."""
        return next((how for how in (NOT_DROPPED, DROPPED, DIRECT) if how in self._cache_use), NOT_DROPPED)

    def do(self, step: Step) -> None:
        """One step, once, if there is room for it.

        Raises:
            RefusedError: ``not_enough_space``.
            HostError: a tool failed.
            StoppedError: the controller stopped the work.
        """
        self.io.check()
        if (why := step.unsupported(self)) is not None:
            self.note(why)
            return
        more = max(0, step.needed_bytes - self.scratch.allocated_bytes())
        self.claim.take(more, self.reserve, self.others)
        self._may_hold = self.scratch.allocated_bytes() + more
        step.run(self)
        self.claim.left(0)
        self.measure_scratch()

    def tool(
        self,
        argv: Sequence[str],
        *,
        output: bytearray | None = None,
        files: Files | None = None,
        pass_fds: Sequence[int] = (),
        watch: Callable[[], None] | None = None,
    ) -> bytes:
        """Run a tool to its end.

        Args:
            argv: its name and arguments; files are named by :meth:`Scratch.path`.
            output: gets its standard output, which is otherwise cut to its end.
            files: all that it is given, where it works on a guest's bytes; else it is given the scratch folder.
            pass_fds: descriptors that it needs beside these.
            watch: called every 0.2 s while it works, beside :meth:`watch`; what it raises stops it.

        Returns:
            What it said on standard error, cut to its end, where ``output`` is given; else both, standard error last.

        Raises:
            RefusedError: ``not_enough_space``.
            HostError: it failed, or said too much.
        """

        def keep(chunk: bytes) -> None:
            if output is not None:
                if len(output) + len(chunk) > OUTPUT_BYTES:
                    raise HostError(f"{argv[0]} printed more than {OUTPUT_BYTES} bytes and was stopped")
                output.extend(chunk)

        def look() -> None:
            self.watch()
            if watch is not None:
                watch()

        done = tools.run(
            argv,
            self.io,
            limits=None,
            idle_io=self.idle_io,
            files=files,
            pass_fds=[*pass_fds, *([self.scratch.fd] if files is None else [])],
            on_output=keep,
            watch=look,
            shown=[self.scratch.shown(argument) for argument in argv],
        )
        if done.exit_code:
            if b"No space left" in done.stderr + done.stdout:
                raise RefusedError("not_enough_space", "the disk was full; free some space and try again")
            raise HostError(f"{argv[0]} failed, {self.scratch.shown(done.words())}")
        return done.stderr if output is not None else done.stdout + done.stderr

    def watch(self) -> None:
        """To be called while something is at work: guests that need the last of the space win."""
        if time.monotonic() - self._looked > _WATCH_INTERVAL:
            self._looked = time.monotonic()
            self.claim.left(self._may_hold - self.measure_scratch())
            space.watch(self.scratch.fd, self.reserve)

    def measure_scratch(self) -> int:
        """Note how much the scratch folder holds now, in bytes."""
        now = self.scratch.allocated_bytes()
        self.scratch_bytes_at_most = max(self.scratch_bytes_at_most, now)
        return now

    def sample(self, setting: Setting, metric: str, value: float | None, note: str = "") -> None:
        """Tell what the agent measured itself, in its unit of :data:`UNITS`; ``note`` says why there is no figure."""
        fields = {"setting": setting, "metric": metric, "unit": UNITS[metric], "value": value}
        self.io.emit(protocol.SAMPLE, **fields, repetition=self.repetition, **({"note": note} if note else {}))

    def took(self, setting: Setting, metric: str, seconds: float) -> None:
        """Tell how long something took by a tool that counts in milliseconds."""
        quick = seconds < _QUICKEST
        self.sample(setting, metric, None if quick else seconds, _TOO_QUICK if quick else "")

    def rate(self, setting: Setting, metric: str, done: int, seconds: float) -> None:
        """Tell how much was done a second; where that was too quick to be measured, no figure is made up for it."""
        if seconds < _QUICKEST:
            self.sample(setting, metric, None, _TOO_QUICK)
        else:
            self.sample(setting, metric, round(done / seconds, 2))

    def output(self, tool: str, setting: Setting, text: bytes) -> None:
        """Tell what a tool said, for the controller to read."""
        shown = text[-OUTPUT_BYTES:].decode("utf-8", "backslashreplace")
        self.io.emit(protocol.OUTPUT, tool=tool, setting=setting, repetition=self.repetition, text=shown)

    def note(self, text: str) -> None:
        """Tell, once, what an admin should know when reading the figures."""
        if text not in self._noted:
            self._noted.add(text)
            self.io.emit(protocol.NOTE, text=text)

    def past_memory(self, *names: str, direct: bool) -> bool:
        """See to it that the next read of some files does not come from this host's memory, as far as that can be done.

        Args:
            names: of the files.
            direct: whether the step wants to read past the cache.

        Returns:
            Whether to read past the cache (``O_DIRECT``).
        """
        if self.past_cache(direct=direct):
            return True
        if self.drop(*names):
            self._cache_use.add(DROPPED)
            return False
        if self.direct:
            self.note("caches could not be dropped: files are read with direct I/O instead")
            self._cache_use.add(DIRECT)
            return True
        self.through_memory(
            "caches could not be dropped, and this filesystem does not support direct I/O: reads may come from memory"
        )
        return False

    def through_cache(self, *names: str) -> None:
        """Bring some files out of this host's memory before what goes through it by design, as far as can be done."""
        if self.drop(*names):
            self._cache_use.add(DROPPED)
        else:
            self.through_memory("caches could not be dropped: what is read through the cache may come from memory")

    def drop(self, *names: str) -> bool:
        """Bring some files out of this host's memory; whether that could be done."""
        fds = [self.scratch.open(name) for name in names]
        try:
            return caches.drop(fds, self.filesystem)
        finally:
            for fd in fds:
                os.close(fd)

    def through_memory(self, why: str) -> None:
        """Note that something was read that may have come from this host's memory."""
        self.note(why)
        self._cache_use.add(NOT_DROPPED)

    def emptied_by_tool(self, why: str) -> None:
        """Note that a tool has the kernel forget its files before it reads; a filesystem's own cache stays."""
        self.note(why)
        self._cache_use.add(NOT_DROPPED if self.filesystem in caches.OWN_CACHE else DROPPED)

    def past_cache(self, *, direct: bool) -> bool:
        """Whether to read or write past the cache, where the step wants that."""
        if direct and not self.direct:
            self.note("this filesystem does not support direct I/O: the cache is used, and dropped where possible")
        elif direct:
            self._cache_use.add(DIRECT)
        return direct and self.direct


class Step(ABC):
    """One measurement, done once a repetition."""

    setting: Setting

    @property
    @abstractmethod
    def needed_bytes(self) -> int:
        """The most that the scratch folder holds while it is done, with what earlier steps left there."""

    @abstractmethod
    def run(self, bench: Bench) -> None:
        """Measure, and tell."""

    def unsupported(self, bench: Bench) -> str | None:  # noqa: ARG002
        """Why this host cannot do it, as a sentence; it is left out then."""
        return None


class Fields(Arguments):
    """The typed fields of a step. All methods refuse with ``invalid``."""

    def __init__(self, raw: Any, known: set[str]) -> None:
        if not isinstance(raw, dict):
            raise RefusedError(INVALID, "a step is an object")
        super().__init__(raw, frozenset(known | {"setting"}))

    def setting(self) -> Setting:
        """What names the step: some words and numbers."""
        given = self.take("setting", dict)
        good = len(given) <= _MOST_KEYS and all(
            isinstance(key, str) and _KEY.fullmatch(key) and isinstance(value, (str, int))
            for key, value in given.items()
        )
        if not good or any(isinstance(value, str) and len(value) > _LONGEST_WORD for value in given.values()):
            raise RefusedError(INVALID, "a step's setting has short words and numbers, under names of a to z")
        return dict(given)

    def number(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number within bounds; required where there is no default."""
        value = self.take(name, int) if default is None else self.get(name, int, default)
        if not least <= value <= most:
            raise RefusedError(INVALID, f"{name} is {least} to {most}")
        return value

    def bytes(self, name: str) -> int:
        """A number of bytes, in whole sectors."""
        return self._sectors(name, _LARGEST)

    def block(self, name: str, default: int | None = None) -> int:
        """The size of a block in bytes, in whole sectors."""
        return self._sectors(name, _LARGEST_BLOCK, default)

    def _sectors(self, name: str, most: int, default: int | None = None) -> int:
        value = self.number(name, _SECTOR, most, default)
        if value % _SECTOR:
            raise RefusedError(INVALID, f"{name} is a multiple of {_SECTOR}")
        return value

    def word(self, name: str, among: Sequence[str], default: str | None = None) -> str:
        """One of several words; required where there is no default."""
        if default is None:
            self.take(name, str)
        return self.choice(name, frozenset(among), default or among[0])
