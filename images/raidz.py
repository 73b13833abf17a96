"""What a block of a volume takes on a raidz vdev of ZFS, parity and padding included.

ZFS writes each block with parity of its own, in whole sectors, and rounds it up to a multiple of parity and one more,
so that what it leaves free can be used (vdev_raidz.c, ``vdev_raidz_psize_to_asize``). What it then counts is that, less
what parity takes of a block of 128 KiB (``vdev_set_deflate_ratio``): small blocks count for more than their bytes.
"""

_UNIT = 512  # SPA_MINBLOCKSIZE
_USUAL = 128 << 10


def full_bytes(size: int, block: int, disks: int, parity: int, sector: int) -> int:
    """What ZFS counts for a volume all of whose blocks are written, without its metadata.

    Args:
        size: of the volume, in bytes; ``block``: of each of its blocks (``volblocksize``).
        disks: of a vdev; ``parity``: how many of them may fail.
        sector: bytes of the smallest write (2 to the power of ``ashift``).
    """
    ratio = _USUAL // (_on_disks(_USUAL, disks, parity, sector) // _UNIT)
    return -(-size // block) * (_on_disks(block, disks, parity, sector) // _UNIT) * ratio


def _on_disks(block: int, disks: int, parity: int, sector: int) -> int:
    """Bytes of all disks that one block takes."""
    data = -(-block // sector)
    sectors = data + parity * -(-data // (disks - parity))
    return -(-sectors // (parity + 1)) * (parity + 1) * sector
