"""The recipe that writes an image in another format, or with other options, under a name of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent.folders.pools import components, open_parent, wrong_name, wrong_name_for
from storage_admin.agent.formats.facts import Facts
from storage_admin.agent.protocol import INVALID, RefusedError, b64, unb64
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite import copying, vmdk_descriptor
from storage_admin.agent.rewrite.base import Recipe, Rewrite
from storage_admin.agent.rewrite.copying import cut_padding, refuse_two_sizes
from storage_admin.agent.rewrite.publish import Publication, Succession
from storage_admin.agent.swap.swap import NewFile

#: The formats that are written, each with the creation options of qemu-img that it takes.
OPTIONS = {
    "qcow2": frozenset(
        {
            "cluster_size",
            "preallocation",
            "compression_type",
            "lazy_refcounts",
            "refcount_bits",
            "compat",
            "extended_l2",
        }
    ),
    "raw": frozenset({"preallocation"}),
    "vmdk": frozenset({"subformat", "adapter_type", "hwversion", "compat6", "zeroed_grain"}),
    "vdi": frozenset({"preallocation"}),
    "vhdx": frozenset({"subformat", "block_size", "log_size", "block_state_zero"}),
    "vpc": frozenset({"subformat"}),
}
#: Subformats of one file; the others have parts that a rename would tear from it.
SUBFORMATS = {
    "vmdk": frozenset({"monolithicSparse", "streamOptimized"}),
    "vhdx": frozenset({"dynamic", "fixed"}),
    "vpc": frozenset({"dynamic", "fixed"}),
}
#: Bytes that any format may need beside the data: tables, headers, a footer.
_TABLES = 8 << 20
_VALUE = re.compile(r"[0-9A-Za-z._]{1,40}")


@dataclass(frozen=True)
class Target:
    """Where a conversion goes: absolute paths of the pool's folder and of the file, its format and creation options."""

    pool_path: bytes
    path: bytes
    format: str
    options: dict[str, str] = field(default_factory=dict)
    #: Whether it takes the place of the image that it is made from, in the same folder.
    replaces: bool = False

    @classmethod
    def parse(cls, fields: Any) -> Target:
        """A target as it travels; raises RefusedError(``invalid``), with the option's name."""
        try:
            pool_path, path = unb64(fields["pool_path_b64"]), unb64(fields["path_b64"])
            form, options = fields["format"], dict(fields.get("options") or {})
            replaces = bool(fields.get("replaces", False))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RefusedError(INVALID, f"the target is not described completely: {error}") from error
        name = refuse_place(pool_path, path)
        if form not in OPTIONS:
            raise RefusedError(INVALID, f"images are converted to {', '.join(sorted(OPTIONS))}")
        for option, value in options.items():
            if option not in OPTIONS[form]:
                known = ", ".join(sorted(OPTIONS[form]))
                raise RefusedError(INVALID, f"{form} has no option {option}; its options: {known}")
            if not isinstance(value, str) or not _VALUE.fullmatch(value):
                raise RefusedError(INVALID, f"{option} is a word or a number")
        if "subformat" in options and options["subformat"] not in SUBFORMATS[form]:
            raise RefusedError("unsupported_subformat", f"{form} is written as {' or '.join(sorted(SUBFORMATS[form]))}")
        if why := wrong_name_for(name, form):
            raise RefusedError(INVALID, why)
        return cls(pool_path, path, form, options, replaces)

    def argument(self, more: Mapping[str, str]) -> str:
        """The creation options and some more, as for ``-o``."""
        # Without force_size, the size of a VHD is rounded up to what a disk's geometry can say.
        own = self.options | ({"force_size": "on"} if self.format == "vpc" else {})
        return ",".join(f"{name}={value}" for name, value in sorted({**own, **more}.items()))


def refuse_place(pool_path: bytes, path: bytes) -> bytes:
    """Refuse a path that no new file can have; its name. Raises RefusedError(``invalid``, ``outside_pool``)."""
    name = os.path.basename(path)
    if why := wrong_name(name):
        raise RefusedError(INVALID, why)
    components(pool_path, path)
    return name


class Convert(Recipe):
    """``qemu-img convert`` of the whole chain into a file of its own, or into one that takes the image's place."""

    method = "convert"
    must_shrink = False

    def __init__(self, target: Target) -> None:
        self.target = target
        self.replaces = target.replaces
        if not target.replaces:
            # The image itself is not touched: what a copy would not carry stays in it, and the plan says so.
            self.carries = frozenset({"has_internal_snapshots", "hard_linked", "immutable"})

    @property
    def result(self) -> dict[str, Any]:
        """The format that was written; where the original stays, nothing becomes free."""
        told = {"format": self.target.format, "name_b64": b64(os.path.basename(self.target.path))}
        return told if self.target.replaces else {**told, "freed_bytes": 0}

    def place(self, work: Rewrite) -> tuple[int, bytes]:
        if self.target.replaces:
            image = work.wish.image
            if os.path.dirname(self.target.path) != os.path.dirname(image.path):
                raise RefusedError(INVALID, "what takes an image's place is in its folder")
            folder, _ = open_parent(image.pool_path, image.path)
            return folder, os.path.basename(self.target.path)
        return open_parent(self.target.pool_path, self.target.path)

    def folder_path(self, work: Rewrite) -> bytes:  # noqa: ARG002
        return os.path.dirname(self.target.path)

    def begin(self, work: Rewrite) -> NewFile:
        """A file that will get the target's name."""
        if not self.target.replaces:
            return Publication(work.folder, work.name, work.chain.image.fd, work.request)
        if self._keeps_name(work):
            return super().begin(work)
        return Succession(
            work.folder,
            work.name,
            work.chain.image.fd,
            work.request,
            work.wish.undo_hours,
            os.path.basename(work.wish.image.path),
        )

    def _keeps_name(self, work: Rewrite) -> bool:
        return self.target.path == work.wish.image.path

    def format(self, work: Rewrite) -> str:  # noqa: ARG002
        return self.target.format

    def refuse(self, work: Rewrite) -> None:
        """Refuse an image with errors, and bitmaps, which only qcow2 holds."""
        image = work.chain.image
        if self.target.replaces and self._keeps_name(work) and self.target.format != image.planned.format:
            raise RefusedError(
                "target_exists", f"{image.shown} already has the name of a {self.target.format} image; rename it first"
            )
        if image.facts.bitmaps and self.target.format != "qcow2":
            raise RefusedError(
                "unsupported_subformat",
                f"{image.shown} has persistent bitmaps, which {self.target.format} cannot hold; delete them first",
            )
        refuse_two_sizes(image)
        work.refuse_damaged()

    def takes_away(self, work: Rewrite) -> bool:
        return self.target.replaces and not self._keeps_name(work)

    def needed(self, work: Rewrite) -> int:
        """What qemu-img measures for the whole chain; all of the virtual size where that is preallocated."""
        virtual_size = work.chain.image.facts.virtual_size
        options = self.target.options
        if options.get("preallocation") in {"full", "falloc"} or options.get("subformat") == "fixed":
            return virtual_size + _TABLES
        # For other formats it measures nothing; qcow2 with as large clusters needs no less.
        cluster_size = options.get("cluster_size", "65536")
        return img.measure(work.io, work.chain.node(), f"cluster_size={cluster_size}") + _TABLES

    def base(self, work: Rewrite) -> Node | None:  # noqa: ARG002
        return None

    def make(self, work: Rewrite, replacement: NewFile) -> None:
        """Convert, and put a VMDK's own name into it."""
        facts, options = work.chain.image.facts, self.target.options
        compress = "compression_type" in options or options.get("subformat") == "streamOptimized"
        copying.convert(work, replacement, self.target.format, self.target.argument({}), compress=compress)
        if self.target.format == "vmdk":
            vmdk_descriptor.name_extent(replacement.new, work.name)
        if self.target.replaces and self.target.format == facts.format:
            # Beside the image it would be another disk under the same id.
            copying.carry_identity_over(facts.format, work.chain.image.fd, replacement.new)
        if self.target.format == facts.format == "raw":
            cut_padding(work.chain.image, replacement.new)

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        """The virtual size to the byte, no base, and the options that were asked for."""
        wrong = []
        if made.virtual_size != work.chain.image.facts.virtual_size:
            wrong.append("virtual_size")
        if made.backing_file is not None or made.dirty or made.corrupt:
            wrong.append("state")
        subformat = self.target.options.get("subformat")
        if subformat is not None and made.subformat not in {None, subformat}:
            wrong.append("subformat")
        return wrong
