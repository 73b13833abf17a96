"""Recipes that change a copy of the image's file: its chain is made shorter, its metadata repaired, or it grows.

qemu's own ``rebase``, ``check -r`` and ``resize`` change an image where it stands, and a kill in the middle leaves a
mixture. So they get a copy of the file, which takes the image's place by protocol P once it is verified.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from storage_admin.agent import formats
from storage_admin.agent.formats.facts import Facts, UnreadableError
from storage_admin.agent.measure.new_image import tables
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite import copying
from storage_admin.agent.rewrite.backing_name import leads_to
from storage_admin.agent.rewrite.base import Recipe, Rewrite
from storage_admin.agent.rewrite.copying import Copy, differences
from storage_admin.agent.swap.swap import NewFile

#: Longest backing file that a qcow2 header takes, in bytes (docs/interop/qcow2.txt).
_LONGEST_BACKING = 1023


def copy_image(work: Rewrite, replacement: NewFile) -> None:
    """Give the new file the image's bytes."""
    image = work.chain.image
    size = image.stamp.file_size

    def watch() -> None:
        work.io.check()
        work.watch()

    def progress(done: int) -> None:
        work.io.progress("copying", done, size)

    work.io.log(f"copying {image.shown} beside itself, holes and all")
    copying.copy_file(image.fd, replacement.new, work.wish.bandwidth, watch, progress)
    os.fsync(replacement.new)


def refuse_other_header(work: Rewrite, replacement: NewFile, base: bytes | None) -> None:
    """Read the copy's own header, right before qemu opens it to write: the image's may have changed since it was read.

    Args:
        base: that it has to name, and no other file.

    Raises:
        RefusedError: ``stale_plan``.
    """
    image = work.chain.image
    try:
        size = os.fstat(replacement.new).st_size
        facts = formats.read(replacement.new, size, os.path.basename(image.planned.path), image.planned.format)
    except UnreadableError as error:
        raise RefusedError("stale_plan", f"the header of {image.shown} changed while it was copied: {error}") from error
    if facts.data_file is not None or facts.extents or facts.backing_file != base:
        raise RefusedError(
            "stale_plan",
            f"the header of {image.shown} changed while it was copied, and names other files; scan "
            "the host and try again",
        )


class Rebase(Recipe):
    """The overlay takes over what the images between it and a lower one hold, and then stands on that one, or on none.

    Args:
        keep: number of the link in the chain that becomes the immediate base (the image is 0); ``None`` for none.
    """

    method = "rebase"
    must_shrink = False

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        #: The new base as the header is to name it.
        self.name = b""

    def refuse(self, work: Rewrite) -> None:
        """Refuse an image without a base, a chain that is that short already, and errors."""
        image, links = work.chain.image, work.chain.links
        if image.facts.format != "qcow2":
            raise RefusedError(
                "unsupported_subformat", f"{image.shown} is not a qcow2 image, so it has no chain to shorten"
            )
        if len(links) == 1:
            raise RefusedError(INVALID, f"{image.shown} has no backing file, so there is nothing to flatten")
        if self.keep is not None and not 2 <= self.keep < len(links):
            raise RefusedError(
                INVALID, f"that image is already the direct backing file of {image.shown}, or not in its chain"
            )
        self.name = self._choose_name(work)
        if len(self.name) > _LONGEST_BACKING or len(self._argument(work)) > _LONGEST_BACKING:
            raise RefusedError(
                "chain_too_deep",
                "the chain below the image that is kept is too deep for qemu-img; flatten that image first",
            )
        work.refuse_damaged()

    def needed(self, work: Rewrite) -> int:
        """The image as it is, and all data of the images in between, uncompressed."""
        if work.wish.predicted_high is not None:
            return work.wish.predicted_high
        between = work.chain.links[1 : self.keep]
        options = f"cluster_size={work.chain.image.facts.cluster_size}"
        layers = (Node(link.fd, link.planned.format, link.planned.path) for link in between)
        return work.chain.image.stamp.allocated_size + sum(img.measure(work.io, layer, options) for layer in layers)

    def base(self, work: Rewrite) -> Node | None:
        """The image that is kept below, with its own chain."""
        return None if self.keep is None else work.chain.below(self.keep)

    def _format(self, work: Rewrite) -> str | None:
        return None if self.keep is None else work.chain.links[self.keep].planned.format

    def _choose_name(self, work: Rewrite) -> bytes:
        """Relative where the name that the base has now is relative, and where such a name leads there."""
        if self.keep is None:
            return b""
        kept = work.chain.links[self.keep]
        for name in (self._as_above(work, self.keep), kept.planned.path):
            if leads_to(work.folder, name, kept.fd):
                return name
        raise RefusedError(
            "chain_broken", f"no path leads from {work.chain.image.shown} to {kept.shown}; scan the host and try again"
        )

    def _as_above(self, work: Rewrite, keep: int) -> bytes:
        """The base's name in the image above it, as it reads from here."""
        above = work.chain.links[keep - 1]
        written, folder = above.facts.backing_file or b"", os.path.dirname(above.planned.path)
        here = os.path.dirname(work.chain.image.planned.path)
        if written.startswith(b"/") or folder == here:
            return written
        name = os.path.relpath(os.path.join(folder, written), here)
        # qemu takes what stands before a colon for a protocol, unless a slash comes first.
        return b"./" + name if b":" in name.split(b"/", 1)[0] else name

    def _argument(self, work: Rewrite) -> bytes:
        base = self.base(work)
        return b"" if base is None else base.shared().encode()

    def make(self, work: Rewrite, replacement: NewFile) -> None:
        """Copy the file, have qemu-img pull the data, and write the base's name."""
        copy_image(work, replacement)
        size = work.chain.image.facts.virtual_size
        refuse_other_header(work, replacement, work.chain.image.facts.backing_file)
        copy = Node(replacement.new, "qcow2", work.shown(replacement), work.chain.below(1))
        done = img.rebase(work.io, copy, self.base(work), work.effort("flattening", size))
        if done.exit_code:
            raise work.failed("qemu-img rebase", done.words(), done.stderr)
        if self.keep is not None:
            refuse_other_header(work, replacement, self._argument(work))
            done = img.name_base(work.io, copy, self.name, self._format(work) or "")
            if done.exit_code:
                raise work.failed("qemu-img rebase -u", done.words(), done.stderr)

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        """All as it was but for the base."""
        return different_chain(work.chain.image.facts, made, self.name or None, self._format(work))


class Standalone(Copy):
    """A copy that holds all that the chain holds: ``qemu-img convert`` without a base."""

    method = "convert"
    must_shrink = False
    formats = frozenset({"qcow2"})

    def refuse(self, work: Rewrite) -> None:
        """Refuse an image without a base, and errors."""
        if len(work.chain.links) == 1:
            raise RefusedError(INVALID, f"{work.chain.image.shown} has no backing file, so there is nothing to flatten")
        super().refuse(work)

    def needed(self, work: Rewrite) -> int:
        """What the whole chain needs, uncompressed."""
        if work.wish.predicted_high is not None:
            return work.wish.predicted_high
        return img.measure(work.io, work.chain.node(), self.options(work))

    def base(self, work: Rewrite) -> Node | None:  # noqa: ARG002 (the same for all)
        """None."""
        return None

    def backing(self, work: Rewrite) -> tuple[bytes, str] | None:  # noqa: ARG002
        """None."""
        return None

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        """All as it was but for the base."""
        return different_chain(work.chain.image.facts, made, None, None)


def different_chain(old: Facts, made: Facts, base: bytes | None, base_format: str | None) -> list[str]:
    """In what a header differs that should have only another base now."""
    wrong = [name for name in differences(old, made, old.compression, base_format) if not name.startswith("backing")]
    if made.backing_file != base:
        wrong.append("backing_file")
    if made.backing_format != base_format:
        wrong.append("backing_format")
    return wrong


class Repair(Recipe):
    """``qemu-img check -r`` on a copy.

    Args:
        level: ``leaks`` gives unused clusters back; ``all`` also mends errors, and a guest may read other bytes then.
    """

    must_shrink = False
    #: It changes no data, so that what a copy by ``convert`` would lose stays.
    carries = frozenset({"dirty_or_corrupt", "has_internal_snapshots"})

    def __init__(self, level: str) -> None:
        self.level = level
        self.method = f"repair {level}"
        self.must_equal = level == "leaks"
        self.found: img.CheckReport | None = None

    @property
    def result(self) -> dict[str, Any]:
        """What the check found before the repair."""
        return {"found": None if self.found is None else vars(self.found)}

    def refuse(self, work: Rewrite) -> None:
        """Refuse formats without a repair, and ``leaks`` where there are errors, too."""
        image = work.chain.image
        if image.facts.format not in img.REPAIRED:
            raise RefusedError("unsupported_subformat", f"qemu-img cannot repair {image.facts.format} images")
        self.found = img.check(work.io, work.chain.node(alone=True), work.effort("checking", 0))
        if self.level == "leaks" and not self.found.sound:
            raise RefusedError(
                "dirty_or_corrupt",
                f"{image.shown} has {self.found.corruptions} corruptions, not only leaks; only the option to repair "
                "all errors may repair them",
            )

    def needed(self, work: Rewrite) -> int:
        """The file once more, and its refcounts anew."""
        image = work.chain.image.stamp
        return image.allocated_size + image.file_size // 64 + (1 << 20)

    def base(self, work: Rewrite) -> Node | None:
        """The same as the image's."""
        return work.chain.below(1)

    def make(self, work: Rewrite, replacement: NewFile) -> None:
        """Copy the file, and have qemu-img repair the copy."""
        copy_image(work, replacement)
        refuse_other_header(work, replacement, work.chain.image.facts.backing_file)
        copy = Node(replacement.new, work.chain.image.planned.format, work.shown(replacement))
        done = img.change(work.io, copy, ["check", "-r", self.level], work.effort("repairing", 0))
        if done.exit_code not in {0, 3}:
            raise HostError(f"qemu-img check -r {self.level} did not succeed, {done.words()}")

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        """The header as it was, no longer marked."""
        return changed(work.chain.image.facts, made)


class Grow(Recipe):
    """``qemu-img resize`` on a copy: the image is larger, and what is new reads as zeros.

    Args:
        virtual_size: the new one, in bytes.
    """

    method = "copy"
    must_shrink = False
    carries = frozenset({"has_internal_snapshots"})

    def __init__(self, virtual_size: int) -> None:
        self.virtual_size = virtual_size

    @property
    def result(self) -> dict[str, Any]:
        """The new size."""
        return {"virtual_size": self.virtual_size}

    def refuse(self, work: Rewrite) -> None:
        """Refuse what is no qcow2, is as large already, has errors, or snapshots that an old version cannot keep."""
        image, facts = work.chain.image, work.chain.image.facts
        if facts.format != "qcow2":
            raise RefusedError("unsupported_subformat", f"{facts.format} images cannot be enlarged; convert the image")
        if self.virtual_size <= facts.virtual_size:
            raise RefusedError(INVALID, f"{image.shown} has {facts.virtual_size} bytes already, and only grows")
        if facts.snapshots and facts.compat == "0.10":
            raise RefusedError(
                "has_internal_snapshots", f"{image.shown} has compat 0.10 and snapshots; delete these first"
            )
        work.refuse_damaged()

    def needed(self, work: Rewrite) -> int:
        """The file once more, and longer tables."""
        return work.chain.image.stamp.allocated_size + tables(work.chain.image.facts.cluster_size, self.virtual_size)

    def base(self, work: Rewrite) -> Node | None:
        """The same as the image's."""
        return work.chain.below(1)

    def make(self, work: Rewrite, replacement: NewFile) -> None:
        """Copy the file, and have qemu-img enlarge the copy."""
        copy_image(work, replacement)
        refuse_other_header(work, replacement, work.chain.image.facts.backing_file)
        copy = Node(replacement.new, "qcow2", work.shown(replacement), work.chain.below(1))
        effort = work.effort("enlarging", 0)
        done = img.change(work.io, copy, ["resize", "-q"], effort, [str(self.virtual_size)])
        if done.exit_code:
            raise work.failed("qemu-img resize", done.words(), done.stderr)

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        """The header as it was but for the size."""
        wrong = changed(replace(work.chain.image.facts, virtual_size=self.virtual_size), made)
        same = [one.name for one in work.chain.image.facts.bitmaps] == [one.name for one in made.bitmaps]
        return wrong if same else [*wrong, "bitmaps"]


def changed(old: Facts, made: Facts) -> list[str]:
    """In what a header is not as it was, where only the content of tables changes."""
    same = ("virtual_size", "cluster_size", "compat", "refcount_bits", "backing_file", "backing_format", "encrypted")
    wrong = [name for name in same if getattr(old, name) != getattr(made, name)]
    if len(old.snapshots) != len(made.snapshots):
        wrong.append("snapshots")
    return [*wrong, "state"] if made.dirty or made.corrupt else wrong
