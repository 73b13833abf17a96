"""What job kinds on running libvirt guests share: the guest as it is now, its locks, the scan that follows."""

from typing import Any

from django.utils.translation import gettext

from images.rewrite import neighbours
from storage_admin.agent.protocol import INVALID, RefusedError
from storage_admin.guests.kinds.vm_disks import GuestKind, find
from storage_admin.guests.models import Guest
from storage_admin.hosts import qemu_bugs
from storage_admin.hosts.libvirt import running
from storage_admin.hosts.libvirt.block_jobs import Program
from storage_admin.hosts.libvirt.relay import refuse_to_write
from storage_admin.hosts.live_facts import GuestNow
from storage_admin.jobs.kinds import Lock, Target
from storage_admin.jobs.plan_and_progress import Refusal

#: The state of a guest that is off, in libvirt's words.
OFF = "shut off"


class LiveGuestKind(GuestKind):
    """A kind that has libvirt change the disks of a running guest."""

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        """The guest, and the chain of its disk: of all its disks where the options name none."""
        found = super().locks(target, options)
        disks = find(target.id).disks.filter(only_in="", device="disk").select_related("use__image")
        for disk in disks.filter(target=options["disk"]) if options.get("disk") else disks:
            if (use := getattr(disk, "use", None)) is not None:
                for image in (use.image, *neighbours.ancestors(use.image)):
                    found += neighbours.locks_on(image, exclusive=True)
        return list({lock.key: lock for lock in found}.values())


def bugs(guest: Guest, kind: str) -> list[Refusal]:
    """What of QEMU's known bugs could corrupt a disk of a running guest: a user may do it all the same, no policy."""
    running = qemu_bugs.started_with(guest.host, guest.name)
    return [Refusal("qemu_bug", one) for one in qemu_bugs.against(guest.host, kind, running)]


def libvirt_guest(guest: Guest, *, agent: bool = False, by: Program | None = None) -> GuestNow:
    """A libvirt guest as it is now.

    Args:
        agent: ask its guest agent as well, which may take seconds.
        by: has it look, where it is going to follow a block job of the guest.

    Raises:
        RefusedError: ``invalid``: it is no guest of libvirt; ``tool_missing``: libvirt there can only be read.
        HostError: libvirt does not answer.
    """
    if guest.kind != Guest.Kind.DOMAIN:
        sentence = gettext("{guest} is no guest of libvirt: only those can be changed this way.")
        raise RefusedError(INVALID, sentence.format(guest=guest.name))
    refuse_to_write(guest.host)
    return by.look(guest.uid) if by is not None else running.look(guest.host, guest.uid, agent=agent)


def running_guest(guest: Guest, by: Program | None = None) -> GuestNow:
    """One that runs; as :func:`libvirt_guest`, and raises ``guest_off`` where it does not."""
    now = libvirt_guest(guest, by=by)
    if not now.runs:
        sentence = gettext("{guest} is not running ({state}): use the jobs of its images instead.")
        raise RefusedError("guest_off", sentence.format(guest=guest.name, state=now.state))
    return now
