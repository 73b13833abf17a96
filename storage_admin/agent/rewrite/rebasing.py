"""Recipes that give an image another base, with what it read from the old one kept in it: qemu-img rebase on a copy of
the file, or a copy that holds all.
"""

from __future__ import annotations

import os
from typing import Any

from storage_admin.agent.formats.facts import Facts
from storage_admin.agent.measure.likeness import Likeness, likeness
from storage_admin.agent.protocol import INVALID, RefusedError, display
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite import backing_name
from storage_admin.agent.rewrite.backing_name import leads_to, near, no_protocol
from storage_admin.agent.rewrite.base import Recipe, Rewrite
from storage_admin.agent.rewrite.chain import Chain, Link
from storage_admin.agent.rewrite.copying import Copy, differences
from storage_admin.agent.rewrite.file_copies import copy_image, refuse_different, refuse_other_header
from storage_admin.agent.swap.swap import NewFile

#: Longest backing file that a qcow2 header takes, in bytes (docs/interop/qcow2.txt).
_LONGEST_BACKING = 1023
#: Blocks that have to be compared before it counts that none is alike.
_ENOUGH = 32


class Rebase(Recipe):
    """The overlay takes over what a lower image of its chain does not hold, and then stands on that one, or on none.

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
        if work.chain.image.facts.format != "qcow2":
            told = f"{work.chain.image.shown} is not a qcow2 image, so it has no backing file"
            raise RefusedError("unsupported_subformat", told)
        self._refuse_base(work)
        self.name = self._choose_name(work)
        if len(self.name) > _LONGEST_BACKING or len(self._argument(work)) > _LONGEST_BACKING:
            raise RefusedError(
                "chain_too_deep",
                "the chain below the image that is kept is too deep for qemu-img; flatten that image first",
            )
        work.refuse_damaged()

    def _refuse_base(self, work: Rewrite) -> None:
        image, links = work.chain.image, work.chain.links
        if len(links) == 1:
            raise RefusedError(INVALID, f"{image.shown} has no backing file, so there is nothing to flatten")
        if self.keep is not None and not 2 <= self.keep < len(links):
            raise RefusedError(
                INVALID, f"that image is already the direct backing file of {image.shown}, or not in its chain"
            )

    def needed(self, work: Rewrite) -> int:
        """The image as it is, and all data of the images in between, uncompressed."""
        between = work.chain.links[1 : self.keep]
        options = f"cluster_size={work.chain.image.facts.cluster_size}"
        layers = (Node(link.fd, link.planned.format, link.planned.path) for link in between)
        return work.chain.image.stamp.allocated_size + sum(img.measure(work.io, layer, options) for layer in layers)

    def base(self, work: Rewrite) -> Node | None:
        return None if self.keep is None else work.chain.below(self.keep)

    def _kept(self, work: Rewrite) -> Link | None:
        return None if self.keep is None else work.chain.links[self.keep]

    def _format(self, work: Rewrite) -> str | None:
        kept = self._kept(work)
        return None if kept is None else kept.planned.format

    def _choose_name(self, work: Rewrite) -> bytes:
        """Relative where the name that the base has now is relative, and where such a name leads there."""
        kept = self._kept(work)
        if kept is None:
            return b""
        for name in (self._as_above(work, kept), kept.planned.path):
            if leads_to(work.folder, name, kept.fd):
                return name
        raise RefusedError(
            "chain_broken", f"no path leads from {work.chain.image.shown} to {kept.shown}; scan the host and try again"
        )

    def _as_above(self, work: Rewrite, kept: Link) -> bytes:
        """The base's name in the image above it, as it reads from here."""
        above = work.chain.links[work.chain.links.index(kept) - 1]
        written, folder = above.facts.backing_file or b"", os.path.dirname(above.planned.path)
        here = os.path.dirname(work.chain.image.planned.path)
        if written.startswith(b"/") or folder == here:
            return written
        name = os.path.relpath(os.path.join(folder, written), here)
        return no_protocol(name)

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
        work.refuse_failed("qemu-img rebase", done)
        if self.name:
            refuse_other_header(work, replacement, self._argument(work))
            done = img.name_base(work.io, copy, self.name, self._format(work) or "")
            work.refuse_failed("qemu-img rebase -u", done)

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        return different_chain(work.chain.image.facts, made, self.name or None, self._format(work))


class Onto(Rebase):
    """The image takes over what another base does not hold of what it reads, and then stands on that one.

    Args:
        base: the other one, with its own chain.
    """

    method = "rebase"

    def __init__(self, base: Chain) -> None:
        super().__init__(None)
        self.onto = base

    def _refuse_base(self, work: Rewrite) -> None:
        image = work.chain.image
        if image.id in {link.id for link in self.onto.links}:
            raise RefusedError("chain_cycle", f"{self.onto.image.shown} is {image.shown} itself or an overlay on it")
        if len(work.chain.links) > 1 and work.chain.links[1].id == self.onto.image.id:
            raise RefusedError(INVALID, f"{self.onto.image.shown} is already the backing file of {image.shown}")
        if any(link.facts.encrypted for link in self.onto.links):
            raise RefusedError("encrypted", f"{self.onto.image.shown} or a base of it is encrypted")
        self.recheck(work)

    def recheck(self, work: Rewrite) -> None:  # noqa: ARG002 (the base alone counts)
        """Refuse a base that somebody writes to, or that has changed since the plan."""
        self.onto.refuse_written()
        self.onto.refuse_stale()

    def base(self, work: Rewrite) -> Node | None:  # noqa: ARG002 (the same for all)
        return self.onto.node()

    def _kept(self, work: Rewrite) -> Link | None:  # noqa: ARG002 (the same for all)
        return self.onto.image

    def _as_above(self, work: Rewrite, kept: Link) -> bytes:
        return near(work.chain.image.planned.path, kept.planned.path)


class Relink(Onto):
    """The image, whose base is lost, names another one: no data is looked at but to say how much the two have alike.

    Args:
        base: that is taken for the lost one, with its own chain.
        force: also where nothing that the image holds is alike.
    """

    method = "relink"
    #: With its base there is nothing to compare with.
    must_equal = False

    def __init__(self, base: Chain, force: bool) -> None:
        super().__init__(base)
        self._force = force
        self._found = Likeness(0, 0)

    @property
    def result(self) -> dict[str, Any]:
        """How many blocks of the image were compared with the base, and how many of them are alike."""
        return {"compared": self._found.looked_at, "alike": self._found.equal}

    def _refuse_base(self, work: Rewrite) -> None:
        super()._refuse_base(work)
        image = work.chain.image
        written = image.facts.backing_file
        if written is None:
            raise RefusedError(INVALID, f"{image.shown} has no backing file")
        if backing_name.found(work.folder, written, [self.onto.image.fd]) is not None:
            raise RefusedError("stale_plan", f"{image.shown} has its backing file {display(written)}; scan the host")

    def refuse(self, work: Rewrite) -> None:
        """Refuse also a base with which the image has too little alike."""
        super().refuse(work)
        found = self._found = likeness(work.io, work.chain.node(), self.onto.node(), seconds=None)
        told = f"{found.equal} of {found.looked_at} blocks that the image holds are the same in the backing file"
        work.io.log(told)
        if self.unlike(found):
            raise RefusedError("unproven", f"{told}; it is hardly the one")

    def unlike(self, found: Likeness) -> bool:
        """Whether that speaks against the base."""
        return found.looked_at >= _ENOUGH and not found.equal and not self._force

    def needed(self, work: Rewrite) -> int:
        """The file once more."""
        return work.chain.image.stamp.allocated_size + (1 << 20)

    def make(self, work: Rewrite, replacement: NewFile) -> None:
        copy_image(work, replacement)
        refuse_other_header(work, replacement, work.chain.image.facts.backing_file)
        copy = Node(replacement.new, "qcow2", work.shown(replacement))
        done = img.name_base(work.io, copy, self.name, self._format(work) or "")
        work.refuse_failed("qemu-img rebase -u", done)
        refuse_different(work, copy, work.chain.image.facts.virtual_size)


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
        return img.measure(work.io, work.chain.node(), self.options(work))

    def base(self, work: Rewrite) -> Node | None:  # noqa: ARG002 (the same for all)
        return None

    def backing(self, work: Rewrite) -> tuple[bytes, str] | None:  # noqa: ARG002
        return None

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        return different_chain(work.chain.image.facts, made, None, None)


def different_chain(old: Facts, made: Facts, base: bytes | None, base_format: str | None) -> list[str]:
    """In what a header differs that should have only another base now."""
    wrong = [name for name in differences(old, made, old.compression, base_format) if not name.startswith("backing")]
    if made.backing_file != base:
        wrong.append("backing_file")
    if made.backing_format != base_format:
        wrong.append("backing_format")
    return wrong
