"""What a qcow2 image takes for content of which so much is known: metadata, and how clusters are laid out.

As qemu writes it (block/qcow2-refcount.c, block/qcow2-cluster.c): a plain cluster takes a cluster; compressed ones are
put one behind the other to the byte, until something else is allocated in between or a cluster has as many of them as
its refcount can say.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage_admin.agent.formats import Facts
from storage_admin.agent.formats.qcow2 import Header, l1_entries
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.measure.sampling import BLOCK

#: Filesystems that allocate nothing between two writes into a new file.
_LEAVES_HOLES = frozenset({"ext2", "ext3", "ext4", "btrfs", "tmpfs"})


@dataclass(frozen=True)
class Layout:
    """What the size of a new image with the same options depends on; sizes in bytes.

    ``bitmaps`` is what the persistent bitmaps take, which are carried over. ``fills_gaps`` says that the filesystem may
    allocate what is left out between two writes, as XFS does with what it set aside while a file grew.
    """

    cluster_size: int
    refcount_bits: int
    l1_size: int
    bitmaps: int = 0
    fills_gaps: bool = False

    @classmethod
    def of(cls, fd: int, header: Header, facts: Facts, bitmaps: int) -> Layout:
        """The layout of an image, and of a new one beside it."""
        mount = Mounts.of_this_machine().of_descriptor(fd)
        fills_gaps = mount is None or mount.filesystem not in _LEAVES_HOLES
        return cls(1 << header.cluster_bits, facts.refcount_bits or 16, l1_entries(header) * 8, bitmaps, fills_gaps)

    @property
    def grain(self) -> int:
        """What is lost at most, in bytes, where a row of compressed clusters breaks off."""
        return min(BLOCK, self.cluster_size)

    @property
    def lost_at_most(self) -> int:
        """The same, with what the filesystem may fill up."""
        return self.cluster_size if self.fills_gaps else self.grain

    def metadata(self, l2_tables: int, data: float) -> float:
        """Header, L1, L2 and refcounts, in bytes on disk.

        Args:
            l2_tables: how many the image has.
            data: bytes of clusters.
        """
        fixed, blocks, table = self._parts(l2_tables, data)
        return fixed + (blocks + table) * self.cluster_size

    def metadata_at_most(self, l2_tables: int, data: float) -> float:
        """The same at most: a refcount table that grows does so by half, and its earlier places stay in the file."""
        fixed, blocks, table = self._parts(l2_tables, data)
        grown = 4 * table if table > 1 else table
        return fixed + (blocks * 1.02 + grown + 1) * self.cluster_size + 2 * BLOCK

    def _parts(self, l2_tables: int, data: float) -> tuple[float, float, float]:
        size = self.cluster_size
        fixed = size + -(-self.l1_size // BLOCK) * BLOCK + l2_tables * size + self.bitmaps
        clusters = (fixed + data) / size + 3
        blocks = -(-clusters * self.refcount_bits // (size * 8))
        return fixed, blocks, -(-blocks * 8 // size)

    @property
    def packs(self) -> bool:
        """Whether more than one compressed cluster can stand in a cluster of the file."""
        return self.refcount_bits > 1

    def crowded(self, packed: float) -> float:
        """How many rows of compressed clusters break off because a refcount cannot count more of them.

        Args:
            packed: how many compressed clusters there are.
        """
        most = (1 << self.refcount_bits) - 1
        return packed / most if 1 < most < 1 << 16 else 0.0

    def rows_at_most(self, plain: float, packed: float, l2_tables: int, data: float) -> float:
        """The most rows that compressed clusters may fall into: whatever is allocated may come between two of them.

        Args:
            plain: how many clusters are stored uncompressed.
            packed: how many compressed.
            l2_tables: how many there are.
            data: bytes of clusters.
        """
        _, blocks, table = self._parts(l2_tables, data)
        # One that lies in two host clusters counts in both.
        return min(plain + l2_tables + blocks + 2 * table + 2 + 2 * self.crowded(packed), packed)
