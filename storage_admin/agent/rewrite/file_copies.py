"""Recipes that change a copy of the image's file: its metadata is repaired, it grows, or loses bitmaps.

qemu's own ``check -r``, ``resize``, ``bitmap`` and ``rebase`` change an image where it stands, and a kill in the middle
leaves a mixture. So they get a copy of the file, which takes the image's place by protocol P once it is verified.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import replace
from typing import Any

from storage_admin.agent import formats
from storage_admin.agent.formats.facts import Facts, UnreadableError
from storage_admin.agent.measure.new_image import tables
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite import copying
from storage_admin.agent.rewrite.base import Recipe, Rewrite
from storage_admin.agent.swap.swap import NewFile


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


def refuse_different(work: Rewrite, copy: Node, size: int) -> None:
    """Compare the first bytes of a copy with those of the image, each without a base.

    Raises:
        RefusedError, HostError: they differ, or somebody wrote to the image.
    """
    if not img.compare(work.io, work.chain.node(alone=True), copy, size, work.effort("verifying", size)):
        work.chain.refuse_stale()
        raise HostError("the content of the copy differs from the content of the image")


class FileCopy(Recipe):
    """What these recipes have in common: a copy of the whole file, on the base that the image has, is changed.

    What a copy by ``convert`` would lose stays.
    """

    must_shrink = False

    def needed(self, work: Rewrite) -> int:
        """The file once more."""
        return work.chain.image.stamp.allocated_size + (1 << 20)

    def base(self, work: Rewrite) -> Node | None:
        return work.chain.below(1)

    def make(self, work: Rewrite, replacement: NewFile) -> None:
        image = work.chain.image
        copy_image(work, replacement)
        refuse_other_header(work, replacement, image.facts.backing_file)
        below = self.base(work)
        self.change(work, Node(replacement.new, image.planned.format, work.shown(replacement), below))

    @abstractmethod
    def change(self, work: Rewrite, copy: Node) -> None:
        """Have the copy changed; raises HostError or RefusedError."""


class Repair(FileCopy):
    """``qemu-img check -r`` on a copy.

    Args:
        level: ``leaks`` gives unused clusters back; ``all`` also mends errors, and a guest may read other bytes then.
    """

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

    def change(self, work: Rewrite, copy: Node) -> None:
        alone = replace(copy, backing=None)
        done = img.change(work.io, alone, ["check", "-r", self.level], work.effort("repairing", 0))
        if done.exit_code not in {0, 3}:
            raise HostError(f"qemu-img check -r {self.level} did not succeed, {done.words()}")

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        return changed(work.chain.image.facts, made)


class Grow(FileCopy):
    """``qemu-img resize`` on a copy: the image is larger, and what is new reads as zeros.

    Args:
        virtual_size: the new one, in bytes.
    """

    method = "copy"
    carries = frozenset({"has_internal_snapshots"})

    def __init__(self, virtual_size: int) -> None:
        self.virtual_size = virtual_size

    @property
    def result(self) -> dict[str, Any]:
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

    def change(self, work: Rewrite, copy: Node) -> None:
        effort = work.effort("enlarging", 0)
        done = img.change(work.io, copy, ["resize", "-q"], effort, [str(self.virtual_size)])
        work.refuse_failed("qemu-img resize", done)

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
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


class RemoveBitmaps(FileCopy):
    """``qemu-img bitmap --remove`` on a copy.

    Args:
        names: of the persistent bitmaps that go.
    """

    method = "copy"
    carries = frozenset({"has_internal_snapshots"})

    def __init__(self, names: list[str]) -> None:
        self.names = names

    @property
    def result(self) -> dict[str, Any]:
        return {"removed": self.names}

    def refuse(self, work: Rewrite) -> None:
        """Refuse names that no bitmap has, and errors."""
        image = work.chain.image
        there = {one.name for one in image.facts.bitmaps}
        if not self.names or not there.issuperset(self.names):
            raise RefusedError("stale_plan", f"{image.shown} does not have these bitmaps; scan the host and try again")
        work.refuse_damaged()

    def change(self, work: Rewrite, copy: Node) -> None:
        for name in self.names:
            done = img.change(work.io, copy, ["bitmap", "--remove", "--"], work.effort("removing", 0), [name])
            work.refuse_failed("qemu-img bitmap", done)

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        stay = [one.name for one in work.chain.image.facts.bitmaps if one.name not in self.names]
        wrong = changed(work.chain.image.facts, made)
        return wrong if stay == [one.name for one in made.bitmaps] else [*wrong, "bitmaps"]
