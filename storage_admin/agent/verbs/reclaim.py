"""Win back the space that an image does not need: a compressed copy takes its place, by protocol P."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent import attributes, formats, links, qemu_img, space
from storage_admin.agent.arguments import Arguments
from storage_admin.agent.formats.facts import Facts, UnreadableError
from storage_admin.agent.journal import file_name
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.links import Chain, Planned
from storage_admin.agent.pools import display, open_parent
from storage_admin.agent.protocol import INVALID, HostError, RefusedError, Request
from storage_admin.agent.swap import Replacement, Swapped, clear_earlier

#: Seconds between two looks at the image and at the free space while a tool works.
WATCH_INTERVAL = 0.5
LONGEST_UNDO_HOURS = 24 * 366

_LINK = ("path_b64", "pool_path_b64", "format", "dev", "inode", "file_size", "mtime_ns", "ctime_ns")
_KNOWN = frozenset(
    (
        *_LINK,
        *("virtual_size", "chain", "children_known", "method", "compression", "undo_hours", "bandwidth_bytes_sec"),
        *("idle_io", "reserve", "reserved_elsewhere_bytes", "predicted_high"),
    )
)


@dataclass(frozen=True)
class Wish:
    """What is asked for. Sizes are in bytes; ``predicted_high`` is the most that the result may need, if known."""

    image: Planned
    ancestors: list[Planned]
    virtual_size: int
    children_known: bool
    compression: str
    undo_hours: float
    bandwidth: int | None
    idle_io: bool
    reserve: space.Reserve
    reserved_elsewhere: int
    predicted_high: int | None

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Wish:
        """The arguments of the verb ``reclaim``; raises RefusedError(``invalid``)."""
        args = Arguments(fields, _KNOWN)
        if args.choice("method", frozenset({"compress"}), "compress") != "compress":
            raise RefusedError(INVALID, "this agent reclaims by compress only")
        reserve = Arguments(args.get("reserve", dict, {}), frozenset({"percent", "bytes"}))
        wish = cls(
            image=Planned.parse(fields),
            ancestors=[Planned.parse(link) for link in args.get("chain", list, [])],
            virtual_size=args.take("virtual_size", int),
            children_known=args.get("children_known", bool, False),
            compression=args.choice("compression", frozenset({"auto", "zlib", "zstd"}), "auto"),
            undo_hours=args.get("undo_hours", float, 24.0),
            bandwidth=args.size("bandwidth_bytes_sec"),
            idle_io=args.get("idle_io", bool, True),
            reserve=space.Reserve(reserve.get("percent", float, 5.0), reserve.get("bytes", int, 2 << 30)),
            reserved_elsewhere=args.get("reserved_elsewhere_bytes", int, 0),
            predicted_high=args.size("predicted_high"),
        )
        if not 0 <= wish.undo_hours <= LONGEST_UNDO_HOURS:
            raise RefusedError(INVALID, f"undo_hours is 0 to {LONGEST_UNDO_HOURS}")
        if wish.reserved_elsewhere < 0 or wish.reserve.minimum_bytes < 0 or not 0 <= wish.reserve.percent <= 100:
            raise RefusedError(INVALID, "a reserve is not negative, and at most 100 percent")
        return wish


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Compress an image into a copy, verify it, and put it in the image's place.

    Args:
        request: its ``args`` are those of :meth:`Wish.parse`.
        io: the controller.

    Returns:
        Allocated sizes before and after, what the undo copy holds, what was freed, the new image's identity.

    Raises:
        RefusedError, HostError, StoppedError: the image is as it was.
    """
    wish = Wish.parse(request.args)
    try:
        chain = Chain(wish.image, wish.ancestors)
        try:
            folder, name = open_parent(wish.image.pool_path, wish.image.path)
            try:
                return _Work(request, io, wish, chain, folder, name).run()
            finally:
                os.close(folder)
        finally:
            chain.close()
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise RefusedError("not_enough_space", "the disk is full; free some space and try again") from error
        if error.errno == errno.EPERM:
            raise RefusedError("immutable", f"the host does not allow it: {error.strerror}") from error
        raise HostError(f"the host failed: {error.strerror or error}") from error


@dataclass
class _Work:
    """One run of the verb, step by step."""

    request: Request
    io: AgentIO
    wish: Wish
    chain: Chain
    folder: int
    name: bytes
    started: float = field(default_factory=time.monotonic)
    _looked: float = 0.0

    def run(self) -> dict[str, Any]:
        """All steps of protocol P."""
        self.io.progress("checking", 0, None, "looking at the image and who uses it")
        clear_earlier(self.folder, self.request)
        self._refuse()
        compression = self._compression()
        options = creation_options(self.chain.image.facts, compression)
        self._require_space(options)
        before = os.fstat(self.chain.image.fd).st_blocks * 512
        with Replacement(
            self.folder, self.name, self.chain.image.fd, self.request, self.wish.undo_hours
        ) as replacement:
            self._copy(replacement, options)
            self._verify(replacement, compression)
            self.io.progress("attributes", 0, None, "owner, mode and attributes")
            attributes.copy(self.chain.image.fd, replacement.new)
            os.fsync(replacement.new)
            # It was written through the host's page cache, which belongs to the guests.
            os.posix_fadvise(replacement.new, 0, 0, os.POSIX_FADV_DONTNEED)
            after = os.fstat(replacement.new).st_blocks * 512
            if after >= before:
                self.io.log(f"the copy needs {after} bytes, the image {before}: it is left as it is")
                return self._result(before, before, compression, None)
            self.io.progress("swapping", 0, None, "waiting for the last word")
            swapped = replacement.swap(self.io, lambda: self._recheck(replacement))
        return self._result(before, swapped.new.allocated_size, compression, swapped)

    def _refuse(self) -> None:
        image, facts = self.chain.image, self.chain.image.facts
        links.refuse_unsafe(self.chain, children_known=self.wish.children_known)
        if facts.format != "qcow2":
            raise RefusedError(
                "unsupported_subformat",
                f"{image.shown} is {facts.format}, which cannot hold compressed data; convert it to qcow2, or reclaim "
                "it in place where it holds zeros",
            )
        if facts.virtual_size != self.wish.virtual_size:
            raise RefusedError("stale_plan", f"{image.shown} was resized since it was scanned; scan the host again")
        self.chain.refuse_in_use()
        report = qemu_img.check(self.io, self.chain.node(), self._effort("checking", 0))
        if not report.sound:
            raise RefusedError(
                "dirty_or_corrupt",
                f"{image.shown} has {report.corruptions} corruptions and {report.errors} errors; check and repair it",
            )

    def _compression(self) -> str:
        asked, compat = self.wish.compression, self.chain.image.facts.compat
        if asked == "zlib" or (asked == "auto" and compat == "0.10"):
            return "zlib"
        if compat == "0.10":
            raise RefusedError(INVALID, "zstd needs an image of compat 1.1; choose zlib or auto")
        if qemu_img.supports_zstd(self.io):
            return "zstd"
        if asked == "zstd":
            raise RefusedError("tool_missing", "this host's qemu-img cannot compress with zstd; choose zlib or auto")
        return "zlib"

    def _require_space(self, options: str) -> None:
        needed = self.wish.predicted_high
        if needed is None:
            needed = qemu_img.measure(self.io, self.chain.node(alone=True), options)
        space.require(self.folder, needed, self.wish.reserve, self.wish.reserved_elsewhere)

    def _copy(self, replacement: Replacement, options: str) -> None:
        facts, base = self.chain.image.facts, self.chain.ancestors[:1]
        target = qemu_img.Conversion(
            folder=self.folder,
            name=replacement.new_name,
            shown=self._shown(replacement),
            options=options,
            compress=True,
            backing=(facts.backing_file, base[0].planned.format) if facts.backing_file is not None else None,
            bitmaps=bool(facts.bitmaps),
            bandwidth=self.wish.bandwidth,
        )
        done = qemu_img.convert(self.io, self.chain.node(), target, self._effort("copying", facts.virtual_size))
        if done.exit_code:
            # The true reason is often one of these: a guest that has started, a disk that is full.
            self.chain.refuse_changes()
            space.watch(self.folder, self.wish.reserve)
            if b"No space left" in done.stderr:
                raise RefusedError("not_enough_space", "the disk was full; free some space and try again")
            raise HostError(f"qemu-img convert failed, {done.words()}")

    def _shown(self, replacement: Replacement) -> bytes:
        """The copy's path, for the log."""
        return os.path.join(os.path.dirname(self.wish.image.path), replacement.new_name)

    def _verify(self, replacement: Replacement, compression: str) -> None:
        """The copy's header says the same, its metadata is sound, and a guest reads the same bytes from it."""
        os.fsync(replacement.new)
        try:
            size = os.fstat(replacement.new).st_size
            made = formats.read(replacement.new, size, replacement.new_name, "qcow2")
        except UnreadableError as error:
            raise HostError(f"the copy cannot be read: {error}") from error
        base = self.chain.ancestors[0].planned.format if self.chain.ancestors else None
        if different := differences(self.chain.image.facts, made, compression, base):
            raise HostError("the copy differs from the image in " + ", ".join(different))
        copy = self.chain.node(top=replacement.new, top_path=self._shown(replacement))
        virtual_size = self.chain.image.facts.virtual_size
        report = qemu_img.check(self.io, copy, self._effort("verifying", 0))
        if not report.sound or report.leaks:
            raise HostError(f"the copy has {report.corruptions} corruptions and {report.leaks} leaks")
        effort = self._effort("verifying", virtual_size)
        if not qemu_img.compare(self.io, self.chain.node(), copy, virtual_size, effort):
            self.chain.refuse_stale()
            raise HostError("the copy's content differs from the image's")

    def _recheck(self, replacement: Replacement) -> None:
        """Everything that was true in the beginning must be true in the moment of the swap."""
        self.chain.refuse_in_use()
        self.chain.refuse_stale()
        if difference := attributes.differences(self.chain.image.fd, replacement.new):
            raise RefusedError("stale_plan", f"the image's {difference} changed while the work went on; try again")

    def _effort(self, stage: str, virtual_size: int) -> qemu_img.Effort:
        def progress(share: float) -> None:
            self.io.progress(stage, int(virtual_size * share), virtual_size)

        return qemu_img.Effort(self.wish.idle_io, self._watch, progress if virtual_size else None)

    def _watch(self) -> None:
        """A guest that starts wins, and so do guests that need the last of the space."""
        if time.monotonic() - self._looked > WATCH_INTERVAL:
            self._looked = time.monotonic()
            self.chain.refuse_changes()
            space.watch(self.folder, self.wish.reserve)

    def _result(self, before: int, after: int, compression: str, swapped: Swapped | None) -> dict[str, Any]:
        held = swapped.undo_bytes if swapped else 0
        stamp = swapped.new if swapped else self.chain.image.stamp
        undo = {"path": display(file_name(self.request.job, "orig")), "bytes": held}
        return {
            "before_bytes": before,
            "after_bytes": after,
            "held_bytes": held,
            "freed_bytes": 0 if held else before - after,
            "compression": compression,
            "dev": stamp.dev,
            "inode": stamp.inode,
            "swapped": swapped is not None,
            "seconds": round(time.monotonic() - self.started, 3),
            "undo": undo if held else None,
        }


def creation_options(facts: Facts, compression: str) -> str:
    """The options that a qcow2 image was created with, for ``-o`` of its compressed copy.

    Args:
        facts: the image's header.
        compression: ``zlib`` or ``zstd``.
    """
    options = [f"cluster_size={facts.cluster_size}", f"compat={facts.compat}"]
    if facts.compat != "0.10":
        options += [f"refcount_bits={facts.refcount_bits}", f"lazy_refcounts={'on' if facts.lazy_refcounts else 'off'}"]
        # Older versions of qemu-img do not know these.
        options += ["extended_l2=on"] if facts.extended_l2 else []
        options += ["compression_type=zstd"] if compression == "zstd" else []
    return ",".join(options)


def differences(old: Facts, new: Facts, compression: str, base_format: str | None) -> list[str]:
    """In what two headers differ that a compressed copy should have left alone, by name.

    Args:
        old: of the image.
        new: of the copy.
        compression: that the copy should have.
        base_format: of the base, which the copy declares also where the image does not.
    """
    same = ["virtual_size", "cluster_size", "compat", "refcount_bits", "extended_l2", "backing_file", "encrypted"]
    different = [name for name in same if getattr(old, name) != getattr(new, name)]
    if bool(old.lazy_refcounts) != bool(new.lazy_refcounts):
        different.append("lazy_refcounts")
    if new.backing_format != (old.backing_format or base_format):
        different.append("backing_format")
    if (new.compression or "zlib") != compression:
        different.append("compression")
    if sorted(old.bitmaps) != sorted(new.bitmaps):
        different.append("bitmaps")
    if new.snapshots or new.data_file is not None or new.dirty or new.corrupt:
        different.append("state")
    return different
