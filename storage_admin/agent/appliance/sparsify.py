"""The recipe that gives an image's deleted data back: its filesystems are trimmed in an appliance, on a copy.

Every file's content is compared before and after: all names and digests of each filesystem that was trimmed.
"""

from __future__ import annotations

from typing import Any

from storage_admin.agent.appliance import appliance
from storage_admin.agent.formats.facts import Facts
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite.base import Rewrite
from storage_admin.agent.rewrite.file_copies import FileCopy, changed

#: Formats that let go of what a guest discards.
FORMATS = frozenset({"qcow2", "raw"})
#: Seconds for a step, which is as long as the disk is large; whoever cancels is heard all the same.
_PATIENCE = 7 * 24 * 3600.0


class Sparsify(FileCopy):
    """A copy whose filesystems are trimmed; only worth it where it becomes smaller."""

    method = "sparsify"
    must_shrink = True
    must_equal = False

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}
        self._sums: list[Any] = []

    @property
    def result(self) -> dict[str, Any]:
        """The filesystems that were trimmed, those that were left, and how many files were compared."""
        return {**self._told, "files": sum(count for _, count, _ in self._sums)}

    def takes_away(self, work: Rewrite) -> bool:  # noqa: ARG002 (always)
        """Blocks that no file has on this disk, and an overlay's filesystem may: it has moved on since."""
        return True

    def refuse(self, work: Rewrite) -> None:
        """Refuse other formats, errors, filesystems that were not unmounted, and disks without any to trim."""
        image = work.chain.image
        if image.planned.format not in FORMATS:
            raise RefusedError("unsupported_subformat", f"{image.planned.format} images keep what a guest discards")
        work.refuse_damaged()
        with appliance.on(work.io, work.chain.node(), work.watch, long=True) as inside:
            unclean = inside.ask("unclean", _PATIENCE)["unclean"]
            if unclean:
                told = "; ".join(f"{one['device']} ({one['type']}): {one['why']}" for one in unclean[:5])
                raise RefusedError("unclean_inside", f"start the guest and shut it down properly first: {told}")
            work.io.progress("reading files", 0, None, "computing the checksums of all files")
            self._sums = inside.ask("sums", _PATIENCE)["sums"]
        if not self._sums:
            raise RefusedError("nothing_to_free", f"{image.shown} has no filesystem that can be trimmed")

    def change(self, work: Rewrite, copy: Node) -> None:
        work.io.progress("trimming", 0, None, "trimming the filesystems of the copy")
        with appliance.on(work.io, copy, work.watch, writable=True, long=True) as inside:
            self._told = inside.ask("trim", _PATIENCE)

    def verify(self, work: Rewrite, copy: Node) -> None:
        """The copy is sound, and each file in it is as it was."""
        super().verify(work, copy)
        work.io.progress("verifying", 0, None, "comparing the checksums of all files")
        with appliance.on(work.io, copy, work.watch, long=True) as inside:
            if inside.ask("sums", _PATIENCE)["sums"] != self._sums:
                raise HostError("files in the copy differ from those in the image")

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        wrong = changed(work.chain.image.facts, made)
        return wrong if work.chain.image.facts.bitmaps == made.bitmaps else [*wrong, "bitmaps"]
