"""One storage pool of a scan: which of its files are images, and which of them are new or changed."""

from __future__ import annotations

import errno
import os
import posixpath
import re
import stat
import sys
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent.folders.pools import is_ours, open_parent, open_root, place
from storage_admin.agent.formats import Reader, UnreadableError, guess, stands_alone, vmdk
from storage_admin.agent.host import attributes, special_mounts
from storage_admin.agent.host.mounts import Mount, Mounts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import STALE, RefusedError, b64, display
from storage_admin.agent.scan.records import OPEN_FLAGS, Recorder, fingerprint
from storage_admin.agent.scan.walk import Folder, OwnFiles, Walk, is_blind

EXTENSIONS = frozenset({"qcow2", "raw", "img", "vmdk", "vdi", "vhd", "vpc", "vhdx", "qed", "qcow", "luks"})
#: A volume of libvirt or Proxmox needs no extension; smaller files are notes, keys and the like.
_MIN_BARE_VOLUME = 1 << 20
_VMDK_PART = re.compile(r"(.+)-(?:flat|delta|s\d{3}|f\d{3})\.vmdk", re.IGNORECASE)
_MAX_DESCRIPTOR = 64 * 1024
#: Files between two looks at the lifeline.
_CHECK_EVERY = 200
_MAX_DETAILS = 3


@dataclass
class PoolScan:
    """One pass over a pool.

    Args:
        pool: the pool's id.
        path: absolute path of its folder.
        kind: ``dir``, ``libvirt`` or ``proxmox``.
        known: fingerprints of the images that the controller has; those that are seen are taken out.
        named: paths that guests name, which are images whatever they look like.
        recorder: opens images.
        io: the controller.
        before: images found in the pools before this one, for the progress.
        nested: folders of the other pools, by device and inode, with their kinds; what they walk is theirs.
        elsewhere: paths that guests name in pools below this one.
    """

    pool: int
    path: bytes
    kind: str
    known: set[bytes]
    named: frozenset[bytes]
    recorder: Recorder
    io: AgentIO
    before: int = 0
    nested: dict[tuple[int, int], str] = field(default_factory=dict)
    elsewhere: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        self._unseen = set(self.named)
        self._seen_files = 0
        self._failures: list[str] = []
        self._others = self._others_bytes = 0
        self._own = OwnFiles()
        self.images = self.before
        self.changed = 0
        self.inodes: set[int] = set()
        self.device: int | None = None
        self.mount: Mount | None = None

    def run(self, mounts: Mounts, machine: str, *, walk: bool = True) -> dict[str, Any]:
        """Walk the pool and send its images.

        Args:
            mounts: of this machine.
            machine: this machine's id, for the keys of its own filesystems.
            walk: also look for others than the named ones.

        Returns:
            The fields of the ``pool`` event.
        """
        try:
            root = open_root(self.path)
        except RefusedError as refused:
            # Not looked into, so nothing in it has vanished. What root has to run ends without a full stop.
            state, end = ("changed", ".") if refused.code == "pool_changed" else ("not_listed", "")
            return self._event(state, refused.detail[:1].upper() + refused.detail[1:] + end)
        except OSError as error:
            gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
            return self._event(
                "missing" if gone else "unreadable",
                STALE if error.errno == errno.ESTALE else f"{error.strerror}",
            )
        try:
            self.mount, told = place(root, mounts, machine)
            self.device = told["dev"]
            walked = Walk(mounts.may_wait, self.nested)
            for folder in walked.folders(root, self.path, self.kind) if walk else ():
                self._folder(folder)
            self._own.leftovers += walked.abandoned
            self._named_elsewhere(mounts)
        finally:
            os.close(root)
        unread = walked.unread + self._failures
        notes = [(unread, "could not be read"), (walked.other_filesystems, "on another filesystem, not entered")]
        if self.kind == "dir":
            notes.append((walked.too_deep, "has folders that are too deep"))
        detail = "; ".join(_few(names) + ": " + what for names, what in notes if names)
        return {**self._event("unreadable" if unread else "ok", detail), **told}

    def without_answer(self) -> dict[str, Any]:
        """The fields of the ``pool`` event of a folder that gives no sign of life; it is not touched."""
        said = (
            f"The pool does not answer: nothing came within {special_mounts.PATIENCE:.0f} s. Its images are "
            "shown as last seen."
        )
        return self._event("silent", said)

    def without_mount(self, place: str) -> dict[str, Any]:
        """The fields of the ``pool`` event of a folder that is a storage only while something is mounted."""
        return self._event(
            "missing",
            f"Nothing is mounted at {place}. Mount it, or check its server. The images of the pool are "
            "shown as last seen.",
        )

    def _event(self, state: str, detail: str) -> dict[str, Any]:
        return {
            "id": self.pool,
            "state": state,
            "detail": detail,
            **dict.fromkeys(
                ("dev", "capacity_bytes", "available_bytes", "reserved_bytes", "filesystem", "mount_source")
            ),
            **dict.fromkeys(("network", "shared_key", "fs_key", "root", "mount")),
            "images": self.images - self.before,
            "others": {"count": self._others, "bytes": self._others_bytes},
            **self._own.facts(),
            # What was not read has not vanished.
            "vanished_b64": b64(b"".join(sorted(self.known))) if state == "ok" else "",
        }

    def _folder(self, folder: Folder) -> None:
        """The hot path: an unchanged image costs one ``stat`` and one hash here."""
        known, inodes, named, elsewhere = self.known, self.inodes, self._unseen, self.elsewhere
        prefix, fd, look = folder.path.rstrip(b"/") + b"/", folder.fd, os.stat
        encoding, errors = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
        parts = self._vmdk_parts(folder)
        for name in folder.files:
            self._seen_files += 1
            if self._seen_files % _CHECK_EVERY == 0:
                self.io.check()
                self.io.progress("scanning", self.images, None, f"{self.images:,} images so far")
            path = prefix + name.encode(encoding, errors)
            if is_ours(name):
                self._own.look(fd, name, path)
                continue
            if path in elsewhere:
                continue
            is_named = path in named
            if is_named:
                named.discard(path)
            try:
                status = look(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._failures.append(f"{name!a} ({error.strerror})")
                continue
            if name in parts and not is_named:
                inodes.add(status.st_ino)
                continue
            plain = fingerprint(path, status)
            if plain in known:
                known.discard(plain)
                inodes.add(status.st_ino)
                self.images += 1
                continue
            stem, _, extension = name.rpartition(".")
            has_extension = bool(stem) and extension.lower() in EXTENSIONS
            if stat.S_ISREG(status.st_mode):
                self._regular(fd, name, path, plain, status, has_extension, is_named)
            elif stat.S_ISLNK(status.st_mode) and (has_extension or is_named):
                self._tell(path, plain, status, "is a symbolic link; register the folder that it leads to")

    def _regular(
        self, fd: int, name: str, path: bytes, plain: bytes, status: os.stat_result, has_extension: bool, named: bool
    ) -> None:
        if not (has_extension or named) and (not status.st_size or name.lower().endswith(".iso")):
            self._other(status)
            return
        try:
            image = os.open(name, OPEN_FLAGS, dir_fd=fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if has_extension or named:
                self._tell(path, plain, status, f"it could not be opened: {error.strerror}")
            else:
                self._other(status)
            return
        try:
            self._opened(image, path, plain, status, has_extension, named)
        except OSError as error:
            self._tell(path, plain, status, f"it could not be read: {error.strerror}")
        finally:
            os.close(image)

    def _opened(
        self, fd: int, path: bytes, plain: bytes, status: os.stat_result, has_extension: bool, named: bool
    ) -> None:
        now = os.fstat(fd)
        if not stat.S_ISREG(now.st_mode):
            return
        if (now.st_ino, now.st_dev) != (status.st_ino, status.st_dev):
            status, plain = now, fingerprint(path, now)
        reader = Reader(fd, now.st_size)
        looks_like = guess(reader, path)
        if not named and not self._is_image(looks_like, reader.file_size, path, has_extension):
            self._other(status)
            return
        if looks_like == "iso":
            looks_like = "raw"
        facts, detail = self.recorder.facts(reader, looks_like)
        self._tell(
            path, plain, status, detail, looks_like=looks_like, facts=facts,
            immutable=self.recorder.immutable(fd, status.st_dev),
            alone=facts is None and stands_alone(reader, looks_like), acl=attributes.acl_of(fd),
            capabilities=attributes.has_capabilities(fd),
        )  # fmt: skip

    def _is_image(self, looks_like: str, size: int, path: bytes, has_extension: bool) -> bool:
        if has_extension or looks_like != "raw":
            return looks_like != "iso"
        if self.kind == "dir":
            return False
        is_bare = b"." not in posixpath.basename(path)
        return is_bare and size >= _MIN_BARE_VOLUME and size % 512 == 0

    def _tell(self, path: bytes, plain: bytes, status: os.stat_result, detail: str, **told: Any) -> None:
        """An image; nothing is ``told`` of one that could not be looked into."""
        self.images += 1
        self.inodes.add(status.st_ino)
        line = self.recorder.line(self.pool, path, plain, status, detail, self.known, **told)
        if line is not None:
            self.changed += 1
            self.io.emit_raw(line)

    def _other(self, status: os.stat_result) -> None:
        self._others += 1
        self._others_bytes += status.st_blocks * 512

    def _vmdk_parts(self, folder: Folder) -> set[str]:
        """The names in a folder that are extents of a VMDK whose descriptor is there as well."""
        names = {name for name in folder.files if name.endswith(("k", "K")) and name[-5:].lower() == ".vmdk"}
        parts = set()
        for name in names:
            found = _VMDK_PART.fullmatch(name)
            if found and found[1] + name[-5:] in names and not is_blind(folder.fd, name):
                parts.add(name)
                continue
            try:
                status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_DESCRIPTOR:
                    parts |= self._extents(folder.fd, name, status.st_size)
            except OSError:
                continue  # it is told where its turn comes
        # An extent is hidden as an image of its own only under a name that claims to be nothing else.
        return {name for name in parts if name.rpartition(".")[2].lower() not in EXTENSIONS - {"vmdk"}}

    def _extents(self, folder: int, name: str, size: int) -> set[str]:
        fd = os.open(name, OPEN_FLAGS, dir_fd=folder)
        try:
            reader = Reader(fd, size)
            if not vmdk.is_descriptor(reader.head):
                return set()
            return {os.fsdecode(extent) for extent in vmdk.read(reader).extents} - {name}
        except UnreadableError:
            return set()
        finally:
            os.close(fd)

    def _named_elsewhere(self, mounts: Mounts) -> None:
        """Files of the pool that guests name and the walk does not come by: deeper, or in another kind of folder."""
        for path in sorted(self._unseen):
            if mounts.may_wait(path):
                # Not looked at, and so not vanished either.
                self._failures.append(f"{display(path)}: it lies on a filesystem that is not scanned")
                continue
            try:
                folder, name = open_parent(self.path, path)
            except (OSError, RefusedError):
                continue  # missing, or reached through a link: the controller asks for its existence by itself
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                plain = fingerprint(path, status)
                if plain in self.known:
                    self.known.discard(plain)
                    self.inodes.add(status.st_ino)
                    self.images += 1
                elif stat.S_ISREG(status.st_mode):
                    self._regular(folder, os.fsdecode(name), path, plain, status, has_extension=False, named=True)
            except FileNotFoundError:
                continue
            except OSError as error:
                # A guest may name anything: one that no file can have is missing like any other.
                if error.errno != errno.ENAMETOOLONG:
                    self._failures.append(f"{name!a} ({error.strerror})")
            finally:
                os.close(folder)


def _few(names: list[str]) -> str:
    more = len(names) - _MAX_DETAILS
    return ", ".join(names[:_MAX_DETAILS]) + (f" and {more} more" if more > 0 else "")
