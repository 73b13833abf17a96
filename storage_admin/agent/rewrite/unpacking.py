"""A packed image becomes a new one: OVA archives, gzip, xz and zstd, and files that were split into parts.

What comes out is written where the new image is to be, nothing in between. All of it may be hostile: an image is only
taken where its header names no other file.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Callable, cast

from storage_admin.agent import formats
from storage_admin.agent.formats import Facts, UnreadableError, tar
from storage_admin.agent.programs import tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import INVALID, HostError, RefusedError, display
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import Member, Node
from storage_admin.agent.rewrite.creation import Creation
from storage_admin.agent.rewrite.incoming import write_sparse
from storage_admin.agent.rewrite.packed import GZIP, OVA, PLAIN, XZ, ZSTD, Source, fed
from storage_admin.agent.swap.swap import NewFile

_PIECE = 1 << 20
_MOST_MANIFEST = 1 << 20
#: Bytes of what is packed that go into the decompressor at once, and for how many of them there may be another member:
#: each costs a copy of what is left of the piece.
_FED, _BYTES_A_MEMBER = 64 << 10, 1 << 10
#: Bytes that an xz file may have its reader keep.
_MOST_MEMORY = 512 << 20
#: As ovftool and VirtualBox write it, the latter with spaces.
_DIGEST = re.compile(r"(SHA1|SHA256|SHA512)\s*\((.+)\)\s*=\s*([0-9a-fA-F]+)\s*")


@dataclass
class Unpacking(Creation):
    """One run of the verb.

    Args:
        source: what is packed.
        member: of an archive, the disk's name; empty for the only one.
        sha256: of the source as a whole, in hexadecimal digits, where whoever asks knows it.
    """

    source: Source = field(default_factory=lambda: Source(b"", []))
    member: str = ""
    sha256: str = ""
    _node: Member | None = None
    _digest: Any = field(default_factory=hashlib.sha256)
    _content: Any = field(default_factory=hashlib.sha256)
    _kind: str = PLAIN
    _done_bytes: int = 0

    def run(self) -> dict[str, Any]:
        self._kind = self.source.kind
        told = super().run()
        digest = None if self._node is not None else self._content.hexdigest()
        told |= {"packed": self._kind, "packed_bytes": self.source.size, "content_sha256": digest}
        return told | {"parts": len(self.source.fds)}

    def _refuse(self) -> None:
        self.source.refuse_changed()

    def _tell(self, written: int) -> None:
        if self._node is None:
            self.io.progress("unpacking", self._done_bytes, self.source.size)
        else:
            super()._tell(written)

    def _needed(self) -> int:
        if self._kind != OVA:
            # How much comes out nobody can tell before: the reserve is watched while it is written.
            return self.source.size
        self._node = self._disk()
        size = img.info(self.io, self._node).get("virtual-size")
        if not isinstance(size, int) or size <= 0 or size % 512:
            raise RefusedError("dirty_or_corrupt", f"the disk in {display(self.source.path)} does not say its size")
        self.wish = replace(self.wish, virtual_size=size)
        return img.measure(self.io, self._node, "cluster_size=65536")

    def _disk(self) -> Member:
        """The disk of the archive, whose manifest was checked."""
        if len(self.source.fds) > 1:
            raise RefusedError(INVALID, "an archive in several parts has to be joined first (cat)")
        fd = self.source.fds[0]
        try:
            members = list(tar.members(fd, self.source.size, self.io.check))
        except tar.DamagedError as error:
            raise RefusedError(
                "dirty_or_corrupt", f"{display(self.source.path)} is no whole archive: {error}"
            ) from error
        disks = [one for one in members if one.name.lower().endswith(b".vmdk")]
        chosen = [one for one in disks if not self.member or one.name == os.fsencode(self.member)]
        if len(chosen) != 1:
            names = ", ".join(display(one.name) for one in disks[:20]) or "none"
            raise RefusedError(INVALID, f"choose one disk of {display(self.source.path)} by its name; it has: {names}")
        disk = chosen[0]
        if os.pread(fd, 4, disk.offset) != b"KDMV":
            raise RefusedError("unsupported_subformat", f"{display(disk.name)} is no VMDK in one piece")
        self._check_manifest(members, disk)
        return Member(fd, "vmdk", self.source.path + b" (" + disk.name + b")", None, disk.offset, disk.size)

    def _check_manifest(self, members: list[tar.Member], disk: tar.Member) -> None:
        """Compare the disk with what the archive's manifest says of it."""
        fd, shown = self.source.fds[0], display(disk.name)
        told = [one for one in members if one.name.lower().endswith(b".mf") and 0 < one.size <= _MOST_MANIFEST]
        if not told:
            self.io.log(f"{display(self.source.path)} has no manifest that its disk could be compared with", "warning")
            return
        for line in os.pread(fd, told[0].size, told[0].offset).decode("utf-8", "replace").splitlines():
            match = _DIGEST.fullmatch(line)
            if match is None or os.fsencode(match[2]) != disk.name:
                continue
            digest, at = hashlib.new(match[1].lower()), 0
            while at < disk.size and (piece := os.pread(fd, min(_PIECE, disk.size - at), disk.offset + at)):
                digest.update(piece)
                at += len(piece)
                self.io.check()
                self.io.progress("checking", at, disk.size)
            if digest.hexdigest() != match[3].lower():
                raise RefusedError("dirty_or_corrupt", f"{shown} does not match the {match[1]} of the manifest")
            return
        self.io.log(f"the manifest does not name {shown}", "warning")

    def _make(self, new: NewFile, effort: img.Effort) -> None:
        if self.sha256 or self._node is None:
            self._unpack(new, effort)
        if self._node is not None:
            effort = img.Effort(
                effort.idle_io, effort.watch, lambda share: self._tell(round(share * self.wish.virtual_size))
            )
            self._done(new, "convert", img.convert(self.io, self._node, self._written(new), effort))

    def _unpack(self, new: NewFile, effort: img.Effort) -> None:
        """Read all of the source; what it holds is written, unless qemu does that."""
        output = _Output(new.new, self._content) if self._node is None else None
        started, shown = time.monotonic(), display(self.source.path)

        def take(piece: bytes) -> None:
            if output is not None:
                output.write(piece)
            self.io.check()
            if effort.watch is not None:
                effort.watch()
            while self.wish.bandwidth and time.monotonic() < started + self._done_bytes / self.wish.bandwidth:
                time.sleep(0.05)
                self.io.check()

        try:
            if self._kind == ZSTD:
                self._zstd(take, effort)
            for piece in self._unpacked():
                take(piece)
        except (zlib.error, lzma.LZMAError, EOFError) as error:
            raise RefusedError("dirty_or_corrupt", f"{shown} cannot be unpacked: {error}") from error
        if self.sha256 and self._digest.hexdigest() != self.sha256.lower():
            raise RefusedError("dirty_or_corrupt", f"the SHA-256 of {shown} is {self._digest.hexdigest()}")
        if output is not None:
            output.end()

    def _pieces(self) -> Iterator[bytes]:
        for piece in self.source.pieces(_FED if self._kind in {GZIP, XZ} else _PIECE):
            self._digest.update(piece)
            self._done_bytes += len(piece)
            yield piece

    def _unpacked(self) -> Iterator[bytes]:
        """What is packed, as far as there is a library for it; of an archive nothing, but all is read."""
        if self._kind == ZSTD:
            return
        if self._kind not in {GZIP, XZ}:
            for piece in self._pieces():
                yield piece if self._kind == PLAIN else b""
            return
        one, members = _decompressor(self._kind), 1
        for piece in self._pieces():
            rest = piece
            while rest:
                if one.eof:
                    if not rest.strip(b"\0"):
                        break  # padding
                    one, members = _decompressor(self._kind), members + 1
                    if members > 1000 + self._done_bytes // _BYTES_A_MEMBER:
                        raise EOFError("it consists of too many pieces")
                yield one.decompress(rest, _PIECE)
                while not one.eof and _more(one):
                    yield one.decompress(_held(one), _PIECE)
                rest = one.unused_data if one.eof else b""
        if not one.eof:
            raise EOFError("its end is missing")

    def _zstd(self, take: Callable[[bytes], None], effort: img.Effort) -> None:
        """Unpack it by the program, as there is no library. By a name it would pass on what it does not know."""
        with fed(self._pieces()) as stdin:
            done = tools.run(
                ["zstd", "-dcq"], self.io, limits=None, idle_io=effort.idle_io, files=Files(), on_output=take,
                watch=effort.watch, shown=["zstd", "-dcq", display(self.source.path)], stdin=stdin,
            )  # fmt: skip
        if done.exit_code:
            raise RefusedError("dirty_or_corrupt", f"{display(self.source.path)} cannot be unpacked: {done.words()}")

    def _verify(self, new: NewFile) -> None:
        """The header names no other file, its metadata is sound, and a disk of an archive reads as there."""
        form, reader = self.target.format, formats.Reader(new.new, os.fstat(new.new).st_size)
        looks_like = formats.probe(reader)
        if looks_like != form and not (form == "raw" and looks_like == "iso"):
            raise RefusedError("format_mismatch", f"what was unpacked looks like {looks_like}, not like {form}")
        try:
            made: Facts = formats.read_as(reader, form)
        except UnreadableError as error:
            raise RefusedError("dirty_or_corrupt", f"what was unpacked cannot be read: {error}") from error
        if made.backing_file is not None or made.data_file is not None or made.extents:
            raise RefusedError("unsupported_subformat", "what was unpacked names other files, which are not in it")
        node, effort = Node(new.new, form, self.name), img.Effort(self.wish.idle_io)
        if form in img.CHECKED:
            report = img.check(self.io, node, effort)
            if not report.sound:
                raise RefusedError("dirty_or_corrupt", f"what was unpacked has {report.corruptions} corruptions")
        self.wish = replace(self.wish, virtual_size=made.virtual_size)
        if self._node is not None and not img.compare(self.io, self._node, node, made.virtual_size, effort):
            raise HostError("the new image differs from the disk in the archive")


def _decompressor(kind: str) -> Any:
    return zlib.decompressobj(31) if kind == GZIP else lzma.LZMADecompressor(lzma.FORMAT_XZ, _MOST_MEMORY)


def _more(one: Any) -> bool:
    """Whether it holds input that it has not worked on, as its output was bounded."""
    return bool(one.unconsumed_tail) if hasattr(one, "unconsumed_tail") else not one.needs_input


def _held(one: Any) -> bytes:
    return cast("bytes", one.unconsumed_tail) if hasattr(one, "unconsumed_tail") else b""


class _Output:
    """Writes a stream into an empty file, zeros as holes."""

    def __init__(self, fd: int, digest: Any) -> None:
        self._fd, self._digest, self._at = fd, digest, 0

    def write(self, piece: bytes) -> None:
        """The next bytes."""
        self._digest.update(piece)
        write_sparse(self._fd, piece, self._at)
        self._at += len(piece)

    def end(self) -> None:
        """Make the file as long as the stream."""
        os.ftruncate(self._fd, self._at)
