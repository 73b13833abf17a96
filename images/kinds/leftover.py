"""The job kind ``settle_leftover``: an undo copy of a dashboard that is no more is put back, or removed."""

from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images import backups
from images.kinds.undo import PUT_BACK, REMOVED
from images.models import Image
from images.rewrite import guest_locks, holding, in_use, needed_as_it_is, refusals
from images.rewrite import record as rewriting
from images.rewrite.neighbours import locks_on
from images.scan import known
from images.scan.known import Leftover
from storage_admin.accounts.models import Actor, Role
from storage_admin.agent import protocol
from storage_admin.agent.protocol import RefusedError, unb64
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.selectors import find_pool
from storage_admin.jobs import services
from storage_admin.jobs.kinds import JobKind, Lock, Target
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Affected, LastBackup, Plan, Refusal

_ALIVE = _(
    "This database does not know the job that left these files. They belong to another dashboard, or to one that "
    "no longer exists. If that dashboard is still in use, undo the job or discard the copy there."
)


class SettleLeftover(JobKind):
    """Does by an admin's word what the dashboard that knew the job would have done: the same undo, the same removal."""

    name = "settle_leftover"
    title = _("Undo copy of another dashboard")
    description = _("Restores or removes the undo copy of a job that this dashboard has no record of (admins only).")
    target = "pool"
    role = Role.ADMIN
    rewrites = True
    urgent = True
    verb = "undo"
    unsuccessful = {"": PUT_BACK, "remove": REMOVED}
    stages = {"checking": (0, 40), "swapping": (40, 100)}
    properties = {
        "job": {
            "type": "string",
            "minLength": 1,
            "maxLength": 40,
            "description": _("The number of the job, as in the names of its files."),
        },
        "action": {
            "enum": ["restore", "remove"],
            "description": _(
                "restore: the original replaces the image again. remove: the undo copy is permanently deleted."
            ),
        },
        "force": {
            "type": "boolean",
            "default": False,
            "description": _(
                "Restore even if the image was written to since, or remove even if the copy may be the only good "
                "one left."
            ),
        },
    }

    def resolve(self, target_id: int) -> Target:
        pool = find_pool(target_id)
        return Target(kind="pool", id=pool.pk, host=pool.host, label=pool.name)

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        image = self._found(find_pool(target.id), options)[2]
        held = Lock(f"leftover:{target.host.pk}:{options['job']}", exclusive=True)
        return [held, *(locks_on(image, exclusive=True) if image is not None else [])]

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        pool = find_pool(target_id)
        against, left, image = self._found(pool, options)
        restores = options["action"] == "restore"
        shown = left.shown if left is not None else options["job"]
        reason = gettext("The original of {shown} is permanently deleted.")
        if restores:
            reason = gettext("The original of {shown} is restored from its undo copy and replaces the current image.")
        return Plan(
            method=options["action"],
            reason=reason.format(shown=shown),
            facts_at=pool.last_scanned,
            before_bytes=image.allocated_size if image is not None else None,
            scratch_bytes=0,
            undo_bytes=0,
            refusals=tuple(against),
            warnings=(str(_ALIVE),),
            affected_images=() if image is None else (Affected(image.pk, image.name, "replaced" if restores else ""),),
            options=options,
        )

    def last_backups(self, target: Target, plan: Plan) -> tuple[LastBackup, ...]:
        image = self._found(find_pool(target.id), plan.options)[2]
        return backups.of_image(image) if image is not None else ()

    @staticmethod
    def _found(pool: StoragePool, options: dict[str, Any]) -> tuple[list[Refusal], Leftover | None, Image | None]:
        left = known.find_leftover(pool, options["job"])
        if left is None or Job.objects.filter(uid=options["job"]).exists():
            told = gettext(
                "{pool} has no files of this job, or the job belongs to this dashboard. Scan the host, then try again."
            )
            return [Refusal("undo_missing", told.format(pool=pool.name))], None, None
        if not left.has_copy:
            told = gettext("No journal says which image this undo copy belongs to. Look at its files on the host.")
            return [Refusal("undo_missing", told)], left, None
        image, against = known.image_of(pool, left), refusals.without_agent(pool.host)
        if options["action"] == "restore":
            told = gettext("{shown} is not in the list of images. Scan the host, then try again.")
            gone = Refusal("stale_plan", told.format(shown=left.shown))
            against += [gone] if image is None else [*refusals.for_undo(image), *guest_locks.refusals(image, 1)]
        if options["action"] == "restore" or not options["force"]:
            against += holding.needed_by(pool.host_id, left.folder.rstrip(b"/") + f"/.sa-{left.job}.orig".encode())
        return against, left, image

    def _restored(self, job: Job) -> Image | None:
        """The image in whose place a job puts the original; ``None`` where it removes the copy."""
        if job.options["action"] != "restore":
            return None
        against, _left, image = self._found(find_pool(job.target_id), job.options)
        if image is None:
            raise RefusedError(against[0].code, against[0].detail)
        return image

    def prepare(self, job: Job) -> None:
        if (image := self._restored(job)) is not None:
            in_use.check_guests_off(image)
            in_use.refuse_used_elsewhere(image)

    def before_swap(self, job: Job) -> None:
        if (image := self._restored(job)) is not None:
            guest_locks.take(job, image)

    def exchanged(self, job: Job) -> None:
        if (image := self._restored(job)) is not None:
            in_use.look_again_elsewhere(job, image)
        guest_locks.look_again(job)

    def note_ready(self, job: Job, ready: dict[str, Any]) -> None:
        rewriting.note_ready(job, ready)

    def verb_for(self, job: Job) -> str:
        return "undo" if job.options["action"] == "restore" else "discard_undo"

    def request(self, job: Job) -> dict[str, Any]:
        pool = find_pool(job.target_id)
        against, left, image = self._found(pool, job.options)
        if against or left is None or left.path is None:
            raise RefusedError(against[0].code, against[0].detail)
        asked = pool.place_of(left.path) | {"undo_job": left.job, "force": job.options["force"]}
        if job.options["action"] == "remove":
            return asked | {"format": image.declared_format or image.format if image is not None else ""}
        if image is None:
            return asked
        return asked | guest_locks.asked(image) | in_use.asked_elsewhere(image) | needed_as_it_is.pools(image)

    def on_event(self, job: Job, event: dict[str, Any]) -> None:
        if event["event"] != protocol.OCCUPIED:
            super().on_event(job, event)

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        pool = find_pool(job.target_id)
        left = known.find_leftover(pool, job.options["job"])
        image = known.image_of(pool, left) if left is not None else None
        pool.leftovers = [one for one in pool.leftovers if one["job"] != job.options["job"]]
        pool.save(update_fields=["leftovers"])
        told = {"of_job": job.options["job"], "action": job.options["action"]}
        if job.options["action"] == "remove":
            rewriting.write_line(
                job, pool, left.held_bytes if left is not None else 0, 0, freed=int(result["freed_bytes"])
            )
            return told | {"freed_bytes": int(result["freed_bytes"])}
        if image is not None:
            rewriting.image_replaced(image, result, rewriting.sibling(image, unb64(result["name_b64"])))
        rewriting.write_line(job, pool, result["before_bytes"], result["after_bytes"], freed=int(result["freed_bytes"]))
        return told | {"before_bytes": result["before_bytes"], "after_bytes": result["after_bytes"]}

    def ended(self, job: Job) -> None:
        guest_locks.give_back(job)
        services.rescan(job)
