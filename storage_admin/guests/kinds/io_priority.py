"""The job kind ``set_io_priority``: a guest's share of the disks, and limits, in whatever way its hypervisor has them.

Containers of OpenVZ have a priority of 0 to 7, guests of libvirt a weight and limits, VMs of Proxmox VE limits. What
was set is read again afterwards: the result says what was there, what is there now, and from when on it counts.
"""

import shlex
from dataclasses import asdict
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import HostError
from storage_admin.errors import InvalidError
from storage_admin.guests import io_settings, proxmox_vms
from storage_admin.guests.io_settings import Setting
from storage_admin.guests.kinds.vm_disks import GuestKind, find
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt.limits import SETTABLE
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Affected, Plan, Recorder, refuse


class SetIoPriority(GuestKind):
    """Sets what a guest may take of the disks."""

    name = "set_io_priority"
    title = _("Set I/O priority")
    description = _(
        "Sets the I/O priority of a container, or the I/O weight and limits of a VM. Then reads back "
        "what the host accepted."
    )
    properties = {
        "priority": {
            "type": ["integer", "null"],
            "minimum": 0,
            "maximum": 7,
            "default": None,
            "description": _("For a container: the higher, the more disk time. Null leaves the priority unchanged."),
        },
        "weight": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": 1000,
            "default": None,
            "description": _(
                "For a libvirt guest: its share relative to other guests. Proxmox VE has no weights. Null leaves "
                "the weight unchanged."
            ),
        },
        "limits": {
            "type": ["object", "null"],
            "default": None,
            "properties": {name: {"type": "integer", "minimum": 0, "maximum": 1 << 50} for name in SETTABLE},
            "additionalProperties": False,
            "description": _("I/O limits for each disk of a VM; 0 removes a limit. Null leaves them unchanged."),
        },
        "disk": {
            "type": ["string", "null"],
            "maxLength": 40,
            "default": None,
            "description": _(
                "The disk (its target, such as vda) that the limits apply to; null for every disk of the VM."
            ),
        },
        **proxmox_vms.ACCEPT,
    }

    def clean(self, options: Any) -> dict[str, Any]:
        cleaned = super().clean(options)
        if all(cleaned[name] is None for name in ("priority", "weight", "limits")):
            raise InvalidError(
                gettext("Set a priority, a weight or limits."), {"priority": gettext("Enter a number from 0 to 7.")}
            )
        return cleaned

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        guest = find(target_id)
        proxmox_vms.accepted_by(actor, guest, options)
        setting = _setting(options)
        return Plan(
            method="set_io_priority",
            reason=_reason(guest, setting),
            commands=tuple(shlex.join(command) for command in io_settings.commands(guest, setting)),
            facts_at=guest.last_seen,
            refusals=tuple(io_settings.refusals_now(guest, setting)),
            warnings=tuple(io_settings.warnings(guest, setting)),
            affected_guests=(Affected(guest.pk, guest.name, guest.state),),
            options=options,
        )

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest = find(job.target_id)
        setting = _setting(job.options)
        refuse(io_settings.refusals(guest, setting))
        outcome = io_settings.apply(guest, setting, recorder)
        if not outcome.as_asked:
            raise HostError(outcome.words)
        return asdict(outcome)

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        values = {name: result["now"][name] for name in ("io_priority", "io_weight", "io_limits")}
        Guest.objects.filter(pk=job.target_id).update(**values)
        return result

    def ended(self, job: Job) -> None:
        """Nothing: the result has told the rows all that a scan would read."""


def _setting(options: dict[str, Any]) -> Setting:
    given = options["priority"], options["weight"], options["limits"], options["disk"]
    return Setting(*given, options.get("accept_hidden_lines"))


def _reason(guest: Guest, setting: Setting) -> str:
    parts = []
    if setting.priority is not None:
        was = gettext("not set") if guest.io_priority is None else guest.io_priority
        parts.append(
            gettext("the I/O priority becomes {priority} (now {was})").format(priority=setting.priority, was=was)
        )
    if setting.weight is not None:
        was = gettext("not set") if guest.io_weight is None else guest.io_weight
        parts.append(gettext("the I/O weight becomes {weight} (now {was})").format(weight=setting.weight, was=was))
    if setting.limits is not None:
        where = gettext("disk {disk}").format(disk=setting.disk) if setting.disk else gettext("each of its disks")
        words = ", ".join(f"{name} {value or 'none'}" for name, value in setting.limits.items())
        parts.append(
            gettext("the limits of {where} become: {words}").format(where=where, words=words or gettext("unchanged"))
        )
    return f"{guest.name}: {'; '.join(parts)}."
