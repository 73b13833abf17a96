"""The job kind ``trim``: the guest agent of a VM of Proxmox VE gives back what its filesystems do not use."""

import contextlib
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from storage_admin.agent.protocol import INVALID, HostError
from storage_admin.guests import proxmox_vms
from storage_admin.guests.kinds.vm_disks import Draft, VmKind
from storage_admin.guests.proxmox_vms import Vm
from storage_admin.hosts.proxmox import actions, drives, guests
from storage_admin.hosts.proxmox.drives import Drive
from storage_admin.jobs.models import JobLog
from storage_admin.jobs.plan_and_progress import Recorder, Refusal

_NOT_DISCARDED = _("discard is not enabled for {disks}. Space that the guest trims there stays allocated on the host.")


class Trim(VmKind):
    """Has the agent inside a VM give back what its filesystems do not use."""

    name = "trim"
    title = _("Trim in the guest")
    methods = {"trim": title}
    description = _("Makes the guest agent of a VM trim its filesystems (fstrim). Trimmed space is freed on the host.")
    writes = False

    def draft(self, vm: Vm, options: dict[str, Any]) -> Draft:  # noqa: ARG002 (it has none)
        draft = Draft(
            gettext(
                "The guest agent of {guest} trims all filesystems. The guest keeps running, and nothing is copied."
            ).format(guest=vm.guest.name),
            ["qm", "guest", "cmd", vm.guest.uid, "fstrim"],
            refusals=proxmox_vms.lacking(vm, "trim"),
        )
        if not guests.has_agent(vm.config.now):
            draft.refusals.append(
                Refusal(
                    "tool_missing",
                    gettext(
                        "No guest agent is configured for {guest}. Install qemu-guest-agent in the guest, and "
                        "enable it in the options of the VM."
                    ).format(guest=vm.guest.name),
                )
            )
        elif not vm.runs():
            draft.refusals.append(
                Refusal(
                    INVALID, gettext("{guest} is off. Only a running guest can be trimmed.").format(guest=vm.guest.name)
                )
            )
        without = sorted(_without_discard(vm))
        if without:
            draft.warnings.append(_NOT_DISCARDED.format(disks=", ".join(without)))
        draft.warnings.append(gettext("Proxmox VE cannot stop a trim that is running, so it cannot be cancelled."))
        return draft

    def do(self, vm: Vm, options: dict[str, Any], recorder: Recorder) -> dict[str, Any]:  # noqa: ARG002 (it has none)
        recorder.progress({"stage": "trimming", "message": "in the guest; no progress is reported"})
        recorder.flush()
        trimmed = actions.trim(vm.client, vm.ref)
        for one in trimmed:
            if one.error:
                recorder.log(f"{one.path}: {one.error}", JobLog.Level.WARNING)
            else:
                told = "trimmed" if one.trimmed_bytes is None else f"{one.trimmed_bytes:,} bytes trimmed"
                recorder.log(f"{one.path}: {told}")
        if trimmed and all(one.error for one in trimmed):
            raise HostError(
                gettext("The guest agent of {guest} could not trim any filesystem: {error}").format(
                    guest=vm.guest.name, error=trimmed[0].error
                )
            )
        known = [one.trimmed_bytes for one in trimmed if one.trimmed_bytes is not None]
        total = sum(known) if known else None
        good = sum(not one.error for one in trimmed)
        what = "amount not reported" if total is None else f"{total:,} bytes trimmed"
        return {
            "filesystems": [
                {"path": one.path, "trimmed_bytes": one.trimmed_bytes, "error": one.error} for one in trimmed
            ],
            "trimmed_bytes": total,
            "words": f"{good} of {len(trimmed)} filesystems in {vm.guest.name}: {what}. The next scan shows how "
            "much space this freed on the host.",
        }


def _without_discard(vm: Vm) -> list[str]:
    """The disks on which a trim frees nothing."""
    found = []
    for key, text in vm.config.now.items():
        if drives.is_drive(key, drives.VM) and not key.startswith(proxmox_vms.BESIDE):
            with contextlib.suppress(ValueError):
                drive = Drive.parse(text)
                if not drive.is_cdrom and not drive.is_empty and drive.option("discard") != "on":
                    found.append(key)
    return found
