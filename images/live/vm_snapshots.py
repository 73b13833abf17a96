"""What the job kinds of snapshots do with VMs of Proxmox VE: tasks of its own, by its API."""

import contextlib
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.live.disks import change, seen
from storage_admin.agent import protocol
from storage_admin.agent.protocol import INVALID, HostError, RefusedError, StoppedError
from storage_admin.guests import proxmox_vms
from storage_admin.guests.kinds.vm_disks import Draft, VmKind, followed, of_template
from storage_admin.guests.models import Guest
from storage_admin.guests.proxmox_vms import Vm
from storage_admin.hosts.live_facts import Snapshot, as_text, named
from storage_admin.hosts.proxmox import drives, guests, reader, snapshots, volumes
from storage_admin.hosts.proxmox.drives import Drive
from storage_admin.jobs import runner
from storage_admin.jobs.models import JobLog
from storage_admin.jobs.plan_and_progress import Recorder, Refusal

#: An option of kinds that are of one snapshot; the plan finds it where it is not given.
CREATED: dict[str, Any] = {
    "created": {
        "type": ["string", "null"],
        "format": "date-time",
        "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$",
        "default": None,
        "description": _("When it was created, as lists of snapshots say: another one of that name is left alone."),
    }
}


def made_at(options: dict[str, Any]) -> int | None:
    """When the snapshot was created that options name, in seconds since 1970, if that is known; raises RefusedError."""
    text = options.get("created")
    try:
        return None if text is None else int(datetime.fromisoformat(text).timestamp())
    except ValueError:
        raise RefusedError(INVALID, gettext("{text} is no time.").format(text=text)) from None


def meant(found: Iterable[Snapshot], options: dict[str, Any]) -> Snapshot | None:
    """The snapshot that options name; raises RefusedError."""
    return named(found, options["name"], made_at(options))


def pinned(found: Iterable[Snapshot], options: dict[str, Any]) -> dict[str, Any]:
    """Options by which a later snapshot of that name is another one; raises RefusedError."""
    chosen = meant(found, options) if "created" in options else None
    if chosen is None or chosen.created is None:
        return options
    return options | {"created": as_text(chosen.created)}


def missing(guest: Guest, found: Iterable[Snapshot], options: dict[str, Any]) -> Refusal:
    """Why there is none that options name."""
    words, now = {"guest": guest.name, "name": options["name"]}, named(found, options["name"])
    sentence = gettext("{guest} has no snapshot {name}.")
    if options.get("created") and now is not None and now.created is not None:
        words |= {"then": options["created"], "now": as_text(now.created)}
        sentence = gettext(
            "The snapshot {name} of {guest} that was created at {then} is gone. There is another one of that name, "
            "created at {now}."
        )
    return Refusal("stale_plan", sentence.format(**words))


def compared(vm: Vm, before: dict[str, int | None]) -> dict[str, Any]:
    """What a VM's images occupied before, and occupy now, in bytes; nothing where its host's agent does not tell."""
    after = seen(vm.guest)
    if not before or before.keys() != after.keys() or None in {*before.values(), *after.values()}:
        return {}
    return change(*(sum(size or 0 for size in sizes.values()) for sizes in (before, after)))


def _left_locked(vm: Vm, name: str) -> str:
    """What to do where a deletion that failed has left the VM locked; empty where it has not, or nobody tells."""
    with contextlib.suppress(HostError, RefusedError):
        if vm.again().now.get("lock") == "snapshot-delete":
            return gettext(
                "Proxmox VE leaves {guest} locked then (snapshot-delete): see what is wrong with its disks, run {tool} "
                "unlock {uid} on the node, and delete the snapshot again; or, where its image has no such snapshot, "
                "{tool} delsnapshot {uid} {name} --force."
            ).format(guest=vm.guest.name, uid=vm.guest.uid, name=name, tool=vm.ref.tool)
    return ""


class VmSnapshotKind(VmKind):
    """A kind that has Proxmox VE do something with snapshots of a VM or a container."""

    containers = True

    def __init__(self, at: datetime | None = None) -> None:
        #: When the job was made; of a plan none.
        self.at = at


class CreateVmSnapshot(VmSnapshotKind):
    """A snapshot of all of a VM's disks, without its memory."""

    name = "snapshot"
    title = _("Create a snapshot")

    def draft(self, vm: Vm, options: dict[str, Any]) -> Draft:
        name, guest = options["name"], vm.guest.name
        reason = gettext("Proxmox VE keeps the present content of all disks of {guest} as the snapshot {name}.")
        draft = Draft(reason.format(guest=guest, name=name), [vm.ref.tool, "snapshot", vm.guest.uid, name])
        draft.refusals += [*of_template(vm), *proxmox_vms.lacking(vm, "snapshot")]
        if not snapshots.NAME.fullmatch(name):
            sentence = gettext(
                "Proxmox VE takes no such name: start it with a letter, use letters, digits, _ and -, 2 to 40 "
                "characters."
            )
            draft.refusals.append(Refusal(INVALID, sentence))
        if options["disks"]:
            sentence = gettext("Proxmox VE keeps all disks of a guest together: leave the disks out.")
            draft.refusals.append(Refusal(INVALID, sentence))
        if name in {one.name for one in snapshots.of(vm.client, vm.ref)}:
            sentence = gettext("{guest} already has a snapshot {name}: choose another name.")
            draft.refusals.append(Refusal("target_exists", sentence.format(guest=guest, name=name)))
        if not snapshots.can(vm.client, vm.ref):
            sentence = gettext(
                "A disk of {guest} lies on a storage that keeps no snapshots in that format, or is a folder of the "
                "node. Move it to qcow2, or to a storage that does."
            )
            draft.refusals.append(Refusal("unsupported_subformat", sentence.format(guest=guest)))
        draft.warnings.append(
            gettext("A snapshot grows as the guest writes data. Delete it when you no longer need it.")
        )
        # A container is frozen for the moment, by its node.
        if vm.ref.kind == drives.VM and vm.runs() and not guests.has_agent(vm.config.now):
            draft.warnings.append(gettext("Filesystems are not quiesced: the snapshot is as after a power cut."))
        return draft

    def do(self, vm: Vm, options: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        before, name = seen(vm.guest), options["name"]
        upid = snapshots.create(vm.client, vm.ref, name, gettext("Created by Storage Admin."))
        done = followed(vm, upid, "creating", recorder, stops=False)
        if name not in {one.name for one in snapshots.of(vm.client, vm.ref)}:
            sentence = gettext("Task {upid} succeeded, but {guest} has no snapshot {name}. Scan the host.")
            raise HostError(sentence.format(upid=upid, guest=vm.guest.name, name=name))
        return {"name": name, "words": f"{vm.guest.name} has the snapshot {name}.", **done, **compared(vm, before)}


class DeleteVmSnapshot(VmSnapshotKind):
    """A snapshot goes; the VM's present data stays."""

    name = "delete_snapshot"
    title = _("Delete a snapshot")

    def wanted(self, known: Sequence[Snapshot], options: dict[str, Any]) -> list[Snapshot]:
        """Those that go, in their order."""
        chosen = meant(known, options)
        return [] if chosen is None else [chosen]

    def draft(self, vm: Vm, options: dict[str, Any]) -> Draft:
        known = snapshots.of(vm.client, vm.ref)
        if not (wanted := self.wanted(known, options)):
            against = self.none(vm, known, options)
            return Draft(against.detail, [], [against])
        names = ", ".join(one.name for one in wanted)
        reason = gettext("{names} of {guest}: the present data stays. Nobody can go back to them any more.")
        draft = Draft(
            reason.format(names=names, guest=vm.guest.name), [vm.ref.tool, "delsnapshot", vm.guest.uid, wanted[0].name],
            options=pinned(known, options),
        )  # fmt: skip
        draft.refusals += [*of_template(vm), *proxmox_vms.lacking(vm, "snapshot")]
        draft.warnings.append(gettext("Proxmox VE cannot be stopped in it: a cancel only ends the waiting."))
        return draft

    def none(self, vm: Vm, known: Sequence[Snapshot], options: dict[str, Any]) -> Refusal:
        """Why there is nothing to delete."""
        return missing(vm.guest, known, options)

    def do(self, vm: Vm, options: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        before, deleted, tasks = seen(vm.guest), list[str](), list[str]()
        for one in self.wanted(snapshots.of(vm.client, vm.ref), options):
            name = one.name
            recorder.flush()
            recorder.tick()
            # Those before may have taken hours: one that was made anew meanwhile is another one.
            if named(snapshots.of(vm.client, vm.ref), name, one.made) is None:
                told = f"The snapshot {name} is gone, or was created anew since, and is left alone."
                recorder.log(told, JobLog.Level.WARNING)
                continue
            if deleted and (recorder.cancel_requested or runner.stopping.is_set()):
                raise StoppedError(protocol.CANCELLED, gettext("Cancelled. The other snapshots stay."))
            upid = snapshots.delete(vm.client, vm.ref, name)
            try:
                followed(vm, upid, "deleting", recorder, stops=False)
            except HostError as error:
                raise HostError(f"{error.detail} {_left_locked(vm, name)}".strip(), error.code) from None
            if named(snapshots.of(vm.client, vm.ref), name, one.made) is not None:
                sentence = gettext("Proxmox VE deleted the snapshot {name} and still lists it.")
                raise HostError(sentence.format(name=name))
            recorder.log(f"The snapshot {name} of {vm.guest.name} is deleted.")
            deleted, tasks = [*deleted, name], [*tasks, upid]
        if not deleted:
            against = self.none(vm, snapshots.of(vm.client, vm.ref), options)
            raise RefusedError(against.code, against.detail)
        words = f"Deleted of {vm.guest.name}: {', '.join(deleted)}. Its present data stays."
        return {"names": deleted, "tasks": tasks, "words": words, **compared(vm, before)}


class DeleteOldVmSnapshots(DeleteVmSnapshot):
    """All from an age on, the oldest first."""

    name = "delete_old_snapshots"
    title = _("Delete old snapshots")

    def wanted(self, known: Sequence[Snapshot], options: dict[str, Any]) -> list[Snapshot]:
        before = (self.at or timezone.now()) - timedelta(days=options["older_than_days"])
        return [one for one in reversed(known) if one.created is not None and one.created <= before]

    def none(self, vm: Vm, known: Sequence[Snapshot], options: dict[str, Any]) -> Refusal:  # noqa: ARG002 (by age)
        sentence = gettext("{guest} has no snapshot that is {days} days old.").format(
            guest=vm.guest.name, days=options["older_than_days"]
        )
        return Refusal("nothing_to_free", sentence)


def _kept_as_files(vm: Vm, name: str) -> str:
    """A disk of a VM whose snapshots are files or volumes of their own; empty where none is."""
    storages = {one.name: one for one in reader.read_storages(vm.client, vm.ref.node)}
    for key, text in vm.config.now.items():
        if drives.is_drive(key, drives.VM) and not key.startswith(proxmox_vms.BESIDE):
            with contextlib.suppress(ValueError):
                if volumes.snapshot_id(Drive.parse(text).volume, name, storages):
                    return key
    return ""


class RevertVm(VmSnapshotKind):
    """The disks of a VM that is off have the content of a snapshot again."""

    name = "revert_snapshot"
    title = _("Go back to a snapshot")

    def draft(self, vm: Vm, options: dict[str, Any]) -> Draft:
        name, guest = options["name"], vm.guest.name
        known = snapshots.of(vm.client, vm.ref)
        if (chosen := meant(known, options)) is None:
            against = missing(vm.guest, known, options)
            return Draft(against.detail, [], [against])
        reason = gettext(
            "The disks and the configuration of {guest} are as of {name} again. What was written since is lost; the "
            "snapshot stays."
        )
        draft = Draft(reason.format(guest=guest, name=name), [vm.ref.tool, "rollback", vm.guest.uid, name])
        draft.options = pinned(known, options)
        draft.refusals += [*of_template(vm), *proxmox_vms.lacking(vm, "rollback")]
        if vm.runs():  # Proxmox VE itself would stop it at once, as by a power cut
            sentence = gettext("{guest} is not off ({state}): shut it down first.")
            draft.refusals.append(Refusal("image_in_use", sentence.format(guest=guest, state=gettext("running"))))
        if not chosen.current and (disk := _kept_as_files(vm, name)):
            sentence = gettext(
                "The storage of {disk} keeps snapshots as files, of which Proxmox VE goes back to the newest alone. "
                "Delete the newer ones first."
            )
            draft.refusals.append(Refusal("in_snapshot_chain", sentence.format(disk=disk)))
        if chosen.with_memory:
            draft.warnings.append(gettext("The snapshot has the guest's memory: the guest runs afterwards."))
        return draft

    def do(self, vm: Vm, options: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        before, name = seen(vm.guest), options["name"]
        known = snapshots.of(vm.client, vm.ref)
        if meant(known, options) is None:
            against = missing(vm.guest, known, options)
            raise RefusedError(against.code, against.detail)
        done = followed(vm, snapshots.roll_back(vm.client, vm.ref, name), "reverting", recorder, stops=False)
        words = f"The disks of {vm.guest.name} are as of the snapshot {name}."
        return {"name": name, "words": words, **done, **compared(vm, before)}
