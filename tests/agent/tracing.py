# ruff: noqa: PTH118
# Paths are bytes here: names need not be UTF-8.
"""What agents opened, where they connected to and what they started, as strace saw it."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from storage_admin.agent.appliance.appliance import CACHE, MARK, PLACE
from storage_admin.agent.folders import image_folders
from storage_admin.agent.host import space
from tests.agent.harness import ROOT

_CALLS = "open,openat,openat2,creat,open_by_handle_at,connect,execve"
STRACE = ["-f", "-qq", "--seccomp-bpf", "-y", "-s", "8192", "-e", f"trace={_CALLS}", "-e", "signal=none"]
_STRING = r'"((?:[^"\\]|\\.)*)"'
_OPEN = re.compile(rf"(?:open|creat|openat2?)\((?:(AT_FDCWD|\d+)(?:<((?:[^>\\]|\\.)*)>)?, )?{_STRING}")
_OPENED = re.compile(r"= \d+<((?:[^>\\]|\\.)*)>$")
_EXEC = re.compile(rf"execve\({_STRING}.* = 0$")
_UNFINISHED, _RESUMED = "<unfinished ...>", re.compile(r"\s*<\.\.\. \w+ resumed>(.*)")
#: Where anybody has mounted what may not answer, another process of ours looks at the pool first, with no words of its
#: own: see ``agent/host/special_mounts.py``. Mounts of tests that run beside this one count.
_LOOKS = f'execve("{sys.executable}", ["{sys.executable}", "-I", "-S", "-c", '
#: A recovery asks LVM for its groups, in words of its own; LVM reads its settings and every disk of the machine.
_ASKS_LVM = 'execve("/usr/sbin/vgs", ["/usr/sbin/vgs", "--reportformat", "json", "--units", "b", "--nosuffix", "-o", '
#: A scan asks whether a libvirtd answers on this host.
_TO_LIBVIRT = re.compile(r'sa_family=AF_UNIX, sun_path="(?:/var)?/run/libvirt/')
#: What any process may open: the system's libraries and tables, and this program.
_SYSTEM = (
    *("/proc", "/sys", "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so", "/etc/ssl", "/dev/null", "/dev/loop"),
    *("/dev/urandom", "/dev/disk/by-uuid", "/etc/machine-id", "/etc/locale.alias"),
    # What this machine exports, as root's tools have written it down.
    "/var/lib/nfs/etab",
    # Which hypervisors are here is a question of every scan.
    *("/etc/libvirt", "/run/libvirt", "/etc/pve"),
    # Where agents tell each other what they have yet to write.
    space.FOLDER,
    # A library of fio's, which is asked for its version.
    "/etc/libnl",
    # The emulator, too.
    *("/etc/qemu", "/dev/sgx_vepc"),
)
#: What is opened besides where the appliance starts: it itself, its folders, what supermin and libguestfs ask of the
#: system (names of users, its package manager, its log).
_OF_APPLIANCE = (
    *(CACHE, PLACE, "/dev/kvm", "/dev/kmsg", "/etc/dpkg", "/etc/group", "/etc/localtime", "/etc/nsswitch.conf"),
    *("/etc/os-release", "/etc/passwd", "/etc/services", "/etc/userdb", "/run/host/userdb", "/run/systemd/userdb"),
    "/run/userdb",
)
_TO_APPLIANCE = re.compile(rf'sun_path="(?:{re.escape(PLACE)}/{re.escape(MARK)}[^"]*|/var/run/nscd/socket)"')
_TOOLS_OF_APPLIANCE = frozenset(
    ("dmesg", "dpkg", "grep", "python3", "qemu-storage-daemon", "rm", "sh", "supermin", "unshare")
)
#: fio and bonnie++ are asked for their versions by a scan.
TOOLS = frozenset(f"setpriv prlimit ionice nice qemu-img qemu-io fio bonnie++ qemu-system-{os.uname().machine}".split())


@dataclass(frozen=True)
class Trace:
    """What a crew did to other files and processes.

    ``opened`` are the paths that were given and, where it worked, those that the kernel says they led to.
    """

    opened: frozenset[bytes]
    connected: tuple[str, ...]
    started: frozenset[str]
    appliance: bool = False

    @classmethod
    def read(cls, path: Path, *, appliance: bool = False) -> Self:
        """From what strace wrote; what belongs to libguestfs' appliance is left out where that was to start."""
        opened: set[bytes] = set()
        connected: list[str] = []
        started: set[str] = set()
        lines = path.read_text(errors="surrogateescape").splitlines()
        # What a Python opens to get going is over when the first request comes in.
        begins = next(number for number, line in enumerate(lines) if "/proc/self/clear_refs" in line)
        lvm: set[str] = set()  # by their numbers
        for line in _whole(lines[begins:]):
            pid = line.partition(" ")[0]
            if "connect(" in line:
                if not _TO_LIBVIRT.search(line) and not (appliance and _TO_APPLIANCE.search(line)):
                    connected.append(line)
            elif execed := _EXEC.search(line):
                (lvm.add if _ASKS_LVM in line else lvm.discard)(pid)
                if _LOOKS not in line and pid not in lvm:
                    started.add(Path(execed[1]).name)
            elif pid not in lvm:
                opened.update(_opened(line))
        started -= _TOOLS_OF_APPLIANCE if appliance else set()
        return cls(frozenset(opened), tuple(connected), frozenset(started), appliance)

    def outside(self, *allowed: Path) -> set[bytes]:
        """What was opened, or tried to be, that neither the system nor these folders hold.

        The folders on the way to these are passed one by one, and root's list of folders is read.
        """
        more = _OF_APPLIANCE if self.appliance else ()
        own = (
            *_SYSTEM,
            *more,
            str(ROOT),
            sys.prefix,
            sys.base_prefix,
            image_folders.file_path(),
            *map(str, allowed),
        )
        roots = [os.fsencode(root) for root in own]
        passed = {os.fsencode(folder) for one in allowed for folder in one.parents}
        return {path for path in self.opened - passed if not any(_is_beneath(path, root) for root in roots)}


def _whole(lines: Sequence[str]) -> Iterator[str]:
    """The calls, each in one line: strace cuts a call in two that another process's comes in between."""
    begun: dict[str, str] = {}  # by the process
    for line in lines:
        pid, _, said = line.partition(" ")
        if line.endswith(_UNFINISHED):
            begun[pid] = line.removesuffix(_UNFINISHED).rstrip()
        elif (rest := _RESUMED.match(said)) is not None:
            yield begun.pop(pid, "") + rest[1]
        else:
            yield line
    yield from begun.values()


def _opened(line: str) -> Iterator[bytes]:
    call = _OPEN.search(line)
    # O_PATH holds a name, as stat looks at it: nothing can be read by it, and opening it again is another line.
    if call is None or "O_PATH" in line:
        return
    folder, name = _plain(call[2] or ""), _plain(call[3])
    path = os.path.normpath(os.path.join(folder, name)) if folder or name.startswith(b"/") else name
    # Through a descriptor a name leads anywhere: what counts is where it led to.
    led_to = _OPENED.search(line)
    if not path.startswith(b"/proc/") or led_to is None:
        yield path
    # A network is no file: tools get an empty one.
    if led_to is not None and not led_to[1].startswith("net:["):
        yield _plain(led_to[1]).removesuffix(b" (deleted)")


def _plain(text: str) -> bytes:
    """Bytes as they were before strace wrote them with escapes."""
    return text.encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1")


def _is_beneath(path: bytes, root: bytes) -> bool:
    return path == root or path.startswith(root.rstrip(b"/") + b"/") or (root in _PREFIXES and path.startswith(root))


_PREFIXES = frozenset({b"/etc/ld.so", b"/dev/loop"})
