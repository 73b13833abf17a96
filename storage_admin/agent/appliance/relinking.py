"""The recipe that gives an image whose base is lost another one, which nothing but what is on the disk can prove."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from storage_admin.agent.appliance import appliance
from storage_admin.agent.appliance.appliance import Appliance
from storage_admin.agent.measure.likeness import Likeness
from storage_admin.agent.protocol import FILESYSTEMS, RefusedError
from storage_admin.agent.rewrite.base import Rewrite
from storage_admin.agent.rewrite.chain import Chain
from storage_admin.agent.rewrite.rebasing import Relink

#: Seconds for a check, which is as long as the disk is large; who cancels is heard all the same.
_PATIENCE = 7 * 24 * 3600.0
#: Of the blocks that the image holds, this part at least has to be the same in the base: of a cluster that a guest has
#: written in part, the rest came from there.
_ALIKE = 1 / 8
#: Kinds of filesystems whose files are looked at: btrfs has checksums of all its data, FAT no times of change.
_WITH_TIMES = frozenset({"ext2", "ext3", "ext4", "xfs"})
#: What is told of each filesystem.
_TOLD = ("device", "type", "state", "why")
#: Files that were changed first since the base was, and the part of them that may be in the base as they are.
_FIRST, _SAME = 32, 1 / 4


class Unproven(Relink):
    """As :class:`Relink`, and only where all that the disk tells speaks for the base: the blocks of the image, its
    filesystems on that base, which an appliance checks, and when each was written last.

    Args:
        base: that is taken for the lost one, with its own chain.
    """

    def __init__(self, base: Chain) -> None:
        super().__init__(base, force=False)
        self._filesystems: list[dict[str, str]] = []

    @property
    def result(self) -> dict[str, Any]:
        """Also what the check of each filesystem found."""
        return {**super().result, "filesystems": self._filesystems}

    def unlike(self, found: Likeness) -> bool:
        """Whether not enough speaks for the base."""
        return not found.equal or found.equal < found.looked_at * _ALIKE

    def refuse(self, work: Rewrite) -> None:
        """Refuse also filesystems that are not sound on that base, or that it has in a later state than the image."""
        super().refuse(work)
        base = self.onto.node()
        with appliance.on(work.io, replace(work.chain.node(), backing=base), work.watch, long=True) as image:
            marks = image.ask("marks", _PATIENCE)["marks"]
            work.io.progress("checking filesystems", 0, None, "checking the filesystems on that backing file")
            found = image.ask("check", _PATIENCE)["filesystems"]
            self._filesystems = [{name: str(one[name])[:500] for name in _TOLD} for one in found]
            work.io.emit(FILESYSTEMS, filesystems=self._filesystems)
            self._refuse_unsound()
            with appliance.on(work.io, base, work.watch, long=True) as below:
                marks_below = below.ask("marks", _PATIENCE)["marks"]
                self._refuse_other(marks, marks_below)
                work.io.progress("checking filesystems", 0, None, "comparing when files were changed")
                for one in self._filesystems:
                    if one["type"] in _WITH_TIMES and one["device"] in marks_below:
                        self._compare_files(image, below, one["device"])

    def _refuse_unsound(self) -> None:
        for state, code, told in (
            ("damaged", "filesystem_damaged", "are damaged on it: the guest would read a mixture of two disks"),
            ("unknown", "unproven", "could not be checked, so that nothing shows whether it is the one"),
        ):
            found = [f"{one['device']} ({one['type']})" for one in self._filesystems if one["state"] == state]
            if found:
                raise RefusedError(code, f"filesystems {told}: {', '.join(found[:5])}")
        if not self._filesystems:
            raise RefusedError("unproven", "no filesystem is on the disk, so that nothing shows whether it is the one")

    def _refuse_other(self, image: dict[str, list[Any]], base: dict[str, list[Any]]) -> None:
        """Refuse a base whose filesystems are others, or were written to after those that the image has."""
        for device in sorted(image.keys() & base.keys()):
            (name, written), (name_below, written_below) = image[device], base[device]
            if name != name_below:
                told = f"{self.onto.image.shown} has another filesystem at {device} than the image"
                raise RefusedError("unproven", told)
            if written_below > written:
                told = f"the filesystem at {device} in {self.onto.image.shown} was written to after the image was"
                raise RefusedError("unproven", told)

    def _compare_files(self, image: Appliance, below: Appliance, device: str) -> None:
        try:
            self._refuse_other_state(image, below, device)
        except RefusedError as error:
            if error.code != "unreadable_inside":
                raise
            # Also where the base alone is damaged at a place that the image hides.
            raise RefusedError("unproven", f"the files at {device} could not be compared: {error.detail}") from error

    def _refuse_other_state(self, image: Appliance, below: Appliance, device: str) -> None:
        """Refuse a base that was written to after the image began to stand on it, or before that.

        What the image did not change is in its base as it is; what it changed, it changed after anything of its base,
        and holds itself.
        """
        base, told = below.ask("changes", _PATIENCE, device=device, of=0), self.onto.image.shown
        files = image.ask("changes", _PATIENCE, device=device, of=base["each"])["files"]
        there, newest = {inode: (changed, size) for _, inode, changed, size in base["files"]}, base["newest"]
        none = (0, 0)
        odd = [inode for _, inode, changed, _ in files if changed < newest and there.get(inode, none)[0] != changed]
        if odd:
            raise RefusedError("unproven", f"{told} was written to since: {len(odd)} files at {device} are older")
        new = [
            (changed, inode)
            for kind, inode, changed, size in files
            if kind == "f" and changed > newest and size > there.get(inode, none)[1]
        ]
        first = [inode for _, inode in sorted(new)[:_FIRST]]
        ends = image.ask("tails", _PATIENCE, device=device, of=first) if first else {"places": [], "digests": []}
        held = below.ask("blocks", _PATIENCE, device=device, of=ends["places"])["digests"]
        same = sum(one == other for one, other in zip(ends["digests"], held))
        if same > len(held) * _SAME:
            raise RefusedError(
                "unproven", f"{told} is in an older state: it lacks {same} of {len(held)} files at {device}"
            )
