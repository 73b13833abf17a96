"""The job kinds ``snapshot`` and ``revert_snapshot``: of libvirt guests, by libvirt's own calls.

Of a guest that runs a snapshot is of the disks alone: each is written to an overlay from then on. Of a guest that
is off a snapshot is internal: it stands in the images themselves, which must be qcow2. Only a guest that is off goes
back to one.
"""

import shlex
from abc import abstractmethod
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, ClassVar

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.live import merging
from images.live.disks import (
    backed_up,
    chain_of,
    change_of,
    files_told,
    images_of,
    in_the_clear,
    layers_of,
    pool_of,
    whole_chains,
)
from images.live.follow import doubts, ended_unseen, keep_begun, settle
from images.live.kind import OFF, LiveGuestKind, bugs, libvirt_guest
from images.live.vm_snapshots import (
    CREATED,
    CreateVmSnapshot,
    RevertVm,
    VmSnapshotKind,
    made_at,
    meant,
    missing,
    pinned,
)
from images.rewrite import record
from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.guests import backups, proxmox_vms
from storage_admin.guests.kinds.vm_disks import find
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import snapshots
from storage_admin.hosts.libvirt.process import GoneError
from storage_admin.hosts.libvirt.snapshots import Snapshots
from storage_admin.hosts.live_facts import GuestNow, Snapshot
from storage_admin.jobs.kinds import OVER, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Affected, LastBackup, Plan, Recorder, Refusal, refuse

#: The agent's command that holds filesystems still.
_FREEZE = "guest-fsfreeze-freeze"
NAME: dict[str, Any] = {
    "type": "string",
    "pattern": r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}$",
    "description": _("Name of the snapshot: letters, digits, and _ . - after the first character."),
}


class SnapshotKind(LiveGuestKind):
    """A kind that has libvirt, or Proxmox VE, do something with snapshots of a guest."""

    #: What it does with VMs of Proxmox VE.
    of_vms: ClassVar[type[VmSnapshotKind]]

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        guest = find(target_id)
        if guest.kind != Guest.Kind.DOMAIN:
            return self.of_vms().plan(actor, target_id, options)
        reason, warnings, against = f"{self.title}: {guest.name}.", list[str](), list[Refusal]()
        commands, by_hand = list[list[str]](), list[Refusal]()
        try:
            now, known = asked(guest, options)
            reason, warnings, against = self.choose(guest, now, known, options)
            options = pinned(known.found, options)
            commands = self.commands(guest, known, options)
            by_hand = doubts([guest.pk], [path for disk in now.disks for path in disk.chain[:1]])
            if now.runs:
                by_hand += bugs(guest, self.name)
        except (RefusedError, HostError) as error:
            against = [Refusal(error.code, error.detail)]
        return Plan(
            method=self.name, reason=reason, commands=tuple(map(shlex.join, commands)),
            facts_at=guest.last_seen, refusals=tuple(against), by_hand=tuple(by_hand),
            warnings=(*(one.detail for one in by_hand), *warnings),
            affected_guests=(Affected(guest.pk, guest.name, guest.state),), options=options,
        )  # fmt: skip

    def last_backups(self, target: Target, plan: Plan) -> tuple[LastBackup, ...]:  # noqa: ARG002 (of the whole guest)
        return backups.of_one(target.id) if self.no_way_back else ()

    def submitted(self, job: Job) -> None:
        job.options |= {name: job.plan["options"].get(name) for name in CREATED if name in self.properties}
        job.save(update_fields=["options"])

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest = find(job.target_id)
        if guest.kind != Guest.Kind.DOMAIN:
            return self.of_vms(job.created).work(job, recorder)
        return self.by_libvirt(job, recorder)

    @abstractmethod
    def by_libvirt(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        """The work on a guest of libvirt; as :meth:`work`."""

    @abstractmethod
    def choose(
        self, guest: Guest, now: GuestNow, known: Snapshots, options: dict[str, Any]
    ) -> tuple[str, list[str], list[Refusal]]:
        """What would be done, what to know before, and what stands against it."""

    @abstractmethod
    def commands(self, guest: Guest, known: Snapshots, options: dict[str, Any]) -> list[list[str]]:
        """What is done, as an admin would type it."""

    def check(self, guest: Guest, options: dict[str, Any]) -> GuestNow:
        """The guest as it is now, provided that it can be done; raises RefusedError or HostError."""
        now, known = asked(guest, options)
        refuse(self.choose(guest, now, known, options)[2])
        return now

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        if "before_bytes" in result:
            record.write_line(job, pool_of(find(job.target_id)), result["before_bytes"], result["after_bytes"])
        return result


class CreateSnapshot(SnapshotKind):
    """Has the disks of a guest written to overlays from now on, or keep their content in themselves."""

    of_vms = CreateVmSnapshot
    name, title = of_vms.name, of_vms.title
    description = _(
        "Creates a snapshot of a guest's disks. A guest that runs writes to new overlays from then on; of one that is "
        "off the snapshot is kept in its images (internal)."
    )
    unsuccessful = {"": Unsuccessful(gettext_noop("The guest's page shows whether the snapshot was created."))}
    properties = {
        "name": NAME,
        "disks": {
            "type": ["array", "null"],
            "items": {"type": "string", "maxLength": 40},
            "minItems": 1,
            "default": None,
            "description": _("Targets of the disks, such as vda; null for all that can be written to."),
        },
        "quiesce": {
            "type": "boolean",
            "default": True,
            "description": _("Has the guest agent flush and freeze the filesystems for that moment."),
        },
        **proxmox_vms.ACCEPT,
    }

    def choose(
        self, guest: Guest, now: GuestNow, known: Snapshots, options: dict[str, Any]
    ) -> tuple[str, list[str], list[Refusal]]:
        targets = [disk.target for disk in now.disks]
        wanted, against = options["disks"] or targets, list[Refusal]()
        if known.named(options["name"]) is not None:
            sentence = gettext("{guest} already has a snapshot {name}: choose another name.")
            against.append(Refusal("target_exists", sentence.format(guest=guest.name, name=options["name"])))
        if not wanted or (missing := sorted(set(wanted) - set(targets))):
            sentence = gettext("{guest} has no disk {missing}; it has {targets}.").format(
                guest=guest.name,
                missing=", ".join(missing if wanted else []) or "?",
                targets=", ".join(targets) or "none",
            )
            against.append(Refusal(INVALID, sentence))
        against += backed_up(guest, now)
        if now.state == OFF:
            return self._internal(guest, now, wanted, against)
        if options["quiesce"] and (now.agent.commands is None or _FREEZE not in now.agent.commands):
            sentence = gettext(
                "The guest agent of {guest} does not answer, or cannot freeze filesystems. Start it in the guest, or "
                "create the snapshot without quiescing, as after a power cut."
            )
            against.append(Refusal("tool_missing", sentence.format(guest=guest.name)))
        images = images_of(guest)
        written = [images[target] for target in wanted if target in images]
        against += in_the_clear(written, gettext("its overlay"))
        depth = max((len(disk.chain) for disk in now.disks if disk.target in wanted), default=0)
        reason = gettext(
            "{guest} writes to new overlays of {disks} from now on. Their chains become {depth} images deep at most."
        ).format(guest=guest.name, disks=", ".join(wanted) or gettext("no disk"), depth=depth + 1)
        warnings = [gettext("A snapshot grows as the guest writes data. Delete it when you no longer need it.")]
        if not options["quiesce"]:
            warnings.append(gettext("Filesystems are not quiesced: the snapshot is as after a power cut."))
        return reason, warnings, against

    @staticmethod
    def _internal(
        guest: Guest, now: GuestNow, wanted: list[str], against: list[Refusal]
    ) -> tuple[str, list[str], list[Refusal]]:
        for disk in now.disks:
            if disk.target in wanted and disk.format != "qcow2":
                sentence = gettext("{disk} is {format}: only qcow2 images hold snapshots. Start the guest first.")
                told = sentence.format(disk=disk.target, format=disk.format or "?")
                against.append(Refusal("unsupported_subformat", told))
        reason = gettext(
            "The images of {disks} keep their present content as a snapshot of their own (internal). {guest} is off."
        ).format(guest=guest.name, disks=", ".join(wanted) or gettext("no disk"))
        return reason, [gettext("Each image grows by what is overwritten in it from now on.")], against

    def commands(self, guest: Guest, known: Snapshots, options: dict[str, Any]) -> list[list[str]]:  # noqa: ARG002
        quiesce = ["--quiesce"] if options["quiesce"] else []
        how = [] if guest.off else ["--disk-only", *quiesce]
        return [["virsh", "snapshot-create-as", guest.name, options["name"], "--atomic", *how]]

    def by_libvirt(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest, options = find(job.target_id), job.options
        now = self.check(guest, options)
        disks = options["disks"] or [disk.target for disk in now.disks]
        recorder.progress({"stage": "creating"})
        recorder.flush()
        before = whole_chains(guest, now) if now.state == OFF else {}
        over = _overlays(now, options["name"], disks) if now.runs else []
        keep_begun(job, {OVER: over})
        described = gettext("Created by {user} (job {job}).").format(user=job.created_by, job=job.pk)
        quiesce = options["quiesce"]
        try:
            known = snapshots.create(guest.host, guest.uid, options["name"], described, disks, quiesce=quiesce)
        except GoneError as error:
            try:
                left = any(files_told(guest, [overlay for _, overlay in over]))
            except (RefusedError, HostError):
                raise error from None  # nobody knows
            if left:
                raise ended_unseen(guest, over) from error
            settle(job)
            raise
        except (RefusedError, HostError):
            settle(job)
            raise
        settle(job)
        made = known.named(options["name"])
        if made is None:
            raise HostError(
                gettext("libvirt created a snapshot but does not list it. Check the guest's snapshots on the host.")
            )
        words = f"{guest.name} has the snapshot {made.name} of {', '.join(part.target for part in made.disks)}."
        recorder.log(words)
        overlays = {part.target: part.path for part in made.disks if part.how == "external"}
        return {"name": made.name, "overlays": overlays, "words": words, **change_of(guest, before)}


def _overlays(now: GuestNow, name: str, disks: list[str]) -> list[list[str]]:
    """What the disks of a running guest stand on, each with its overlay as libvirt names that."""
    tops = [disk.chain[0] for disk in now.disks if disk.target in disks and disk.chain]
    return [[top, f"{PurePosixPath(top).with_suffix('')}.{name}"] for top in tops]


class RevertSnapshot(SnapshotKind):
    """Gives a guest that is off the content of a snapshot again; what was written since is lost."""

    of_vms = RevertVm
    name, title = of_vms.name, of_vms.title
    description = _(
        "Gives the disks of a guest that is off the content again that they had at a snapshot. What was written since "
        "is lost."
    )
    no_way_back = True
    unsuccessful = {
        "": Unsuccessful(gettext_noop("The guest's disks have either the content of the snapshot, or that before."))
    }
    properties = {"name": NAME, **CREATED, **proxmox_vms.ACCEPT}

    def choose(
        self, guest: Guest, now: GuestNow, known: Snapshots, options: dict[str, Any]
    ) -> tuple[str, list[str], list[Refusal]]:
        chosen, against, warnings = meant(known.found, options), list[Refusal](), list[str]()
        if chosen is None:
            gone = missing(guest, known.found, options)
            return gone.detail, [], [gone]
        if now.state != OFF:
            sentence = gettext("{guest} is not off ({state}): shut it down first.")
            against.append(Refusal("image_in_use", sentence.format(guest=guest.name, state=now.state)))
        if now.saved:
            sentence = gettext(
                "{guest} was saved with its memory, which would not fit its disks afterwards: start it and shut it "
                "down, or drop the memory (virsh managedsave-remove)."
            )
            against.append(Refusal("image_in_use", sentence.format(guest=guest.name)))
        if chosen.is_external and known.version < snapshots.REVERTS_EXTERNAL:
            sentence = gettext(
                "libvirt {version} on {host} cannot go back to snapshots that have files of their own; 9.9 and later "
                "can."
            )
            against.append(Refusal("tool_missing", sentence.format(version=known.version_words, host=guest.host.name)))
        against += _not_the_newest(guest, now, known, chosen)
        concerned = {part.target for part in chosen.disks}
        for disk in now.disks:
            if disk.target in concerned:
                layers = layers_of(guest, replace(now, snapshots=()), disk)
                against += [*layers.refusals, *merging.needed_by_others(layers, 0, 0)]
        warnings.append(gettext("The guest's definition becomes that of the snapshot as well, with the disks of then."))
        if chosen.with_memory:
            warnings.append(gettext("The snapshot has the guest's memory: the guest runs afterwards."))
        reason = gettext(
            "The disks of {guest} have the content of {name} again. What was written since is lost; the snapshot stays."
        ).format(guest=guest.name, name=chosen.name)
        return reason, warnings, against

    def commands(self, guest: Guest, known: Snapshots, options: dict[str, Any]) -> list[list[str]]:  # noqa: ARG002
        return [["virsh", "snapshot-revert", guest.name, options["name"]]]

    def by_libvirt(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest, name = find(job.target_id), job.options["name"]
        before = whole_chains(guest, self.check(guest, job.options))
        recorder.progress({"stage": "reverting"})
        recorder.flush()
        snapshots.revert(guest.host, guest.uid, name, made_at(job.options))
        words = f"The disks of {guest.name} are as of the snapshot {name}."
        recorder.log(words)
        return {"name": name, "words": words, **change_of(guest, before)}


def _not_the_newest(guest: Guest, now: GuestNow, known: Snapshots, chosen: Snapshot) -> list[Refusal]:
    """Where snapshots have files of their own, only the newest is gone back to, and only with all disks.

    An older one stands in images that others stand on by then. And libvirt (11.3) goes back with all disks, whichever
    the snapshot is of, and deletes the files of the snapshot that the guest is at, whatever stands on them.
    """
    tops = {disk.target: disk.chain[0] for disk in now.disks if disk.chain}
    inside = [part for part in chosen.disks if part.how == "internal" and part.path]
    if any(part.path != tops.get(part.target, part.path) for part in inside):
        sentence = gettext("{name} is in an image that others stand on by now: going back would write over it.")
        return [Refusal("in_snapshot_chain", sentence.format(name=chosen.name))]
    if not any(one.is_external for one in known.found):
        return []
    if not chosen.current or any(one.parent == chosen.name for one in known.found):
        sentence = gettext(
            "{guest} has snapshots with files of their own: only the newest can be gone back to. Delete the newer ones "
            "first."
        )
        return [Refusal("in_snapshot_chain", sentence.format(guest=guest.name))]
    overlays = {part.target: part.path for part in chosen.disks}
    if chosen.is_external and any(overlays.get(target) != top for target, top in tops.items()):
        sentence = gettext(
            "libvirt goes back with all disks, and {guest} does not write to the overlays of {name} on each of them. "
            "Create a snapshot of all disks first, or go back by hand."
        )
        return [Refusal("in_snapshot_chain", sentence.format(guest=guest.name, name=chosen.name))]
    return []


def asked(guest: Guest, options: dict[str, Any]) -> tuple[GuestNow, Snapshots]:
    """A guest and its snapshots as they are now; raises RefusedError or HostError."""
    now = libvirt_guest(guest, agent=bool(options.get("quiesce")))
    now = replace(now, disks=tuple(replace(disk, chain=chain_of(guest, disk)) for disk in now.disks))
    if not now.runs and now.state != OFF:
        sentence = gettext("{guest} is neither running nor off ({state}).")
        raise RefusedError(INVALID, sentence.format(guest=guest.name, state=now.state))
    return now, snapshots.of(guest.host, guest.uid)
