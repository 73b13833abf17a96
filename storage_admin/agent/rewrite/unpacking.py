"""A packed image becomes a new one: OVA archives, gzip, xz and zstd, and files that were split into parts.

What is packed is read once, from beginning to end, and written where the new image is to be: nothing is unpacked twice.
All of it may be hostile, so that only headers of images that name no other file are taken.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import tarfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Callable, cast

from storage_admin.agent import formats
from storage_admin.agent.folders.pools import open_beneath
from storage_admin.agent.formats.facts import Facts, UnreadableError
from storage_admin.agent.host import locking
from storage_admin.agent.programs import tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import INVALID, HostError, RefusedError, display
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite.creation import Creation
from storage_admin.agent.swap.journal import Stamp
from storage_admin.agent.swap.swap import NewFile

_PIECE = 1 << 20
#: What is all zeros in pieces of this size is not written: a hole takes no space.
_HOLE = 64 << 10
_MOST_PARTS, _MOST_MEMBERS, _MOST_MANIFEST = 500, 1000, 1 << 20
_GZIP, _XZ, _ZSTD, _OVA, _PLAIN = "gzip", "xz", "zstd", "ova", "plain"
_MAGIC = {b"\x1f\x8b": _GZIP, b"\xfd7zXZ\0": _XZ, b"\x28\xb5\x2f\xfd": _ZSTD}
#: Bytes that an xz file may have its reader keep.
_MOST_MEMORY = 512 << 20
#: `disk.001`, `disk.aa`, `disk.part1`: what split(1) and archivers make.
_NUMBERED = re.compile(rb"(.*?\.(?:part)?)([0-9]+|[a-z]{2,3})")
#: As ovftool and VirtualBox write it, the latter with spaces.
_DIGEST = re.compile(r"(SHA1|SHA256|SHA512)\s*\((.+)\)\s*=\s*([0-9a-fA-F]+)\s*")


@dataclass
class Source:
    """The file or files that are read, in their order. Close it in the end.

    Args:
        path: of the first one.
        fds: descriptors, open for reading.
    """

    path: bytes
    fds: list[int]
    stamps: list[Stamp] = field(default_factory=list)

    @classmethod
    def open(cls, pool_path: bytes, path: bytes) -> Source:
        """The file at that path, and the parts that follow it.

        Raises:
            RefusedError: ``stale_plan``, ``outside_pool``; ``image_in_use`` where somebody writes to one.
        """
        source = cls(path, [])
        try:
            for one in _parts(path):
                try:
                    source.fds.append(open_beneath(pool_path, one, os.O_RDONLY))
                except FileNotFoundError:
                    if not source.fds:
                        raise RefusedError("stale_plan", f"{display(path)} does not exist") from None
                    break
            source.stamps = [Stamp.of(os.fstat(fd)) for fd in source.fds]
            source.refuse_changed()
        except BaseException:
            source.close()
            raise
        return source

    def close(self) -> None:
        """Let go of it."""
        while self.fds:
            os.close(self.fds.pop())

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(stamp.file_size for stamp in self.stamps)

    @property
    def kind(self) -> str:
        """How it is packed, by its content."""
        head = os.pread(self.fds[0], 512, 0)
        if head[257:262] == b"ustar":
            return _OVA
        return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), _PLAIN)

    def refuse_changed(self) -> None:
        """Refuse what somebody writes to, or has written to since it was opened."""
        for fd, stamp in zip(self.fds, self.stamps):
            if locking.open_for_writing(fd):
                raise RefusedError(
                    "image_in_use", f"{display(self.path)} is still written to; wait until it is complete"
                )
            if Stamp.of(os.fstat(fd)) != stamp:
                raise RefusedError("stale_plan", f"{display(self.path)} was changed while it was read; try again")

    def pieces(self) -> Iterator[bytes]:
        """All bytes."""
        for fd in self.fds:
            at = 0
            while piece := os.pread(fd, _PIECE, at):
                yield piece
                at += len(piece)


def _parts(path: bytes) -> Iterator[bytes]:
    """The path, and those of the parts that would follow it."""
    yield path
    folder, name = os.path.split(path)
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return
    stem, last = match.groups()
    if not (last.strip(b"0") in {b"", b"1"} or last.strip(b"a") == b""):
        return
    for _ in range(_MOST_PARTS):
        last = _next(last)
        yield os.path.join(folder, stem + last)


def _next(part: bytes) -> bytes:
    if part.isdigit():
        return str(int(part) + 1).encode().rjust(len(part), b"0")
    letters = bytearray(part)
    for place in reversed(range(len(letters))):
        if letters[place] < ord("z"):
            letters[place] += 1
            break
        letters[place] = ord("a")
    return bytes(letters)


@dataclass(frozen=True)
class Member(Node):
    """An image that is part of another file."""

    offset: int = 0
    size: int = 0

    def options(self) -> dict[str, Any]:
        """As of any node; its file is so many bytes of the other one."""
        opened = super().options()
        return opened | {"file": {"driver": "raw", "offset": self.offset, "size": self.size, "file": opened["file"]}}


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
    _read: Any = field(default_factory=hashlib.sha256)
    _content: Any = field(default_factory=hashlib.sha256)
    _kind: str = _PLAIN
    _done_bytes: int = 0

    def run(self) -> dict[str, Any]:
        """All steps; returns and raises as the verb."""
        self._kind = self.source.kind
        told = super().run()
        digest = None if self._node is not None else self._content.hexdigest()
        return told | {"packed": self._kind, "packed_bytes": self.source.size, "content_sha256": digest}

    def _refuse(self) -> None:
        self.source.refuse_changed()

    def _tell(self, written: int) -> None:
        if self._node is None:
            self.io.progress("unpacking", self._done_bytes, self.source.size)
        else:
            super()._tell(written)

    def _needed(self) -> int:
        if self._kind != _OVA:
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
        members = self._members()
        disks = [one for one in members if one.name.lower().endswith(".vmdk") and one.isreg() and not one.issparse()]
        chosen = [one for one in disks if not self.member or one.name == self.member]
        if len(chosen) != 1:
            names = ", ".join(one.name for one in disks[:20]) or "none"
            raise RefusedError(INVALID, f"choose one disk of {display(self.source.path)} by its name; it has: {names}")
        disk, fd = chosen[0], self.source.fds[0]
        if os.pread(fd, 4, disk.offset_data) != b"KDMV":
            raise RefusedError("unsupported_subformat", f"{disk.name} is no VMDK in one piece")
        self._check_manifest(members, disk)
        return Member(
            fd, "vmdk", self.source.path + b" (" + os.fsencode(disk.name) + b")", None, disk.offset_data, disk.size
        )

    def _members(self) -> list[tarfile.TarInfo]:
        found: list[tarfile.TarInfo] = []
        try:
            with os.fdopen(os.dup(self.source.fds[0]), "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    found.append(member)
                    if len(found) > _MOST_MEMBERS:
                        raise RefusedError("unsupported_subformat", "the archive has too many members")
        except (tarfile.TarError, ValueError, EOFError, OverflowError, OSError) as error:
            raise RefusedError(
                "dirty_or_corrupt", f"{display(self.source.path)} is no whole archive: {error}"
            ) from error
        return [one for one in found if one.offset_data + one.size <= self.source.size]

    def _check_manifest(self, members: list[tarfile.TarInfo], disk: tarfile.TarInfo) -> None:
        """Compare the disk with what the archive's manifest says of it."""
        fd = self.source.fds[0]
        told = [one for one in members if one.name.lower().endswith(".mf") and 0 < one.size <= _MOST_MANIFEST]
        if not told:
            self.io.log(f"{display(self.source.path)} has no manifest that its disk could be compared with", "warning")
            return
        for line in os.pread(fd, told[0].size, told[0].offset_data).decode("utf-8", "replace").splitlines():
            match = _DIGEST.fullmatch(line)
            if match is None or match[2] != disk.name:
                continue
            digest, at = hashlib.new(match[1].lower()), 0
            while at < disk.size:
                piece = os.pread(fd, min(_PIECE, disk.size - at), disk.offset_data + at)
                if not piece:
                    break
                digest.update(piece)
                at += len(piece)
                self.io.check()
                self.io.progress("checking", at, disk.size)
            if digest.hexdigest() != match[3].lower():
                raise RefusedError("dirty_or_corrupt", f"{disk.name} does not match the {match[1]} of the manifest")
            return
        self.io.log(f"the manifest does not name {disk.name}", "warning")

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
        started = time.monotonic()

        def take(piece: bytes) -> None:
            if output is not None:
                output.write(piece)
            self.io.check()
            if effort.watch is not None:
                effort.watch()
            while self.wish.bandwidth and time.monotonic() < started + self._done_bytes / self.wish.bandwidth:
                time.sleep(0.05)
                self.io.check()

        shown = display(self.source.path)
        try:
            for piece in self._plain():
                take(piece)
        except (zlib.error, lzma.LZMAError, EOFError) as error:
            raise RefusedError("dirty_or_corrupt", f"{shown} cannot be unpacked: {error}") from error
        if self.sha256 and self._read.hexdigest() != self.sha256.lower():
            raise RefusedError("dirty_or_corrupt", f"the SHA-256 of {shown} is {self._read.hexdigest()}")
        if self._kind == _ZSTD:
            self._zstd(take, effort)
        if output is not None:
            output.end()

    def _counted(self) -> Iterator[bytes]:
        for piece in self.source.pieces():
            self._read.update(piece)
            self._done_bytes += len(piece)
            yield piece

    def _plain(self) -> Iterator[bytes]:
        """What is packed, as far as there is a library for it; else nothing, but all is read."""
        if self._kind not in {_GZIP, _XZ}:
            for piece in self._counted():
                yield piece if self._kind == _PLAIN else b""
            return
        one = _decompressor(self._kind)
        for piece in self._counted():
            rest = piece
            while rest:
                if one.eof:
                    if not rest.strip(b"\0"):
                        break  # padding
                    one = _decompressor(self._kind)
                yield one.decompress(rest, _PIECE)
                while not one.eof and _more(one):
                    yield one.decompress(_held(one), _PIECE)
                rest = one.unused_data if one.eof else b""
        if not one.eof:
            raise EOFError("its end is missing")

    def _zstd(self, take: Callable[[bytes], None], effort: img.Effort) -> None:
        """Unpack it by the program, as there is no library."""
        if len(self.source.fds) > 1:
            raise RefusedError(INVALID, "zstd in several parts has to be joined first (cat)")
        fd = self.source.fds[0]
        done = tools.run(
            ["zstd", "-dcqf", f"/proc/self/fd/{fd}"], self.io, limits=None, idle_io=effort.idle_io,
            files=Files([fd]), on_output=take, watch=effort.watch,
            shown=["zstd", "-dcq", display(self.source.path)],
        )  # fmt: skip
        if done.exit_code:
            raise RefusedError("dirty_or_corrupt", f"{display(self.source.path)} cannot be unpacked: {done.words()}")

    def _verify(self, new: NewFile) -> None:
        """The header names no other file, its metadata is sound, and a disk of an archive reads as there."""
        form, size = self.target.format, os.fstat(new.new).st_size
        looks_like = formats.probe(new.new, size)
        if looks_like != form and not (form == "raw" and looks_like == "iso"):
            raise RefusedError("format_mismatch", f"what was unpacked looks like {looks_like}, not like {form}")
        try:
            made: Facts = formats.read(new.new, size, self.name, form)
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
    return zlib.decompressobj(31) if kind == _GZIP else lzma.LZMADecompressor(lzma.FORMAT_XZ, _MOST_MEMORY)


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
        view = memoryview(piece)
        for start in range(0, len(piece), _HOLE):
            part = view[start : start + _HOLE]
            if part.tobytes().strip(b"\0"):
                done = 0
                while done < len(part):
                    done += os.pwrite(self._fd, part[done:], self._at + start + done)
        self._at += len(piece)

    def end(self) -> None:
        """Make the file as long as the stream."""
        os.ftruncate(self._fd, self._at)
