"""A new image that is made from nothing, or as an overlay that reads everything from its base."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent import formats
from storage_admin.agent.folders.pools import held, open_parent
from storage_admin.agent.formats.facts import UnreadableError
from storage_admin.agent.host import cgroups, space
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure.new_image import room
from storage_admin.agent.programs.tools import Finished
from storage_admin.agent.protocol import (
    INVALID,
    SPACE,
    Arguments,
    HostError,
    RefusedError,
    Request,
    b64,
    display,
    refusal_of_tool,
)
from storage_admin.agent.qemu import img, keys
from storage_admin.agent.qemu.keys import Keys
from storage_admin.agent.qemu.node import Node, seldom
from storage_admin.agent.rewrite import vmdk_descriptor
from storage_admin.agent.rewrite.backing_name import leads_to, near
from storage_admin.agent.rewrite.chain import Chain
from storage_admin.agent.rewrite.conversion import Target
from storage_admin.agent.rewrite.publish import Birth
from storage_admin.agent.swap.swap import Looks, NewFile, Swapped, clear_earlier

#: qemu-img reads no larger number (qemu, ``qemu_strtosz``).
_LARGEST = (1 << 63) - 1
_SECTOR = 512
#: Formats that can be encrypted: raw as a LUKS volume of its own.
LOCKABLE = frozenset({"qcow2", "raw"})


@dataclass(frozen=True)
class Wish:
    """What is asked beside the target. Sizes are in bytes."""

    ARGS = frozenset(
        (
            *("target", "virtual_size", "base", "chain", "bandwidth_bytes_sec", "idle_io", "reserve", "others_bytes"),
            *("secrets", "iter_time"),
        )
    )
    #: Those of an image whose content, and so its size, comes from elsewhere.
    OF_A_SOURCE = ARGS - {"virtual_size", "base", "chain", "secrets", "iter_time"}

    #: Zero as long as only what is packed says it.
    virtual_size: int
    bandwidth: int | None
    idle_io: bool
    reserve: space.Reserve
    others: space.Others
    #: The ``passphrase`` of an encrypted image.
    keys: Keys = field(default_factory=Keys)
    iter_time: int | None = None

    @classmethod
    def parse(cls, args: Arguments) -> Wish:
        """From the arguments :data:`ARGS`; raises RefusedError(``invalid``)."""
        size = args.get("virtual_size", int, 0)
        if not 0 <= size <= _LARGEST or size % _SECTOR:
            raise RefusedError(INVALID, f"virtual_size is a positive multiple of {_SECTOR} bytes")
        given = args.get("secrets", dict, {})
        if set(given) - {"passphrase"} or not all(isinstance(one, str) for one in given.values()):
            raise RefusedError(INVALID, "a new image has one passphrase")
        return cls(
            size, args.size("bandwidth_bytes_sec"), args.get("idle_io", bool, False), space.Reserve.parse(args),
            space.Others.parse(args), Keys.of(**given), keys.iter_time(args),
        )  # fmt: skip


@dataclass
class Creation:
    """One run of the verb.

    Args:
        base: the image that the new one is to stand on, with its own chain.
    """

    request: Request
    io: AgentIO
    target: Target
    wish: Wish
    base: Chain | None
    folder: int = -1
    name: bytes = b""

    def run(self) -> dict[str, Any]:
        """All steps; returns and raises as the verb."""
        started = time.monotonic()
        self.folder, self.name = open_parent(self.target.pool_path, self.target.path)
        with held(self.folder):
            limited = cgroups.limited(self.io, self.folder, idle=self.wish.idle_io, bandwidth=self.wish.bandwidth)
            with limited, space.SpaceClaim(self.request.job, self.folder) as claim:
                done = self._run(claim)
        return {
            "virtual_size": self.wish.virtual_size,
            "after_bytes": done.new.allocated_size,
            "dev": done.new.dev,
            "inode": done.new.inode,
            "format": self.format,
            "name_b64": b64(self.name),
            "seconds": round(time.monotonic() - started, 3),
        }

    def _run(self, claim: space.SpaceClaim) -> Swapped:
        self.io.progress("checking", 0, None, "checking the pool and the base")
        clear_earlier(self.folder, self.request)
        self._refuse()
        needed = self._needed()
        claim.take(needed, self.wish.reserve, self.wish.others)
        self.io.emit(SPACE, needed_bytes=needed)
        with Birth(self.folder, self.name, self.request) as new:

            def look() -> None:
                space.watch(self.folder, self.wish.reserve)
                written = space.allocated(new.new)
                claim.left(needed - written)
                self._tell(written)

            self._make(new, img.Effort(self.wish.idle_io, seldom(look)))
            os.fsync(new.new)
            claim.left(0)
            self._verify(new)
            self.io.progress("swapping", 0, None, "waiting for the go-ahead")
            return new.swap(self.io, Looks(self._refuse, self._refuse))

    def _needed(self) -> int:
        """The most that the new file may take, in bytes."""
        try:
            locked = bool(self.wish.keys.by_id)
            return room(self.target.format, self.target.options, self.wish.virtual_size, locked=locked).high
        except (ValueError, ArithmeticError) as error:
            raise RefusedError(INVALID, f"the creation options cannot be used: {error}") from error

    def _tell(self, written: int) -> None:
        """How far it is, by what the new file occupies."""
        self.io.progress("creating", min(written, self.wish.virtual_size), self.wish.virtual_size)

    def _refuse(self) -> None:
        """Refuse a base that somebody writes to, or that was changed since the plan."""
        if self.base is None:
            return
        self.base.refuse_written()
        self.base.refuse_stale()

    def _make(self, new: NewFile, effort: img.Effort) -> None:
        self._done(new, "create", img.create(self.io, self._written(new), effort))

    def _written(self, new: NewFile) -> img.Conversion:
        """What qemu-img is to write."""
        options: dict[str, str] = {}
        if self.wish.keys.by_id:
            prefix = "" if self.format == "luks" else "encrypt."
            options |= {"encrypt.format": "luks"} if prefix else {}
            options |= {f"{prefix}key-secret": "passphrase"}
            options |= {f"{prefix}iter-time": str(self.wish.iter_time)} if self.wish.iter_time else {}
        return img.Conversion(
            folder=self.folder,
            name=new.new_name,
            shown=os.path.join(os.path.dirname(self.target.path), new.new_name),
            format=self.format,
            options=self.target.argument(options),
            compress=False,
            backing=self._backing(),
            virtual_size=self.wish.virtual_size,
            keys=self.wish.keys,
        )

    @property
    def format(self) -> str:
        """Of the new file: what is to be raw and encrypted is a LUKS volume."""
        return "luks" if self.wish.keys.by_id and self.target.format == "raw" else self.target.format

    def _done(self, new: NewFile, what: str, done: Finished) -> None:
        """What qemu-img's end means; raises RefusedError and HostError."""
        if done.exit_code:
            space.watch(self.folder, self.wish.reserve)
            raise refusal_of_tool(done.stderr) or HostError(f"qemu-img {what} failed, {done.words()}")
        if self.target.format == "vmdk":
            vmdk_descriptor.name_extent(new.new, self.name)

    def _backing(self) -> tuple[bytes, str] | None:
        """The base as the header is to name it, and its format: by its name alone where it is in the same folder."""
        if self.base is None:
            return None
        planned = self.base.image.planned
        return near(self.target.path, planned.path), planned.format

    def _verify(self, new: NewFile) -> None:
        """The header says what was asked for, and its metadata is sound."""
        form, size = self.format, os.fstat(new.new).st_size
        try:
            made = formats.read(new.new, size, self.name, form)
        except UnreadableError as error:
            raise HostError(f"the new image cannot be read: {error}") from error
        if made.virtual_size != self.wish.virtual_size or made.dirty or made.corrupt:
            raise HostError(f"the new image has {made.virtual_size} bytes, or is not marked clean")
        if bool(self.wish.keys.by_id) != (made.key_slots == (0,)):
            raise HostError("the new image is not encrypted as it should be")
        base = self._backing()
        if made.backing_file != (base[0] if base is not None else None):
            raise HostError("the new image has another backing file than was asked for")
        if self.base is not None and base is not None and not leads_to(self.folder, base[0], self.base.image.fd):
            raise RefusedError(
                "stale_plan", f"{display(base[0])} does not lead to {self.base.image.shown}; scan the host first"
            )
        below = self.base.node() if self.base is not None else None
        node = Node(new.new, form, self.name, below)
        for passphrase in self.wish.keys.by_id.values():
            if not keys.opens(self.io, node, passphrase):
                raise HostError("the passphrase does not open the new image")
        if form in img.CHECKED and not self.wish.keys.by_id:
            report = img.check(self.io, node, img.Effort(self.wish.idle_io))
            if not report.sound or report.leaks:
                raise HostError(f"the new image has {report.corruptions} corruptions and {report.leaks} leaks")
