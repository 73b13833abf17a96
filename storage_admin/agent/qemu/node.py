"""What the subcommands of qemu-img share: images as qemu is to open them, how long ones run, what answers mean.

Also which qemu-img a host has.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import HostError, display

_PROGRESS = re.compile(rb"\(\s*([0-9]+(?:\.[0-9]+)?)/100%\)")
_VERSION = re.compile(rb"qemu-img version ([0-9]+)\.([0-9]+)")
#: What was asked of a qemu-img already, by its device, inode and time of last modification: an upgrade is another one.
_known_versions: dict[tuple[int, int, int], tuple[int, int]] = {}
_known_zstd: dict[tuple[int, int, int], bool] = {}
#: Of a tool that may be slow on a large image and must not be big.
SLOW_QUERY = tools.Limits(cpu_seconds=None, wall_seconds=None)


@dataclass(frozen=True)
class Node:
    """An image as qemu is to open it: only for reading, and without keeping a guest from starting.

    Args:
        fd: descriptor of the file.
        format: qemu's name for its format; never probed.
        path: what the log shows.
        backing: its base, also where the header names another one; ``None`` opens it without.
    """

    fd: int
    format: str
    path: bytes
    backing: Node | None = None

    def path_by_descriptor(self) -> str:
        """A path that leads to the opened file, whatever its name leads to by now."""
        return f"/proc/self/fd/{self.fd}"

    def options(self) -> dict[str, Any]:
        """The block device options, as ``blockdev-add`` takes them."""
        opened: dict[str, Any] = {
            "driver": self.format,
            "file": {"driver": "file", "filename": self.path_by_descriptor()},
        }
        if self.format != "raw":
            opened["backing"] = self.backing.options() if self.backing is not None else None
        return opened

    def argument(self) -> str:
        """The options as a file name that qemu takes."""
        return _json(self.options())

    def shared(self) -> str:
        """As :meth:`argument`, for a subcommand that has no ``-U`` because it writes to another image: only read, and
        without keeping anybody from writing.
        """
        return _json(self._sharing())

    def _sharing(self) -> dict[str, Any]:
        opened = self.options() | {"read-only": True, "force-share": True}
        if self.backing is not None:
            opened["backing"] = self.backing._sharing()
        return opened

    def written(self) -> str:
        """As :meth:`argument`, to be written to; what is below it is only read."""
        opened = self.options()
        if self.backing is not None:
            opened["backing"] = self.backing._sharing()
        return _json(opened)

    def part(self, offset: int, size: int) -> str:
        """As :meth:`argument`, of ``size`` bytes from ``offset`` on as the guest sees them."""
        part = {"driver": "raw", "offset": offset, "size": size, "file": self.options()}
        return _json(part)

    def files(
        self,
        *,
        written: bool = False,
        written_below: bool = False,
        beside: Sequence[Node] = (),
        connected: tuple[str, str] | None = None,
    ) -> Files:
        """What a tool is to be given that opens it, to write to it and to its base or not, and reads ``beside`` it;
        ``connected`` as of :class:`Files`.
        """
        read = [fd for node in (self, *beside) for fd in node._fds()]
        below = [self.backing.fd] if written_below and self.backing is not None else []
        return Files(read, [*([self.fd] if written else []), *below], connected=connected)

    def _fds(self) -> list[int]:
        return [self.fd, *(self.backing._fds() if self.backing is not None else [])]


@dataclass(frozen=True)
class Member(Node):
    """An image that is part of another file: ``size`` bytes from ``offset`` on, or all that follows."""

    offset: int = 0
    size: int | None = None

    def options(self) -> dict[str, Any]:
        opened = super().options()
        length = {} if self.size is None else {"size": self.size}
        return opened | {"file": {"driver": "raw", "offset": self.offset, **length, "file": opened["file"]}}


@dataclass(frozen=True)
class DeviceNode(Node):
    """A block device: its first ``size`` bytes, or all of it."""

    size: int | None = None

    def options(self) -> dict[str, Any]:
        """Raw, by qemu's driver for devices."""
        length = {} if self.size is None else {"size": self.size}
        return {"driver": "raw", **length, "file": {"driver": "host_device", "filename": self.path_by_descriptor()}}


def _json(options: dict[str, Any]) -> str:
    return "json:" + json.dumps(options, separators=(",", ":"))


@dataclass(frozen=True)
class Effort:
    """How a long subcommand runs: at idle priority or not, looked after by ``watch``, telling a share from 0 to 1."""

    idle_io: bool = False
    watch: Callable[[], None] | None = None
    progress: Callable[[float], None] | None = None

    @classmethod
    def telling(
        cls, io: AgentIO, stage: str, size: int, idle_io: bool, watch: Callable[[], None] | None = None
    ) -> Effort:
        """One that tells how many of so many bytes are done in a stage; of 0 bytes it tells nothing."""
        if not size:
            return cls(idle_io, watch)
        return cls(idle_io, watch, lambda share: io.progress(stage, round(share * size), size))

    def on_output(self) -> Callable[[bytes], None] | None:
        """What reads the share out of the tool's ``(12.00/100%)\\r``."""
        read = self.on_outputs([1])
        return None if read is None else lambda chunk: read(0, chunk)

    def on_outputs(self, sizes: Sequence[int]) -> Callable[[int, bytes], None] | None:
        """The same for several tools, each with a part of the work of such a size."""
        if self.progress is None:
            return None
        tell = self.progress
        tails = [bytearray() for _ in sizes]
        done = [0.0 for _ in sizes]

        def read(number: int, chunk: bytes) -> None:
            tails[number].extend(chunk)
            shares = _PROGRESS.findall(tails[number])
            del tails[number][:-32]
            if shares:
                done[number] = sizes[number] * float(shares[-1]) / 100
                tell(sum(done) / sum(sizes))

        return read


#: Seconds between two looks at the image and at the free space while a tool works.
WATCH_INTERVAL = 0.5


def seldom(look: Callable[[], None], seconds: float = WATCH_INTERVAL, since: float = 0.0) -> Callable[[], None]:
    """What may be called all the time, and looks once in so many seconds; ``since``, by the monotonic clock, it has."""

    def watch() -> None:
        nonlocal since
        if time.monotonic() - since > seconds:
            since = time.monotonic()
            look()

    return watch


def formats(images: Sequence[Node]) -> list[str]:
    """The options that declare the formats of one image, or of two."""
    return [word for flag, image in zip(("-f", "-F"), images) for word in (flag, image.format)]


def answered(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise HostError("qemu-img answered something that is no JSON") from error
    if not isinstance(answer, dict):
        raise HostError("qemu-img answered something that is no object")
    return answer


def fail(subcommand: str, answer: tools.Finished) -> Any:
    raise HostError(f"qemu-img {subcommand} failed, {answer.words()}")


def text(argument: tools.Argument) -> str:
    return display(argument) if isinstance(argument, bytes) else argument


def version(io: AgentIO) -> tuple[int, int]:
    """Major and minor version of this host's qemu-img; asked once for each.

    Raises:
        RefusedError: ``tool_missing``.
        HostError: it does not say.
    """
    program = _program()
    if program not in _known_versions:
        done = tools.run(["qemu-img", "--version"], io)
        found = _VERSION.search(done.stdout)
        if done.exit_code or found is None:
            raise HostError(f"qemu-img does not say its version: {done.words()}")
        _known_versions[program] = int(found.group(1)), int(found.group(2))
    return _known_versions[program]


def supports_zstd(io: AgentIO) -> bool:
    """Whether this host's qemu-img can compress with zstd; asked once."""
    program = _program()
    if program not in _known_zstd:
        _known_zstd[program] = version(io) >= (5, 1) and tools.compresses_by_zstd(tools.find("qemu-img"))
    return _known_zstd[program]


def _program() -> tuple[int, int, int]:
    status = os.stat(tools.find("qemu-img"))
    return status.st_dev, status.st_ino, status.st_mtime_ns
