"""Bugs of QEMU that corrupt disks while a guest runs, and which builds of it have them.

A version alone does not tell: distributions mend bugs in the versions that they keep. So a build is mended where its
upstream version is, or where its package has a revision for which a changelog says so. Whatever is not known to be
mended, or to be older than the bug, counts as affected; a build that says nothing is affected by all.

Sources, read in November 2026:

``discard_while_writing``
    https://gitlab.com/qemu-project/qemu/-/commit/b8bfb1478d61512f851badd0d912c6661a2efee7 ("qcow2: Fix corruption on
    discard during write with COW", merged in May 2026, after 11.0.0), https://lore.kernel.org/qemu-devel/20260427170520.101242-4-kwolf@redhat.com/;
    Proxmox VE: pve-qemu-kvm 11.0.0-1 has it as ``extra/0008-qcow2-Fix-corruption-on-discard-during-write-with-CO``.
``mirror_start``
    https://gitlab.com/qemu-project/qemu/-/commit/167ef239fbdcc4bde126e47668bfc4839b873b19 ("mirror: Fix missed dirty
    bitmap writes during startup", in 11.0.0), https://gitlab.com/qemu-project/qemu/-/issues/3273; it came with
    32125b14606a in 8.0.0. Proxmox VE: pve-qemu-kvm 10.2.1-1 ("stable fixes for QEMU 10.2.1"). RHEL and CentOS Stream 10:
    qemu-kvm 10.1.0-15.el10 (RHEL-155601).
``mirror_zero_write``
    https://gitlab.com/qemu-project/qemu/-/commit/4a7b1bd18d2e1a6b3796e177ae5df9b198264a0b ("block/mirror: check range when
    setting zero bitmap for sync write", in 11.0.0); it came with 7e277545b9 in 10.1.0, and ends the guest.
    Proxmox VE: pve-qemu-kvm 10.1.2-7, https://bugzilla.proxmox.com/show_bug.cgi?id=7222.

Debian 12 to 13 and Ubuntu up to 24.04 have no package whose changelog names any of these fixes.
"""  # noqa: E501 (addresses)

import re
from dataclasses import dataclass

from django.utils.translation import gettext as _

from storage_admin.hosts.models import Host

Version = tuple[int, ...]

#: What follows `QEMU emulator version`: `7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)`, `9.1.0 (qemu-kvm-9.1.0-15.el9)`,
#: `10.1.2 (pve-qemu-kvm_10.1.2-7)`, `10.1.0`.
_SAID = re.compile(r"(\d+(?:\.\d+){1,3})\S*(?:\s+\((?:(Debian)\s+|(qemu-kvm)-|(pve-qemu-kvm)_|v)?([^()\s]+)\))?")
_EL = re.compile(r"\.el(\d+)")


@dataclass(frozen=True)
class Build:
    """A QEMU as it is installed.

    Args:
        version: upstream.
        vendor: ``debian``, ``ubuntu``, ``rhel``, ``proxmox``; empty where it does not say.
        revision: of its package, with the version.
    """

    version: Version
    vendor: str = ""
    revision: str = ""

    @classmethod
    def parse(cls, said: object) -> "Build | None":
        """What an emulator says of itself after the word ``version``; ``None`` where that is not understood."""
        found = _SAID.fullmatch(said.strip()) if isinstance(said, str) else None
        if found is None:
            return None
        number, debian, rhel, proxmox, revision = found.groups()
        vendor = "rhel" if rhel else "proxmox" if proxmox else ""
        if debian:
            vendor = "ubuntu" if "ubuntu" in revision else "debian"
        return cls(tuple(map(int, number.split("."))), vendor, revision or "")


@dataclass(frozen=True)
class Mended:
    """The first revision of a package without a bug. ``release`` of RHEL: 10 for ``.el10``."""

    vendor: str
    package: str
    revision: str
    release: int | None = None

    def covers(self, build: Build) -> bool:
        """Whether a build is that revision or a later one of the same line."""
        if build.vendor != self.vendor or not build.revision:
            return False
        found = _EL.search(build.revision)
        if self.release != (int(found[1]) if found else None):
            return False
        return compare(_EL.split(build.revision)[0], self.revision) >= 0


@dataclass(frozen=True)
class Bug:
    """One bug.

    Args:
        code: of it, for programs.
        what: it does, in a sentence.
        since: the first upstream version that has it; empty where all do.
        upstream: the first version of each branch that has it no more, the newest last: later branches have none.
        packages: that mend it in other versions.
        kinds: of jobs that provoke it.
        instead: what to do instead, in a sentence.
    """

    code: str
    what: str
    since: Version
    upstream: tuple[Version, ...]
    packages: tuple[Mended, ...]
    kinds: frozenset[str]
    instead: str

    def affects(self, build: Build | None) -> bool:
        """Whether a build has the bug, as far as it is not known to be free of it."""
        if build is None:
            return True
        # Red Hat takes later code, bugs included, into the versions that it keeps.
        if build.version < self.since and build.vendor != "rhel":
            return False
        *branches, newest = self.upstream
        if build.version >= newest or any(build.version[:2] == one[:2] and build.version >= one for one in branches):
            return False
        return not any(one.covers(build) for one in self.packages)

    def cure(self, build: Build | None) -> str:
        """What mends it: the package of the build's vendor where one is known, else the upstream version."""
        known = [one for one in self.packages if build is not None and one.vendor == build.vendor]
        upstream = ".".join(map(str, self.upstream[-1]))
        return (
            _("{package} {revision} or newer").format(package=known[0].package, revision=known[0].revision)
            if known
            else _("QEMU {upstream} or newer").format(upstream=upstream)
        )


_MOVED_OFF = "Do it while the guest is off."
#: Kinds of jobs that mirror a running guest's disk: libvirt merges the newest external snapshot by an active commit.
_MIRRORS = frozenset({"move_disk", "live_merge", "live_copy", "delete_snapshot", "delete_old_snapshots"})
BUGS = (
    Bug(
        "discard_while_writing",
        "A discard during a write to the same preallocated cluster of a qcow2 image corrupts the image.",
        since=(),
        upstream=((11, 1, 0),),
        packages=(Mended("proxmox", "pve-qemu-kvm", "11.0.0-1"),),
        kinds=frozenset({"trim"}),
        instead="Shut the guest down and reclaim its images instead.",
    ),
    Bug(
        "mirror_start",
        "Data that a guest writes while a mirror of its disk starts may be missing from the copy.",
        since=(8, 0),
        upstream=((11, 0, 0),),
        packages=(
            Mended("proxmox", "pve-qemu-kvm", "10.2.1-1"),
            Mended("rhel", "qemu-kvm", "10.1.0-15", release=10),
        ),
        kinds=_MIRRORS,
        instead=_MOVED_OFF,
    ),
    Bug(
        "mirror_zero_write",
        "A short write of zeros during a synchronous mirror terminates the guest.",
        since=(10, 1),
        upstream=((11, 0, 0),),
        packages=(Mended("proxmox", "pve-qemu-kvm", "10.1.2-7"),),
        kinds=_MIRRORS,
        instead=_MOVED_OFF,
    ),
)

#: Kinds of jobs that provoke any of them.
KINDS = frozenset(kind for bug in BUGS for kind in bug.kinds)


def build_of(host: Host) -> Build | None:
    """The emulator that the last scan found on a host; ``None`` where it is not known."""
    return Build.parse(host.capabilities.get("qemu_system"))


def started_with(host: Host, guest: str) -> str:
    """The QEMU that a guest of libvirt was started with where an update has replaced that since, as of the last scan;
    empty where it runs the one that is installed.
    """
    return str((host.capabilities.get("older_qemus") or {}).get(guest, ""))


def of_host(host: Host) -> list[tuple[Bug, str]]:
    """The bugs that a host's emulator has, and what mends each; none where guests cannot run on it."""
    facts = host.capabilities
    if not facts or (not facts.get("proxmox_version") and not (facts.get("tools") or {}).get("qemu-system")):
        return []
    build = build_of(host)
    return [(bug, bug.cure(build)) for bug in BUGS if bug.affects(build)]


def against(host: Host, kind: str, running: str = "") -> list[str]:
    """Why a kind of job may corrupt a running guest's disk, what to do instead and what mends it, in sentences.

    Args:
        running: the version that the guest runs, where somebody tells: it may have been started before an update.
    """
    build = build_of(host)
    now = Build.parse(running) if running else build
    if build is not None and now is not None and not now.revision and now.version[:3] == build.version[:3]:
        now = build
    said = _("(version unknown)") if now is None else ".".join(map(str, now.version))
    said = f"{said} ({now.revision})" if now is not None and now.revision else said
    return [
        _("{what} QEMU {said} on this host has this bug, or may have it. {instead} The bug is fixed in {cure}.").format(
            what=bug.what, said=said, instead=bug.instead, cure=bug.cure(build)
        )
        for bug in BUGS
        if kind in bug.kinds and bug.affects(now)
    ]


def compare(first: str, second: str) -> int:
    """-1, 0 or 1 as the first version of a package is older, equal or newer: digits as numbers, ``~`` before the end.

    As dpkg orders them (deb-version(7)); the epoch is a number like the others.
    """
    one, two = _parts(first), _parts(second)
    return (one > two) - (one < two)


def _parts(version: str) -> list[tuple[tuple[int, ...], int]]:
    epoch, colon, rest = version.partition(":")
    text = rest if colon else version
    found: list[tuple[tuple[int, ...], int]] = [((), int(epoch) if colon and epoch.isdigit() else 0)]
    for letters, digits in re.findall(r"(\D*)(\d*)", text):
        # What ends sorts before any letter, and a tilde before that.
        order = (*(-1 if one == "~" else ord(one) + (0 if one.isalpha() else 256) for one in letters), 0)
        found.append((order, int(digits or 0)))
    return found
