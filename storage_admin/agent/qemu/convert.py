"""``qemu-img convert``: an image's data into a new image.

``qemu-img compare``, in parts at the same time where that pays.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import HostError, display
from storage_admin.agent.qemu.node import SLOW_QUERY, Effort, Node, fail, formats, text


@dataclass(frozen=True)
class Conversion:
    """How ``convert`` writes its target.

    Args:
        folder: descriptor of the folder that the target is in.
        name: of the target, which exists, is empty, and is of this program's own making.
        shown: the target's path for the log.
        format: of the target.
        options: creation options, as for ``-o``; may be empty.
        compress: whether clusters are compressed.
        backing: the backing file exactly as the header is to say it, and its format; the source stands on it as well.
        virtual_size: of the target in bytes, which has to be said where there is a ``backing``.
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
    virtual_size: int = 0
    bitmaps: bool = False
    bandwidth: int | None = None


def convert(io: AgentIO, source: Node, target: Conversion, effort: Effort) -> tools.Finished:
    """Copy an image's data into a new image.

    With a ``backing``, only the source's own layer is copied: what its immediate base holds is not.

    Returns:
        How it ended. Exit code 0 does not mean that the data is on the disk, nor that it is right: sync and compare.

    Raises:
        HostError: the target is not the empty file that it should be.
    """
    new = _open_new(target)
    try:
        image = Node(new, target.format, target.shown, source.backing if target.backing is not None else None)
        if target.backing is not None:
            # By itself convert would open the base by the name that the header is to have, wherever that leads by now.
            made = _create(io, image, target, target.backing)
            if made.exit_code:
                return made
        return _convert(io, source, image, target, effort)
    finally:
        os.close(new)


def _open_new(target: Conversion) -> int:
    """The target by descriptor: somebody may exchange its name for one that leads out of the pool."""
    fd = os.open(target.name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=target.folder)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size or status.st_nlink != 1:
        os.close(fd)
        raise HostError("the temporary file was exchanged by somebody else")
    return fd


def _create(io: AgentIO, image: Node, target: Conversion, backing: tuple[bytes, str]) -> tools.Finished:
    asked: list[tools.Argument] = ["create", "-q", "-u", "-f", target.format]
    asked += ["-o", target.options] if target.options else []
    asked += ["-b", backing[0], "-F", backing[1]]
    size = str(target.virtual_size)
    return tools.run(
        ["qemu-img", *asked, image.path_by_descriptor(), size],
        io,
        limits=SLOW_QUERY,
        files=Files(written=[image.fd]),
        shown=["qemu-img", *map(text, asked), display(target.shown), size],
    )


def _convert(io: AgentIO, source: Node, image: Node, target: Conversion, effort: Effort) -> tools.Finished:
    asked: list[tools.Argument] = ["convert", "-U", "-p", "-m", "8", "-W"]
    asked += ["-c"] if target.compress else []
    asked += ["--bitmaps"] if target.bitmaps else []
    asked += ["-r", str(target.bandwidth)] if target.bandwidth else []
    asked += ["-O", target.format]
    if target.backing is not None:
        asked += ["-n", "-B", target.backing[0], "-F", target.backing[1]]
    elif target.options:
        asked += ["-o", target.options]
    written = image.path_by_descriptor() if target.backing is None else image.written()
    shown = [*map(text, asked), *formats([source]), display(source.path), display(target.shown)]
    return tools.run(
        ["qemu-img", *asked, source.argument(), written],
        io,
        limits=None,
        idle_io=effort.idle_io,
        files=image.files(written=True, beside=[source]),
        on_output=effort.on_output(),
        watch=effort.watch,
        shown=["qemu-img", *shown],
    )


_MIB = 1 << 20
#: Bytes that pay for the start of a process which compares them, and into how many parts an image is cut at most.
_WORTH_A_PART = 128 * _MIB
_MOST_PARTS = 16
_MOST_AT_ONCE = 4


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
    parts = parts_of(virtual_size) if alone else [(0, virtual_size)]
    asked = [[image.part(*part) if alone else image.argument() for image in (first, second)] for part in parts]
    answers = tools.run_all(
        [["qemu-img", "compare", "-U", "-p", *images] for images in asked],
        io,
        at_once=_at_once(),
        limits=None,
        idle_io=effort.idle_io,
        files=first.files(beside=[second]),
        on_output=effort.on_outputs([size for _, size in parts]),
        watch=effort.watch,
        shown=_shown_compare([first, second], len(parts)),
    )
    for answer in answers:
        if answer.exit_code not in {0, 1}:
            fail("compare", answer)
    return all(answer.exit_code == 0 for answer in answers)


def _at_once() -> int:
    """How many comparisons run at the same time: the processors belong to the guests, and the disk is one."""
    return min(_MOST_AT_ONCE, os.cpu_count() or 1)


def parts_of(virtual_size: int) -> list[tuple[int, int]]:
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
    shown = ["qemu-img", "compare", "-U", *formats(images), *(display(image.path) for image in images)]
    return shown if parts == 1 else [*shown, f"(in {parts} parts)"]
