"""Which folders of a host images are in: what root has written down, and what libvirt and Proxmox VE keep theirs in.

Whoever may start the agent says what it works on. Without this list that would be any file of root's, for the key of a
dashboard as for an admin of one host. So root says it, in a file that nobody else may write, and every path of every
verb begins in one of these folders (:func:`storage_admin.agent.folders.pools.open_root`). A line is a folder's absolute
path, with all that is below it; ``!`` before one takes it out, with all that is below and around it; ``#`` begins a
comment.

Folders of the operating system, and those that this very program runs from, are never among them, whoever lists them.

A path is an admin's word, but whoever owns a folder on the way can put a link there. So each name is opened in the
folder above, from ``/`` down, and a link is followed only where nobody but root can have made it (:func:`reach`).
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

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
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40


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
        if not is_roots(os.fstat(fd)) or not stat.S_ISREG(os.fstat(fd).st_mode) or not _folders_are_roots(path):
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
        raise RefusedError(
            "folder_not_listed",
            f"{display(folder.real)} is a folder of the operating system by another name; choose another folder",
        )


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


def is_beneath(path: bytes, folders: Collection[bytes]) -> bool:
    """Whether a path is one of these folders, or below one, by its words."""
    return any(path == folder or path.startswith(folder.rstrip(b"/") + b"/") for folder in folders)


def _folders_are_roots(path: str) -> bool:
    """Whether no other user can exchange a file, all the way up; in a sticky folder nobody can take another's names."""
    folder = os.path.dirname(path)
    while True:
        status = os.lstat(folder)
        if not is_sticky(status) and not is_roots_folder(status):
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
                found.append(real_path(folder))
        except (OSError, RefusedError):
            continue  # it is not there, or somebody else's link leads to it
    return found


def _of_proxmox() -> list[bytes]:
    """The folders of Proxmox VE's storages, which its root configures."""
    from storage_admin.agent.host.facts import proxmox_storages  # noqa: PLC0415 (seldom needed, and slow to load)

    return [os.path.normpath(os.fsencode(one.path)) for one in proxmox_storages() if one.path and one.path[:1] == "/"]


def _of_libvirt() -> list[bytes]:
    """The folders of libvirt's pools: who may define one there may give any file to a guest."""
    from storage_admin.agent.host.facts import libvirt_pools  # noqa: PLC0415 (seldom needed, and slow to load)

    found = []
    for pool in libvirt_pools():
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


@dataclass(frozen=True)
class Reached:
    """A folder that a path leads to: its descriptor (``O_PATH``), its path without links, and all folders to it."""

    fd: int
    real: bytes
    ids: tuple[tuple[int, int], ...]


def reach(path: bytes) -> Reached:
    """Go down to a folder; the caller closes the descriptor.

    Args:
        path: absolute, without ``..``.

    Raises:
        RefusedError: ``pool_changed``, where a link that others than root may have made stands in the way.
        OSError: a folder is missing, or is none.
    """
    steps = [_Step(os.open("/", _LOOK | os.O_DIRECTORY), b"", True)]
    try:
        names, links = deque(_parts(path)), 0
        while names:
            name = names.popleft()
            if name == b"..":
                if len(steps) > 1:
                    os.close(steps.pop().fd)
                continue
            below = _below(steps[-1], name)
            if isinstance(below, _Step):
                steps.append(below)
                continue
            links += 1
            if not below.is_roots or links > _MOST_LINKS:
                raise RefusedError(
                    "pool_changed",
                    f"{display(name)} in the path {display(path)} is a symbolic link that users other than root "
                    "could have created; restore the folder, or register the folder that the link leads to",
                )
            if below.target.startswith(b"/"):
                while len(steps) > 1:
                    os.close(steps.pop().fd)
            names.extendleft(reversed(_parts(below.target)))
        ids = tuple((status.st_dev, status.st_ino) for status in (os.fstat(step.fd) for step in steps))
        return Reached(os.dup(steps[-1].fd), b"/" + b"/".join(step.name for step in steps[1:]), ids)
    finally:
        for step in steps:
            os.close(step.fd)


def real_path(path: bytes) -> bytes:
    """Where a folder is, as :func:`reach` goes."""
    found = reach(path)
    os.close(found.fd)
    return found.real


@dataclass(frozen=True)
class _Step:
    """A folder on the way; ``only_root``: nobody else can have put it there, or on the way to it."""

    fd: int
    name: bytes
    only_root: bool

    @property
    def takes_links(self) -> bool:
        """Whether a link in it that is root's was made by root. In a sticky folder it may be another name of one."""
        return self.only_root and is_roots_folder(os.fstat(self.fd))


@dataclass(frozen=True)
class _Link:
    """A symbolic link on the way."""

    target: bytes
    is_roots: bool


def _below(above: _Step, name: bytes) -> _Step | _Link:
    try:
        # As a folder first: that is what starts an automount.
        fd = os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=above.fd)
    except OSError as error:
        if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
            raise
        fd = os.open(name, _LOOK, dir_fd=above.fd)
        mode = os.fstat(fd).st_mode
        # A folder by now, where somebody exchanges it with a link: then that is what is gone into.
        if not stat.S_ISDIR(mode):
            try:
                if not stat.S_ISLNK(mode):
                    raise
                is_roots = above.takes_links and os.fstat(fd).st_uid in {0, os.geteuid()}
                return _Link(os.readlink(b"", dir_fd=fd), is_roots)
            finally:
                os.close(fd)
    return _Step(fd, name, above.only_root and (is_roots_folder(os.fstat(fd)) or is_sticky(os.fstat(fd))))


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]


def is_roots_folder(status: os.stat_result) -> bool:
    """Whether only root can put names into a folder, or exchange them."""
    return is_roots(status) and stat.S_ISDIR(status.st_mode)


def is_sticky(status: os.stat_result) -> bool:
    """Whether a folder is root's, and nobody can take or exchange another user's names in it, as in ``/tmp``."""
    return status.st_uid == 0 and stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)


def is_roots(status: os.stat_result) -> bool:
    """Whether a file belongs to root, and only root may write to it."""
    return status.st_uid in {0, os.geteuid()} and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
