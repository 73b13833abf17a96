"""The job kinds ``delete_snapshot`` and ``delete_old_snapshots``: of libvirt guests, by libvirt's own calls.

Of a guest that runs libvirt writes what the overlays hold into the images below, and removes them; it goes on with that
when whoever asked for it has gone. Of a guest that is off it takes the snapshot out of the images.
"""

import shlex
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext, gettext_noop, ngettext
from django.utils.translation import gettext_lazy as _

from images.live import merging
from images.live.disks import backed_up, change_of, layers_of, pool_of, refuse_needed, whole_chains
from images.live.follow import GUEST_ENDED, ended_unseen, keep_begun, settle, tell_lost, until_it_hangs
from images.live.snapshots import NAME, SnapshotKind, asked
from images.live.vm_snapshots import CREATED, DeleteOldVmSnapshots, DeleteVmSnapshot, meant, missing
from images.rewrite import record
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError, StoppedError
from storage_admin.guests import proxmox_vms
from storage_admin.guests.kinds.vm_disks import find
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import snapshots
from storage_admin.hosts.libvirt.process import GoneError
from storage_admin.hosts.libvirt.snapshots import Snapshots
from storage_admin.hosts.live_facts import GuestNow, Snapshot
from storage_admin.jobs import runner
from storage_admin.jobs.kinds import BEGUN, OVER, GoesOnError, Unsuccessful, pairs_of
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder, Refusal, refuse

#: What libvirt says while it is at work on the domain.
_BUSY = ("state change lock", "block job", "did not answer")
#: Seconds until it is tried again where libvirt is still busy with it.
_AGAIN = 2.0


class DeleteSnapshot(SnapshotKind):
    """Has libvirt delete a snapshot; what was written since stays."""

    of_vms = DeleteVmSnapshot
    name, title = of_vms.name, of_vms.title
    description = _(
        "Deletes a snapshot of a guest; its present data stays. Of a guest that runs, libvirt writes what the overlays "
        "hold into the images below, and removes the overlays."
    )
    goes_on = no_way_back = True
    unsuccessful = {
        "": Unsuccessful(gettext_noop("The guest's data is whole. Its page shows whether the snapshot is gone."))
    }
    properties = {"name": NAME, **CREATED, **proxmox_vms.ACCEPT}

    def wanted(self, known: Snapshots, options: dict[str, Any], at: datetime | None = None) -> list[Snapshot]:  # noqa: ARG002
        """Those that go, in their order, as of a moment: of now where none is given."""
        chosen = meant(known.found, options)
        return [] if chosen is None else [chosen]

    def choose(
        self, guest: Guest, now: GuestNow, known: Snapshots, options: dict[str, Any]
    ) -> tuple[str, list[str], list[Refusal]]:
        wanted = self.wanted(known, options)
        if not wanted:
            gone = missing(guest, known.found, options)
            return gone.detail, [], [gone]
        reason = gettext(
            "What {guest} has written since the snapshot {name} stays, and goes into the images below. Nobody can go "
            "back to {name} any more."
        ).format(guest=guest.name, name=wanted[0].name)
        if not wanted[0].is_external:
            reason = gettext("{name} is removed from the images of {guest}. The present content stays.").format(
                guest=guest.name, name=wanted[0].name
            )
        return reason, [self._warning()], self.against(guest, now, known, wanted[0])

    @staticmethod
    def _warning() -> str:
        return gettext("libvirt cannot be stopped in it: a cancel only ends the waiting.")

    @staticmethod
    def against(guest: Guest, now: GuestNow, known: Snapshots, chosen: Snapshot) -> list[Refusal]:
        """What stands against deleting one."""
        against = list[Refusal]()
        if chosen.is_external and known.version < snapshots.DELETES_EXTERNAL:
            sentence = gettext(
                "libvirt {version} on {host} cannot delete snapshots that have files of their own; 9.0 and later can."
            )
            against.append(Refusal("tool_missing", sentence.format(version=known.version_words, host=guest.host.name)))
        against += backed_up(guest, now) if chosen.is_external else []
        for part in chosen.disks:
            if part.how != "external":
                continue
            disk = next((one for one in now.disks if one.target == part.target), None)
            if disk is None or part.path not in disk.chain[:-1]:
                sentence = gettext(
                    "{path} is not in the chain of {disk}. If libvirt ended after it had merged that, have it forget "
                    "the snapshot ({command}), and never attach the file to a guest again."
                )
                command = shlex.join(["virsh", "snapshot-delete", guest.name, chosen.name, "--metadata"])
                told = sentence.format(path=part.path, disk=part.target, command=command)
                against.append(Refusal("stale_plan", told))
                continue
            layers = layers_of(guest, now, disk)
            top = layers.chain.index(part.path)
            against += merging.needed_by_others(layers, top, top + 1)
        return against

    def commands(self, guest: Guest, known: Snapshots, options: dict[str, Any]) -> list[list[str]]:
        return [["virsh", "snapshot-delete", guest.name, one.name] for one in self.wanted(known, options)]

    def by_libvirt(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest, kept = find(job.target_id), job.kept.get(BEGUN)
        if kept is None:
            now = self.check(guest, job.options)
            kept = {"before": whole_chains(guest, now), "deleted": []}
        # What an earlier version has begun was one of a guest that runs, and kept no sizes.
        before, deleted = kept.get("before", {}), list(kept.get("deleted", []))
        recorder.progress({"stage": "merging", "message": "by libvirt, which reports no progress"})
        recorder.flush()
        try:
            self._delete_each(job, guest, recorder, kept if "name" in kept else None, before, deleted)
        except (StoppedError, RefusedError, HostError):
            # What those before have freed is so, however the job ends.
            if deleted and job.ours().exists() and (changed := change_of(guest, before)):
                record.write_line(job, pool_of(guest), changed["before_bytes"], changed["after_bytes"])
            raise
        words = f"Deleted of {guest.name}: {', '.join(deleted)}. What was written since stays."
        return {"names": deleted, "words": words, **change_of(guest, before)}

    def _delete_each(
        self,
        job: Job,
        guest: Guest,
        recorder: Recorder,
        begun: dict[str, Any] | None,
        before: dict[str, int],
        deleted: list[str],
    ) -> None:
        """Has libvirt delete one after the other.

        Args:
            begun: what was kept of the one that a worker before has asked for, if any.
            before: what the chains' images occupied before the first one.
            deleted: takes the names of those that are gone.
        """

        def tick() -> None:
            recorder.tick()
            if runner.stopping.is_set():
                raise GoesOnError("this worker was told to end")
            if recorder.cancel_requested:
                if not job.ours().exists():
                    raise GoesOnError("another worker has taken the job over")
                told = gettext("Cancelled. libvirt finishes deleting the snapshot, unless it has ended.")
                raise StoppedError(protocol.CANCELLED, told)

        while True:
            taken_over = begun is not None
            if begun is None:
                now, known = asked(guest, job.options) if not deleted else self._asked_again(guest, recorder, tick)
                # Of an age as of the plan: none becomes old enough while the job waits or works. And one of a name
                # that went is a later one.
                found = self.wanted(known, job.options, job.created)
                if not (wanted := [one for one in found if one.name not in deleted]):
                    if not deleted:
                        sentence = gettext("Nothing that was to be deleted of {guest} is left.")
                        raise RefusedError("stale_plan", sentence.format(guest=guest.name))
                    return
                if deleted:
                    recorder.flush()
                    tick()
                self._refuse(guest, now, known, wanted[0])
                begun = _begun(now, wanted[0]) | {"before": before, "deleted": deleted}
            self._delete(job, guest, begun, recorder, tick, taken_over=taken_over)
            settle(job)
            recorder.log(f"The snapshot {begun['name']} of {guest.name} is deleted; what was written since stays.")
            deleted.append(begun["name"])
            begun = None

    def _refuse(self, guest: Guest, now: GuestNow, known: Snapshots, chosen: Snapshot) -> None:
        """Looks once more what stands against it, and who needs the images of an external one by now.

        Raises:
            RefusedError, HostError: something does, or may.
        """
        refuse(self.against(guest, now, known, chosen))
        _refuse_needed(guest, now, chosen)

    def _delete(
        self,
        job: Job,
        guest: Guest,
        begun: dict[str, Any],
        recorder: Recorder,
        tick: Callable[[], None],
        *,
        taken_over: bool,
    ) -> None:
        """Has libvirt delete one, and waits for it, also for a libvirt that has ended: it leaves all as it was.

        Args:
            begun: what is kept of it, or will be.
            taken_over: a worker before has asked for it: libvirt may still be at it, or may have given it up.
        """
        again = taken_over
        if taken_over and not self._goes_on(guest, begun, recorder, tick):
            return
        waits = until_it_hangs(guest, tick) if begun.get("run") else tick
        while True:
            keep_begun(job, begun)
            try:
                known = snapshots.delete(guest.host, guest.uid, begun["name"], begun.get("created"), waits)
                break
            except GoneError as error:
                again = True
                tell_lost(recorder, error)
                now, known = self._asked_again(guest, recorder, tick)
                if (chosen := _still(known, begun)) is None:
                    return
                _refuse_unseen(guest, now, begun)
                settle(job)
                self._refuse(guest, now, known, chosen)
            except HostError as error:
                if error.code == GUEST_ENDED:
                    raise
                if not again or not _is_busy(error):
                    settle(job)
                    raise
                tell_lost(recorder, error, "is busy")
            tick()
            time.sleep(_AGAIN)
        if _still(known, begun) is not None:
            settle(job)
            sentence = gettext("libvirt deleted the snapshot {name} and still lists it.")
            raise HostError(sentence.format(name=begun["name"]))

    def _goes_on(self, guest: Guest, begun: dict[str, Any], recorder: Recorder, tick: Callable[[], None]) -> bool:
        """Whether a deletion that a worker before has begun is still to be done, and may be.

        Raises:
            RefusedError, HostError: it may not, or nobody knows.
        """
        refused = 0
        while True:
            now, known = self._asked_again(guest, recorder, tick)
            if (chosen := _still(known, begun)) is None:
                return False
            _refuse_unseen(guest, now, begun)
            try:
                _refuse_needed(guest, now, chosen)
                return True
            except RefusedError:  # perhaps as libvirt has just removed the overlay
                refused += 1
                if refused > 1:
                    raise
            except HostError as error:
                if error.code != "host_unreachable":
                    raise
                tell_lost(recorder, error, "may be at it, and the host does not answer")
            tick()
            time.sleep(_AGAIN)

    def _asked_again(self, guest: Guest, recorder: Recorder, tick: Callable[[], None]) -> tuple[GuestNow, Snapshots]:
        """As :func:`asked`, of what was begun: waits for a libvirt that has ended, or is busy."""
        while True:
            try:
                return asked(guest, {})
            except GoneError as error:
                tell_lost(recorder, error)
            except HostError as error:
                if not _is_busy(error):
                    raise
                tell_lost(recorder, error, "is busy")
            tick()
            time.sleep(_AGAIN)


def _begun(now: GuestNow, chosen: Snapshot) -> dict[str, Any]:
    """What is kept of a deletion: which one goes; and, where its overlays are what the guest writes to, from which
    files to which ones QEMU switches it over at the end, and in which of its runs that is.
    """
    overlays = {part.path for part in chosen.disks if part.how == "external"}
    over = [list(disk.chain[:2]) for disk in now.disks if overlays & set(disk.chain[:1]) and len(disk.chain) > 1]
    run = {"run": now.run, "cpu_ns": now.cpu_ns, OVER: over if now.run else []}
    return {"name": chosen.name, "created": chosen.made, **run}


def _still(known: Snapshots, begun: dict[str, Any]) -> Snapshot | None:
    """The snapshot whose deletion was begun, where it is there still, and no later one of its name."""
    return known.named(begun["name"], begun.get("created"))


def _refuse_needed(guest: Guest, now: GuestNow, chosen: Snapshot) -> None:
    """Refuse where somebody needs the images that a deletion changes; those of disks that it has been through are not
    looked at.

    Raises:
        RefusedError, HostError: as :func:`refuse_needed`.
    """
    overlays = {part.target: part.path for part in chosen.disks if part.how == "external"}
    for disk in now.disks:
        if overlays.get(disk.target, "") in disk.chain[:-1]:
            layers = layers_of(guest, now, disk)
            top = layers.chain.index(overlays[disk.target])
            refuse_needed(guest, layers, top, top + 1)


def _refuse_unseen(guest: Guest, now: GuestNow, begun: dict[str, Any]) -> None:
    """Refuse to go on where QEMU may have switched a guest over while libvirt was away, and the guest ended before that
    was back: libvirt would write the older content over the newer one.

    Raises:
        HostError: ``guest_ended``.
    """
    # libvirt counts from one again when it begins anew: a number can come twice.
    if (over := pairs_of(begun)) and (now.run != begun["run"] or now.cpu_ns < begun["cpu_ns"]):
        raise ended_unseen(guest, over)


def _is_busy(error: HostError) -> bool:
    return any(word in error.detail for word in _BUSY)


class DeleteOldSnapshots(DeleteSnapshot):
    """Has libvirt delete all snapshots of a guest from an age on, the oldest first; what was written since stays."""

    of_vms = DeleteOldVmSnapshots
    name, title = of_vms.name, of_vms.title
    description = _(
        "Deletes the snapshots of a guest that are older than some days, the oldest first; its present data stays. Of "
        "a guest that runs, libvirt writes what the overlays hold into the images below."
    )
    properties = {
        "older_than_days": {
            "type": "integer",
            "minimum": 1,
            "maximum": 3650,
            "default": 30,
            "description": _("Age in days from which a snapshot is deleted."),
        },
        **proxmox_vms.ACCEPT,
    }

    def wanted(self, known: Snapshots, options: dict[str, Any], at: datetime | None = None) -> list[Snapshot]:
        before = (at or timezone.now()) - timedelta(days=options["older_than_days"])
        return [one for one in reversed(known.found) if one.created is not None and one.created <= before]

    def choose(
        self, guest: Guest, now: GuestNow, known: Snapshots, options: dict[str, Any]
    ) -> tuple[str, list[str], list[Refusal]]:
        wanted = self.wanted(known, options)
        if not wanted:
            sentence = ngettext(
                "{guest} has no snapshot that is older than {count} day.",
                "{guest} has no snapshot that is older than {count} days.",
                options["older_than_days"],
            ).format(guest=guest.name, count=options["older_than_days"])
            return sentence, [], [Refusal("nothing_to_free", sentence)]
        reason = gettext(
            "These snapshots of {guest} are deleted, the oldest first: {names}. What was written since stays; nobody "
            "can go back to them any more."
        ).format(guest=guest.name, names=", ".join(one.name for one in wanted))
        against = [refusal for one in wanted for refusal in self.against(guest, now, known, one)]
        return reason, [self._warning()], against
