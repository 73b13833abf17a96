"""The job kind ``resize``: a disk grows, by Proxmox VE, or by libvirt while its guest runs."""

from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.live.kind import running_guest
from images.models import Image
from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.guests.kinds import vm_disks
from storage_admin.guests.kinds.vm_disks import Draft, find
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import running
from storage_admin.hosts.live_facts import DiskNow, GuestNow
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Recorder, Refusal, refuse


class Resize(vm_disks.Resize):
    """Makes a disk of a guest larger."""

    description = _(
        "Enlarges a disk of a VM with Proxmox VE, or of a running guest of libvirt. Enlarge the partitions and "
        "filesystems in the guest afterwards."
    )

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        guest = find(target_id)
        if guest.kind != Guest.Kind.DOMAIN:
            return super().plan(actor, target_id, options)
        draft = Draft(f"{self.title}: {guest.name}.", [])
        try:
            draft = _draft(guest, running_guest(guest), options)
        except (RefusedError, HostError) as error:
            draft.refusals = [Refusal(error.code, error.detail)]
        return self.planned(guest, draft, [], options)

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest = find(job.target_id)
        if guest.kind != Guest.Kind.DOMAIN:
            return super().work(job, recorder)
        now, target, wanted = running_guest(guest), job.options["disk"], job.options["size_bytes"]
        refuse(_draft(guest, now, job.options).refusals)
        before = _disk(guest, now, target).virtual_bytes
        recorder.progress({"stage": "enlarging"})
        after = running.grow(guest.host, guest.uid, target, wanted)
        if after != wanted:
            told = gettext("{target} of {guest} has {size:,} bytes now. Scan the host and check the disk.")
            raise HostError(told.format(target=target, guest=guest.name, size=after))
        words = f"{target} of {guest.name} had {before:,} bytes and now has {after:,} bytes."
        recorder.log(words)
        return {"disk": target, "before": {"size_bytes": before}, "now": {"size_bytes": after}, "words": words}


def _disk(guest: Guest, now: GuestNow, target: str) -> DiskNow:
    disk = next((one for one in now.disks if one.target == target), None)
    if disk is None:
        told = gettext("{guest} has no disk {target} that it writes to.")
        raise RefusedError(INVALID, told.format(guest=guest.name, target=target))
    return disk


def _draft(guest: Guest, now: GuestNow, options: dict[str, Any]) -> Draft:
    """What would be done to a disk as the running guest has it now, and what stands against it."""
    target, wanted = options["disk"], options["size_bytes"]
    disk = _disk(guest, now, target)
    noted = disk.virtual_bytes
    reason = gettext("{target} of {guest} ({image}) is enlarged to {wanted:,} bytes (now {noted}) as it runs.")
    draft = Draft(
        reason.format(
            target=target, guest=guest.name, image=disk.chain[0] if disk.chain else disk.kind, wanted=wanted,
            noted=gettext("size unknown") if noted is None else f"{noted:,}",
        ),
        ["virsh", "blockresize", guest.name, target, f"{wanted}B"],
        warnings=[
            gettext(
                "The disk cannot be made smaller again. Enlarge the partitions and filesystems in the guest afterwards."
            )
        ],
    )  # fmt: skip
    if disk.kind != "file":
        told = gettext("{target} of {guest} is no file ({kind}). Enlarge the volume with the tools of its storage.")
        draft.refusals.append(Refusal("unsupported_pool", told.format(target=target, guest=guest.name, kind=disk.kind)))
    elif disk.format not in {"qcow2", "raw"}:
        told = gettext("{target} of {guest} is {format}: QEMU enlarges qcow2 and raw images.")
        sentence = told.format(target=target, guest=guest.name, format=disk.format)
        draft.refusals.append(Refusal("unsupported_subformat", sentence))
    elif noted is None or wanted <= noted:
        told = gettext("{target} of {guest} has {noted} bytes already; the new size must be larger.")
        size = gettext("an unknown number of") if noted is None else f"{noted:,}"
        draft.refusals.append(Refusal(INVALID, told.format(target=target, guest=guest.name, noted=size)))
    images = Image.objects.filter(host=guest.host_id, uses__disk__guest=guest, uses__disk__target=target)
    image = images.select_related("pool").first()
    more = wanted - (noted or 0)
    if image is not None and image.pool.available_bytes is not None and more > image.pool.available_bytes:
        told = gettext(
            "{pool} has {available:,} bytes free, and the disk may take {more:,} more. If the pool runs full, the "
            "guest gets write errors."
        )
        draft.warnings.append(told.format(pool=image.pool.name, available=image.pool.available_bytes, more=more))
    return draft
