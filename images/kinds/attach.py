"""The job kinds ``attach`` and ``detach``: an image becomes a block device of its host, and is one no longer."""

import shlex
from typing import Any

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.kinds.create import links_of
from images.models import Image
from images.rewrite import attached, in_use, needed_as_it_is, neighbours, refusals
from images.rewrite.kind import RewriteKind
from images.rewrite.neighbours import chain_of, find
from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.verbs.inside import HARMLESS
from storage_admin.errors import InvalidError
from storage_admin.jobs import services
from storage_admin.jobs.kinds import Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Affected, Plan, Refusal, refuse

_UNSUCCESSFUL = gettext_noop("The data of the image is unchanged. The list of attached images says whether it is one.")


class _DeviceKind(RewriteKind):
    """A kind that connects an image with a device of its host, or parts them."""

    role = Role.ADMIN
    asks = False
    stages = {"checking": (0, 100)}
    unsuccessful = {"": Unsuccessful(_UNSUCCESSFUL, _UNSUCCESSFUL)}

    def look(self, target_id: int, job: Job | None = None) -> None:
        super().look(target_id, job)
        attached.look(find(target_id).host)

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        # One at a time on each host: devices are chosen there.
        return [*super().locks(target, options), Lock(f"nbd:{target.host.pk}", exclusive=True)]

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        attached.note(job.host_id, {"attached": result["attached"]})
        how = "read-only" if result["read_only"] else "writable"
        words = f"It is {result['path']}, {how}." if "path" in result else f"It is {result['device']} no longer."
        return {"device": result["device"], "read_only": result["read_only"], "words": words}

    def ended(self, job: Job) -> None:
        services.rescan(job)


class Attach(_DeviceKind):
    """Gives an admin an image as a block device of its host, to look at or to change with tools of his own."""

    name = "attach"
    title = _("Attach to host")
    description = _(
        "Attaches an image that nobody uses to its host as a block device, so that an admin can mount it there. "
        "Read-only, unless the name of the image is typed to confirm that it may be written to."
    )
    verb = "attach"
    properties = {
        "writable": {
            "type": "boolean",
            "default": False,
            "description": _("Whether the device can be written to. There is no undo copy."),
        },
        "confirm_name": {
            "type": "string",
            "maxLength": 1100,
            "default": "",
            "description": _("The name of the image as pages show it; required for a writable device."),
        },
    }

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        writable, below = options["writable"], list[Image]()
        against = self.against(image, writable=writable)
        try:
            below = neighbours.of(image).below
        except RefusedError as error:
            against.append(Refusal(error.code, error.detail))
        against += refusals.for_bases(image, below)
        reason = gettext("{image} becomes a block device of {host} that can only be read.")
        warnings = [
            gettext("The device is not in /dev, so that LVM, multipath and udev of {host} ignore it."),
            gettext("No guest and no job can use the image until it is detached. A restart of {host} detaches it."),
        ]
        if writable:
            reason = gettext("{image} becomes a block device of {host} that can be written to.")
            warnings.insert(0, gettext("There is no undo copy: what is written to the device is in the image."))
        if image.host.capabilities.get("proxmox"):
            warnings.append(gettext("QEMU of Proxmox VE ignores that it is attached. Do not start its guest."))
        how = ["qemu-nbd", "--connect=DEVICE", *([] if writable else ["--read-only"])]
        changed = gettext("attached, can be written to") if writable else gettext("read, not changed")
        return Plan(
            method="attach",
            reason=reason.format(image=image.name, host=image.host.name),
            commands=(shlex.join([*how, "-f", image.declared_format or "raw", image.path]),),
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            refusals=tuple({(one.code, one.detail): one for one in against}.values()),
            warnings=(*refusals.age_warning(image), *(one.format(host=image.host.name) for one in warnings)),
            affected_images=(
                Affected(image.pk, image.name, changed),
                *(Affected(base.pk, base.name, gettext("read, not changed")) for base in below),
            ),
            options=options,
        )

    @staticmethod
    def against(image: Image, *, writable: bool) -> list[Refusal]:
        """What stands against it, as far as the database knows."""
        kept = frozenset({"has_internal_snapshots"}) if writable else HARMLESS
        found = attached.against(image.host)
        found += [one for one in refusals.for_rewrite(image) if one.code not in kept or image.unreadable]
        if writable:
            found += needed_as_it_is.refusals(image, gettext("Attach it read-only."))
        if writable and image.disks and image.host.capabilities.get("proxmox"):
            told = gettext(
                "QEMU of Proxmox VE takes no locks, so guest {guest} could be started while {image} is written to. "
                "Attach it read-only, or remove the disk from the guest."
            )
            told = told.format(guest=image.guest_names[0], image=image.name)
            found.append(Refusal("guests_unknown", told))
        return found

    def admit(self, target: Target, plan: Plan) -> None:
        image = find(target.id)
        if plan.options["writable"] and plan.options["confirm_name"] != image.name:
            sentence = gettext("{image} was not attached. Type its name to confirm.").format(image=image.name)
            raise InvalidError(sentence, {"confirm_name": sentence})

    def prepare(self, job: Job) -> None:
        image = find(job.target_id)
        in_use.check_guests_off(image)
        in_use.refuse_used_elsewhere(image)

    def request(self, job: Job) -> dict[str, Any]:
        image, writable = find(job.target_id), job.options["writable"]
        refuse(self.against(image, writable=writable))
        own, *below = links_of(chain_of(image))
        looked_through = needed_as_it_is.pools(image) if writable else {}
        wanted = {"writable": writable, "by": job.created_by, "children_known": True}
        return own | {"virtual_size": image.virtual_size, "chain": below} | wanted | looked_through


class Detach(_DeviceKind):
    """Parts an image from its device, once nobody uses that."""

    name = "detach"
    title = _("Detach from host")
    description = _(
        "Detaches an image from its host, once nothing there uses its device. What was written to the device is in "
        "the image before."
    )
    verb = "detach"
    urgent = True

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        found = image.attached
        against = refusals.for_host(image.host)
        if found is None:
            told = gettext("{image} is not attached to {host}. Scan the host.")
            against.append(Refusal("stale_plan", told.format(image=image.name, host=image.host.name)))
        path = found["path"] if found else ""
        return Plan(
            method="detach",
            reason=gettext("{path} is given up on {host}, if nothing there has it open or mounted.").format(
                path=path or gettext("The device"), host=image.host.name
            ),
            commands=(shlex.join(["qemu-nbd", "--disconnect", path]),) if path else (),
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            refusals=tuple(against),
            affected_images=(Affected(image.pk, image.name, gettext("detached")),),
            options=options,
        )

    def request(self, job: Job) -> dict[str, Any]:
        image = find(job.target_id)
        found = image.attached
        if found is None:
            raise RefusedError("stale_plan", gettext("{image} is no longer attached.").format(image=image.name))
        return {name: found[name] for name in ("device", "dev", "inode")}
