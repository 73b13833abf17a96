"""What a header says about an image, in one shape for every format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple


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
    ``extents`` are the names of further files that hold the image's data (VMDK), relative to the image.
    """

    format: str
    virtual_size: int
    cluster_size: Optional[int] = None
    compat: Optional[str] = None
    compression: Optional[str] = None
    refcount_bits: Optional[int] = None
    lazy_refcounts: Optional[bool] = None
    extended_l2: Optional[bool] = None
    preallocation: Optional[str] = None
    subformat: Optional[str] = None
    encrypted: bool = False
    encryption: Optional[str] = None
    dirty: bool = False
    corrupt: bool = False
    backing_file: Optional[bytes] = None
    backing_format: Optional[str] = None
    data_file: Optional[bytes] = None
    data_file_raw: Optional[bool] = None
    extents: Tuple[bytes, ...] = ()
    snapshots: Tuple[Snapshot, ...] = ()
    bitmaps: Tuple[str, ...] = ()
