"""The recipe that adds a passphrase to an encrypted image or takes one away, on a copy of its file.

Only the LUKS header and the areas of the keys may differ from the image then: every other byte is compared, for which
no key is needed. A new passphrase has proven that it opens the copy before that takes the image's place, and so has
another one before the place of an old one is left empty.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.formats import Facts, UnreadableError, luks, qcow2
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.agent.qemu import keys
from storage_admin.agent.qemu.keys import Keys
from storage_admin.agent.qemu.node import Node, version
from storage_admin.agent.rewrite.base import Rewrite
from storage_admin.agent.rewrite.file_copies import FileCopy, changed

#: Key slots of LUKS 1.
SLOTS = 8
#: Since when qemu-img changes key slots (its changelog).
_SINCE = (5, 1)
_PIECE = 1 << 20


@dataclass
class KeySlots(FileCopy):
    """One change of the key slots.

    Args:
        keys: ``passphrase``, which opens the image before and after; ``new_passphrase`` is to open it, too.
        slot: the one that is to be emptied, in place of a new passphrase.
        must_open: passphrases that have to open the image afterwards as well, as a guest's.
        iter_time: milliseconds that it is to take to try the new passphrase; ``None`` for qemu's own choice.
    """

    keys: Keys
    slot: int | None = None
    must_open: tuple[str, ...] = ()
    iter_time: int | None = None
    _after: tuple[int, ...] = ()

    method = "copy"
    carries = frozenset({"encrypted", "has_internal_snapshots"})

    @property
    def result(self) -> dict[str, Any]:
        """Which slots hold a key now."""
        return {"key_slots": list(self._after)}

    def refuse(self, work: Rewrite) -> None:
        """Refuse what has no LUKS header that qemu changes, a wrong passphrase, the last slot, and one too many."""
        image, facts = work.chain.image, work.chain.image.facts
        if facts.key_slots is None:
            raise RefusedError("unsupported_subformat", f"{image.shown} has no LUKS header of version 1")
        if version(work.io) < _SINCE:
            raise RefusedError("tool_missing", "key slots are changed by qemu-img 5.1 or newer")
        node = work.chain.node()
        if not keys.opens(work.io, node, self._passphrase):
            raise RefusedError("wrong_passphrase", f"this passphrase does not open {image.shown}")
        if self.slot is not None and (self.slot not in facts.key_slots or len(facts.key_slots) < 2):
            raise RefusedError(
                "stale_plan", f"key slot {self.slot} of {image.shown} is empty or the last one; scan the host first"
            )
        if self.slot is None and len(facts.key_slots) >= SLOTS:
            raise RefusedError("stale_plan", f"all {SLOTS} key slots of {image.shown} are taken; empty one first")
        if self.slot is None and keys.opens(work.io, node, self._new):
            raise RefusedError("stale_plan", f"the new passphrase opens {image.shown} already")

    @property
    def _passphrase(self) -> str:
        return self.keys.by_id["passphrase"]

    @property
    def _new(self) -> str:
        return self.keys.by_id["new_passphrase"]

    def change(self, work: Rewrite, copy: Node) -> None:
        """Have qemu-img do it, and try who opens the copy now."""
        work.io.progress("changing keys", 0, None)
        if self.slot is None:
            options = {"state": "active", "new-secret": "new_passphrase"}
            options.update({"iter-time": str(self.iter_time)} if self.iter_time else {})
            keys.amend(work.io, copy, self.keys, "passphrase", options)
            needed = (self._passphrase, self._new, *self.must_open)
        else:
            alone = Keys({"passphrase": self._passphrase})
            keys.amend(work.io, copy, alone, "passphrase", {"state": "inactive", "keyslot": str(self.slot)})
            needed = (self._passphrase, *self.must_open)
        os.fsync(copy.fd)
        for number, one in enumerate(needed):
            if not keys.opens(work.io, copy, one):
                told = "this passphrase alone" if not number else "the passphrase that libvirt has for a guest"
                raise RefusedError("wrong_passphrase", f"{told} would not open {work.chain.image.shown} any more")

    def verify(self, work: Rewrite, copy: Node) -> None:
        """Every byte outside of the LUKS header is as it was."""
        image = work.chain.image
        size = image.stamp.file_size
        try:
            is_whole = image.planned.format == "luks"
            start, length = (0, luks.payload_offset(copy.fd)) if is_whole else qcow2.luks_area(copy.fd, size)
        except UnreadableError as error:
            raise HostError(f"the copy cannot be read: {error}") from error
        for number, (at, piece) in enumerate(_data(image.fd, copy.fd, size)):
            first, second = (os.pread(fd, piece, at) for fd in (image.fd, copy.fd))
            if first != second:
                inside = range(max(start - at, 0), min(max(start + length - at, 0), piece))
                rest = [part[: inside.start] + part[inside.stop :] if inside else part for part in (first, second)]
                if rest[0] != rest[1]:
                    work.chain.refuse_stale()
                    raise HostError("the copy differs from the image outside of its LUKS header")
            if number % 16 == 0:
                work.io.check()
                work.watch()
                work.io.progress("verifying", at, size)

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        self._after = made.key_slots or ()
        before = set(work.chain.image.facts.key_slots or ())
        wrong = changed(work.chain.image.facts, made)
        expected = before - {self.slot}
        fits = set(self._after) == expected if self.slot is not None else len(set(self._after) - before) == 1
        return wrong if fits and expected <= set(self._after) else [*wrong, "key slots"]


def _data(first: int, second: int, size: int) -> Iterator[tuple[int, int]]:
    """Offset and length, in bytes, of all pieces that are data in one of two files."""
    at = 0
    while at < size:
        starts = []
        for fd in (first, second):
            try:
                starts.append(os.lseek(fd, at, os.SEEK_DATA))
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
        if not starts:
            return
        at = max(at, min(starts) // _PIECE * _PIECE)
        yield at, min(_PIECE, size - at)
        at += _PIECE
