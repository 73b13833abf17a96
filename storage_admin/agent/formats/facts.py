"""What a header says about an image, in one shape for every format."""

from __future__ import annotations

from dataclasses import dataclass


class UnreadableError(Exception):
    """The header cannot be believed: damaged, cut off, beyond the bounds, or of a format that is not read.

    Its only argument is a sentence for the admin.
    """


@dataclass(frozen=True)
class Snapshot:
    """An internal snapshot: ``size`` is that of the saved machine state in bytes, ``created`` seconds since 1970."""

    id: str
    name: str
    size: int
    created: int


@dataclass(frozen=True)
class Facts:
    """An image's header. ``None`` means that the format does not say; sizes are in bytes.

    ``backing_file`` and ``data_file`` stand as they were written: relative to the image, or with a protocol.
    ``encryption`` is ``aes`` or ``luks`` for what a qcow2 holds, ``luks (CIPHER)`` or ``luks2`` for a LUKS volume.
    ``other_size`` is what programs other than qemu take for the virtual size, where the header leaves that open (VHD).
    ``extents`` are the names of further files that hold the image's data (VMDK), relative to the image.
    """

    format: str
    virtual_size: int
    cluster_size: int | None = None
    compat: str | None = None
    compression: str | None = None
    refcount_bits: int | None = None
    lazy_refcounts: bool | None = None
    extended_l2: bool | None = None
    preallocation: str | None = None
    subformat: str | None = None
    encrypted: bool = False
    encryption: str | None = None
    dirty: bool = False
    corrupt: bool = False
    backing_file: bytes | None = None
    backing_format: str | None = None
    data_file: bytes | None = None
    data_file_raw: bool | None = None
    extents: tuple[bytes, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    bitmaps: tuple[str, ...] = ()
    other_size: int | None = None
