"""Recipes that write an image's own layer anew: compressed, or as it is without its zeros and unused clusters.

What a disk is known by: VirtualBox and others name it by its UUID, and so do images that build on it.

Layouts: qemu, block/vdi.c, for VDI 1.1; Microsoft, Virtual Hard Disk Image Format Specification 1.0.

A copy of a file as it lies on the disk, holes and all: what a tool that changes an image works on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from typing import Callable

from storage_admin.agent.formats import Facts, vpc
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.agent.qemu import img, node
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite import vmdk_descriptor
from storage_admin.agent.rewrite.base import Recipe, Rewrite
from storage_admin.agent.rewrite.chain import Link
from storage_admin.agent.rewrite.incoming import write
from storage_admin.agent.swap.swap import NewFile

#: Offset and length in a VDI: its comment; its own UUID and that of its last change.
_VDI = ((0x54, 256), (0x188, 32))
#: Where in a VHD's footer it says how this very file is laid out: version and data offset, checksum, disk type.
_VHD_LAYOUT = ((0, 24), (60, 8))
_FIXED = bytes((0, 0, 0, 2))


def carry_identity_over(image_format: str, source: int, target: int) -> None:
    """Make a copy that takes an image's place the same disk for who knows it; of other formats there is nothing to do.

    Args:
        image_format: of both.
        source: descriptor of the image.
        target: descriptor of the copy, open for reading and writing.

    Raises:
        HostError: the copy is not laid out as qemu lays it out.
    """
    if image_format == "vdi":
        for offset, length in _VDI:
            os.pwrite(target, os.pread(source, length, offset), offset)
    elif image_format == "vpc":
        _carry_footer_over(source, target)
    elif image_format == "vmdk":
        vmdk_descriptor.carry_identity(source, target)


def _carry_footer_over(source: int, target: int) -> None:
    """All that a footer says of the disk: unique id, time, size, geometry, and who made it (the size goes by that)."""
    head, end = _at(source, 0), _at(source, _end(source))
    footer = bytearray(head if head[:8] == vpc.COOKIE else end)
    made = _at(target, _end(target))
    # In a fixed one the first sector is the guest's, whatever it looks like.
    places = {_end(target)} if made[60:64] == _FIXED else {0, _end(target)}
    if any(_at(target, place)[:8] != vpc.COOKIE for place in places):
        raise HostError("the copy has no footer where a VHD has one")
    for offset, length in _VHD_LAYOUT:
        footer[offset : offset + length] = made[offset : offset + length]
    footer[64:68] = vpc.checksum(bytes(footer)).to_bytes(4, "big")
    for place in places:
        os.pwrite(target, footer, place)


def _end(fd: int) -> int:
    return os.fstat(fd).st_size - vpc.FOOTER_SIZE


def _at(fd: int, place: int) -> bytes:
    return os.pread(fd, vpc.FOOTER_SIZE, place)


_MIB = 1 << 20
_PIECE = 8 * _MIB
#: linux/fs.h: share the blocks of another file, where the filesystem can (xfs, btrfs).
_FICLONE = 0x40049409
_CANNOT_SHARE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS, errno.EBADF, errno.EPERM}


def copy_file(
    source: int, target: int, bandwidth: int | None, watch: Callable[[], None], progress: Callable[[int], None]
) -> None:
    """Give an empty file the content of another one.

    Args:
        source: descriptor to read from.
        target: descriptor of an empty file, open for writing.
        bandwidth: bytes a second, at most.
        watch: called for each piece; what it raises ends the copy.
        progress: told how many bytes of the file, holes included, are done.

    Raises:
        OSError: it could not be read or written.
    """
    size = os.fstat(source).st_size
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in _CANNOT_SHARE:
            raise
    else:
        progress(size)
        return
    os.ftruncate(target, size)
    at, copied, started = 0, 0, time.monotonic()
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break  # nothing but a hole up to the end
            raise
        at = os.lseek(source, start, os.SEEK_HOLE)
        while start < at:
            done = _copy_piece(source, target, start, min(_PIECE, at - start))
            start, copied = start + done, copied + done
            watch()
            progress(start)
            if bandwidth:
                _wait_until(started + copied / bandwidth, watch)
    progress(size)


def _copy_piece(source: int, target: int, start: int, length: int) -> int:
    piece = os.pread(source, length, start)
    if not piece:
        raise OSError(errno.EIO, "the file became shorter while it was copied")
    write(target, memoryview(piece), start)
    return len(piece)


def _wait_until(when: float, watch: Callable[[], None]) -> None:
    while (left := when - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
        watch()


#: Bytes that tables may take beside the data, in formats that qemu-img does not measure.
_TABLES = 8 << 20
_SECTOR = 512


def convert(
    work: Rewrite,
    replacement: NewFile,
    form: str,
    options: str,
    *,
    compress: bool,
    backing: tuple[bytes, str] | None = None,
) -> None:
    """Have qemu-img write the chain into the new file, or only the image's own layer on a ``backing``.

    Args:
        form, options, compress, backing: as of :class:`img.Conversion`.
    """
    facts = work.chain.image.facts
    target = img.Conversion(
        folder=work.folder,
        name=replacement.new_name,
        shown=work.shown(replacement),
        format=form,
        options=options,
        compress=compress,
        backing=backing,
        virtual_size=facts.virtual_size,
        bitmaps=bool(facts.bitmaps),
        bandwidth=work.wish.bandwidth,
    )
    done = img.convert(work.io, work.chain.node(), target, work.effort("copying", facts.virtual_size))
    work.refuse_failed("qemu-img convert", done)


class Copy(Recipe):
    """``qemu-img convert`` into the same format with the same options; an overlay keeps its immediate base."""

    method = "copy"
    formats = frozenset({"qcow2", "raw", "vdi", "vmdk", "vpc"})
    compress = False

    def refuse(self, work: Rewrite) -> None:
        """Refuse formats that are not written anew, and images with errors."""
        image, form = work.chain.image, work.chain.image.facts.format
        if form not in self.formats:
            raise RefusedError(
                "unsupported_subformat", f"{image.shown} is a {form} image, which {self.method} cannot write"
            )
        refuse_two_sizes(image)
        if form == "vmdk":
            if image.facts.backing_file is not None:
                raise RefusedError(
                    "unsupported_subformat",
                    f"{image.shown} is a VMDK with a backing file, which cannot be written; convert it to qcow2",
                )
            vmdk_descriptor.refuse_unnamed(image.fd, image.shown)
        work.refuse_damaged()

    def needed(self, work: Rewrite) -> int:
        """What qemu-img measures for the layer uncompressed."""
        if work.chain.image.facts.format not in {"qcow2", "raw"}:
            return work.chain.image.stamp.allocated_size + _TABLES  # qemu-img does not measure these
        if work.chain.image.facts.format == "raw":
            return work.chain.image.stamp.allocated_size
        return img.measure(work.io, work.chain.node(alone=True), self.options(work))

    def options(self, work: Rewrite) -> str:
        """Creation options of the new file, for ``-o``."""
        facts = work.chain.image.facts
        if facts.format == "qcow2":
            return creation_options(facts, facts.compression or "zlib")
        if facts.format == "vdi":
            return "static=on" if facts.subformat == "static" else ""
        if facts.format == "vpc":
            # Without force_size the virtual size is rounded up to what a disk's geometry can say.
            return f"subformat={facts.subformat},force_size=on"
        return f"subformat={facts.subformat}" if facts.format == "vmdk" else ""

    def base(self, work: Rewrite) -> Node | None:
        return work.chain.node().backing

    def backing(self, work: Rewrite) -> tuple[bytes, str] | None:
        """The base as the new header is to name it, and its format."""
        written, base = work.chain.image.facts.backing_file, work.chain.ancestors[:1]
        return None if written is None else (written, base[0].planned.format)

    def make(self, work: Rewrite, replacement: NewFile) -> None:
        """Convert the image's own layer, or the whole of it without a base, into the new file."""
        facts = work.chain.image.facts
        compress = self.compress or facts.subformat == "streamOptimized"
        convert(work, replacement, facts.format, self.options(work), compress=compress, backing=self.backing(work))
        if facts.format == "vmdk":
            vmdk_descriptor.carry_over(work.chain.image.fd, replacement.new, work.name)
        else:
            carry_identity_over(facts.format, work.chain.image.fd, replacement.new)
        if facts.format == "raw":
            cut_padding(work.chain.image, replacement.new)

    def differences(self, work: Rewrite, made: Facts) -> list[str]:
        """What a copy leaves alone must be as it was."""
        old, ancestors = work.chain.image.facts, work.chain.ancestors
        base = ancestors[0].planned.format if ancestors else None
        return differences(old, made, self.compression_of(work), base)

    def compression_of(self, work: Rewrite) -> str | None:
        """What the copy's header has to name."""
        return work.chain.image.facts.compression


class Compress(Copy):
    """The same, compressed; only qcow2 holds compressed clusters."""

    method = "compress"
    formats = frozenset({"qcow2"})
    compress = True

    def __init__(self, asked: str) -> None:
        """Args: ``asked`` is ``zlib``, ``zstd``, or ``auto`` for the better one that the image and qemu-img can."""
        self.asked = asked
        self.compression = "zlib"

    @property
    def result(self) -> dict[str, object]:
        return {"compression": self.compression}

    def refuse(self, work: Rewrite) -> None:
        """Refuse other formats, errors, and a compression that is not there."""
        image, form = work.chain.image, work.chain.image.facts.format
        if form != "qcow2":
            raise RefusedError(
                "unsupported_subformat",
                f"{image.shown} is a {form} image, which cannot hold compressed data; convert it to qcow2, or "
                "reclaim it in place if it contains zeros",
            )
        super().refuse(work)
        self.compression = self._choose(work)

    def _choose(self, work: Rewrite) -> str:
        compat = work.chain.image.facts.compat
        if self.asked == "zlib" or (self.asked == "auto" and compat == "0.10"):
            return "zlib"
        if compat == "0.10":
            raise RefusedError(INVALID, "zstd requires an image of compat 1.1; choose zlib or auto")
        if node.supports_zstd(work.io):
            return "zstd"
        if self.asked == "zstd":
            raise RefusedError("tool_missing", "this host's qemu-img cannot compress with zstd; choose zlib or auto")
        return "zlib"

    def options(self, work: Rewrite) -> str:
        return creation_options(work.chain.image.facts, self.compression)

    def compression_of(self, work: Rewrite) -> str | None:  # noqa: ARG002 (it was chosen before)
        return self.compression


def cut_padding(image: Link, new: int) -> None:
    """Let a raw copy of a raw image end where that does, also within a sector: qemu fills the last one up with zeros.

    Raises:
        HostError: the copy ends elsewhere.
    """
    end = image.stamp.file_size
    padding = os.fstat(new).st_size - end
    if not 0 <= padding < _SECTOR or any(os.pread(new, padding, end)):
        raise HostError(f"the copy does not end where the image does, but {padding} bytes from there")
    os.ftruncate(new, end)


def refuse_two_sizes(image: Link) -> None:
    """Refuse a disk that other programs see with another end than qemu, which would be missing from what it writes.

    Raises:
        RefusedError: ``unsupported_subformat``.
    """
    facts = image.facts
    if facts.other_size is not None:
        raise RefusedError(
            "unsupported_subformat",
            f"the size of {image.shown} is ambiguous: {facts.virtual_size} bytes by its geometry, {facts.other_size} "
            "by its footer; convert it with the program that created it",
        )


def creation_options(facts: Facts, compression: str) -> str:
    """The options that a qcow2 image was created with, for ``-o`` of its copy.

    Args:
        facts: the image's header.
        compression: ``zlib`` or ``zstd``.
    """
    options = [f"cluster_size={facts.cluster_size}", f"compat={facts.compat}"]
    if facts.compat != "0.10":
        options += [f"refcount_bits={facts.refcount_bits}", f"lazy_refcounts={'on' if facts.lazy_refcounts else 'off'}"]
        # Older versions of qemu-img do not know these.
        options += ["extended_l2=on"] if facts.extended_l2 else []
        options += ["compression_type=zstd"] if compression == "zstd" else []
    return ",".join(options)


def differences(old: Facts, new: Facts, compression: str | None, base_format: str | None) -> list[str]:
    """In what two headers differ that a copy should have left alone, by name.

    Args:
        old: of the image.
        new: of the copy.
        compression: that the copy should have; ``None`` stands for zlib.
        base_format: of the base, which the copy declares also where the image does not.
    """
    same = ["virtual_size", "cluster_size", "compat", "refcount_bits", "extended_l2", "backing_file", "encrypted"]
    same.append("subformat")
    different = [name for name in same if getattr(old, name) != getattr(new, name)]
    if bool(old.lazy_refcounts) != bool(new.lazy_refcounts):
        different.append("lazy_refcounts")
    if new.backing_format != (old.backing_format or base_format):
        different.append("backing_format")
    if (new.compression or "zlib") != (compression or "zlib"):
        different.append("compression")
    if sorted(one.name for one in old.bitmaps) != sorted(one.name for one in new.bitmaps):
        different.append("bitmaps")
    if new.snapshots or new.data_file is not None or new.dirty or new.corrupt:
        different.append("state")
    return different
