"""Which folders of a host images are in: what root has written down, and what libvirt and Proxmox VE keep theirs in.

Whoever may start the agent says what it works on. Without this list that would be any file of root's, for the key of a
dashboard as for an admin of one host. So root says it, in a file that nobody else may write, and every path of every
verb begins in one of these folders (:func:`storage_admin.agent.folders.pools.open_root`). A line is a folder's absolute
path, with all that is below it; ``!`` before one takes it out, with all that is below and around it; ``#`` begins a
comment.

Folders of the operating system, and those that this very program runs from, are never among them, whoever lists them.
"""

from __future__ import annotations

import glob
import os
import stat
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from storage_admin.agent.folders import roots
from storage_admin.agent.folders.roots import Reached
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.protocol import RefusedError, display

FILE = "/etc/storage-admin/image-folders"
#: Another place of that file, for tests. It is read from the environment of the agent's own process, which neither sshd
#: nor sudo fills with what a client sends; and the file there has to be root's all the same.
VARIABLE = "STORAGE_ADMIN_IMAGE_FOLDERS"
#: The one word that the agent has to be started with before it adds a folder. No forced command and no rule of sudo
#: that names the agent has it: only who may run anything as root there can say it.
ALLOW = "allow-folders"
HEADER = """# Folders of disk images that Storage Admin may read and rewrite, with all below them, by absolute path.
# This file and its folder belong to root, and nobody else may write them. A line that begins with ! is never one.
"""

#: libvirt's and Proxmox VE's own, which need not be listed.
STANDARD = (b"/var/lib/libvirt/images", b"/var/lib/libvirt/boot", b"/var/lib/vz", b"/mnt/pve")
#: The operating system's, with all that is below them but :data:`HOMES`.
TREES = (
    b"/bin", b"/boot", b"/dev", b"/etc", b"/lib", b"/lib32", b"/lib64", b"/libx32", b"/lost+found", b"/proc", b"/root",
    b"/run", b"/sbin", b"/sys", b"/usr", b"/var/backups", b"/var/cache", b"/var/lib", b"/var/log", b"/var/mail",
    b"/var/spool", b"/var/www",
)  # fmt: skip
#: Below these, images of hypervisors live in the system's trees.
HOMES = (
    *STANDARD, b"/var/lib/glance/images", b"/var/lib/machines", b"/var/lib/nova/instances", b"/var/lib/one/datastores",
    b"/var/lib/xen/images",
)  # fmt: skip
#: Folders that hold the folders of many: none of them is one by itself.
PLACES = (b"/home", b"/media", b"/mnt", b"/opt", b"/srv", b"/tmp", b"/var/local", b"/var/opt", b"/var/tmp")
_LONGEST = 1024 * 1024


@dataclass(frozen=True)
class Listed:
    """What the file says: folders that images are in, folders that never are, and why it is not heeded, else empty."""

    folders: tuple[bytes, ...] = ()
    never: tuple[bytes, ...] = ()
    wrong: str = ""


def file_path() -> str:
    """Where the list is."""
    return os.environ.get(VARIABLE) or FILE


def read() -> Listed:
    """The list; none where there is no file, or one that others than root could have written."""
    path = file_path()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Listed()
    except OSError as error:
        return Listed(wrong=f"{path} cannot be read: {error.strerror}")
    with os.fdopen(fd, "rb") as file:
        if not roots.is_roots(os.fstat(fd)) or not stat.S_ISREG(os.fstat(fd).st_mode) or not _folders_are_roots(path):
            return Listed(wrong=f"{path} is ignored: only root may own or write to this file and its folders")
        lines = [line.strip() for line in file.read(_LONGEST).splitlines()]
    lines = [line for line in lines if line and not line.startswith(b"#")]
    return Listed(
        tuple(os.path.normpath(line) for line in lines if line.startswith(b"/")),
        tuple(
            os.path.normpath(line[1:].strip())
            for line in lines
            if line[1:].strip().startswith(b"/") and line[:1] == b"!"
        ),
    )


def check(folder: Reached) -> None:
    """Refuse a folder that root has not listed.

    Raises:
        RefusedError: ``folder_not_listed``, with what root has to run.
    """
    if forbidden(folder.real) or not is_listed(folder.real):
        raise refusal(folder.real)
    if _system_ids().intersection(folder.ids) and not is_beneath(folder.real, _homes()):
        raise RefusedError("folder_not_listed", f"{display(folder.real)} leads to a folder of the operating system")


def is_listed(real: bytes) -> bool:
    """Whether images may be in a folder, by its real path: a listed one, or one of the hypervisors' own."""
    listed = read().folders
    if is_beneath(real, (*STANDARD, *listed)) or is_beneath(real, _real((*STANDARD, *listed))):
        return True
    return is_beneath(real, [*_of_proxmox(), *_of_libvirt()])


def forbidden(real: bytes) -> str:
    """Why a folder can never be one of images, in a few words; empty where it can.

    Args:
        real: its absolute path without links.
    """
    if is_beneath(real, _trees()) and not is_beneath(real, _homes()):
        return "belongs to the operating system"
    if any(is_beneath(one, [real]) for one in (*_trees(), *PLACES)):
        return "belongs to the operating system"
    never = (*_own(), *read().never)
    excluded = is_beneath(real, never) or any(is_beneath(one, [real]) for one in never)
    return "belongs to this program, is excluded by root, or contains such a folder" if excluded else ""


@lru_cache(maxsize=1)
def _trees() -> frozenset[bytes]:
    """The system's trees, and where links lead them."""
    return frozenset({*TREES, *map(os.path.realpath, TREES)} - {b"/"})


@lru_cache(maxsize=1)
def _homes() -> tuple[bytes, ...]:
    return (*HOMES, *_real(HOMES))


@lru_cache(maxsize=1)
def _system_ids() -> frozenset[tuple[int, int]]:
    """Device and inode of those trees, and of this program's folders: each is one under whatever name it is mounted."""
    found = set()
    for tree in (*_trees(), *_own()):
        try:
            status = os.stat(tree)
        except OSError:
            continue
        found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def refusal(real: bytes) -> RefusedError:
    """Why nothing is done in a folder, with the line that root would add."""
    if why := forbidden(real):
        detail = f"{display(real)} {why}; keep images in a separate folder and register that one"
    else:
        detail = (
            f"{display(real)} is not listed as an image folder on this host. As root, run there: {line_to_run(real)}"
        )
        if wrong := read().wrong:
            detail += f" ({wrong})"
    return RefusedError("folder_not_listed", detail)


def refuse_elsewhere(given: str, usual: str) -> str:
    """A place of the system's that only a laboratory has elsewhere: one whose list of folders is elsewhere, too.

    Raises:
        RefusedError: ``folder_not_listed``, where a client names another place than the usual one.
    """
    if given != usual and VARIABLE not in os.environ:
        raise RefusedError("folder_not_listed", f"{usual} is read here, and nothing that a client names instead")
    return given


def line_to_run(folder: bytes) -> str:
    """What root runs in a shell to add a folder."""
    quoted = "'" + display(folder).replace("'", "'\\''") + "'"
    return f"install -d /etc/storage-admin && echo {quoted} >> {FILE}"


def add(folders: Collection[bytes], never: Collection[bytes] = ()) -> None:
    """Append folders to the list, and folders that are never in it; what it has already is left out.

    Args:
        folders: real paths.

    Raises:
        RefusedError: ``folder_not_listed``, for a folder that can never be one; ``invalid``, where a line cannot say
            a name, or the file is not root's alone.
    """
    for path in (*folders, *never):
        if not path.startswith(b"/") or b"\n" in path or b"\r" in path or path != path.strip():
            raise RefusedError(
                "invalid", f"{display(path)} contains characters that the list of image folders cannot hold"
            )
    listed = read()
    if listed.wrong:
        raise RefusedError("invalid", listed.wrong)
    new = [b"!" + path for path in never if path not in listed.never]
    wanted = [path for path in folders if path not in listed.folders]
    for path in wanted:
        if forbidden(path) or any(is_beneath(path, [one]) or is_beneath(one, [path]) for one in never):
            raise refusal(path)
    if not new and not wanted:
        return
    file_name = file_path()
    os.makedirs(os.path.dirname(file_name), mode=0o755, exist_ok=True)
    fd = os.open(file_name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "ab") as file:
        begin = HEADER.encode() if os.fstat(fd).st_size == 0 else b"" if _ends_a_line(file_name) else b"\n"
        file.write(begin + b"".join(line + b"\n" for line in (*new, *wanted)))
        file.flush()
        os.fsync(fd)


def _ends_a_line(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def is_beneath(path: bytes, folders: Collection[bytes]) -> bool:
    """Whether a path is one of these folders, or below one, by its words."""
    return any(path == folder or path.startswith(folder.rstrip(b"/") + b"/") for folder in folders)


def _folders_are_roots(path: str) -> bool:
    """Whether no other user can exchange a file, all the way up; in a sticky folder nobody can take another's names."""
    folder = os.path.dirname(path)
    while True:
        status = os.lstat(folder)
        if not roots.is_sticky(status) and not roots.is_roots_folder(status):
            return False
        if folder == "/":
            return True
        folder = os.path.dirname(folder)


def _real(folders: Collection[bytes]) -> list[bytes]:
    """Where folders are, if links of root's lead there; what lies on a server that may be away is not looked at."""
    mounts = Mounts.of_this_machine()
    found = []
    for folder in folders:
        try:
            if not mounts.may_wait_there(folder):
                found.append(roots.real_path(folder))
        except (OSError, RefusedError):
            continue  # it is not there, or somebody else's link leads to it
    return found


def _of_proxmox() -> list[bytes]:
    """The folders of Proxmox VE's storages, which its root configures."""
    from storage_admin.agent.host.facts import proxmox_storages  # noqa: PLC0415 (seldom needed, and slow to load)

    return [os.path.normpath(os.fsencode(one.path)) for one in proxmox_storages() if one.path and one.path[:1] == "/"]


def _of_libvirt() -> list[bytes]:
    """The folders of libvirt's pools: who may define one there may give any file to a guest."""
    from xml.etree import ElementTree as ET  # noqa: PLC0415 (seldom needed, slow to load; what it reads is root's own)

    found = []
    for name in (*glob.glob("/etc/libvirt/storage/*.xml"), *glob.glob("/run/libvirt/storage/*.xml")):
        try:
            tree = ET.parse(name)  # noqa: S314 (root's own file)
        except (OSError, ET.ParseError):
            continue
        for pool in tree.iter("pool"):
            path = pool.findtext("target/path", "")
            if pool.get("type") in {"dir", "fs", "netfs"} and path.startswith("/"):
                found.append(os.path.normpath(os.fsencode(path)))
    return [*found, *_real(found)]


@lru_cache(maxsize=1)
def _own() -> tuple[bytes, ...]:
    """Where this program is, its Python, and the data folder of the dashboard that has put it there."""
    program = os.path.realpath(os.fsencode(sys.argv[0]))
    found = [os.fsencode(sys.prefix), os.fsencode(sys.base_prefix)]
    if program.endswith(b".pyz"):
        folder = os.path.dirname(program)
        found.append(os.path.dirname(folder) if os.path.basename(folder) == b"agent" else folder)
    else:
        found.append(os.path.realpath(os.fsencode(__file__)).rsplit(b"/storage_admin/", 1)[0])
    return tuple({os.path.realpath(one) for one in found} - {b"/", b"/usr"})
