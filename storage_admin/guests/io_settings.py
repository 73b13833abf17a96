"""What a guest may take of the disks, by whatever its hypervisor has for that."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests import proxmox_vms
from storage_admin.guests.models import Guest
from storage_admin.guests.proxmox_vms import Vm
from storage_admin.hosts import openvz, transport
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.libvirt.io import IoOutcome
from storage_admin.hosts.libvirt.relay import why_read_only
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import changes
from storage_admin.hosts.proxmox import limits as proxmox_limits
from storage_admin.hosts.proxmox.errors import RIGHT_MISSING
from storage_admin.hosts.proxmox.guests import limits_of
from storage_admin.jobs.models import JobLog
from storage_admin.jobs.plan_and_progress import Recorder, Refusal, refuse


@dataclass(frozen=True)
class Setting:
    """What is to be set; ``None`` leaves a part as it is.

    Args:
        limits: by name, bytes or operations a second; 0 for none.
        disk: target of the disk that they are for; ``None`` for all.
        accepted: see :data:`proxmox_vms.ACCEPT`.
    """

    priority: int | None = None
    weight: int | None = None
    limits: dict[str, int] | None = None
    disk: str | None = None
    accepted: str | None = None


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


def refusals(guest: Guest, setting: Setting) -> Iterator[Refusal]:
    """What stands against it."""
    host = guest.host
    if guest.kind == Guest.Kind.VM:
        yield from _refusals_of_vm(guest, setting)
    else:
        if host.status == Host.Status.UNREACHABLE:
            yield Refusal("host_unreachable", f"{host.name} does not answer: {host.status_detail}")
        if guest.lock:
            yield Refusal(
                "guest_locked",
                _("{guest} is locked ({lock}). Wait until the lock is released.").format(
                    guest=guest.name, lock=guest.lock
                ),
            )
    container = guest.kind == Guest.Kind.CONTAINER
    if not guest.takes_io:
        yield Refusal(
            "invalid",
            _("{guest} is a container of Proxmox VE. These have no I/O priority and no I/O limits.").format(
                guest=guest.name
            ),
        )
        return
    if setting.priority is not None and not container:
        yield Refusal(
            "invalid",
            _("{guest} is not a container. Set a weight or limits instead of a priority.").format(guest=guest.name),
        )
    if container and (setting.weight is not None or setting.limits is not None):
        yield Refusal(
            "invalid",
            _("{guest} is a container. Set a priority from 0 to 7 instead of a weight or limits.").format(
                guest=guest.name
            ),
        )
    if guest.kind == Guest.Kind.DOMAIN and (why := why_read_only(host)):
        yield Refusal("tool_missing", why)
    targets = {disk.target for disk in guest.disks.all()}
    if setting.disk is not None and setting.disk not in targets:
        yield Refusal(
            "invalid",
            _("{guest} has no disk {disk}. Its disks: {targets}.").format(
                guest=guest.name, disk=setting.disk[:40], targets=", ".join(sorted(targets)) or "none"
            ),
        )


def _refusals_of_vm(guest: Guest, setting: Setting) -> Iterator[Refusal]:
    yield from proxmox_vms.offline(guest)
    if setting.weight is not None:
        yield Refusal(
            "invalid",
            _("{guest} is a VM of Proxmox VE, which has no I/O weight. Set limits instead.").format(guest=guest.name),
        )
    if setting.limits is not None:
        try:
            proxmox_limits.check(setting.limits)
        except RefusedError as error:
            yield Refusal(error.code, error.detail)
        paths = {disk.target: disk.path for disk in guest.disks.all() if not disk.volume and not disk.only_in}
        for target in targets_of(guest, setting):
            if target in guest.waiting:
                sentence = _(
                    "A pending change of {target} of {guest} takes effect at the next start. Start the guest or "
                    "revert the change, then scan the host."
                ).format(target=target, guest=guest.name)
                yield Refusal("stale_plan", sentence)
            if paths.get(target, "").startswith("/"):
                sentence = _(
                    "{target} of {guest} is the path {paths}. Proxmox VE lets only root@pam change such a drive, "
                    "not a token. Choose another disk, or set the limits on the node (qm set {uid} --{target} …)."
                ).format(target=target, guest=guest.name, paths=paths[target], uid=guest.uid)
                yield Refusal(RIGHT_MISSING, sentence)


def refusals_now(guest: Guest, setting: Setting) -> list[Refusal]:
    """The same, and what has to be asked for: which rights a token lacks."""
    found = list(refusals(guest, setting))
    if not found and guest.kind == Guest.Kind.VM:
        return proxmox_vms.lacking_on(guest, "limits") or _hidden_lines(guest, setting)
    return found


def _hidden_lines(guest: Guest, setting: Setting) -> list[Refusal]:
    """As far as the last scan knows; where that has seen lines that it did not understand, they are looked at now."""
    against = proxmox_vms.unchecked(guest, guest.digest, setting.accepted)
    if against or not guest.unread:
        return against
    try:
        with proxmox_vms.opened(guest, proxmox_vms.PLAN_SECONDS) as vm:
            proxmox_vms.check_writing(vm, setting.accepted)
    except (RefusedError, HostError) as error:
        return [Refusal(error.code, error.detail)]
    return []


def warnings(guest: Guest, setting: Setting) -> Iterator[str]:
    """What an admin should know before."""
    if guest.kind == Guest.Kind.CONTAINER and is_edited(guest):
        files = " or ".join(f"{folder}/{guest.uid}.conf" for folder in openvz.FOLDERS)
        yield _(
            'vzctl is not installed on {host}. {files} is edited to say IOPRIO="{priority}", which takes effect at '
            "the next start."
        ).format(host=guest.host.name, files=files, priority=setting.priority)
    elif guest.off and guest.kind == Guest.Kind.CONTAINER:
        yield _("The container is not running. The priority takes effect at its next start.")
    if guest.kind == Guest.Kind.VM and guest.host.by_api_alone:
        yield str(proxmox_vms.UNCHECKED)
    if setting.priority is not None:
        yield _("The priority is relative: it decides who goes first when the disks are busy. It is not a limit.")


def is_edited(guest: Guest) -> bool:
    """Whether the last scan found no vzctl on a container's host, so that its configuration is edited."""
    return (guest.host.capabilities.get("tools") or {}).get("vzctl") is False


def commands(guest: Guest, setting: Setting) -> Iterator[list[str]]:
    """What is done, as an admin would type it."""
    if not guest.takes_io:
        return
    if guest.kind == Guest.Kind.CONTAINER:
        if setting.priority is not None and not is_edited(guest):
            yield ["vzctl", "set", guest.uid, "--ioprio", str(setting.priority), "--save"]
        return
    where = ["--config"] if guest.off else ["--live", "--config"]
    if guest.kind == Guest.Kind.DOMAIN and setting.weight is not None:
        yield ["virsh", "blkiotune", guest.name, *where, "--weight", str(setting.weight)]
    limits = setting.limits or {}
    for target in targets_of(guest, setting) if limits else ():
        if guest.kind == Guest.Kind.DOMAIN:
            words = [word for name, value in limits.items() for word in (f"--{name.replace('_', '-')}", str(value))]
            yield ["virsh", "blkdeviotune", guest.name, target, *where, *words]
        else:
            yield ["qm", "set", guest.uid, f"--{target}", ",".join(["…", *_qm_words(limits)])]


def _qm_words(limits: dict[str, int]) -> Iterator[str]:
    for name, value in limits.items():
        yield f"{proxmox_limits.KEYS[name]}={proxmox_limits.text(proxmox_limits.KEYS[name], value) if value else ''}"


def targets_of(guest: Guest, setting: Setting) -> list[str]:
    """The disks that limits are for."""
    disks = [disk for disk in guest.disks.all() if disk.device == "disk" and not disk.only_in]
    if guest.kind == Guest.Kind.VM:
        disks = [disk for disk in disks if not disk.target.startswith(proxmox_vms.BESIDE)]
    return [setting.disk] if setting.disk else [disk.target for disk in disks]


def apply(guest: Guest, setting: Setting, recorder: Recorder) -> Outcome:
    """Sets it and reads it again.

    Raises:
        RefusedError, HostError: it was not set; says what is there instead where that is known.
    """
    if guest.kind == Guest.Kind.CONTAINER:
        return _container(guest, setting, recorder)
    if guest.kind == Guest.Kind.DOMAIN:
        return _domain(guest, setting, recorder)
    with proxmox_vms.opened(guest) as vm:
        return _vm(vm, setting, recorder)


def _container(guest: Guest, setting: Setting, recorder: Recorder) -> Outcome:
    if setting.priority is None:
        raise RefusedError("invalid", _("Set a priority."))

    def told(run: openvz.CommandRun) -> None:
        if run.argv[0] != "sh":  # those that look and edit: what they come to stands in the result
            recorder.command({"argv": list(run.argv), "exit_code": run.exit_code})
            if run.said:
                recorder.log(run.said)
        recorder.tick()

    try:
        done = openvz.set_priority(transport.shell(guest.host), guest.uid, setting.priority, told=told)
    except openvz.NotSetError as error:
        Guest.objects.filter(pk=guest.pk).update(io_priority=error.outcome.now.priority)
        if error.lost:
            text = error.lost.decode("utf-8", "backslashreplace")
            recorder.log(f"Previous content of {error.outcome.path}:\\n{text}", JobLog.Level.ERROR)
        raise
    if done.by == "file":
        recorder.log(f"{done.path} was edited, because vzctl is not installed.")
    _tell(done, recorder)
    return Outcome(
        Values(done.before.priority), Values(done.now.priority), str(done.effect), done.words, done.as_asked, done.notes
    )


def _domain(guest: Guest, setting: Setting, recorder: Recorder) -> Outcome:
    limits = None if setting.limits is None else dict.fromkeys(targets_of(guest, setting), setting.limits)
    done = control.set_io(guest.host, guest.uid, weight=setting.weight, limits=limits)
    _tell(done, recorder)
    return Outcome(
        Values(None, done.before.weight, done.before.limits), Values(None, done.now.weight, done.now.limits),
        done.effect, done.words, done.as_asked, done.notes,
    )  # fmt: skip


def _tell(done: openvz.PrioritySet | IoOutcome, recorder: Recorder) -> None:
    for note in done.notes:
        recorder.log(note, JobLog.Level.WARNING)
    recorder.log(done.words)


def _vm(vm: Vm, setting: Setting, recorder: Recorder) -> Outcome:
    """A VM of Proxmox VE: one drive after the other, each by compare-and-set."""
    refuse(proxmox_vms.lacking(vm, "limits"))
    proxmox_vms.check_writing(vm, setting.accepted)
    proxmox_vms.accept(vm.guest, vm.config.digest)
    before, waiting, done = limits_of(vm.config.next), [], list[str]()
    digest = vm.config.digest
    for target in targets_of(vm.guest, setting):
        try:
            one = changes.set_limits(vm.client, vm.ref, target, setting.limits or {}, digest=digest)
            digest = one.digest
            # Proxmox VE has just written that file: it has no line that it would drop.
            proxmox_vms.accept(vm.guest, digest)
        except (RefusedError, HostError) as error:
            if not done:
                raise
            raise HostError(
                _("{detail} Already set before that: {done}.").format(detail=error.detail, done=", ".join(done)),
                error.code,
            ) from error
        done.append(target)
        waiting += [target] if one.waits else []
        recorder.log(f"{target}: {_limits_in_words(one.before)} before, {_limits_in_words(one.after)} now")
        recorder.tick()
    if not done:
        raise RefusedError(
            "stale_plan",
            _("{guest} has no disk that takes limits. Scan the host, then try again.").format(guest=vm.guest.name),
        )
    now, runs = limits_of(vm.again().next), vm.runs()
    effect = "next_start" if waiting or not runs else "now"
    since = (
        _("The guest is off. The limits take effect at its next start.") if not runs else _("The limits are in effect.")
    )
    if waiting:
        since = _(
            "The limits of {waiting} take effect at the next start of the guest, because its hotplug setting "
            "does not include disks."
        ).format(waiting=", ".join(waiting))
    words = "; ".join(
        f"{one} had {_limits_in_words(before.get(one))}, has {_limits_in_words(now.get(one))}" for one in done
    )
    words = f"{vm.guest.name}: {words}. {since}"
    recorder.log(words)
    return Outcome(Values(io_limits=before), Values(io_limits=now), effect, words)


def _limits_in_words(found: Mapping[str, int] | None) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in (found or {}).items()) or "no limits"
