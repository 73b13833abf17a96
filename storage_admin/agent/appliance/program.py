"""What runs beside the appliance: libguestfs' own process, as a user who owns nothing, and without network.

It is no module of the agent: the system's Python runs its text, since libguestfs' binding belongs to that. It reads a
request a line from standard input and answers each with a line of JSON; bytes of a file come behind the line that
tells their number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import sys
import tempfile
from typing import Any, Callable

import guestfs  # type: ignore[import-not-found]

#: Entries of one folder, and bytes of a file that are read at once: a message of libguestfs holds 4 MiB.
MOST_ENTRIES, PIECE = 5000, 2 << 20
#: What is no filesystem that could be mounted.
_NONE = frozenset({"swap", "unknown", "crypto_LUKS", "LVM2_member", "linux_raid_member"})
#: What filesystems need there beside the kernel: libguestfs' name for it, and the package of the host that brings it.
_NEEDS = {
    "ntfs": ("ntfs3g", "ntfs-3g (libguestfs-winsupport on Red Hat's systems)"),
    "xfs": ("xfs", "libguestfs-xfs (of other systems than Debian's: xfsprogs)"),
}
#: What the kernel gives free space back of, and how all of such a filesystem is mounted.
_TRIMMED = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "vfat"})
_WHOLE = {"btrfs": "noatime,subvolid=5"}
#: Where the superblock of a btrfs is; its magic is at byte 64 of it, the tree of what was written last at 96.
_BTRFS = 65536
#: How each kind is checked without a write; an ext first replays its journal, as a guest would that mounts it.
_EXT = "e2fsck -y -E journal_only {0}; e2fsck -f -n {0}"
_CHECKS = {
    "ext2": _EXT, "ext3": _EXT, "ext4": _EXT, "xfs": "xfs_repair -n {0}", "vfat": "fsck.fat -n {0}",
    "btrfs": "btrfs check --readonly --check-data-csum {0}",
}  # fmt: skip
#: How these end where they cannot tell: not called rightly, another version's filesystem, cancelled, not installed.
_UNTOLD = frozenset({2, 8, 16, 32, 127})
#: The type of a GPT's partition that holds a boot loader and no filesystem (UEFI knows it as GRUB's).
_BOOTS = "21686148-6449-6E6F-744E-656564454649"
#: By which the disk is found among those of the appliance.
_LABEL = "guest"
#: So many files are told of at most, and bytes of a block that is compared.
_FILES, _BLOCK = 40_000, 4096


def text(said: object) -> str:
    """A name or a sentence that a guest's disk has chosen."""
    return str(said)[:500]


class MissingError(Exception):
    """The appliance was made without what a filesystem needs."""


class Appliance:
    """The disk in its appliance."""

    def __init__(self, socket: str, memory: int, writable: bool) -> None:
        self._guest = guestfs.GuestFS(python_return_dict=True)
        self._guest.set_network(False)
        self._guest.set_memsize(memory)
        server = [f"unix:{socket}"]
        more = {"discard": "enable"} if writable else {"label": _LABEL}
        self._guest.add_drive_opts("disk", format="raw", readonly=not writable, protocol="nbd", server=server, **more)
        self._guest.launch()
        self._mounted = ""

    def look(self) -> dict[str, Any]:
        """The filesystems with how full they are, and the operating systems."""
        found = []
        encrypted = self._encrypted()
        for device, kind in sorted({**self._guest.list_filesystems(), **encrypted}.items()):
            told: dict[str, Any] = {"device": text(device), "type": text(kind), "size": None, "free": None, "why": ""}
            if device in encrypted:
                told["why"] = "it is encrypted"
            elif kind not in _NONE:
                told.update(self._sizes(device))
            found.append(told)
        self._unmount()
        return {"filesystems": found, "systems": [self._system(root) for root in self._guest.inspect_os()]}

    def _sizes(self, device: str) -> dict[str, Any]:
        try:
            self._mount(device)
            told = self._guest.statvfs("/")
        except (RuntimeError, MissingError) as error:
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
            except (RuntimeError, UnicodeError):
                told[name] = "unknown"
        return told

    def _mount(self, device: str) -> None:
        if self._mounted == device:
            return
        self._unmount()
        try:
            self._guest.mount_ro(device, "/")
        except RuntimeError:
            self._refuse_without_tools(self._guest.vfs_type(device))
            raise
        self._mounted = device

    def _refuse_without_tools(self, kind: str) -> None:
        group, package = _NEEDS.get(kind, ("", ""))
        if group and not self._guest.feature_available([group]):
            raise MissingError(f"the appliance was made without the tools for {kind}; install {package} on the host")

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
        found = [
            {"device": text(device), "type": "btrfs", "why": "it was not unmounted"}
            for device in self._known()
            if self._has_log(device)
        ]
        found += self._arrays()
        for device, kind in [] if found else self._devices():
            try:
                why = self._unclean(device, kind)
            except RuntimeError as error:
                why = text(error)
            if why:
                found.append({"device": text(device), "type": text(kind), "why": why})
        return {"unclean": found}

    def _known(self) -> list[str]:
        """Disk, partitions and logical volumes, whatever is on them."""
        return [*self._guest.list_devices(), *self._guest.list_partitions(), *self._guest.lvs()]

    def _arrays(self) -> list[dict[str, Any]]:
        """Parts of arrays: libguestfs starts one also without its other half, which would then be taken for failed."""
        arrays = list(self._guest.list_md_devices())
        arrays += [one for one in self._known() if "raid_member" in self._guest.vfs_type(one)]
        why = "it is part of a software RAID"
        return [{"device": text(device), "type": "array", "why": why} for device in arrays]

    def _devices(self) -> list[tuple[str, str]]:
        """Each filesystem once: those of btrfs are also listed by subvolume."""
        known = {**self._guest.list_filesystems(), **self._encrypted()}.items()
        return sorted((device, kind) for device, kind in known if not device.startswith("btrfsvol:"))

    def _encrypted(self) -> dict[str, str]:
        """What libguestfs does not list, since nobody knows what is in it."""
        found = {}
        for device in self._known():
            with contextlib.suppress(RuntimeError):  # words of LVM's about damaged metadata stand among its volumes
                if (kind := self._guest.vfs_type(device)) == "crypto_LUKS":
                    found[device] = kind
        return found

    def _unclean(self, device: str, kind: str) -> str:
        if kind == "swsuspend":
            return "a hibernated system"
        if kind in {"ext2", "ext3", "ext4"}:
            told = self._guest.tune2fs_l(device)
            if told.get("Filesystem state") != "clean" or "needs_recovery" in told.get("Filesystem features", ""):
                return "it was not unmounted"
        if kind == "xfs":
            self._refuse_without_tools(kind)
            if self._guest.xfs_repair(device, nomodify=True):
                return "it was not unmounted, or is damaged"
        return ""

    def _has_log(self, device: str) -> bool:
        """Whether it is a btrfs whose last writes are in its log alone."""
        if self._guest.blockdev_getsize64(device) < _BTRFS + 4096:
            return False
        block = self._guest.pread_device(device, 4096, _BTRFS)
        return bool(block[64:72] == b"_BHRfS_M" and any(block[96:104]))

    def marks(self) -> dict[str, Any]:
        """Of each filesystem, by its device: its id, and a number that grows when it is written to.

        Of ext the time of the last write, of XFS the place in its log, of btrfs the generation: from the superblocks
        (``fs/ext4/ext4.h``, ``fs/xfs/libxfs/xfs_format.h``, ``include/uapi/linux/btrfs_tree.h``), as they stand there.
        """
        found = {}
        for device in self._known():
            if self._guest.blockdev_getsize64(device) < _BTRFS + 4096:
                continue
            head = self._guest.pread_device(device, 4096, 0)
            block = self._guest.pread_device(device, 4096, _BTRFS)
            if head[1080:1082] == b"\x53\xef":
                name, grows = head[1128:1144], int.from_bytes(head[1072:1076] + head[1652:1653], "little")
            elif head[:4] == b"XFSB":
                name, grows = head[32:48], int.from_bytes(head[240:248], "big") if head[101] & 15 == 5 else 0
            elif block[64:72] == b"_BHRfS_M":
                name, grows = block[32:48], int.from_bytes(block[72:80], "little")
            else:
                continue
            found[text(device)] = [name.hex(), grows]
        return {"marks": found}

    def check(self) -> dict[str, Any]:
        """Whether each filesystem is sound, once its log was replayed: what that writes is thrown away afterwards."""
        found = [{**one, "state": "unknown"} for one in self._arrays()]
        for device, kind in self._devices():
            if kind != "swap" and not (kind == "unknown" and self._boots(device)):
                state, why = self._checked(device, kind)
                found.append({"device": text(device), "type": text(kind), "state": state, "why": text(why)})
        return {"filesystems": found}

    def _boots(self, device: str) -> bool:
        try:
            disk, number = self._guest.part_to_dev(device), self._guest.part_to_partnum(device)
            return bool(self._guest.part_get_gpt_type(disk, number).upper() == _BOOTS)
        except RuntimeError:
            return False

    def _checked(self, device: str, kind: str) -> tuple[str, str]:
        """``sound``, ``damaged`` or ``unknown``, and what the tool said last."""
        self._unmount()
        if kind not in _CHECKS:
            return "unknown", "nothing here checks such a filesystem"
        if kind == "xfs":  # xfs_repair replays no log: a mount does; of one that cannot be mounted it says why
            with contextlib.suppress(RuntimeError):
                self._guest.mount_options("noatime", device, "/")
                self._guest.umount_all()
        # libguestfs's names of disks are not the kernel's there, which may call its own root /dev/sda.
        there = shlex.quote(re.sub(r"^/dev/sd[a-z]+", f"/dev/disk/guestfs/{_LABEL}", device))
        check = f"if test -b {there}; then {_CHECKS[kind].format(there)}; else (exit 127); fi"
        said = self._said("{ " + check + "; code=$?; echo; echo $code; } 2>&1 | tail -c 1000")
        lines = [one.strip() for one in said if one.strip()]
        code = int(lines.pop())
        why = lines[-1] if lines else ""
        return ("sound", "") if code == 0 else ("unknown" if code in _UNTOLD else "damaged", why)

    def _said(self, command: str) -> list[str]:
        """The words of a command of the appliance's own, by line."""
        return str(self._guest.debug("sh", [command])).splitlines()

    def changes(self, device: str, each: int) -> dict[str, Any]:
        """Of each file its kind, inode, the second of its last change and its bytes; the second of the last of all.

        Args:
            each: of how many inodes one is told of; 0 chooses that by their number.
        """
        self._mount(device)
        status = self._guest.statvfs("/")
        each = each or (status["files"] - status["ffree"]) // _FILES + 1
        self._said("find /sysroot -xdev -printf '%y %i %C@ %s\\n' > /tmp/files")
        files, newest, at, rest = list[list[Any]](), 0, 1, ""
        while piece := str(self._guest.debug("sh", [f"tail -c +{at} /tmp/files | head -c {PIECE}"])):
            at += len(piece)
            *lines, rest = (rest + piece).split("\n")
            for kind, inode, changed, size in map(str.split, lines):
                newest = max(newest, int(float(changed)))
                if int(inode) % each == 0:
                    files.append([kind, int(inode), int(float(changed)), int(size)])
        return {"each": each, "newest": newest, "files": files}

    def tails(self, device: str, inodes: list[int]) -> dict[str, Any]:
        """Where the last block of each of these files is on the device, in bytes, and the digest of what is there."""
        self._mount(device)
        wanted = " -o ".join(f"-inum {int(one)}" for one in inodes)
        said = self._said(f"find /sysroot -xdev -type f \\( {wanted} \\) -exec filefrag -b{_BLOCK} -v {{}} + || true")
        found = []
        for line in said:
            words = line.replace(":", " ").replace("..", " ").split()
            told = set(words[-1].split(",")) if words[4:5] and words[4].isdecimal() else set()
            if "eof" in told and not {"inline", "unwritten", "unknown", "encoded"} & told:
                found.append(int(words[4]) * _BLOCK)
        return {"places": found, **self.blocks(device, found)}

    def blocks(self, device: str, places: list[int]) -> dict[str, Any]:
        """Digests of the blocks at these bytes of the device."""
        read = [self._guest.pread_device(device, _BLOCK, place) for place in places]
        return {"digests": [hashlib.sha256(one).hexdigest() for one in read]}

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
                # Without any file, sha256sum tells of its empty standard input.
                lines = sorted(one for one in file.read().split(b"\n") if one[64:] not in {b"", b"  -"})
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
            elif asked["do"] in {"unclean", "trim", "sums", "marks", "check"}:
                answer(getattr(appliance, asked["do"])())
            elif asked["do"] in {"changes", "tails", "blocks"}:
                answer(getattr(appliance, asked["do"])(asked["device"], asked["of"]))
        except (RuntimeError, UnicodeError, MissingError) as error:
            answer({"missing" if isinstance(error, MissingError) else "error": text(error)})
        sys.stdout.flush()


main()
