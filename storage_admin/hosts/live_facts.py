"""A guest as it is at this moment, with what decides whether space that it frees becomes free on its host."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

#: Seconds since 1970 of the year 3000: what is claimed beyond it is no time.
LATEST = 32_503_680_000
#: The command of the guest agent that trims.
FSTRIM = "guest-fstrim"
#: Of what an agent tells, which is whatever the guest wants: filesystems, and characters of each text.
MOST, LONGEST = 200, 1000


@dataclass(frozen=True)
class AgentNow:
    """The guest agent.

    Args:
        configured: the guest's definition has a line to it.
        answers: whether it answers; ``None`` where that was not asked.
        commands: that it takes; ``None`` where it did not say.
        said: what was said where it does not answer.
    """

    configured: bool = False
    answers: bool | None = None
    commands: frozenset[str] | None = None
    said: str = ""


@dataclass(frozen=True)
class DiskNow:
    """A disk of a guest, as it is attached.

    Args:
        target: how the guest's definition calls it: ``vda``, ``scsi0``.
        bus: ``virtio``, ``scsi``, ``sata``, ...
        kind: ``file``, ``block``, ``network``, ...
        format: of its image, as declared.
        chain: paths of its image and of all that this one stands on, from above; ``None`` in it for what is no path.
        discard, detect_zeroes: in QEMU's words; empty where the definition says nothing.
        keeps_clusters: ``discard_no_unref`` is on.
        granularity: of its discards, in bytes; ``None`` where the definition says nothing.
        allocated_bytes: what its image occupies; ``None`` where nobody tells.
        virtual_bytes: its size as the guest sees it, likewise.
    """

    target: str
    bus: str = ""
    kind: str = "file"
    format: str = ""
    chain: tuple[str, ...] = ()
    discard: str = ""
    detect_zeroes: str = ""
    keeps_clusters: bool = False
    granularity: int | None = None
    allocated_bytes: int | None = None
    virtual_bytes: int | None = None


@dataclass(frozen=True)
class DeviceNow:
    """What lies below a disk that is a block device, as the agent's verb ``beneath`` tells."""

    target: str = ""
    discards: bool | None = None
    passes_on: bool | None = None


@dataclass(frozen=True)
class Filesystem:
    """A filesystem that is mounted in a guest, by its agent; sizes in bytes. ``disks`` are targets."""

    path: str
    type: str = ""
    used_bytes: int | None = None
    total_bytes: int | None = None
    disks: tuple[str, ...] = ()


@dataclass(frozen=True)
class GuestNow:
    """A guest at this moment.

    Args:
        state: in libvirt's words.
        machine: its type, such as ``pc-q35-7.2``; empty where nobody tells.
        snapshots, checkpoints: names of those that its hypervisor keeps.
        backs_up: it makes a backup of it now.
        saved: its memory is kept for its next start.
        run: libvirt's number of the run that it is in; 0 while it is off.
        cpu_ns: time of processors that it has taken in that run, in nanoseconds.
    """

    state: str
    machine: str = ""
    agent: AgentNow = AgentNow()
    disks: tuple[DiskNow, ...] = ()
    filesystems: tuple[Filesystem, ...] = field(default_factory=tuple)
    snapshots: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    backs_up: bool = False
    saved: bool = False
    run: int = 0
    cpu_ns: int = 0

    @property
    def runs(self) -> bool:
        """Whether its agent could be asked."""
        return self.state == "running"


@dataclass(frozen=True)
class Trimmed:
    """A filesystem in a guest that its agent was to trim.

    Args:
        path: where it is mounted.
        trimmed_bytes: what it gave back; ``None`` where the agent does not tell (Windows), or it failed.
        error: the agent's words; empty where it went well.
    """

    path: str
    trimmed_bytes: int | None = None
    error: str = ""


def trimmed(paths: object) -> tuple[Trimmed, ...]:
    """What an agent answers to ``guest-fstrim`` in ``paths``.

    Raises:
        ValueError: it is something else than it should be.
    """
    if not isinstance(paths, list):
        raise ValueError(repr(paths)[:100])
    return tuple(
        Trimmed(
            str(one.get("path") or "")[:LONGEST],
            one["trimmed"] if isinstance(one.get("trimmed"), int) else None,
            str(one.get("error") or "")[:LONGEST],
        )
        for one in paths[:MOST]
        if isinstance(one, dict)
    )


@dataclass(frozen=True)
class Part:
    """What a snapshot has of a disk: ``how`` is ``external``, then ``path`` is the overlay, or ``internal``, then it is
    the image that holds it; empty where that is not told.
    """

    target: str
    how: str
    path: str


@dataclass(frozen=True)
class Snapshot:
    """A snapshot as libvirt, or Proxmox VE, tells of it at this moment.

    Args:
        created: ``None`` where nobody tells.
        state: the guest's then, in libvirt's words; ``disk-snapshot`` without its memory.
        current: it is what the guest's present stands on.
        disks: as far as it is told what it has of each.
    """

    name: str
    created: datetime | None
    description: str
    state: str
    parent: str
    current: bool
    disks: tuple[Part, ...]

    @property
    def made(self) -> int | None:
        """Seconds since 1970 at which it was created, as who keeps it has it; ``None`` where nobody tells."""
        return None if self.created is None else int(self.created.timestamp())

    @property
    def is_external(self) -> bool:
        """Whether it has files of its own."""
        return any(part.how == "external" for part in self.disks)

    @property
    def with_memory(self) -> bool:
        """Whether a guest that goes back to it runs afterwards."""
        return self.state not in {"shutoff", "disk-snapshot"}


def named(found: Iterable[Snapshot], name: str, made: int | None = None) -> Snapshot | None:
    """The snapshot of that name.

    Args:
        made: when it was created, as :attr:`Snapshot.made`, where that is known: one from another time is another one.
    """
    return next((one for one in found if one.name == name and (made is None or one.made in {None, made})), None)


def as_text(moment: datetime) -> str:
    """A time as lists and options have it, in UTC: ``2026-11-29T20:00:00Z``."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def since_1970(seconds: object) -> datetime | None:
    """A time that a header, a guest's manager or a stranger claims; ``None`` for what is none, or of another age."""
    if not isinstance(seconds, int) or not 0 < seconds < LATEST:
        return None
    return datetime.fromtimestamp(seconds, UTC)


def newest_first(found: Iterable[Snapshot]) -> tuple[Snapshot, ...]:
    """Snapshots by their age, undated ones at the end."""
    return tuple(sorted(found, key=lambda one: one.created or datetime.min.replace(tzinfo=UTC), reverse=True))


@dataclass(frozen=True)
class StoppedGuest:
    """A guest that QEMU has paused because of an I/O error.

    Args:
        disks: why, by disk target, of those that its manager names.
    """

    kind: str
    uid: str
    name: str
    disks: dict[str, str] = field(default_factory=dict)
