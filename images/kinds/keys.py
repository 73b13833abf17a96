"""The job kind ``keys``: a passphrase is added to an encrypted image, or one of its key slots is emptied."""

from dataclasses import replace
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds.create import Create, succeeded
from images.models import Image
from images.rewrite import neighbours, passphrases, refusals
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting, beside, of_a_copy
from images.rewrite.neighbours import find
from images.rewrite.space import WRITTEN
from storage_admin.agent.rewrite.key_slots import SLOTS
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal

#: What does not stand against it: no key of the data is needed, and the copy keeps snapshots.
_NOT_AGAINST = frozenset({"encrypted", "has_internal_snapshots"})


class Keys(Rewriting):
    """Adds a passphrase, which has to open the image before the copy replaces it; or takes one away, never the last."""

    name = "keys"
    title = _("Change passphrases")
    description = _(
        "Adds a passphrase to an encrypted image (LUKS), or empties one of its key slots. The change is made on a "
        "copy, which must open with the passphrases that stay, and then replaces the image. The last passphrase is "
        "never removed."
    )
    verb = "keys"
    stages = {"checking": (0, 5), "copying": (5, 55), "changing keys": (55, 70)} | WRITTEN
    properties = {
        "slot": {
            "type": ["integer", "null"],
            "minimum": 0,
            "maximum": SLOTS - 1,
            "default": None,
            "description": _("Number of the key slot that is emptied; null to add the secret `new_passphrase`."),
        },
        "libvirt_secret": {
            "type": "boolean",
            "default": True,
            "description": _("Where a guest opens the image by a secret of libvirt, give that the new passphrase."),
        },
        "iter_time": Create.properties["iter_time"],
        **REWRITE_OPTIONS,
    }
    methods = {"copy": _("Change passphrases")}

    def secrets(self, options: dict[str, Any]) -> tuple[str, ...]:
        return ("passphrase",) if options.get("slot") is not None else ("passphrase", "new_passphrase")

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:  # noqa: ARG002 (the same for all)
        return [one for one in refusals.for_rewrite(image) if one.code not in _NOT_AGAINST]

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:  # noqa: ARG002
        slots, slot, against = image.from_header("key_slots"), options["slot"], list[Refusal]()
        if slots is None:
            told = gettext("{image} has no key slots that can be changed: it is not encrypted by LUKS version 1.")
            against.append(Refusal("unsupported_subformat", told.format(image=image.name)))
        elif slot is None and len(slots) >= SLOTS:
            told = gettext("All {count} key slots of {image} are taken. Empty one first.")
            against.append(Refusal("stale_plan", told.format(count=SLOTS, image=image.name)))
        elif slot is not None and (slot not in slots or len(slots) < 2):
            told = gettext("Key slot {slot} of {image} is empty, or the last one that is not.")
            against.append(Refusal("stale_plan", told.format(slot=slot, image=image.name)))
        prefix = "" if image.declared_format == "luks" else "encrypt."
        change = f"state=active,{prefix}new-secret=new" if slot is None else f"state=inactive,{prefix}keyslot={slot}"
        opened = f"driver={image.declared_format},{prefix}key-secret=s,file.filename={beside(image)}"
        secrets = [f"secret,id={name},file=PASSPHRASE" for name in (["s", "new"] if slot is None else ["s"])]
        objects = [word for one in secrets for word in ("--object", one)]
        command = ["qemu-img", "amend", *objects, "-o", f"{prefix}{change}", "--image-opts", opened]
        reason = (
            gettext("A passphrase is added to a copy of {image}, which has to open with it, and then replaces it.")
            if slot is None
            else gettext("Key slot {slot} is emptied in a copy of {image}. That must still open, and then replaces it.")
        ).format(image=image.name, slot=slot)
        return replace(
            of_a_copy(self.name, image, options, "copy", reason, [command]),
            after=image.allocated_size,
            refusals=[*against, *neighbours.against_rewriting(image)],
            warnings=_warnings(image, options),
        )

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        asked: dict[str, Any] = {"secrets": dict(job.secrets)}
        if job.options["slot"] is None:
            return asked | {"iter_time": job.options["iter_time"]}
        return asked | {
            "slot": job.options["slot"],
            "must_open": passphrases.of_guests(image.host, image.path) if image.disks else [],
        }

    def ended(self, job: Job) -> None:
        if "new_passphrase" in job.secrets and job.options["libvirt_secret"] and succeeded(job):
            image = find(job.target_id)
            if image.disks:
                passphrases.tell(
                    job, image.path, job.secrets["new_passphrase"], was=job.secrets["passphrase"], define=False
                )
        super().ended(job)


def _warnings(image: Image, options: dict[str, Any]) -> list[str]:
    if options["slot"] is None:
        told = gettext("If this job is undone, give the guest's secret of libvirt the old passphrase again.")
        return [told] if image.disks and options["libvirt_secret"] and options["undo_hours"] else []
    found = []
    if options["undo_hours"]:
        found.append(
            gettext("Until its undo copy is removed, the removed passphrase still opens that. Keep none for 0 hours.")
        )
    if guests := image.guest_names:
        told = gettext("Make sure that {guests} does not start with the removed passphrase (virsh secret-get-value).")
        found.append(told.format(guests=", ".join(guests)))
    return found
