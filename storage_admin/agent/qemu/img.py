"""qemu-img: one function per subcommand; ``compare`` in parts at the same time where that pays.

Names of files are chosen by strangers and qemu gives meaning to some (``nbd:x``, ``a,b``), and a path may lead
elsewhere a moment later. So images are given as descriptors that were opened and checked before, each with its
format and its base spelled out: qemu opens exactly these files, and none that a header names.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.folders.pools import held
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import HostError, RefusedError, display
from storage_admin.agent.qemu import node
from storage_admin.agent.qemu.keys import Keys, deriving
from storage_admin.agent.qemu.node import SLOW_QUERY, DeviceNode, Effort, Node, answered, fail, formats, text


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
        keys: that the ``options`` name.
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
    keys: Keys | None = None


def convert(io: AgentIO, source: Node, target: Conversion, effort: Effort) -> tools.Finished:
    """Copy an image's data into a new image.

    With a ``backing``, only the source's own layer is copied: what its immediate base holds is not.

    Returns:
        How it ended. Exit code 0 does not mean that the data is on the disk, nor that it is right: sync and compare.

    Raises:
        HostError: the target is not the empty file that it should be.
    """
    with held(_open_new(target)) as new:
        image = Node(new, target.format, target.shown, source.backing if target.backing is not None else None)
        if target.backing is not None:
            # By itself convert would open the base by the name that the header is to have, wherever that leads by now.
            made = _create(io, image, target, Effort())
            if made.exit_code:
                return made
        return _convert(io, source, image, target, effort)


def create(io: AgentIO, target: Conversion, effort: Effort) -> tools.Finished:
    """Make a new image of ``virtual_size`` without any data of its own; of the rest of a conversion nothing counts.

    Returns, raises:
        As :func:`convert`.
    """
    with held(_open_new(target)) as new:
        return _create(io, Node(new, target.format, target.shown), target, effort)


def _open_new(target: Conversion) -> int:
    """The target by descriptor: somebody may exchange its name for one that leads out of the pool."""
    fd = os.open(target.name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=target.folder)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size or status.st_nlink != 1:
        os.close(fd)
        raise HostError("the temporary file was replaced by someone else")
    return fd


def _create(io: AgentIO, image: Node, target: Conversion, effort: Effort) -> tools.Finished:
    asked: list[tools.Argument] = ["create", "-q", "-f", target.format]
    options = _options(io, target)
    asked += ["-o", options] if options else []
    asked += ["-u", "-b", target.backing[0], "-F", target.backing[1]] if target.backing is not None else []
    size = str(target.virtual_size)

    def run() -> tools.Finished:
        with (target.keys or Keys()).handed() as handed:
            return tools.run(
                ["qemu-img", asked[0], *handed.objects, *asked[1:], image.path_by_descriptor(), size],
                io,
                limits=SLOW_QUERY,
                idle_io=effort.idle_io,
                files=handed.with_files(Files(written=[image.fd])),
                pass_fds=handed.pipes,
                watch=effort.watch,
                shown=["qemu-img", *map(text, asked), display(target.shown), size],
            )

    return deriving(run)


def _options(io: AgentIO, target: Conversion) -> str:
    """Creation options with those of the filesystem: on XFS, qemu-img rounds what a file takes up to 1 MiB."""
    mount = Mounts.of_this_machine().of_descriptor(target.folder)
    if mount is None or mount.filesystem != "xfs" or node.version(io) < (5, 2):
        return target.options
    return ",".join(filter(None, [target.options, "extent_size_hint=0"]))


def _convert(io: AgentIO, source: Node, image: Node, target: Conversion, effort: Effort) -> tools.Finished:
    asked: list[tools.Argument] = ["convert", "-U", "-p", "-m", "8", "-W"]
    asked += ["-c"] if target.compress else []
    asked += ["--bitmaps"] if target.bitmaps else []
    asked += ["-r", str(target.bandwidth)] if target.bandwidth else []
    asked += ["-O", target.format]
    if target.backing is not None:
        asked += ["-n", "-B", target.backing[0]]  # its format is in the header; QEMU before 6.1 has no -F here
    elif options := _options(io, target):
        asked += ["-o", options]
    written = image.path_by_descriptor() if target.backing is None else image.written()
    shown = [*map(text, asked), *formats([source]), display(source.path), display(target.shown)]
    files = image.files(written=True, beside=[source])
    return _run(io, [*asked, source.argument(), written], shown, files, effort)


def fill(
    io: AgentIO, source: Node, target: Node, effort: Effort, *, zeroed: bool, bandwidth: int | None = None
) -> tools.Finished:
    """Write all that a guest reads of an image into another one that exists, or into a device; returns as `convert`.

    Args:
        target: at least as large; a device not through memory, from where it would be written to later, and unseen.
        zeroed: whether it reads as zeros, which then are left out; packed is what its format can only hold so.
        bandwidth: bytes a second, at most.
    """
    asked: list[tools.Argument] = ["convert", "-U", "-p", "-m", "8", "-n"]
    asked += ["--target-is-zero"] if zeroed else []
    asked += ["-c"] if target.format == "vmdk" else ["-W"]
    asked += ["-r", str(bandwidth)] if bandwidth else []
    asked += ["-t", "none"] if isinstance(target, DeviceNode) else []
    asked += ["-O", target.format]
    shown = [*map(text, asked), *formats([source]), display(source.path), display(target.path)]
    files = target.files(written=True, beside=[source])
    return _run(io, [*asked, source.argument(), target.written()], shown, files, effort)


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


__all__ = [
    "CHECKED", "REPAIRED", "CheckReport", "Conversion", "Effort", "Node", "change", "check", "commit", "compare",
    "convert", "create", "fill", "info", "measure", "name_base", "rebase", "refuse_damaged",
]  # fmt: skip

#: Formats that ``qemu-img check`` knows, and those that it repairs.
CHECKED = frozenset({"qcow2", "qed", "vdi", "vhdx", "vmdk"})
REPAIRED = frozenset({"qcow2", "qed", "vhdx"})


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


def info(io: AgentIO, image: Node) -> dict[str, Any]:
    """What ``qemu-img info`` says about one image, without its chain.

    Raises:
        HostError: it fails.
    """
    answer = _query(io, ["info", "-U"], image)
    return answered(answer.stdout) if answer.exit_code == 0 else fail("info", answer)


def measure(io: AgentIO, image: Node, options: str) -> int:
    """Bytes that a new, uncompressed qcow2 image with this image's data would need at most.

    Args:
        io: the controller.
        image: without a base, only its own layer is counted.
        options: creation options, as for ``-o``.

    Raises:
        HostError: it fails.
    """
    answer = _query(io, ["measure", "-U", "-O", "qcow2", "-o", options], image)
    required = answered(answer.stdout).get("required") if answer.exit_code == 0 else None
    if not isinstance(required, int):
        return int(fail("measure", answer))
    return required


def check(io: AgentIO, image: Node, effort: Effort) -> CheckReport:
    """Look through an image's metadata, changing nothing.

    Raises:
        HostError: it could not be looked through at all.
    """
    answer = _query(io, ["check", "-U"], image, effort)
    # 2: corruptions, 3: leaks only; 1 also stands for errors during the check, which the report counts.
    if answer.exit_code in {0, 1, 2, 3} and answer.stdout.lstrip().startswith(b"{"):
        report = answered(answer.stdout)
        counts = [report.get(key, 0) for key in ("corruptions", "leaks", "check-errors")]
        if all(isinstance(count, int) for count in counts):
            return CheckReport(*counts)
    return CheckReport(*fail("check", answer))


def refuse_damaged(io: AgentIO, image: Node, shown: str, effort: Effort) -> None:
    """Refuse (``dirty_or_corrupt``) an image that a check finds errors in; one without a check is taken as it is."""
    if image.format in CHECKED and not (report := check(io, image, effort)).sound:
        raise RefusedError(
            "dirty_or_corrupt",
            f"{shown} has {report.corruptions} corruptions and {report.errors} errors; check and repair it",
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
    files = image.files(written=True, beside=[] if base is None else [base])
    return _run(io, [*asked, image.written()], [*shown, display(image.path)], files, effort)


def name_base(io: AgentIO, image: Node, name: bytes, base_format: str) -> tools.Finished:
    """Write another base's name and format into an image's header; no data is looked at."""
    alone = Node(image.fd, image.format, image.path)
    return change(io, alone, ["rebase", "-u", "-b", name, "-F", base_format], Effort())


def commit(io: AgentIO, image: Node, effort: Effort) -> tools.Finished:
    """Have an image's data written into its base, which becomes as large as it; the image itself keeps all.

    Args:
        image: with its base, which is written to as well.
    """
    # qemu opens the base anew to write to it, which it does not where something below was opened by `force-share`.
    files = image.files(written=True, written_below=True)
    asked = ["commit", "-d", "-p"]
    shown = [*asked, *formats([image]), display(image.path)]
    return _run(io, [*asked, image.argument()], shown, files, effort)


def change(
    io: AgentIO, image: Node, asked: Sequence[tools.Argument], effort: Effort, behind: Sequence[str] = ()
) -> tools.Finished:
    """Have a subcommand change an image of our own; what that stands on is only read.

    Args:
        asked: the subcommand and its options.
        behind: what stands behind the image's name.
    """
    shown = [*map(text, asked), "-f", image.format, display(image.path), *behind]
    return _run(io, [*asked, image.written(), *behind], shown, image.files(written=True), effort, SLOW_QUERY)


def _query(io: AgentIO, asked: Sequence[str], image: Node, effort: Effort | None = None) -> tools.Finished:
    asked = [*asked, "--output=json"]
    shown = [*asked, *formats([image]), display(image.path)]
    return _run(io, [*asked, image.argument()], shown, image.files(), effort or Effort(), SLOW_QUERY)


def _run(
    io: AgentIO,
    argv: Sequence[tools.Argument],
    shown: Sequence[str],
    files: Files,
    effort: Effort,
    limits: tools.Limits | None = None,
) -> tools.Finished:
    """Args: ``shown`` is as an admin would type it: what is run names descriptors, which mean nothing to others."""
    return tools.run(
        ["qemu-img", *argv],
        io,
        limits=limits,
        idle_io=effort.idle_io,
        files=files,
        on_output=effort.on_output(),
        watch=effort.watch,
        shown=["qemu-img", *shown],
    )
