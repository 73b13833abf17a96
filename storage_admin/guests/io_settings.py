"""What a guest may take of the disks, by whatever its hypervisor has for that."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts import libvirt_control, openvz, transport
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import JobLog
from storage_admin.jobs.recorder import Recorder


@dataclass(frozen=True)
class Setting:
    """What is to be set; ``None`` leaves a part as it is.

    Args:
        limits: by name, bytes or operations a second; 0 for none.
        disk: target of the disk that they are for; ``None`` for all.
    """

    priority: int | None = None
    weight: int | None = None
    limits: dict[str, int] | None = None
    disk: str | None = None


@dataclass(frozen=True)
class Values:
    """What is set; ``None`` or nothing where that is so."""

    io_priority: int | None = None
    io_weight: int | None = None
    io_limits: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What was there, what is there now, and since when it counts.

    Args:
        effect: ``now``, ``next_start``, ``unsupported`` or ``unknown``.
        words: all of it in sentences.
    """

    before: Values
    now: Values
    effect: str
    words: str
    as_asked: bool = True
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As the job's result has it."""
        return asdict(self)


def of(guest: Guest) -> Values:
    """As the last scan, or job, found it."""
    return Values(guest.io_priority, guest.io_weight, guest.io_limits)


def refusals(guest: Guest, setting: Setting) -> Iterator[tuple[str, str]]:
    """Codes and sentences of what stands against it."""
    host = guest.host
    if host.status == Host.Status.UNREACHABLE:
        yield "host_unreachable", f"{host.name} does not answer: {host.status_detail}"
    if guest.lock:
        yield "guest_locked", f"{guest.name} is locked ({guest.lock}): wait until that is over."
    container = guest.kind == Guest.Kind.CONTAINER
    if setting.priority is not None and not container:
        yield "invalid", f"{guest.name} is no container: it takes a weight and limits, no priority."
    if container and (setting.weight is not None or setting.limits is not None):
        yield "invalid", f"{guest.name} is a container: it takes a priority of 0 to 7, no weight and no limits."
    targets = {disk.target for disk in guest.disks.all()}
    if setting.disk is not None and setting.disk not in targets:
        yield "invalid", f"{guest.name} has no disk {setting.disk[:40]}; it has {', '.join(sorted(targets)) or 'none'}."


def refused(code: str, sentence: str) -> RefusedError:
    """The refusal, to be raised."""
    return RefusedError(code, sentence)


def warnings(guest: Guest, setting: Setting) -> Iterator[str]:
    """What an admin should know before."""
    if guest.off and guest.kind == Guest.Kind.CONTAINER:
        yield "It is not running: the priority counts from its next start."
    if setting.priority is not None:
        yield "It is relative: it says who comes first where the disks are busy, and is no limit."


def commands(guest: Guest, setting: Setting) -> Iterator[list[str]]:
    """What is done, as an admin would type it."""
    if guest.kind == Guest.Kind.CONTAINER and setting.priority is not None:
        yield ["vzctl", "set", guest.uid, "--ioprio", str(setting.priority), "--save"]
        return
    where = ["--config"] if guest.off else ["--live", "--config"]
    if guest.kind == Guest.Kind.DOMAIN and setting.weight is not None:
        yield ["virsh", "blkiotune", guest.name, *where, "--weight", str(setting.weight)]
    if guest.kind == Guest.Kind.DOMAIN and setting.limits:
        for target in targets_of(guest, setting):
            words = [word for name, value in setting.limits.items() for word in (_VIRSH[name], str(value))]
            yield ["virsh", "blkdeviotune", guest.name, target, *where, *words]


_VIRSH = {
    "read_bytes_sec": "--read-bytes-sec",
    "write_bytes_sec": "--write-bytes-sec",
    "read_iops_sec": "--read-iops-sec",
    "write_iops_sec": "--write-iops-sec",
}


def targets_of(guest: Guest, setting: Setting) -> list[str]:
    """The disks that limits are for."""
    disks = [disk for disk in guest.disks.all() if disk.device == "disk" and not disk.only_in]
    return [setting.disk] if setting.disk else [disk.target for disk in disks]


def apply(guest: Guest, setting: Setting, recorder: Recorder) -> Outcome:
    """Sets it and reads it again.

    Raises:
        RefusedError, HostError: it was not set; says what is there instead where that is known.
    """
    match guest.kind:
        case Guest.Kind.CONTAINER:
            return _container(guest, setting, recorder)
        case Guest.Kind.DOMAIN:
            return _domain(guest, setting, recorder)
        case _:
            raise HostError(f"{guest.name} is of a kind that this version cannot set anything of.")


def _container(guest: Guest, setting: Setting, recorder: Recorder) -> Outcome:
    if setting.priority is None:
        raise RefusedError("invalid", "Give a priority.")

    def told(run: openvz.CommandRun) -> None:
        recorder.command({"argv": list(run.argv), "exit_code": run.exit_code})
        recorder.tick()

    done = openvz.set_priority(transport.shell(guest.host), guest.uid, setting.priority, told=told)
    for note in done.notes:
        recorder.log(note, JobLog.Level.WARNING)
    recorder.log(done.words)
    return Outcome(
        Values(done.before.priority), Values(done.now.priority), str(done.effect), done.words, done.as_asked, done.notes
    )


def _domain(guest: Guest, setting: Setting, recorder: Recorder) -> Outcome:
    limits = None if setting.limits is None else dict.fromkeys(targets_of(guest, setting), setting.limits)
    done = libvirt_control.set_io(guest.host, guest.uid, weight=setting.weight, limits=limits)
    recorder.log(done.words)
    return Outcome(
        Values(None, done.before.weight, done.before.limits), Values(None, done.now.weight, done.now.limits),
        done.effect, done.words, done.as_asked,
    )  # fmt: skip
