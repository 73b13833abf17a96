"""The header of a LUKS volume that fills a file, versions 1 and 2.

Layout: LUKS On-Disk Format Specification 1.2.3 and LUKS2 On-Disk Format Specification 1.1.1; all numbers big-endian.
Bounds of version 1 as in qemu (crypto/block-luks.c).
"""

from __future__ import annotations

import hashlib
import os
import re
import struct

from storage_admin.agent.formats.facts import Facts, Reader, UnreadableError, text

MAGIC = b"LUKS\xba\xbe"

_SECTOR = 512
_HEADER = struct.Struct(">6sH32s32s32sII20s32sI40s")
_SLOT = struct.Struct(">II32sII")
_SLOTS = 8
#: What :func:`slots_of` needs.
HEADER_BYTES = _HEADER.size + _SLOTS * _SLOT.size
_SLOT_ON, _SLOT_OFF = 0x00AC71F3, 0x0000DEAD
_STRIPES = 4000
_FIRST_KEY_SECTOR = 8
_MAX_KEY_BYTES = 512
_WORD = re.compile(rb"[a-z0-9_:.-]{1,31}", re.IGNORECASE)

_HEADER_2 = struct.Struct(">6sHQQ48s32s64s40s48sQ184s64s")
_HEADER_2_AREA = 4096
#: The sizes that a LUKS2 header may have, its text included: 16 KiB to 4 MiB, doubled from one to the next.
_SIZES_2 = frozenset(16384 << step for step in range(9))
_CHECKSUMS = frozenset({b"sha1", b"sha256", b"sha512"})
_CHECKSUM_OFFSET = 448


def read(reader: Reader) -> Facts:
    """The facts of a LUKS volume; it is always encrypted.

    Version 1: the virtual size is that of the file without the header and keys, as ``qemu-img info`` says.

    Version 2: qemu does not open it as LUKS and takes it for a raw image, so that a guest can only have the whole file
    as its disk and decrypt it by itself. Hence it is no error, and its virtual size is the file's, as
    ``qemu-img info`` says of it; ``encryption`` is ``luks2``. What an opened volume holds stands in the header's text,
    which is not read.

    Raises:
        UnreadableError: what is wrong with the header, or which bound it exceeds.
    """
    if len(reader.head) < HEADER_BYTES or reader.head[:6] != MAGIC:
        raise UnreadableError("the LUKS header is cut off or missing")
    version = int.from_bytes(reader.head[6:8], "big")
    # qemu counts a file in whole sectors.
    file_size = (reader.file_size + _SECTOR - 1) // _SECTOR * _SECTOR
    if version == 1:
        encryption, payload_offset, slots = _version_1(reader.head)
        if payload_offset > file_size:
            raise UnreadableError(f"the file is cut off: its encrypted data starts at byte {payload_offset}")
        return Facts(
            format="luks", virtual_size=file_size - payload_offset, encrypted=True, encryption=encryption,
            key_slots=slots,
        )  # fmt: skip
    if version == 2:
        _check_version_2(reader)
        return Facts(format="luks", virtual_size=file_size, encrypted=True, encryption="luks2")
    raise UnreadableError(f"this version does not read LUKS version {version}")


def slots_of(head: bytes) -> tuple[int, ...] | None:
    """The slots of a header of version 1 that hold a key; ``None`` where it is damaged.

    Args:
        head: its first :data:`HEADER_BYTES`, wherever it stands.
    """
    try:
        return _version_1(head)[2]
    except UnreadableError:
        return None


def payload_offset(fd: int) -> int:
    """Where the encrypted data of a volume of version 1 starts, in bytes.

    Raises:
        UnreadableError: its header is damaged.
    """
    return _version_1(os.pread(fd, HEADER_BYTES, 0))[1]


def _version_1(head: bytes) -> tuple[str, int, tuple[int, ...]]:
    """How it is encrypted, in words, where the encrypted data starts, in bytes, and the slots that hold a key."""
    if len(head) < HEADER_BYTES or head[:8] != MAGIC + b"\0\1":
        raise UnreadableError("the LUKS header is cut off or missing")
    _, _, *words, payload_sector, key_bytes, _, _, iterations, _ = _HEADER.unpack_from(head)
    cipher, mode, _ = (_word(raw) for raw in words)
    if "-" not in mode:
        raise UnreadableError(f"unknown LUKS cipher mode {mode!r}")
    if not 0 < key_bytes <= _MAX_KEY_BYTES:
        raise UnreadableError(f"a LUKS key of {key_bytes} bytes")
    if not iterations:
        raise UnreadableError("the LUKS header says that its key was derived in no iterations")
    if payload_sector < _FIRST_KEY_SECTOR:
        raise UnreadableError("the LUKS header says that its data is in another file, or lies over the header")
    taken, held = [], []
    for number in range(_SLOTS):
        active, slot_iterations, _, start, stripes = _SLOT.unpack_from(head, _HEADER.size + number * _SLOT.size)
        if active not in (_SLOT_ON, _SLOT_OFF) or stripes != _STRIPES or (active == _SLOT_ON and not slot_iterations):
            raise UnreadableError(f"the LUKS key slot {number} is damaged")
        sectors = (key_bytes * stripes + _SECTOR - 1) // _SECTOR
        taken.append((start, start + sectors))
        if active == _SLOT_ON:
            held.append(number)
    taken.sort()
    if taken[0][0] < _FIRST_KEY_SECTOR or taken[-1][1] > payload_sector:
        raise UnreadableError("the LUKS key slots lie over the header or the encrypted data")
    if any(first[1] > second[0] for first, second in zip(taken, taken[1:])):
        raise UnreadableError("two LUKS key slots overlap")
    # In XTS one half of the key is for the tweak.
    key_bits = key_bytes * 8 // (2 if mode.startswith("xts-") else 1)
    return f"luks ({cipher}-{key_bits}-{mode})", payload_sector * _SECTOR, tuple(held)


def _word(raw: bytes) -> str:
    word, found, _ = raw.partition(b"\0")
    if not found or not _WORD.fullmatch(word):
        raise UnreadableError(f"the LUKS header names its cipher {text(word)!r}")
    return word.decode("ascii")


def _check_version_2(reader: Reader) -> None:
    if len(reader.head) < _HEADER_2_AREA:
        raise UnreadableError("the LUKS2 header is cut off")
    _, _, size, _, _, algorithm, _, _, _, offset, _, stored = _HEADER_2.unpack_from(reader.head)
    if size not in _SIZES_2 or offset != 0:
        raise UnreadableError(f"a LUKS2 header of {size} bytes at byte {offset}")
    name = algorithm.split(b"\0")[0]
    if name not in _CHECKSUMS:
        raise UnreadableError(f"unknown checksum {text(name)!r} of a LUKS2 header")
    whole = memoryview(reader.at(0, size, "the LUKS2 header"))
    found = hashlib.new(name.decode("ascii"), whole[:_CHECKSUM_OFFSET], usedforsecurity=False)
    found.update(bytes(len(stored)))
    found.update(whole[_CHECKSUM_OFFSET + len(stored) :])
    if stored[: found.digest_size] != found.digest():
        raise UnreadableError("the LUKS2 header is damaged: its checksum is wrong")
