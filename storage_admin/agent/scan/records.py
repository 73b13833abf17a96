"""One image as it is told to the controller, and the fingerprint by which it is known again.

Files that a header may mean where it does not name a plain one: ``json:{…}``, ``file:name``, ``nbd://host/name``.

Nothing is opened by such a name. It is only asked whether it may mean an image that is about to lose its own.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import stat
import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from storage_admin.agent.formats import Facts, Reader, UnreadableError, read_as
from storage_admin.agent.host import attributes
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.protocol import b64

_NESTED = 8


def described_names(name: str) -> set[str]:
    """The paths, or file names, that a description may mean; more than it does mean, never less.

    Args:
        name: as it stands in the header; display form or decoded.
    """
    return set(_names(name, _NESTED))


def _names(name: str, deeper: int) -> Iterator[str]:
    if not deeper:
        return
    if name.startswith("json:"):
        try:
            yield from _strings(json.loads(name[5:]), deeper - 1)
        except (ValueError, RecursionError):
            # qemu would not understand it either, or it does not travel as it stands there.
            yield from filter(None, re.split(r'["/:,{}]', name))
        return
    yield name
    while ":" in name:
        name = name.partition(":")[2]
        yield name


def _strings(value: Any, deeper: int) -> Iterator[str]:
    if isinstance(value, str):
        yield from _names(value, deeper)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one, deeper)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one, deeper)


FINGERPRINT_SIZE = 16
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_STATUS = struct.Struct("=QQQQQQ").pack
#: A file may claim to be from long before 1970 or long after 2262: its times are cut to 64 bits.
_64_BITS = (1 << 64) - 1
_PROTOCOL = re.compile(rb"^[^/:]*:")
#: Facts that are told under the same name and need no change.
_PLAIN = (
    "format", "virtual_size", "other_size", "cluster_size", "compat", "compression", "refcount_bits", "lazy_refcounts",
    "extended_l2", "preallocation", "subformat", "encrypted", "encryption", "key_slots", "dirty", "corrupt",
    "backing_format", "data_file_raw", "bitmaps",
)  # fmt: skip
_BACKING = dict.fromkeys(("backing_b64", "backing_path_b64", "backing_unsafe", "backing_dev", "backing_inode"))
_WORDS = {True: "true", False: "false", None: "null"}
#: Headers that are kept as they were written out.
_MAX_HEADERS = 256
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_NO_BACKING = _encode(_BACKING)[1:-1]


def fingerprint(path: bytes, status: os.stat_result) -> bytes:
    """16 bytes that change whenever a file may have changed, or another one took its name."""
    return blake2b(
        path
        + _STATUS(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns & _64_BITS,
            status.st_ctime_ns & _64_BITS,
            status.st_blocks,
        ),
        digest_size=FINGERPRINT_SIZE,
    ).digest()


def with_parts(plain: bytes, parts: list[os.stat_result | None]) -> bytes:
    """The fingerprint of an image whose data is in other files: it changes when one of them does."""
    words = [b"" if part is None else fingerprint(b"", part) for part in parts]
    return blake2b(plain + b"|".join(words), digest_size=FINGERPRINT_SIZE).digest()


def backing_unsafe(name: bytes) -> str | None:
    """Why a name in a header is not a plain file's; ``None`` where it is.

    qemu takes what stands before a colon for a protocol, unless a slash comes first (block.c, path_has_protocol).
    """
    found = _PROTOCOL.match(name)
    if found is None:
        return None
    protocol = found[0][:40].decode("utf-8", "backslashreplace")
    return f"it does not name a plain file: qemu would use the protocol {protocol}"


def absolute(folder: bytes, name: bytes) -> bytes:
    """The normalised path of a name that stands in an image of this folder."""
    if b"/" not in name and name not in (b".", b".."):
        return (b"" if folder == b"/" else folder) + b"/" + name
    path = posixpath.normpath(posixpath.join(folder, name))
    return path[1:] if path.startswith(b"//") else path


class Recorder:
    """Opens images and tells what they are.

    Args:
        mounts: of this machine; a base on a filesystem that could hang is not looked at.
    """

    def __init__(self, mounts: Mounts) -> None:
        self._mounts = mounts
        self._has_flags: dict[int, bool] = {}
        self._headers: dict[tuple[Any, ...], str] = {}
        self._owners: dict[tuple[int, int, bytes, bytes], str] = {}

    def look(self, path: bytes) -> os.stat_result | None:
        """The status of the file that a header names; ``None`` where there is none or looking could hang."""
        if path.startswith((b"/dev/", b"/proc/", b"/sys/")) or self._mounts.may_wait_there(path):
            return None
        try:
            return os.stat(path)
        except (OSError, ValueError):
            return None

    def immutable(self, fd: int, device: int) -> bool | None:
        """Whether the file carries ``chattr +i`` or ``+a``; ``None`` where its filesystem does not say."""
        if not self._has_flags.get(device, True):
            return None
        try:
            return bool(attributes.told_flags(fd) & (attributes.IMMUTABLE | attributes.APPEND_ONLY))
        except OSError:
            self._has_flags[device] = False
            return None

    def facts(self, reader: Reader, looks_like: str) -> tuple[Facts | None, str]:
        """A file's facts, or why there are none."""
        try:
            return read_as(reader, looks_like), ""
        except UnreadableError as error:
            return None, str(error)

    def line(
        self,
        pool: int,
        path: bytes,
        plain: bytes,
        status: os.stat_result,
        detail: str,
        known: set[bytes],
        *,
        looks_like: str | None = None,
        facts: Facts | None = None,
        immutable: bool | None = None,
        alone: bool = False,
        acl: bytes = b"",
        capabilities: bool = False,
    ) -> bytes | None:
        """The ``image`` event, or ``None`` where the image is known by a fingerprint that counts its parts in.

        Args:
            pool: the pool's id.
            path: absolute.
            plain: fingerprint of the file itself.
            status: of the file, from before it was read.
            detail: why its header is not readable.
            known: the controller's fingerprints; the image's own is taken out.
            looks_like: the format by its magic; ``None`` where it was not opened.
            facts: what the header says, ``None`` where it is not readable.
            immutable: as :meth:`immutable`.
            alone: whether a header that is not readable says at least that it names no other file.
            acl: who may read it beside its mode, as the kernel keeps that.
            capabilities: whether it has some (setcap).
        """
        parts = self._parts(path, facts) if facts is not None and facts.extents else None
        print_ = plain if parts is None else with_parts(plain, parts)
        if print_ in known:
            known.discard(print_)
            return None
        blocks = status.st_blocks + sum(part.st_blocks for part in parts or () if part is not None)
        # Numbers, hexadecimal and base64 need no escaping: a format string takes a third of an encoder's time.
        return (
            f'{{"event":"image","pool":{pool},"path_b64":"{b64(path)}","fp":"{print_.hex()}","dev":{status.st_dev},'
            f'"inode":{status.st_ino},"nlink":{status.st_nlink},"file_size":{status.st_size},'
            f'"allocated_size":{blocks * 512},"mtime_ns":{status.st_mtime_ns},"ctime_ns":{status.st_ctime_ns},'
            f'"mode":{stat.S_IMODE(status.st_mode)},"uid":{status.st_uid},"gid":{status.st_gid},'
            f'"acl":{_encode(acl.hex() or None)},"capabilities":{_WORDS[capabilities or None]},'
            f'"immutable":{_WORDS[immutable]},'
            f"{self._header(path, looks_like, facts, detail, alone)},{self._backing(path, facts, status)}}}\n"
        ).encode("ascii")

    def _parts(self, path: bytes, facts: Facts) -> list[os.stat_result | None]:
        folder = posixpath.dirname(path)
        # An external data file of a qcow2 does not count: qemu-img info leaves it out, and it may be an image itself.
        return [None if backing_unsafe(name) else self.look(absolute(folder, name)) for name in facts.extents]

    def _header(self, path: bytes, looks_like: str | None, facts: Facts | None, detail: str, alone: bool) -> str:
        """What the header says but the base's place. Most images of a pool say the same: it is written out once."""
        if facts is not None and (facts.extents or facts.data_file):
            return _encode(_header_fields(looks_like, facts, detail) | {"parts": self._stands_for(path, facts)})[1:-1]
        if facts is None:
            return _encode(_header_fields(looks_like, facts, detail) | {"alone": alone})[1:-1]
        if facts.snapshots or facts.bitmaps:
            return _encode(_header_fields(looks_like, facts, detail))[1:-1]
        values = facts.__dict__
        key = tuple([values[name] for name in _PLAIN])
        found = self._headers.get(key)
        if found is None:
            if len(self._headers) >= _MAX_HEADERS:
                self._headers.clear()
            found = self._headers[key] = _encode(_header_fields(looks_like, facts, ""))[1:-1]
        return found

    def _stands_for(self, path: bytes, facts: Facts) -> list[tuple[int, int]]:
        """Device and inode of the other files that hold the image's data, by whatever name the header reaches them."""
        folder = posixpath.dirname(path) or b"/"
        named = [name for name in (facts.data_file, *facts.extents) if name and not backing_unsafe(name)]
        found = [self.look(absolute(folder, name)) for name in named]
        return [(one.st_dev, one.st_ino) for one in found if one is not None]

    def _backing(self, path: bytes, facts: Facts | None, owner: os.stat_result) -> str:
        name = None if facts is None else facts.backing_file
        if name is None:
            return _NO_BACKING
        reason = backing_unsafe(name)
        if reason is not None:
            return _encode({**_BACKING, "backing_b64": b64(name), "backing_unsafe": reason})[1:-1]
        base = absolute(path[: path.rindex(b"/")] or b"/", name)
        status = self.look(base)
        place = 'null,"backing_inode":null' if status is None else f'{status.st_dev},"backing_inode":{status.st_ino}'
        told = (
            f'"backing_b64":"{b64(name)}","backing_path_b64":"{b64(base)}","backing_unsafe":null,"backing_dev":{place}'
        )
        return told if status is None else told + self._readers(owner, path, base)

    def _readers(self, owner: os.stat_result, path: bytes, base: bytes) -> str:
        """The groups of an overlay's owner, who else owns its folder, and whether a folder keeps them from its base."""
        key = owner.st_uid, owner.st_gid, posixpath.dirname(path), posixpath.dirname(base)
        if key not in self._owners:
            if len(self._owners) >= _MAX_HEADERS:
                self._owners.clear()
            folder = self.look(key[2] or b"/")
            if folder is None:  # it went away meanwhile
                return ""
            told, who = "", attributes.Who.owns(owner, folder)
            if who.uid != 0:
                closed = attributes.closed_folder(who, os.path.realpath(base)) is not None
                told = f',"groups":{sorted(who.groups)},"backing_closed":{_WORDS[closed]}'
            if folder.st_uid not in (0, who.uid):
                who = attributes.Who.keeps(folder)
                closed = attributes.closed_folder(who, os.path.realpath(base)) is not None
                told += f',"keeper":[{who.uid},{folder.st_gid}],"keeper_closed":{_WORDS[closed]}'
            self._owners[key] = told
        return self._owners[key]


def _header_fields(looks_like: str | None, facts: Facts | None, detail: str) -> dict[str, Any]:
    told: dict[str, Any] = {"format": looks_like, "state": "unreadable" if facts is None else "ok", "detail": detail}
    if facts is None:
        return {
            **dict.fromkeys(_PLAIN),
            **told,
            "bitmaps": (),
            "data_file_b64": None,
            "extents_b64": (),
            "snapshots": (),
        }
    for name in _PLAIN:
        told[name] = getattr(facts, name)
    told["data_file_b64"] = None if facts.data_file is None else b64(facts.data_file)
    told["extents_b64"] = [b64(extent) for extent in facts.extents]
    told["snapshots"] = [vars(snapshot) for snapshot in facts.snapshots]
    told["bitmaps"] = [vars(bitmap) for bitmap in facts.bitmaps]
    return told
