"""The job kind ``set_disk``: how a disk of a libvirt guest is driven: cache, io, discard, zeroes, an I/O thread."""

import shlex
from typing import Any

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.guests.kinds.vm_disks import GuestKind, find
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.libvirt.control import DiskSettings
from storage_admin.jobs.kinds import Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Affected, Plan, Recorder, Refusal, refuse

#: The word for "the definition does not say it", which leaves it to the hypervisor.
UNSET = "default"
#: Values of each setting that are offered, and why one would choose them.
VALUES: dict[str, dict[str, Any]] = {
    "bus": {
        "virtio": _("The fastest, takes an I/O thread; Linux has its driver, Windows needs it installed."),
        "scsi": _("At a virtio-scsi controller: for many disks; the guest needs that driver."),
        "sata": _("Any guest of the last fifteen years knows it; slow."),
        "ide": _("For very old guests, and a machine of the type pc alone; slow."),
        "usb": _("For guests that know nothing else; the slowest."),
    },
    "cache": {
        "none": _("Bypasses the host's page cache: no data is kept twice, and live migration is safe."),
        "writeback": _("Uses the host's page cache: fast, and safe as long as the guest flushes; keeps data twice."),
        "directsync": _("Bypasses the page cache, and flushes after each write: safe for guests that never flush."),
        "writethrough": _("Reads through the page cache, and flushes after each write: slow, for old guests."),
    },
    "io": {
        "native": _("The kernel's own asynchronous I/O; needs cache none or directsync."),
        "io_uring": _("Fewer system calls than threads; needs QEMU 5.0 and a kernel that allows it."),
        "threads": _("A pool of threads: works with every cache mode."),
    },
    "discard": {
        "unmap": _("Space that the guest trims becomes free on the host."),
        "ignore": _("QEMU drops the guest's trim requests: nothing becomes free."),
    },
    "detect_zeroes": {
        "off": _("Zeros are written like all else."),
        "on": _("Zeros that the guest writes take no space in new clusters; costs some processor time."),
        "unmap": _("Zeros that the guest writes free space, too; needs discard=unmap."),
    },
    "iothread": {"on": _("Gives the disk a thread of its own, which relieves QEMU's main loop; virtio only.")},
}
_DIRECT = frozenset({"none", "directsync"})


class SetDisk(GuestKind):
    """Changes how a disk is driven, in its guest's definition."""

    name = "set_disk"
    title = _("Change a disk's settings")
    description = _(
        "Sets cache, io, discard, detect_zeroes and I/O thread of a libvirt guest's disk in its definition. A guest "
        "that runs has them from its next start on. The job keeps what was there before."
    )
    unsuccessful = {
        "": Unsuccessful(gettext_noop("The guest's definition has either the old settings or the new ones."))
    }
    properties = {
        "disk": {"type": "string", "minLength": 1, "maxLength": 40, "description": _("The disk (its target).")},
        **{
            name: {
                "type": ["string", "null"],
                "enum": [None, *([] if name == "bus" else [UNSET]), *values],
                "default": None,
                "description": _("Null leaves it as it is; default removes it from the definition."),
            }
            for name, values in VALUES.items()
        },
    }

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        guest = find(target_id)
        reason, warnings, against = f"{self.title}: {guest.name}.", list[str](), list[Refusal]()
        try:
            told = self._asked(guest, options, write=False)
            against = _against(told, options)
            changed = _changes(told)
            reason = gettext("{disk} of {guest}: {changes}.").format(
                disk=options["disk"], guest=guest.name, changes=", ".join(changed) or gettext("nothing changes")
            )
            chosen = sorted(_wanted(options).items())
            warnings = [f"{name}={value}: {VALUES[name][value]}" for name, value in chosen if value in VALUES[name]]
            if told.after["bus"] != told.before["bus"]:
                sentence = gettext(
                    "The disk will be called {disk}. The guest starts only if it has the driver, and names its disks "
                    "by UUID or label, and not by the bus."
                )
                warnings.append(sentence.format(disk=told.disk))
            if told.live is not None and changed:
                warnings.append(gettext("{guest} runs: it has them from its next start on.").format(guest=guest.name))
            if not changed and not against:
                against.append(Refusal("stale_plan", gettext("The definition says all of that already.")))
        except (RefusedError, HostError) as error:
            against = [Refusal(error.code, error.detail)]
        return Plan(
            method=self.name, reason=reason, commands=(shlex.join(["virsh", "edit", guest.name]),),
            facts_at=guest.last_seen, refusals=tuple(against), warnings=tuple(warnings),
            affected_guests=(Affected(guest.pk, guest.name, guest.state),), options=options,
        )  # fmt: skip

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest, options = find(job.target_id), job.options
        refuse(_against(self._asked(guest, options, write=False), options))
        told = self._asked(guest, options, write=True)
        words = f"{options['disk']} of {guest.name}: {', '.join(_changes(told)) or 'nothing changed'}"
        words += "; from its next start on." if told.live is not None else "."
        recorder.log(words)
        return {
            "disk": told.disk, "before": told.before, "now": told.after, "pending": told.live is not None,
            "words": words,
        }  # fmt: skip

    def _asked(self, guest: Guest, options: dict[str, Any], *, write: bool) -> DiskSettings:
        if guest.kind != Guest.Kind.DOMAIN:
            sentence = gettext("{guest} is no guest of libvirt: only those can be changed this way.")
            raise RefusedError(INVALID, sentence.format(guest=guest.name))
        wanted = {name: "" if value == UNSET else value for name, value in _wanted(options).items()}
        if wanted.get("iothread"):
            wanted["iothread"] = control.disk_settings(guest.host, guest.uid, options["disk"], {}, write=False).thread
        return control.disk_settings(guest.host, guest.uid, options["disk"], wanted, write=write)


def restore_options(result: dict[str, Any]) -> dict[str, str]:
    """The options that give a disk again what a finished job found there."""
    before = result["before"]
    words = {name: before[name] or UNSET for name in VALUES if before[name] != result["now"][name]}
    return words | ({"iothread": "on"} if words.get("iothread", UNSET) != UNSET else {})


def _wanted(options: dict[str, Any]) -> dict[str, str]:
    return {name: options[name] for name in VALUES if options[name] is not None}


def _changes(told: DiskSettings) -> list[str]:
    return [
        f"{name} {told.before[name] or UNSET} → {told.after[name] or UNSET}"
        for name in VALUES
        if told.before[name] != told.after[name]
    ]


def _against(told: DiskSettings, options: dict[str, Any]) -> list[Refusal]:
    """What QEMU would refuse at the guest's next start, or would not do."""
    found, after = [], told.after
    if after["io"] == "native" and after["cache"] not in _DIRECT:
        found.append(Refusal(INVALID, gettext("io=native needs cache none or directsync: QEMU does not start else.")))
    if after["detect_zeroes"] == "unmap" and after["discard"] != "unmap":
        found.append(Refusal(INVALID, gettext("detect_zeroes=unmap needs discard=unmap: it frees nothing else.")))
    if options["iothread"] == "on" and after["bus"] != "virtio":
        sentence = gettext("{disk} is at the bus {bus}: only virtio disks take an I/O thread of their own.")
        found.append(Refusal(INVALID, sentence.format(disk=options["disk"], bus=after["bus"] or "?")))
    if after["bus"] != told.before["bus"]:
        if told.live is not None:
            found.append(Refusal("guest_running", gettext("The bus of a disk is changed while its guest is off.")))
        if told.boots_another:
            sentence = gettext(
                "The guest would boot from another disk then. Give its disks a boot order of their own first (virsh "
                "edit: boot order)."
            )
            found.append(Refusal(INVALID, sentence))
        if told.kept:
            sentence = gettext("Snapshots, or the guest's saved state, know the disk as {disk}: delete them first.")
            found.append(Refusal("in_snapshot_chain", sentence.format(disk=options["disk"])))
    return found
