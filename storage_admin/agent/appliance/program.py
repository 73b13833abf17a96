"""What runs beside the appliance: libguestfs' own process, as a user who owns nothing, and without network.

It is no module of the agent: the system's Python runs its text, since libguestfs' binding belongs to that. It reads a
request a line from standard input and answers each with a line of JSON; bytes of a file come behind the line that
tells their number.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from typing import Any, Callable

import guestfs  # type: ignore[import-not-found]

#: Entries of one folder, and bytes of a file that are read at once: a message of libguestfs holds 4 MiB.
MOST_ENTRIES, PIECE = 5000, 2 << 20
#: What is no filesystem that could be mounted.
_NONE = frozenset({"swap", "unknown", "crypto_LUKS", "LVM2_member", "linux_raid_member"})

#: What the kernel gives free space back of, and how all of such a filesystem is mounted.
_TRIMMED = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "vfat"})
_WHOLE = {"btrfs": "noatime,subvolid=5"}
#: Where the superblock of a btrfs is; its magic is at byte 64 of it, the tree of what was written last at 96.
_BTRFS = 65536


def text(said: object) -> str:
    """A name or a sentence that a guest's disk has chosen."""
    return str(said)[:500]


class Appliance:
    """The disk in its appliance."""

    def __init__(self, socket: str, memory: int, writable: bool) -> None:
        self._guest = guestfs.GuestFS(python_return_dict=True)
        self._guest.set_network(False)
        self._guest.set_memsize(memory)
        server = [f"unix:{socket}"]
        more = {"discard": "enable"} if writable else {}
        self._guest.add_drive_opts("disk", format="raw", readonly=not writable, protocol="nbd", server=server, **more)
        self._guest.launch()
        self._mounted = ""

    def look(self) -> dict[str, Any]:
        """The filesystems with how full they are, and the operating systems."""
        found = []
        for device, kind in sorted(self._guest.list_filesystems().items()):
            told: dict[str, Any] = {"device": text(device), "type": text(kind), "size": None, "free": None}
            if kind not in _NONE:
                told.update(self._sizes(device))
            found.append(told)
        self._unmount()
        return {"filesystems": found, "systems": [self._system(root) for root in self._guest.inspect_os()]}

    def _sizes(self, device: str) -> dict[str, Any]:
        try:
            self._mount(device)
            told = self._guest.statvfs("/")
        except RuntimeError as error:
            return {"why": text(error)}
        return {"size": told["blocks"] * told["frsize"], "free": told["bfree"] * told["frsize"]}

    def _system(self, root: str) -> dict[str, Any]:
        asked: dict[str, Callable[[str], Any]] = {
            "type": self._guest.inspect_get_type,
            "product": self._guest.inspect_get_product_name,
            "distribution": self._guest.inspect_get_distro,
            "architecture": self._guest.inspect_get_arch,
            "hostname": self._guest.inspect_get_hostname,
        }
        told = {"root": text(root)}
        for name, ask in asked.items():
            try:
                told[name] = text(ask(root))
            except RuntimeError:
                told[name] = "unknown"
        return told

    def _mount(self, device: str) -> None:
        if self._mounted == device:
            return
        self._unmount()
        self._guest.mount_ro(device, "/")
        self._mounted = device

    def _unmount(self) -> None:
        if self._mounted:
            self._guest.umount_all()
            self._mounted = ""

    def folder(self, device: str, path: str) -> dict[str, Any]:
        """What is in a folder."""
        self._mount(device)
        with tempfile.NamedTemporaryFile() as file:
            self._guest.ls0(path, file.name)
            raw = [one for one in file.read().split(b"\0") if one]
        names: list[str] = []
        odd: list[str] = []
        for one in sorted(raw)[:MOST_ENTRIES]:
            try:
                names.append(one.decode())
            except UnicodeDecodeError:
                odd.append(one.decode("utf-8", "backslashreplace"))
        entries = []
        for name, status in zip(names, self._guest.lstatnslist(path, names)):
            entries.append(
                {
                    "name": name, "mode": status["st_mode"], "size": status["st_size"], "mtime": status["st_mtime_sec"],
                    "uid": status["st_uid"], "gid": status["st_gid"],
                }
            )  # fmt: skip
        # libguestfs' binding takes no other names: they are told, and that is all.
        nothing = dict.fromkeys(("mode", "size", "mtime", "uid", "gid"), 0)
        return {"entries": [*entries, *({"name": name, **nothing} for name in odd)], "count": len(raw)}

    def unclean(self) -> dict[str, Any]:
        """Filesystems that were not unmounted, and systems that only sleep: nothing may be written there."""
        # Before the others are listed: for that, libguestfs mounts each btrfs, which writes what its log holds.
        known = [*self._guest.list_devices(), *self._guest.list_partitions(), *self._guest.lvs()]
        found = [
            {"device": text(device), "type": "btrfs", "why": "it was not unmounted"}
            for device in known
            if self._has_log(device)
        ]
        # libguestfs starts an array also without its other half, which would then be taken for failed.
        arrays = list(self._guest.list_md_devices())
        arrays += [one for one in known if "raid_member" in self._guest.vfs_type(one)]
        why = "it is part of a software RAID"
        found += [{"device": text(device), "type": "array", "why": why} for device in arrays]
        for device, kind in [] if found else self._devices():
            try:
                why = self._unclean(device, kind)
            except RuntimeError as error:
                why = text(error)
            if why:
                found.append({"device": text(device), "type": text(kind), "why": why})
        return {"unclean": found}

    def _devices(self) -> list[tuple[str, str]]:
        """Each filesystem once: those of btrfs are also listed by subvolume."""
        known = self._guest.list_filesystems().items()
        return sorted((device, kind) for device, kind in known if not device.startswith("btrfsvol:"))

    def _unclean(self, device: str, kind: str) -> str:
        if kind == "swsuspend":
            return "a hibernated system"
        if kind in {"ext2", "ext3", "ext4"}:
            told = self._guest.tune2fs_l(device)
            if told.get("Filesystem state") != "clean" or "needs_recovery" in told.get("Filesystem features", ""):
                return "it was not unmounted"
        if kind == "xfs" and self._guest.xfs_repair(device, nomodify=True):
            return "it was not unmounted, or is damaged"
        return ""

    def _has_log(self, device: str) -> bool:
        """Whether it is a btrfs whose last writes are in its log alone."""
        if self._guest.blockdev_getsize64(device) < _BTRFS + 4096:
            return False
        block = self._guest.pread_device(device, 4096, _BTRFS)
        return bool(block[64:72] == b"_BHRfS_M" and any(block[96:104]))

    def trim(self) -> dict[str, Any]:
        """Gives free space of each filesystem back to the disk."""
        trimmed, left = [], []
        for device, kind in self._devices():
            if kind not in _TRIMMED:
                left.append({"device": text(device), "type": text(kind)})
                continue
            self._unmount()
            self._guest.mount_options(_WHOLE.get(kind, "noatime"), device, "/")
            self._mounted = device
            self._guest.fstrim("/")
            trimmed.append({"device": text(device), "type": text(kind)})
        self._unmount()
        self._guest.sync()
        self._guest.shutdown()
        return {"trimmed": trimmed, "left": left}

    def sums(self) -> dict[str, Any]:
        """One digest of the names and contents of all files, for each filesystem that is trimmed."""
        found = []
        for device, kind in self._devices():
            if kind not in _TRIMMED:
                continue
            self._unmount()
            self._guest.mount_options("ro" + _WHOLE.get(kind, "noatime").replace("noatime", ",noatime"), device, "/")
            self._mounted = device
            with tempfile.NamedTemporaryFile() as file:
                self._guest.checksums_out("sha256", "/", file.name)
                lines = sorted(file.read().split(b"\n"))
            found.append([text(device), len(lines), hashlib.sha256(b"\n".join(lines)).hexdigest()])
        self._unmount()
        return {"sums": found}

    def read(self, device: str, path: str) -> None:
        """The bytes of a file."""
        self._mount(device)
        status = self._guest.statns(path)
        if status["st_mode"] & 0o170000 != 0o100000:
            raise RuntimeError("it is no regular file")
        answer({"size": status["st_size"]})
        at = 0
        while piece := self._guest.pread(path, PIECE, at):
            answer({"bytes": len(piece)})
            sys.stdout.buffer.write(piece)
            at += len(piece)
        answer({"bytes": 0})


def answer(told: dict[str, Any]) -> None:
    """One line."""
    sys.stdout.buffer.write(json.dumps(told).encode() + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Answer requests until standard input ends."""
    appliance = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "begin":
                appliance = Appliance(asked["socket"], asked["memory"], asked["writable"])
                answer({})
            elif appliance is None:
                raise RuntimeError("the appliance does not run")
            elif asked["do"] == "look":
                answer(appliance.look())
            elif asked["do"] == "list":
                answer(appliance.folder(asked["device"], asked["path"]))
            elif asked["do"] == "read":
                appliance.read(asked["device"], asked["path"])
            elif asked["do"] in {"unclean", "trim", "sums"}:
                answer(getattr(appliance, asked["do"])())
        except (RuntimeError, UnicodeError) as error:
            answer({"error": text(error)})
        sys.stdout.flush()


main()
