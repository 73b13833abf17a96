"""qemu-img: one function per subcommand.

Names of files are chosen by strangers and qemu gives meaning to some (``nbd:x``, ``a,b``), and a path may lead
elsewhere a moment later. So images are given as descriptors that were opened and checked before, each with its
format and its base spelled out: qemu opens exactly these files, and none that a header names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from storage_admin.agent import tools
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.pools import display
from storage_admin.agent.protocol import HostError

_PROGRESS = re.compile(rb"\(\s*([0-9]+(?:\.[0-9]+)?)/100%\)")
_VERSION = re.compile(rb"qemu-img version ([0-9]+)\.([0-9]+)")
#: Formats that ``qemu-img check`` knows, and those that it repairs.
CHECKED = frozenset({"qcow2", "qed", "vdi", "vhdx", "vmdk"})
REPAIRED = frozenset({"qcow2", "qed", "vhdx"})
_MIB = 1 << 20
#: Bytes that pay for the start of a process which compares them, and into how many parts an image is cut at most.
_WORTH_A_PART = 128 * _MIB
_MOST_PARTS = 16
_MOST_AT_ONCE = 4
#: Of a tool that may be slow on a large image and must not be big.
_SLOW_QUERY = tools.Limits(cpu_seconds=None, wall_seconds=None)


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

    def options(self) -> dict[str, Any]:
        """The block device options, as ``blockdev-add`` takes them."""
        opened: dict[str, Any] = {
            "driver": self.format,
            "file": {"driver": "file", "filename": f"/proc/self/fd/{self.fd}"},
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

    def fds(self) -> list[int]:
        """All descriptors that the tool needs for it."""
        return [self.fd, *(self.backing.fds() if self.backing is not None else [])]


def _json(options: dict[str, Any]) -> str:
    return "json:" + json.dumps(options, separators=(",", ":"))


@dataclass(frozen=True)
class Effort:
    """How a long subcommand runs: at idle priority or not, looked after by ``watch``, telling a share from 0 to 1."""

    idle_io: bool = False
    watch: Callable[[], None] | None = None
    progress: Callable[[float], None] | None = None

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


@dataclass(frozen=True)
class CheckReport:
    """What ``check`` found: numbers of clusters, and of errors that kept it from looking."""

    corruptions: int
    leaks: int
    errors: int

    @property
    def sound(self) -> bool:
        """Whether every cluster can be trusted; a leak only wastes space."""
        return not self.corruptions and not self.errors


def version(io: AgentIO) -> tuple[int, int]:
    """Major and minor version of this host's qemu-img.

    Raises:
        RefusedError: ``tool_missing``.
        HostError: it does not say.
    """
    done = tools.run(["qemu-img", "--version"], io)
    found = _VERSION.search(done.stdout)
    if done.exit_code or found is None:
        raise HostError(f"qemu-img does not say its version: {done.words()}")
    return int(found.group(1)), int(found.group(2))


def supports_zstd(io: AgentIO) -> bool:
    """Whether this host's qemu-img can compress with zstd: since 5.1, where it was built with it."""
    if version(io) < (5, 1):
        return False
    asked = ["qemu-img", "measure", "-O", "qcow2", "-o", "compression_type=zstd", "--size", "1M"]
    return tools.run(asked, io).exit_code == 0


def info(io: AgentIO, image: Node) -> dict[str, Any]:
    """What ``qemu-img info`` says about one image, without its chain.

    Raises:
        HostError: it fails.
    """
    answer = _query(io, ["info", "-U"], [image], _SLOW_QUERY)
    return _object(answer.stdout) if answer.exit_code == 0 else _fail("info", answer)


def measure(io: AgentIO, image: Node, options: str) -> int:
    """Bytes that a new, uncompressed qcow2 image with this image's data would need at most.

    Args:
        io: the controller.
        image: without a base, only its own layer is counted.
        options: creation options, as for ``-o``.

    Raises:
        HostError: it fails.
    """
    answer = _query(io, ["measure", "-U", "-O", "qcow2", "-o", options], [image], _SLOW_QUERY)
    required = _object(answer.stdout).get("required") if answer.exit_code == 0 else None
    if not isinstance(required, int):
        return int(_fail("measure", answer))
    return required


def check(io: AgentIO, image: Node, effort: Effort) -> CheckReport:
    """Look through an image's metadata, changing nothing.

    Raises:
        HostError: it could not be looked through at all.
    """
    answer = _query(io, ["check", "-U"], [image], _SLOW_QUERY, effort)
    # 2: corruptions, 3: leaks only; 1 also stands for errors during the check, which the report counts.
    if answer.exit_code in {0, 1, 2, 3} and answer.stdout.lstrip().startswith(b"{"):
        report = _object(answer.stdout)
        counts = [report.get(key, 0) for key in ("corruptions", "leaks", "check-errors")]
        if all(isinstance(count, int) for count in counts):
            return CheckReport(*counts)
    return CheckReport(*_fail("check", answer))


def compare(io: AgentIO, first: Node, second: Node, virtual_size: int, effort: Effort) -> bool:
    """Whether a guest reads the same bytes from both images.

    Args:
        io: the controller.
        first, second: both of ``virtual_size`` bytes, a multiple of 512.

    Raises:
        HostError: one of them could not be read.
    """
    # Seen through another node, what an overlay does not hold would count as zeros and not as what its base holds.
    alone = first.backing is None and second.backing is None
    parts = _parts(virtual_size) if alone else [(0, virtual_size)]
    asked = [[image.part(*part) if alone else image.argument() for image in (first, second)] for part in parts]
    answers = tools.run_all(
        [["qemu-img", "compare", "-U", "-p", *images] for images in asked],
        io,
        at_once=_at_once(),
        limits=None,
        idle_io=effort.idle_io,
        pass_fds=sorted({*first.fds(), *second.fds()}),
        on_output=effort.on_outputs([size for _, size in parts]),
        watch=effort.watch,
        shown=_shown_compare([first, second], len(parts)),
    )
    for answer in answers:
        if answer.exit_code not in {0, 1}:
            _fail("compare", answer)
    return all(answer.exit_code == 0 for answer in answers)


def _at_once() -> int:
    """How many comparisons run at the same time: the processors belong to the guests, and the disk is one."""
    return min(_MOST_AT_ONCE, os.cpu_count() or 1)


def _parts(virtual_size: int) -> list[tuple[int, int]]:
    """Offset and length, in bytes, of the parts that are compared by themselves.

    They are more than run at the same time: data stands together at one end of most disks, and who is done with an
    empty part takes the next one.
    """
    count = min(_MOST_PARTS, virtual_size // _WORTH_A_PART) if _at_once() > 1 else 1
    if count <= 1:
        return [(0, virtual_size)]
    size = -(-virtual_size // count) + _MIB - 1 & -_MIB
    return [(start, min(size, virtual_size - start)) for start in range(0, virtual_size, size)]


def _shown_compare(images: Sequence[Node], parts: int) -> list[str]:
    shown = ["qemu-img", "compare", "-U", *_formats(images), *(display(image.path) for image in images)]
    return shown if parts == 1 else [*shown, f"(in {parts} parts)"]


@dataclass(frozen=True)
class Conversion:
    """How ``convert`` writes its target.

    Args:
        folder: descriptor of the folder that the target is in; a relative backing file is seen from there.
        name: of the target, which exists, is empty, and is of this program's own making.
        shown: the target's path for the log.
        format: of the target.
        options: creation options, as for ``-o``; may be empty.
        compress: whether clusters are compressed.
        backing: the backing file exactly as the header is to say it, and its format.
        bitmaps: whether persistent bitmaps are taken over.
        bandwidth: bytes a second, at most.
    """

    folder: int
    name: bytes
    shown: bytes
    format: str
    options: str
    compress: bool
    backing: tuple[bytes, str] | None = None
    bitmaps: bool = False
    bandwidth: int | None = None


def convert(io: AgentIO, source: Node, target: Conversion, effort: Effort) -> tools.Finished:
    """Copy an image's data into a new image.

    With a ``backing``, only the source's own layer is copied: what its immediate base holds is not.

    Returns:
        How it ended. Exit code 0 does not mean that the data is on the disk, nor that it is right: sync and compare.
    """
    asked: list[tools.Argument] = [
        "convert",
        "-U",
        "-p",
        "-m",
        "8",
        "-W",
    ]
    asked += ["-c"] if target.compress else []
    asked += ["--bitmaps"] if target.bitmaps else []
    asked += ["-r", str(target.bandwidth)] if target.bandwidth else []
    asked += ["-O", target.format]
    asked += ["-o", target.options] if target.options else []
    if target.backing is not None:
        asked += ["-B", target.backing[0], "-F", target.backing[1]]
    path = b"/proc/self/fd/%d/%s" % (target.folder, target.name)
    shown = [*map(_text, asked), *_formats([source]), display(source.path), display(target.shown)]
    return tools.run(
        ["qemu-img", *asked, source.argument(), path],
        io,
        limits=None,
        idle_io=effort.idle_io,
        pass_fds=[target.folder, *source.fds()],
        on_output=effort.on_output(),
        watch=effort.watch,
        shown=["qemu-img", *shown],
    )


def rebase(io: AgentIO, image: Node, base: Node | None, effort: Effort) -> tools.Finished:
    """Have an image hold all that differs between its chain and a lower base, on which it stands afterwards.

    The header then names the base by a descriptor, which :func:`name_base` puts right.

    Args:
        io: the controller.
        image: a copy of our own, to be written to, on its present chain.
        base: that becomes the immediate base; ``None`` for none.
    """
    declared = ["-F", base.format] if base is not None else []
    asked = ["rebase", "-p", "-b", "" if base is None else base.shared(), *declared]
    shown = ["rebase", "-p", "-f", image.format, "-b", "" if base is None else display(base.path), *declared]
    return tools.run(
        ["qemu-img", *asked, image.written()],
        io,
        limits=None,
        idle_io=effort.idle_io,
        pass_fds=sorted({*image.fds(), *([] if base is None else base.fds())}),
        on_output=effort.on_output(),
        watch=effort.watch,
        shown=["qemu-img", *shown, display(image.path)],
    )


def name_base(io: AgentIO, image: Node, name: bytes, base_format: str) -> tools.Finished:
    """Write another base's name and format into an image's header; no data is looked at."""
    alone = Node(image.fd, image.format, image.path)
    asked: list[tools.Argument] = ["rebase", "-u", "-b", name, "-F", base_format]
    return tools.run(
        ["qemu-img", *asked, alone.argument()],
        io,
        limits=_SLOW_QUERY,
        pass_fds=alone.fds(),
        shown=["qemu-img", *map(_text, asked[:2]), "-f", image.format, *map(_text, asked[2:]), display(image.path)],
    )


def repair(io: AgentIO, image: Node, level: str, effort: Effort) -> tools.Finished:
    """``check -r`` on an image of our own, opened without its base.

    Args:
        level: ``leaks`` or ``all``.

    Returns:
        How it ended: 0 clean, 3 with leaks that remain.
    """
    asked = ["check", "-r", level]
    return tools.run(
        ["qemu-img", *asked, image.written()],
        io,
        limits=_SLOW_QUERY,
        idle_io=effort.idle_io,
        pass_fds=image.fds(),
        watch=effort.watch,
        shown=["qemu-img", *asked, "-f", image.format, display(image.path)],
    )


def _query(
    io: AgentIO, asked: Sequence[str], images: Sequence[Node], limits: tools.Limits, effort: Effort | None = None
) -> tools.Finished:
    return _run(io, [*asked, "--output=json"], images, limits, effort or Effort())


def _run(
    io: AgentIO, asked: Sequence[str], images: Sequence[Node], limits: tools.Limits | None, effort: Effort
) -> tools.Finished:
    return tools.run(
        ["qemu-img", *asked, *(image.argument() for image in images)],
        io,
        limits=limits,
        idle_io=effort.idle_io,
        pass_fds=sorted({fd for image in images for fd in image.fds()}),
        on_output=effort.on_output(),
        watch=effort.watch,
        # As an admin would type it: what is run names descriptors, which mean nothing to anybody else.
        shown=["qemu-img", *asked, *_formats(images), *(display(image.path) for image in images)],
    )


def _formats(images: Sequence[Node]) -> list[str]:
    """The options that declare the formats of one image, or of two."""
    return [word for flag, image in zip(("-f", "-F"), images) for word in (flag, image.format)]


def _object(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise HostError("qemu-img answered something that is no JSON") from error
    if not isinstance(answer, dict):
        raise HostError("qemu-img answered something that is no object")
    return answer


def _fail(subcommand: str, answer: tools.Finished) -> Any:
    raise HostError(f"qemu-img {subcommand} failed, {answer.words()}")


def _text(argument: tools.Argument) -> str:
    return display(argument) if isinstance(argument, bytes) else argument
