"""The recipe that packs an image into a file for elsewhere: by gzip or zstd, in parts where wanted, or as an OVA."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.formats import Facts, ova
from storage_admin.agent.host import space
from storage_admin.agent.programs import tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import INVALID, HostError, RefusedError, display
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import Member, Node
from storage_admin.agent.rewrite import vmdk_descriptor
from storage_admin.agent.rewrite.base import Rewrite
from storage_admin.agent.rewrite.conversion import Convert, Target
from storage_admin.agent.rewrite.copying import refuse_two_sizes
from storage_admin.agent.rewrite.incoming import write
from storage_admin.agent.rewrite.packed import GZIP, MOST_PARTS, OVA, ZSTD, fed
from storage_admin.agent.swap.swap import NewFile

#: What packs the standard input, and what unpacks it again; ``-n`` leaves name and time out.
_PACK = {GZIP: ["gzip", "-cn"], ZSTD: ["zstd", "-cq"]}
_UNPACK = {GZIP: ["gzip", "-dcq"], ZSTD: ["zstd", "-dcq"]}
PACKINGS = frozenset({*_PACK, OVA})
#: Bytes that are read at once.
_PIECE = 1 << 20
#: Bytes that any packing may need beside that.
_MORE = 16 << 20
#: What a part of a file of holes takes (gzip: a thousandth; zstd: 1 in 10,000), and by how much data that cannot be
#: packed grows (gzip: 5 bytes for 32 KiB; a VMDK's grain: its header, in sectors).
_HOLES = {GZIP: 0.0011, ZSTD: 0.0001}
_GROWTH = 1.01


def room(packing: str, data: int, file_size: int, virtual_size: int) -> int:
    """The most that an export takes, in bytes.

    Args:
        data: what the image occupies, or of an OVA what its chain holds. Of the tables of a VMDK only those of data are
            no holes: 15 MiB of a disk of 60 TiB without any (measured, QEMU 7.2).
    """
    tables = virtual_size // 1_000_000 if packing == OVA else round(file_size * _HOLES[packing])
    return round(data * _GROWTH) + tables + _MORE


@dataclass(frozen=True)
class Export:
    """What is asked for beside the target's place.

    Args:
        packing: :data:`packed.GZIP`, ``ZSTD`` or ``OVA``.
        part_bytes: the size of each part; ``None`` for one file. The name is that of the first part.
        appliance: what an OVA says of its guest.
    """

    packing: str
    part_bytes: int | None
    appliance: ova.Appliance


class Exporting(Convert):
    """One packed file, or its parts; what it holds is compared with the image by unpacking it again."""

    method = "export"

    def __init__(self, pool_path: bytes, path: bytes, asked: Export) -> None:
        super().__init__(Target(pool_path, path, "raw"))
        self._asked, self._made = asked, list[int]()
        self._digest, self._disk_bytes = hashlib.sha256(), 0
        self._content, self._told = hashlib.sha256(), dict[str, Any]()
        if asked.packing != OVA:
            # Its bytes are packed as they are, whatever they mean.
            self.carries |= {"encrypted"}

    @property
    def result(self) -> dict[str, Any]:
        """How it is packed, in how many parts, what all occupy, and the SHA-256 of all parts and of what they hold."""
        return super().result | self._told

    def begin(self, work: Rewrite) -> NewFile:
        """As any new file; of one in parts no name that a part may get is taken."""
        if self._asked.part_bytes is not None:
            like = re.compile(re.escape(self._stem) + rb"[0-9]{3}")
            taken = next(filter(like.fullmatch, map(os.fsencode, os.listdir(work.folder))), None)
            if taken is not None:
                raise RefusedError("target_exists", f"{display(taken)} already exists; choose another name")
        return super().begin(work)

    @property
    def _stem(self) -> bytes:
        """What the names of all parts begin with."""
        return os.path.basename(self.target.path)[:-3]

    def refuse(self, work: Rewrite) -> None:
        """Refuse an overlay that would be packed without what it stands on, and what has errors."""
        image = work.chain.image
        if self._asked.packing != OVA and work.chain.ancestors:
            raise RefusedError(
                "unsupported_subformat",
                f"{image.shown} is an overlay, which is nothing without its base; export it as OVA, or convert it",
            )
        if self._asked.packing == OVA:
            refuse_two_sizes(image)
            if not image.facts.virtual_size:
                raise RefusedError("unsupported_subformat", f"{image.shown} has no bytes, which is no disk")
        if not image.facts.encrypted:
            work.refuse_damaged()

    def needed(self, work: Rewrite) -> int:
        """What the data takes where it cannot be packed at all."""
        image, packing = work.chain.image, self._asked.packing
        data = space.allocated(image.fd)
        if packing == OVA:
            data = img.measure(work.io, work.chain.node(), "cluster_size=65536")
        return room(packing, data, os.fstat(image.fd).st_size, image.facts.virtual_size)

    def recheck(self, work: Rewrite) -> None:  # noqa: ARG002 (what it made is measured)
        """Nothing more; all is written, and what filesystems set aside behind its end is given back."""
        for fd in self._made:
            os.ftruncate(fd, os.fstat(fd).st_size)
        self._told["after_bytes"] = sum(space.allocated_on_disk(fd) for fd in self._made)

    def make(self, work: Rewrite, replacement: NewFile) -> None:
        self._made = [replacement.new]
        if self._asked.packing == OVA:
            self._make_ova(work, replacement)
        else:
            self._pack(work, replacement)

    def _pack(self, work: Rewrite, replacement: NewFile) -> None:
        source, packing = work.chain.image.fd, self._asked.packing
        total, started, limit = os.fstat(source).st_size, time.monotonic(), self._asked.part_bytes
        os.lseek(source, 0, os.SEEK_SET)
        written = 0

        def take(piece: bytes) -> None:
            nonlocal written
            rest = memoryview(piece)
            while rest:
                if limit is not None and written == limit:
                    self._made.append(replacement.add_part(self._part_name(len(self._made) + 1)))
                    written = 0
                done = os.write(self._made[-1], rest[: None if limit is None else limit - written])
                rest, written = rest[done:], written + done
            self._digest.update(piece)
            read = os.lseek(source, 0, os.SEEK_CUR)  # which the tool moves: it has the same open file
            work.io.progress("copying", read, total)
            while work.wish.bandwidth and time.monotonic() < started + read / work.wish.bandwidth:
                time.sleep(0.05)
                work.io.check()
                work.watch()

        done = tools.run(
            _PACK[packing], work.io, limits=None, idle_io=work.wish.idle_io, files=Files(), on_output=take,
            watch=work.watch, shown=[*_PACK[packing], display(work.wish.image.path)], stdin=source,
        )  # fmt: skip
        work.refuse_failed(packing, done)

    def _part_name(self, number: int) -> bytes:
        if number > MOST_PARTS:
            raise RefusedError(INVALID, f"these are more than {MOST_PARTS} parts; choose larger ones")
        return self._stem + b"%03d" % number

    def _make_ova(self, work: Rewrite, replacement: NewFile) -> None:
        new, effort = replacement.new, work.effort("copying", work.chain.image.facts.virtual_size)
        empty = img.Conversion(
            folder=work.folder, name=replacement.new_name, shown=self._asked.appliance.disk.encode(), format="vmdk",
            options="adapter_type=lsilogic,subformat=streamOptimized", compress=False,
            virtual_size=work.chain.image.facts.virtual_size,
        )  # fmt: skip
        done = img.create(work.io, empty, effort)
        if not done.exit_code:
            self._move(new)
            disk = Member(new, "vmdk", work.shown(replacement), None, ova.DISK)
            done = img.fill(work.io, work.chain.node(), disk, effort, zeroed=True, bandwidth=work.wish.bandwidth)
        work.refuse_failed("qemu-img convert", done)
        os.fsync(new)
        end = os.fstat(new).st_size
        end += -end % len(ova.END)
        os.ftruncate(new, end)
        self._disk_bytes = end - ova.DISK
        digest = self._digest_of(work, new, ova.DISK, "copying")
        write(new, self._asked.appliance.front(self._disk_bytes, digest), 0)
        write(new, ova.END, end)

    def _move(self, new: int) -> None:
        """Put the empty disk where it is to be in the archive, under its name there. Most of its tables are zeros."""
        vmdk_descriptor.name_extent(new, self._asked.appliance.disk.encode())
        size, at, made = os.fstat(new).st_size, 0, list[tuple[int, bytes]]()
        for piece in _pieces(new, 0):
            made += [(at, piece)] if piece.strip(b"\0") else []
            at += len(piece)
        os.ftruncate(new, 0)
        for at, piece in made:
            write(new, piece, ova.DISK + at)
        os.ftruncate(new, ova.DISK + size)

    def _digest_of(self, work: Rewrite, fd: int, at: int, stage: str) -> str:
        """SHA-256 of a file from there on, in hexadecimal digits."""
        digest, size = hashlib.sha256(), os.fstat(fd).st_size
        for piece in _pieces(fd, at):
            digest.update(piece)
            at += len(piece)
            work.io.check()
            work.watch()
            work.io.progress(stage, at, size)
        return digest.hexdigest()

    def verify(self, work: Rewrite, copy: Node) -> None:
        """Unpack it again, and compare that with the image."""
        image, size = work.chain.image, work.chain.image.facts.virtual_size
        if self._asked.packing == OVA:
            sha256 = self._digest_of(work, copy.fd, 0, "verifying")
            disk = Member(copy.fd, "vmdk", copy.path, None, ova.DISK, self._disk_bytes)
            report = img.check(work.io, disk, work.effort("verifying", 0))
            if not report.sound:
                raise HostError(f"the disk in the archive has {report.corruptions} corruptions")
            same = img.compare(work.io, work.chain.node(), disk, size, work.effort("verifying", size))
        else:
            same, sha256 = self._unpacks_to(work, image.fd, copy.path), self._digest.hexdigest()
        if not same:
            work.chain.refuse_stale()
            raise HostError("what was packed differs from the image")
        self._told = {
            "packing": self._asked.packing,
            "parts": len(self._made),
            "file_size": sum(os.fstat(fd).st_size for fd in self._made),
            "sha256": sha256,
            "content_sha256": None if self._asked.packing == OVA else self._content.hexdigest(),
        }

    def _unpacks_to(self, work: Rewrite, image: int, copy: bytes) -> bool:
        argv, total, at, same = _UNPACK[self._asked.packing], os.fstat(image).st_size, 0, True

        def compare(piece: bytes) -> None:
            nonlocal at, same
            self._content.update(piece)
            while piece and same:
                there = os.pread(image, len(piece), at)
                same = bool(there) and piece.startswith(there)
                at, piece = at + len(there), piece[len(there) :]
            work.io.progress("verifying", at, total)

        packed = (piece for fd in self._made for piece in _pieces(fd, 0))
        with fed(packed) as stdin:
            done = tools.run(
                argv, work.io, limits=None, idle_io=work.wish.idle_io, files=Files(), on_output=compare,
                watch=work.watch, shown=[*argv, display(copy)], stdin=stdin,
            )  # fmt: skip
        if done.exit_code:
            raise HostError(f"what was packed cannot be unpacked: {done.words()}")
        return same and at == total

    def differences(self, work: Rewrite, made: Facts) -> list[str]:  # noqa: ARG002 (it is no image)
        """None that a header could tell."""
        return []


def _pieces(fd: int, at: int) -> Iterator[bytes]:
    while piece := os.pread(fd, _PIECE, at):
        yield piece
        at += len(piece)
