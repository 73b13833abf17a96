"""A recipe that takes the end of an image away, where partition table and filesystems prove that it is unused."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from storage_admin.agent.formats.facts import Facts
from storage_admin.agent.measure import partitions
from storage_admin.agent.measure.partitions import Table, UnprovenError
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.agent.qemu import content, img
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite.base import Rewrite
from storage_admin.agent.rewrite.file_copies import FileCopy, changed, refuse_different

#: What is left is a multiple of this: of the sectors of every disk, and of the clusters of most filesystems.
STEP = 1 << 20
FORMATS = frozenset({"qcow2", "raw"})


class Shrink(FileCopy):
    """``qemu-img resize --shrink`` on a copy, whose partition table is moved to its new end.

    Args:
        virtual_size: the new one in bytes; ``None`` for the least that is proven to hold everything.
    """

    method = "shrink"
    #: What is left is compared here, before the partition table is moved.
    must_equal = False

    def __init__(self, virtual_size: int | None) -> None:
        self.asked = virtual_size
        self.virtual_size = virtual_size or 0
        self._table = Table("")
        self._need = 0
        self._disk: content.Disk

    @property
    def result(self) -> dict[str, Any]:
        """The new size, and what has to fit."""
        return {"virtual_size": self.virtual_size, "needed_bytes": self._need}

    def takes_away(self, work: Rewrite) -> bool:  # noqa: ARG002 (always)
        """What overlays read behind the new end, and of a moved partition table."""
        return True

    def refuse(self, work: Rewrite) -> None:
        """Refuse what has a base or no proof, and a size that is no smaller, or too small."""
        image, facts = work.chain.image, work.chain.image.facts
        if facts.format not in FORMATS:
            raise RefusedError(
                "unsupported_subformat", f"{facts.format} images cannot be made smaller; convert the image"
            )
        if len(work.chain.links) > 1:
            raise RefusedError("unsupported_subformat", f"{image.shown} has a backing file; flatten it first")
        work.refuse_damaged()
        self._need, self._table = self._proof(work)
        self.virtual_size = self.asked if self.asked is not None else -(-self._need // STEP) * STEP
        if self.virtual_size >= facts.virtual_size:
            why = "size has to be less than that"
            if self.asked is None:
                why = f"its partitions and filesystems reach up to byte {self._need}; shrink those in the guest first"
            raise RefusedError(INVALID, f"{image.shown} has {facts.virtual_size} bytes, and {why}")
        if self._table.gpt is not None and self.virtual_size % self._table.gpt.sector:
            raise RefusedError(INVALID, f"size is a multiple of the disk's sectors, {self._table.gpt.sector} bytes")
        if self.virtual_size < self._need:
            raise RefusedError(
                "end_in_use", f"{image.shown} needs {self._need} bytes; partitions and filesystems end there"
            )

    def _proof(self, work: Rewrite) -> tuple[int, Table]:
        """The least size, and the partition table."""
        size = work.chain.image.facts.virtual_size
        self._disk = content.Disk(work.io, work.chain.node(), size)
        try:
            return partitions.needed(self._disk.read, size)
        except UnprovenError as error:
            raise RefusedError("end_in_use", f"it is not shown that the end of the disk is unused: {error}") from error

    def change(self, work: Rewrite, copy: Node) -> None:
        """Cut it, compare what is left, and write the table's second copy at the new end."""
        size = self.virtual_size
        if copy.format == "raw":
            os.ftruncate(copy.fd, size)
        else:
            done = img.change(work.io, copy, ["resize", "-q", "--shrink"], work.effort("shrinking", 0), [str(size)])
            work.refuse_failed("qemu-img resize", done)
        refuse_different(work, copy, size)
        if (gpt := self._table.gpt) is not None:
            first, end = gpt.moved(size)
            pieces = [(0, gpt.protective(self._disk.read(0, 512), size)), (gpt.sector, first), (size - len(end), end)]
            content.write(work.io, copy, pieces)
            again = content.read(work.io, copy, [(at, len(piece)) for at, piece in pieces])
            if again != [piece for _, piece in pieces]:
                raise HostError("the partition table of the copy was not written as it should be")

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        return changed(replace(work.chain.image.facts, virtual_size=self.virtual_size), made)
