"""The job kinds ``set_aside``, ``restore_aside`` and ``delete_aside``: what is done with an image that nobody needs."""

import shlex
from datetime import timedelta
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.orphans import ask_hypervisors, rows
from images.orphans import refusals as against
from images.rewrite import in_use, needed_as_it_is, refusals
from images.rewrite import record as rewriting
from images.rewrite.kind import ImageKind
from images.rewrite.neighbours import facts, find, locks_on, silent_storage
from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.protocol import RefusedError, b64
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.kinds import Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Affected, Plan, refuse


class AsideKind(ImageKind):
    """A kind that changes an image's names and nothing else."""

    role = Role.ADMIN
    rewrites = True
    volumes = frozenset(StoragePool.VOLUMES)
    #: Whether it frees what the image takes.
    deletes = False
    #: What the agent is asked to do with a volume.
    volume_verb = ""
    stages = {"checking": (0, 50), "swapping": (50, 100)}
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop(
                "The image is unchanged. It has either its own name, or the name under which it is set aside."
            ),
            gettext_noop("This job did not rename the image."),
        )
    }

    def verb_for(self, job: Job) -> str:
        return self.volume_verb if find(job.target_id).volume else self.verb

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:  # noqa: ARG002 (the same for all)
        return locks_on(find(target.id), exclusive=True)

    def waits_for_storage(self, job: Job) -> str:
        return silent_storage(job.target_id)

    def ended(self, job: Job) -> None:
        services.rescan(job)


class SetAside(AsideKind):
    """Gives an orphan another name, under which nobody finds it by chance; everything else of it stays."""

    name = "set_aside"
    title = _("Set aside")
    description = _(
        "Sets an unused image aside: the image keeps its data, and can be restored until an admin deletes it."
    )
    verb = "set_aside"
    volume_verb = "set_volume_aside"
    properties = {
        "grace_days": {
            "type": "integer",
            "minimum": 1,
            "maximum": 365,
            "default": rows.GRACE_DAYS,
            "description": _("Days before the image can be deleted. Nothing is deleted automatically."),
        }
    }

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        until = timezone.now() + timedelta(days=options["grace_days"])
        return Plan(
            method="set_aside",
            reason=gettext(
                "{image} is renamed within its {place}, so that no guest and no list finds it. It can be restored "
                "at any time. An admin can delete it from {until:%Y-%m-%d} on; no space is freed before that."
            ).format(
                image=image.name,
                place=_TOOLS[image.volume["backend"]][0] if image.volume else gettext("folder"),
                until=until,
            ),
            commands=(_renaming(image, image.name, ".sa-JOB.aside"),),
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            predicted_after_bytes=image.allocated_size,
            scratch_bytes=0,
            undo_bytes=0,
            refusals=tuple(against.setting_aside(image)),
            warnings=(*refusals.age_warning(image), *against.warnings(image)),
            affected_images=(Affected(image.pk, image.name, gettext("set aside")),),
            options=options,
        )

    def prepare(self, job: Job) -> None:
        image = find(job.target_id)
        ask_hypervisors.refuse_named(image)
        in_use.refuse_used_elsewhere(image)

    def request(self, job: Job) -> dict[str, Any]:
        image = find(job.target_id)
        refuse(against.setting_aside(image))
        if image.volume:
            return image.volume_place
        asked = facts(image)
        del asked["format"]
        return asked | {"children_known": True, **needed_as_it_is.pools(image)}

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        image = find(job.target_id)
        rows.set_aside(image, job)
        return aside_result(rows.taken(image, result["held_bytes"]), result["seconds"])


class RestoreAside(AsideKind):
    """Gives an image that is set aside its own name again."""

    name = "restore_aside"
    title = _("Restore")
    description = _("Gives an image that was set aside its original name again. Refused if another file has that name.")
    verb = "restore_aside"
    volume_verb = "restore_volume"
    urgent = True

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        return Plan(
            method="restore_aside",
            reason=gettext("{image} gets its original name again, with its data unchanged.").format(image=image.name),
            commands=(_renaming(image, ".sa-JOB.aside", image.name),),
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            predicted_after_bytes=image.allocated_size,
            scratch_bytes=0,
            undo_bytes=0,
            refusals=tuple(against.restoring(image)),
            affected_images=(Affected(image.pk, image.name, "restored"),),
            options=options,
        )

    def request(self, job: Job) -> dict[str, Any]:
        image = find(job.target_id)
        refuse(against.restoring(image))
        return where(image)

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        image = find(job.target_id)
        before, after = image.allocated_size, rows.taken(image, result["after_bytes"])
        if not image.volume:  # else the next scan tells what it takes now
            image.dev, image.inode, image.allocated_size = str(result["dev"]), str(result["inode"]), after
            image.save(update_fields=["dev", "inode", "allocated_size"])
        rows.restored(image)
        return {
            "before_bytes": before, "after_bytes": after, "held_bytes": 0, "freed_bytes": 0, "freed_at": None,
            "seconds": result["seconds"],
        }  # fmt: skip


class DeleteAside(AsideKind):
    """Deletes an image that was set aside, once its grace period is over."""

    name = "delete_aside"
    title = _("Delete")
    description = _(
        "Permanently deletes an image that is set aside, once its grace period is over. The name of the image must "
        "be typed to confirm."
    )
    verb = "delete_aside"
    volume_verb = "delete_volume"
    deletes = True
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The image is either deleted, or still set aside with its data."),
            gettext_noop("This job did not delete the image."),
        )
    }
    properties = {
        "confirm_name": {
            "type": "string",
            "maxLength": 1100,
            "default": "",
            "description": _("The name of the image as pages show it; required to confirm the deletion."),
        }
    }

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        return Plan(
            method="delete_aside",
            reason=gettext("{image} is deleted permanently. There is no undo copy.").format(image=image.name),
            commands=(_removal(image),),
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            predicted_after_bytes=0,
            scratch_bytes=0,
            undo_bytes=0,
            refusals=tuple(against.deleting(image)),
            warnings=(gettext("The image cannot be restored afterwards."),),
            affected_images=(Affected(image.pk, image.name, "deleted"),),
            options=options,
        )

    def admit(self, target: Target, plan: Plan) -> None:
        image = find(target.id)
        if plan.options.get("confirm_name") != image.name:
            sentence = gettext("{image} was not deleted. Type its name to confirm.").format(image=image.name)
            raise InvalidError(sentence, {"confirm_name": sentence})

    def prepare(self, job: Job) -> None:
        image = find(job.target_id)
        ask_hypervisors.refuse_named(image)
        in_use.refuse_used_elsewhere(image, named=False)

    def request(self, job: Job) -> dict[str, Any]:
        image = find(job.target_id)
        refuse(against.deleting(image))
        if image.volume:
            return where(image)
        return where(image) | {"inode": int(image.inode), "pools": needed_as_it_is.looked_through(image.host)}

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        image = find(job.target_id)
        rows.deleted(image)
        before, freed = rows.taken(image, result["before_bytes"]), result["freed_bytes"]
        if freed is not None:
            if image.pool.kind == StoragePool.Kind.LVMTHIN:  # others of its pool may have let go of some meanwhile
                freed = min(freed, (before or freed) if image.own_bytes is None else image.own_bytes)
            rewriting.write_line(job, image.pool, before, 0, freed=freed)
        return deletion_result(before, freed, result["seconds"])


def aside_result(held: int, seconds: float | None) -> dict[str, Any]:
    """What a job that has set an image aside shows: nothing is freed, all of it is held."""
    return {
        "before_bytes": held, "after_bytes": held, "held_bytes": held, "freed_bytes": 0, "freed_at": None,
        "seconds": seconds,
    }  # fmt: skip


def deletion_result(before: int, freed: int | None, seconds: float | None) -> dict[str, Any]:
    """What a job that has deleted an image shows; the ledger has no line of what nobody counted (``None``)."""
    return {
        "before_bytes": before, "after_bytes": 0, "held_bytes": 0, "freed_bytes": freed,
        "freed_at": timezone.now().isoformat(), "seconds": seconds,
    }  # fmt: skip


def where(image: Image) -> dict[str, Any]:
    """Where an image is that is set aside: its own path, and the job that names its files."""
    if image.aside_job is None:
        raise RefusedError("aside_missing", gettext("{image} is no longer set aside.").format(image=image.name))
    if image.volume:
        return image.volume_place | {"aside_job": image.aside_job.uid}
    return image.place | {"aside_job": image.aside_job.uid}


def where_volume(image: Image) -> dict[str, Any]:
    """A volume that is set aside, as a recovery asks for it."""
    return where(image) | {"inode": image.inode, "path_b64": b64(bytes(image.path_bytes))}


#: Of volumes: where they are, what renames one, and what deletes it.
_TOOLS = {
    "lvm": (_("volume group"), ("lvrename",), ("lvremove", "--yes", "-S", "lv_attr=~^[^oO]")),
    "zfs": (_("dataset"), ("zfs", "rename"), ("zfs", "destroy")),
    "rbd": (_("Ceph pool"), ("rbd", "rename"), ("rbd", "rm")),
}


def _renaming(image: Image, before: str, after: str) -> str:
    if volume := image.volume:
        names = (f"{volume['group']}/{name}" for name in (before, after))
        return shlex.join([*_TOOLS[volume["backend"]][1], *names])
    folder = image.path.rpartition("/")[0]
    return shlex.join(["mv", f"{folder}/{before}", f"{folder}/{after}"])


def _removal(image: Image) -> str:
    if volume := image.volume:
        return shlex.join([*_TOOLS[volume["backend"]][2], f"{volume['group']}/.sa-JOB.aside"])
    return shlex.join(["rm", f"{image.path.rpartition('/')[0]}/.sa-JOB.aside"])
