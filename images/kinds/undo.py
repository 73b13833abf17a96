"""The job kinds ``undo`` (the original comes back) and ``discard_undo`` (the undo copy goes, and frees space)."""

import contextlib
from typing import Any

from django.db.models import Q
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images import backups
from images.models import Image
from images.rewrite import guest_locks, holding, in_use, mount, needed_as_it_is, refusals, repointing
from images.rewrite import (
    record as rewriting,
)
from images.rewrite.kind import Rewriting
from images.rewrite.neighbours import find, locks_on_chain, silent_storage
from images.scan import look
from storage_admin.accounts.models import SYSTEM, Actor, Role
from storage_admin.agent import protocol
from storage_admin.agent.protocol import RefusedError, b64, unb64
from storage_admin.errors import NotFoundError
from storage_admin.hosts.names import display
from storage_admin.jobs import claims, kinds, services
from storage_admin.jobs.kinds import JobKind, Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.plan_and_progress import Affected, LastBackup, Plan, Refusal, refuse

PUT_BACK = Unsuccessful(
    gettext_noop("The image is either the original, or what it was before this job, never a mixture."),
    gettext_noop("This job did not restore the original, and removed nothing."),
)
REMOVED = Unsuccessful(
    gettext_noop("The undo copy may already have been removed. The image itself is unchanged."),
    gettext_noop("This job did not remove the undo copy, and did not change the image."),
    open_from="",
)


class OfJob(JobKind):
    """A kind that works on what an earlier job left."""

    target = "job"
    rewrites = True

    def resolve(self, target_id: int) -> Target:
        job = self._job(target_id)
        return Target(kind="job", id=job.pk, host=job.host, label=job.target_label)

    @staticmethod
    def _job(job_id: int) -> Job:
        job = Job.objects.select_related("host").filter(pk=job_id).first()
        if job is None:
            raise NotFoundError(gettext("Job {job} does not exist.").format(job=job_id))
        return job

    @staticmethod
    def _image(job: Job) -> Image:
        if job.target_kind != "image":
            raise RefusedError(
                "undo_missing",
                gettext("Job {job} ({kind}) did not rewrite an image.").format(job=job.pk, kind=job.kind),
            )
        return find(job.target_id)

    def look(self, target_id: int, job: Job | None = None) -> None:
        undone = self._job(target_id)
        if undone.undo_available:
            look.at([self._image(undone)], job)

    def _missing(self, job: Job) -> list[Refusal]:
        if job.undo_available:
            return self._cut_off(job)
        words = {
            Job.UndoState.UNDONE: gettext("Job {job} is already undone."),
            Job.UndoState.DISCARDED: gettext("The undo copy of job {job} was discarded."),
            Job.UndoState.EXPIRED: gettext("The undo window of job {job} has closed. Its undo copy was removed."),
            Job.UndoState.MISSING: gettext("The undo copy of job {job} was deleted outside this dashboard."),
        }
        sentence = words.get(Job.UndoState(job.undo_state), gettext("Job {job} has no undo copy."))
        return [Refusal("undo_missing", sentence.format(job=job.pk))]

    @staticmethod
    def _cut_off(job: Job) -> list[Refusal]:
        """An undo that was cut off may have happened or not: only a recovery can tell, and it has to be first."""
        there = Q(pk=job.pk) | Q(target_kind="job", target_id=job.pk)
        other = Job.objects.filter(there, needs_recovery=True).first()
        if other is None:
            return []
        sentence = gettext(
            "Job {other} ({kind}) was interrupted. {host} is being recovered automatically. Try again afterwards."
        ).format(other=other.pk, kind=other.kind, host=job.host.name)
        return [Refusal("busy", sentence)]

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:  # noqa: ARG002 (the same for all)
        return locks_on_chain(self._image(self._job(target.id)), exclusive=True)

    def waits_for_storage(self, job: Job) -> str:
        return silent_storage(self._job(job.target_id).target_id)

    def last_backups(self, target: Target, plan: Plan) -> tuple[LastBackup, ...]:  # noqa: ARG002 (the same for all)
        return backups.of_image(self._image(self._job(target.id)))

    def request(self, job: Job) -> dict[str, Any]:
        undone = self._job(job.target_id)
        return self._image(undone).place | {"undo_job": undone.uid}

    def ended(self, job: Job) -> None:
        job.refresh_from_db(fields=["state", "error_code"])
        if job.error_code == "undo_missing":
            # Gone, exchanged or only written to? The journals and names on the host tell, and recovery reads them.
            with contextlib.suppress(RefusedError):
                services.submit(SYSTEM, "recover", job.host_id, {})
        services.rescan(job)


class Undo(OfJob):
    """Puts the original back where a job's new image stands now."""

    name = "undo"
    title = _("Undo")
    description = _(
        "Restores the original from its undo copy. Refused if the new image was written to since, unless forced."
    )
    verb = "undo"
    urgent = True
    unsuccessful = {"": PUT_BACK}
    stages = {"checking": (0, 40), "swapping": (40, 100)}
    properties = {
        "force": {
            "type": "boolean",
            "default": False,
            "description": _("Undo even if the new image was written to since. Those writes are lost (admin)."),
        }
    }

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        if options["force"]:
            actor.require(Role.ADMIN)
        job = self._job(target_id)
        image = self._image(job)
        against = self._missing(job)
        against += [*refusals.for_undo(image), *mount.against_replacing(image.pool), *guest_locks.refusals(image, 1)]
        against += _against_what_goes(job, image, options)
        return Plan(
            method="undo",
            reason=gettext("The original of {image} is restored from its undo copy and replaces the new image.").format(
                image=image.name
            ),
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            predicted_after_bytes=job.undo_bytes or None,
            scratch_bytes=0,
            undo_bytes=0,
            refusals=tuple(against),
            warnings=_warnings(job, options),
            affected_images=(Affected(image.pk, image.name, gettext("replaced by its original")),),
            options=options,
        )

    def prepare(self, job: Job) -> None:
        image = self._image(self._job(job.target_id))
        in_use.check_guests_off(image)
        in_use.refuse_used_elsewhere(image)

    def before_swap(self, job: Job) -> None:
        undone = self._job(job.target_id)
        repointing.lead_back(undone)
        guest_locks.take(job, self._image(undone))

    def exchanged(self, job: Job) -> None:
        in_use.look_again_elsewhere(job, self._image(self._job(job.target_id)))
        guest_locks.look_again(job)

    def note_ready(self, job: Job, ready: dict[str, Any]) -> None:
        rewriting.note_ready(job, ready)

    def request(self, job: Job) -> dict[str, Any]:
        undone = self._job(job.target_id)
        image = self._image(undone)
        refuse(_against_what_goes(undone, image, job.options))
        asked = super().request(job) | {"force": job.options["force"]}
        asked |= guest_locks.asked(image) | in_use.asked_elsewhere(image)
        return asked | (needed_as_it_is.pools(image) if _takes_away(undone, job.options) else {})

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        undone = self._job(job.target_id)
        image = self._image(undone)
        rewriting.image_replaced(image, result, rewriting.sibling(image, unb64(result["name_b64"])))
        repointing.restore_declaration(image, undone)
        undone_for_good(job, undone, image, result["before_bytes"], result["freed_bytes"], result["after_bytes"])
        return {
            "before_bytes": result["before_bytes"],
            "after_bytes": result["after_bytes"],
            "held_bytes": 0,
            "freed_bytes": 0,
            "freed_at": None,
            "undone_job": undone.pk,
            "seconds": result["seconds"],
        }

    def ended(self, job: Job) -> None:
        guest_locks.give_back(job)
        job.refresh_from_db(fields=["state", "needs_recovery"])
        if not job.needs_recovery:
            repointing.agree(self._job(job.target_id))
        super().ended(job)


class DiscardUndo(OfJob):
    """Removes an undo copy before its window closes."""

    name = "discard_undo"
    title = _("Discard the undo copy")
    description = _("Removes the undo copy of a job and frees its space. The job can no longer be undone.")
    verb = "discard_undo"
    asks = False
    unsuccessful = {"": REMOVED}
    role = Role.ADMIN
    properties = {
        "force": {
            "type": "boolean",
            "default": False,
            "description": _(
                "Remove the copy even if it was written to, or if the image is gone, damaged or not known to be "
                "the result of the job. The copy may then be the only good one left."
            ),
        }
    }

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        job = self._job(target_id)
        image = self._image(job)
        against = [] if options["force"] else refusals.only_copy(image)
        if not options["force"] and actor != SYSTEM:  # of what goes by itself the job says so, once
            against += _needed(job, image)
        return Plan(
            method="discard_undo",
            reason=gettext("The undo copy of {image} is removed. The job can no longer be undone.").format(
                image=image.name
            ),
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            predicted_after_bytes=image.allocated_size,
            scratch_bytes=0,
            undo_bytes=0,
            refusals=(*self._missing(job), *against),
            affected_images=(Affected(image.pk, image.name, gettext("not changed; its undo copy is removed")),),
            options=options,
        )

    def request(self, job: Job) -> dict[str, Any]:
        undone = self._job(job.target_id)
        image = self._image(undone)
        left_at = rewriting.path_left_by(undone, image)
        name = bytes(image.path_bytes).rpartition(b"/")[2]
        if image.state == Image.State.SET_ASIDE and image.aside_job is not None:
            name = f".sa-{image.aside_job.uid}.aside".encode()
        # What was deleted by its name, on purpose, is missed by nobody.
        force = job.options.get("force", False) or image.state == Image.State.DELETED
        if not force:
            refuse(_needed(undone, image))
        return super().request(job) | {
            "path_b64": b64(left_at),
            "now_b64": b64(name),
            "format": image.declared_format or image.format,
            "force": force,
            **holding.evidence(job, undone, image),
        }

    def on_event(self, job: Job, event: dict[str, Any]) -> None:
        if event["event"] != protocol.OCCUPIED:
            super().on_event(job, event)
        else:
            # Whether the copy had another name nobody can tell when it is gone.
            job.ours().update(kept={"freed_bytes": event["freed_bytes"]})

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        undone = self._job(job.target_id)
        freed = int(result["freed_bytes"])
        if not result["found"]:
            why = "the undo copy was already gone when it was due for removal"
            rewriting.undo_copy_lost(undone, why, found=result)
            return {"copy_bytes": 0, "of_job": undone.pk}
        if not freed and undone.undo_bytes:
            # Somebody gave the file a second name: the original lives on.
            claims.log(
                undone,
                "the undo copy has a second name (hard link) on the host: nothing was freed",
                JobLog.Level.WARNING,
            )
        rewriting.close_undo(undone, state_after_removal(undone, job), rewriting.won_bytes(undone, freed))
        return {"copy_bytes": freed, "of_job": undone.pk}


def _takes_away(undone: Job, options: dict[str, Any]) -> str:
    """What an undo takes from those who need the image as it is now, in a sentence; empty where they lose nothing."""
    if len(set(rewriting.paths_of(undone))) > 1:
        return gettext(
            "They use the image under its current name and could no longer find it. Flatten the overlays first."
        )
    kind = kinds.get(undone.kind)
    if options["force"] or (isinstance(kind, Rewriting) and kind.changes_content(undone.options)):
        return str(needed_as_it_is.CONTENT)
    return ""


def _against_what_goes(undone: Job, image: Image, options: dict[str, Any]) -> list[Refusal]:
    taken = _takes_away(undone, options)
    return [*_needed(undone, image), *(needed_as_it_is.refusals(image, taken) if taken else [])]


def _needed(job: Job, image: Image) -> list[Refusal]:
    return holding.needed_by(image.host_id, rewriting.sibling(image, f".sa-{job.uid}.orig".encode()))


def undone_for_good(undo: Job, undone: Job, image: Image | None, gone: int, freed: int, back: int | None) -> None:
    """Writes that a job was undone, and what else went with its new file.

    Args:
        gone: bytes that the new file occupied.
        freed: those that the filesystem got back.
        back: bytes that the original occupies.
    """
    rewriting.close_undo(undone, Job.UndoState.UNDONE, 0)
    # What the job itself took is given back. The rest was written into the new file since, or was not freed.
    if others := freed - rewriting.made_bytes(undone):
        rewriting.write_line(
            undo, image.pool if image is not None else None, gone, gone if back is None else back, freed=others
        )


def _warnings(job: Job, options: dict[str, Any]) -> tuple[str, ...]:
    warnings = [gettext("Data written to the new image since the job is lost.")] if options["force"] else []
    paths = rewriting.paths_of(job)
    if len(set(paths)) > 1:
        warnings.append(gettext("The image gets its original name again: {paths}.").format(paths=display(paths[0])))
    if guests := [guest["name"] for guest in job.kept.get("guests", [])]:
        warnings.append(
            gettext("The definition of {guests} will name the original again.").format(guests=", ".join(guests))
        )
    warnings += [
        gettext("The configuration of {name} will name {old} again.").format(name=one["name"], old=one["old"])
        for one in job.kept.get("volumes", [])
    ]
    return tuple(warnings)


def state_after_removal(undone: Job, removal: Job) -> Job.UndoState:
    """``expired`` where an undo copy was removed after its window had closed, else ``discarded``."""
    expired = undone.undo_expires is not None and undone.undo_expires <= removal.created
    return Job.UndoState.EXPIRED if expired else Job.UndoState.DISCARDED
