"""The job kinds ``move_disk`` and ``resize``: what Proxmox VE itself does with a VM's disks, by its API.

Its tasks do the work; a job asks for one, follows it by its id, and reads the configuration again afterwards.
"""

import shlex
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import CANCELLED, INVALID, HostError, RefusedError, StoppedError
from storage_admin.errors import NotFoundError
from storage_admin.guests import backups, proxmox_vms
from storage_admin.guests.models import Guest
from storage_admin.guests.proxmox_vms import Vm
from storage_admin.hosts.proxmox import actions, reader, tasks, volumes
from storage_admin.hosts.proxmox.drives import Drive
from storage_admin.hosts.proxmox.storages import StorageFacts
from storage_admin.jobs import runner, services
from storage_admin.jobs.kinds import JobKind, Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.plan_and_progress import Affected, Cause, LastBackup, Plan, Recorder, Refusal, refuse

_DISK = {"type": "string", "minLength": 1, "maxLength": 40, "description": _("Target name of the disk, such as scsi0.")}


@dataclass
class Draft:
    """What would be done to a VM, and what stands against it."""

    reason: str
    command: list[str]
    refusals: list[Refusal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    #: Of the options, what the plan has found.
    options: dict[str, Any] = field(default_factory=dict)


class GuestKind(JobKind):
    """A kind whose target is a guest: it is alone on it, and a scan writes the rows of what it has changed."""

    target = "guest"

    def resolve(self, target_id: int) -> Target:
        guest = find(target_id)
        return Target(kind="guest", id=guest.pk, host=guest.host, label=guest.name)

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:  # noqa: ARG002 (for those that need more)
        return [Lock(f"guest:{target.id}", exclusive=True)]

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 (a scan writes the rows)
        return result

    def ended(self, job: Job) -> None:
        services.rescan(job)


class VmKind(GuestKind):
    """A kind that has Proxmox VE do something with a VM. Its plan asks the node: what a scan knows may be old."""

    unsuccessful = {
        "": Unsuccessful(gettext_noop("A task started in Proxmox VE continues there. See the log, then scan the host."))
    }
    #: Whether Proxmox VE writes the VM's configuration for it.
    writes = True
    #: Whether it can be done with its containers as well.
    containers = False

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        keys = [f"guest:{target.id}"]
        # As a job on the image locks its file and its row, which may be listed at another node.
        for disk in find(target.id).disks.all():
            if disk.target == options.get("disk") and not disk.only_in:
                keys += [f"inode:{target.host.pk}:{disk.dev}:{disk.inode}"] if disk.inode else []
                if (use := getattr(disk, "use", None)) is not None:
                    image = use.image
                    keys += [f"inode:{image.host_id}:{image.dev}:{image.inode}", f"image:{image.pk}"]
        return [Lock(key, exclusive=True) for key in dict.fromkeys(keys)]

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        guest = find(target_id)
        accepted = proxmox_vms.accepted_by(actor, guest, options)
        against = list(proxmox_vms.offline(guest, containers=self.containers))
        draft, by_hand = Draft(f"{self.title}: {guest.name}.", [], against), list[Refusal]()
        if not against:
            try:
                with proxmox_vms.opened(guest, proxmox_vms.PLAN_SECONDS) as vm:
                    draft = self.draft(vm, options)
                    by_hand = proxmox_vms.bugs(vm, self.name)
                    draft.warnings += proxmox_vms.check_writing(vm, accepted) if self.writes else []
            except (RefusedError, HostError) as error:
                draft.refusals[:0] = [Refusal(error.code, error.detail)]
        return self.planned(guest, draft, by_hand, options)

    def planned(self, guest: Guest, draft: Draft, by_hand: list[Refusal], options: dict[str, Any]) -> Plan:
        """The plan of a draft."""
        return Plan(
            method=self.name, reason=draft.reason, commands=(shlex.join(draft.command),) if draft.command else (),
            facts_at=guest.last_seen, refusals=tuple(draft.refusals), by_hand=tuple(by_hand),
            warnings=(*(one.detail for one in by_hand), *draft.warnings), causes=tuple(draft.causes),
            affected_guests=(Affected(guest.pk, guest.name, guest.state),), options=options | draft.options,
        )  # fmt: skip

    @abstractmethod
    def draft(self, vm: Vm, options: dict[str, Any]) -> Draft:
        """What would be done, from what the node tells now; raises RefusedError or HostError where it cannot be."""

    @abstractmethod
    def do(self, vm: Vm, options: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        """Does it, and reads again what came of it; raises as :meth:`JobKind.work`."""

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest = find(job.target_id)
        refuse(proxmox_vms.offline(guest, containers=self.containers))
        with proxmox_vms.opened(guest) as vm:
            refuse(self.draft(vm, job.options).refusals)
            if self.writes:
                proxmox_vms.check_writing(vm, job.options["accept_hidden_lines"])
                proxmox_vms.accept(guest, vm.config.digest)
            result = self.do(vm, job.options, recorder)
        recorder.log(result["words"])
        return result


class MoveDisk(VmKind):
    """Moves a disk to another storage, while the guest runs or not."""

    name = "move_disk"
    title = _("Move a disk")
    description = _("Copies a VM's disk to another storage or format, and uses the copy from then on.")
    properties = {
        "disk": _DISK,
        "storage": {"type": "string", "minLength": 1, "maxLength": 100, "description": _("The target storage.")},
        "format": {
            "type": ["string", "null"],
            "enum": [None, *actions.FORMATS],
            "default": None,
            "description": _("Format of the new image, if the storage supports several; null for the same format."),
        },
        "delete_source": {
            "type": "boolean",
            "default": False,
            "description": _("Remove the old volume after the move. Otherwise it stays with the VM as an unused disk."),
        },
        "bandwidth_bytes_sec": {
            "type": ["integer", "null"],
            "minimum": 1_048_576,
            "default": None,
            "description": _("Limit in bytes per second; null for the setting of the cluster."),
        },
        **proxmox_vms.ACCEPT,
    }

    def last_backups(self, target: Target, plan: Plan) -> tuple[LastBackup, ...]:
        return backups.of_one(target.id) if plan.options["delete_source"] else ()

    def draft(self, vm: Vm, options: dict[str, Any]) -> Draft:
        target, name = options["disk"], options["storage"]
        drive = actions.check_move(vm.config, target, name, options["format"] or "")
        form = gettext(" as {format}").format(format=options["format"]) if options["format"] else ""
        reason = gettext(
            "{target} of {guest} ({volume}) is copied to {name}{form}, and the VM then uses the copy. The old "
            "volume stays with the VM as an unused disk."
        )
        if options["delete_source"]:
            reason = gettext(
                "{target} of {guest} ({volume}) is copied to {name}{form}, and the VM then uses the copy. The old "
                "volume is removed."
            )
        draft = Draft(
            reason.format(target=target, guest=vm.guest.name, volume=drive.volume, name=name, form=form),
            ["qm", "disk", "move", vm.guest.uid, target, name]
            + (["--format", options["format"]] if options["format"] else [])
            + ["--delete", str(int(options["delete_source"]))],
        )
        draft.refusals += [*of_template(vm), *proxmox_vms.lacking(vm, "move", name)]
        draft.refusals += _against_storage(_storage(vm, name), drive, vm)
        draft.refusals += proxmox_vms.still_needed(vm.guest, target) if options["delete_source"] else []
        naming = vm.snapshots_with(drive.volume)
        if naming and options["delete_source"]:
            sentence = gettext(
                "The snapshot {naming} of {guest} needs the old volume. Keep the volume, or delete the snapshot first."
            ).format(naming=naming[0], guest=vm.guest.name)
            draft.refusals.append(Refusal("has_internal_snapshots", sentence))
        elif naming:
            sentence = gettext("The snapshots of the VM ({naming}) continue to use the old volume.")
            draft.warnings.append(sentence.format(naming=", ".join(naming[:5])))
        if volumes.own_id(drive.volume) != drive.volume:
            draft.warnings.append(
                gettext("The disk is a linked clone. The copy is a full copy, and also needs the space of the base.")
            )
        if not options["delete_source"]:
            draft.warnings.append(gettext("No space is freed on the old storage until the old volume is removed."))
        return draft

    def do(self, vm: Vm, options: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        target, before = options["disk"], vm.config.drive(options["disk"])
        upid = actions.move_disk(
            vm.client, vm.config, target, options["storage"], format=options["format"] or "",
            delete_source=options["delete_source"], bandwidth_bytes_sec=options["bandwidth_bytes_sec"],
        )  # fmt: skip
        done = followed(vm, upid, "moving", recorder)
        config = vm.again()
        now = config.drive(target)
        if now.volume == before.volume or not now.volume.startswith(options["storage"] + ":"):
            told = gettext(
                "Task {upid} succeeded, but {target} of {guest} is {volume}. Scan the host and check the disk."
            )
            raise HostError(told.format(upid=upid, target=target, guest=vm.guest.name, volume=now.volume))
        left = [key for key, text in sorted(config.now.items()) if key.startswith("unused") and text == before.volume]
        kept = f"; the old volume stays as {left[0]}" if left else ""
        return {
            "disk": target, "before": _told(before), "now": _told(now), "left_as": left[0] if left else None,
            "words": f"{target} of {vm.guest.name} was {before.volume} and is now {now.volume}{kept}.", **done,
        }  # fmt: skip


class Resize(VmKind):
    """Makes a disk larger; Proxmox VE makes none smaller."""

    name = "resize"
    title = _("Enlarge a disk")
    description = _(
        "Enlarges a disk of a VM with Proxmox VE. Enlarge the partitions and filesystems in the guest afterwards."
    )
    properties = {
        "disk": _DISK,
        "size_bytes": {
            "type": "integer",
            "minimum": 1024,
            "maximum": 1 << 50,
            "multipleOf": 1024,
            "description": _("The new size in bytes; must be larger than the current size."),
        },
        **proxmox_vms.ACCEPT,
    }

    def draft(self, vm: Vm, options: dict[str, Any]) -> Draft:
        target, wanted = options["disk"], options["size_bytes"]
        drive = actions.check_resize(vm.config, target, wanted)
        parts = volumes.split(drive.volume)
        name = parts[0] if parts else ""
        noted = drive.size_bytes
        draft = Draft(
            gettext("{target} of {guest} ({volume}) is enlarged to {wanted:,} bytes (now {noted}).").format(
                target=target,
                guest=vm.guest.name,
                volume=drive.volume,
                wanted=wanted,
                noted=gettext("size unknown") if noted is None else f"{noted:,}",
            ),
            ["qm", "disk", "resize", vm.guest.uid, target, str(wanted)],
            warnings=[
                gettext(
                    "The disk cannot be made smaller again. Enlarge the partitions and filesystems in the "
                    "guest afterwards."
                )
            ],
        )
        if parts is None:
            sentence = gettext("{target} of {guest} is not a volume of a storage.")
            draft.refusals.append(Refusal(INVALID, sentence.format(target=target, guest=vm.guest.name)))
            return draft
        draft.refusals += [*of_template(vm), *proxmox_vms.lacking(vm, "resize", name)]
        naming = vm.snapshots_with(drive.volume)
        if naming and drive.volume.endswith(".qcow2"):
            sentence = gettext("Proxmox VE cannot enlarge a qcow2 disk with snapshots. Delete them first ({naming}).")
            draft.refusals.append(Refusal("has_internal_snapshots", sentence.format(naming=", ".join(naming[:5]))))
        storage, more = _storage(vm, name), wanted - (noted or 0)
        if storage is not None and storage.available_bytes is not None and more > storage.available_bytes:
            sentence = gettext("{name} has {available:,} bytes free, and the disk may take {more:,} more.").format(
                name=name, available=storage.available_bytes, more=more
            )
            if storage.type == "lvm":
                draft.refusals.append(
                    Refusal("not_enough_space", gettext("{sentence} Free some space first.").format(sentence=sentence))
                )
            else:
                draft.warnings.append(
                    gettext("{sentence} If the storage runs full, the guest gets write errors.").format(
                        sentence=sentence
                    )
                )
        return draft

    def do(self, vm: Vm, options: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        target, wanted = options["disk"], options["size_bytes"]
        before = vm.config.drive(target)
        upid = actions.resize(vm.client, vm.config, target, wanted)
        done = followed(vm, upid, "enlarging", recorder)
        now = vm.again().drive(target)
        if now.size_bytes is None or now.size_bytes < wanted:
            told = gettext(
                "Task {upid} succeeded, but {target} of {guest} has {size} bytes. Scan the host and check the disk."
            )
            raise HostError(told.format(upid=upid, target=target, guest=vm.guest.name, size=now.size_bytes))
        was = "an unknown size" if before.size_bytes is None else f"{before.size_bytes:,} bytes"
        return {
            "disk": target, "before": _told(before), "now": _told(now),
            "words": f"{target} of {vm.guest.name} had {was} and now has {now.size_bytes:,} bytes.", **done,
        }  # fmt: skip


def find(guest_id: int) -> Guest:
    """The guest with its host and disks; raises NotFoundError."""
    guest = Guest.objects.select_related("host").prefetch_related("disks").filter(pk=guest_id).first()
    if guest is None:
        raise NotFoundError(gettext("There is no guest {guest}.").format(guest=guest_id))
    return guest


def followed(vm: Vm, upid: str, stage: str, recorder: Recorder, *, stops: bool = True) -> dict[str, Any]:
    """Waits for a task: its id and its log become the job's, its percentage the job's progress.

    Args:
        stage: what the job does meanwhile, in a word.
        stops: the task ends with the job; else it goes on.

    Returns:
        What the job's result says of it.

    Raises:
        StoppedError: somebody cancelled the job, or the worker ends; a task that ``stops`` has ended then.
        RefusedError, HostError: as :func:`tasks.follow`.
    """
    recorder.log(f"Proxmox VE's task {upid}")
    recorder.progress({"stage": stage, "percent": 0.0})
    recorder.flush()

    def check() -> None:
        recorder.tick()
        if not recorder.cancel_requested and not runner.stopping.is_set():
            return
        if not stops:
            sentence = gettext("Cancelled. Proxmox VE goes on with its task {upid}.")
            raise StoppedError(CANCELLED, sentence.format(upid=upid))
        recorder.log("stopping the task", JobLog.Level.WARNING)
        sentence = gettext("Cancelled. Proxmox VE has ended its task {upid}.")
        raise StoppedError(CANCELLED, sentence.format(upid=upid))

    warnings = tasks.follow(
        vm.client, upid, progress=lambda percent: recorder.progress({"stage": stage, "percent": percent}),
        log=recorder.log, check=check, stops=stops,
    )  # fmt: skip
    if warnings:
        recorder.log(f"Proxmox VE reported {warnings} warnings, see above", JobLog.Level.WARNING)
    return {"task": upid, "warnings": warnings}


def _told(drive: Drive) -> dict[str, Any]:
    return {"volume": drive.volume, "size_bytes": drive.size_bytes}


def _storage(vm: Vm, name: str) -> StorageFacts | None:
    return next((one for one in reader.read_storages(vm.client, vm.ref.node) if one.name == name), None)


def of_template(vm: Vm) -> list[Refusal]:
    if not vm.is_template:
        return []
    sentence = gettext("{guest} is a template. Linked clones use its disks, which cannot be changed.").format(
        guest=vm.guest.name
    )
    return [Refusal("immutable", sentence)]


def _against_storage(storage: StorageFacts | None, drive: Drive, vm: Vm) -> list[Refusal]:
    """What stands against copying a drive into a storage."""
    if storage is None or not storage.enabled or "images" not in storage.content:
        fit = [
            one.name
            for one in reader.read_storages(vm.client, vm.ref.node)
            if one.enabled and one.active and "images" in one.content
        ]
        why = gettext("it does not exist") if storage is None else gettext("it does not accept VM disks on this node")
        sentence = gettext("The storage cannot be used: {why}. Storages of {node} for VM disks: {fit}.")
        return [Refusal(INVALID, sentence.format(why=why, node=vm.ref.node, fit=", ".join(fit) or "none"))]
    if not storage.active:
        sentence = gettext("{node} cannot reach the storage {storage} at present. Check the storage, then try again.")
        return [Refusal("host_unreachable", sentence.format(node=vm.ref.node, storage=storage.name))]
    size, free = drive.size_bytes, storage.available_bytes
    if size is not None and free is not None and size > free:
        sentence = gettext(
            "The copy may need up to {size:,} bytes, but {storage} has {free:,} free. Free some space first."
        )
        return [Refusal("not_enough_space", sentence.format(size=size, storage=storage.name, free=free))]
    return []
