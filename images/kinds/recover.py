"""The job kind ``recover``: what interrupted jobs left on a host is finished or put back, and their rows say so."""

from datetime import timedelta
from enum import Enum
from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from images.kinds import commit, recover_without_journal
from images.kinds.aside import where_volume
from images.kinds.convert import Convert
from images.kinds.move import Move
from images.kinds.undo import state_after_removal, undone_for_good
from images.models import Image
from images.orphans import recovery, rows
from images.rewrite import record as rewriting
from images.rewrite import refusals, repointing
from images.scan import shared_storages
from images.scan.from_volumes import KINDS
from images.scan.volume_places import group_id
from storage_admin.accounts.models import Actor
from storage_admin.agent import protocol
from storage_admin.agent.protocol import b64, unb64
from storage_admin.hosts.models import Host
from storage_admin.jobs import claims, kinds, services
from storage_admin.jobs.claims import tell_end
from storage_admin.jobs.kinds import HostKind
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan

#: How a job ends whose storage fails: its agent may have been unable to tell, or put back, what it had done.
_STORAGE_FAILED = frozenset({"pool_changed", "immutable", "not_enough_space", protocol.TOOL_FAILED})


class Settled(Enum):
    """What is known of a job after a recovery: it is written down, its image has another file, or nothing yet."""

    DONE, REPLACED, OPEN = range(3)


class Recover(HostKind):
    """Reads the journals in a host's pools; each tells whether its image was replaced already."""

    name = "recover"
    title = _("Recover")
    description = _(
        "Finishes or reverts interrupted jobs on the host by their journals. Removes leftover benchmark files."
    )
    verb = "recover"
    single = True

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        host = self.resolve(target_id).host
        count = host.pools.count()
        return Plan(
            reason=ngettext(
                "Looks for journals of interrupted jobs and for scratch files in {count} pool.",
                "Looks for journals of interrupted jobs and for scratch files in {count} pools.",
                count,
            ).format(count=count),
            refusals=tuple(refusals.without_agent(host)),
        )

    def request(self, job: Job) -> dict[str, Any]:
        jobs = Job.objects.filter(host=job.host_id)
        folders = job.host.pools.filter(kind__in=refusals.FOLDERS)
        # Also those of other hosts, which may have a disk with volumes that this one sees as well.
        active = Job.objects.filter(state=Job.State.RUNNING, rewrites=True)
        kept = jobs.filter(undo_state=Job.UndoState.AVAILABLE)
        lost = jobs.filter(undo_state=Job.UndoState.MISSING)
        aside = _where_aside(job.host_id)
        return {
            "pools": [{"id": pool.pk, "path_b64": b64(bytes(pool.path_bytes)), "kind": "dir"} for pool in folders],
            "jobs_active": list(active.values_list("uid", flat=True)),
            "jobs_recorded": [*(kept | lost).values_list("uid", flat=True), *(one["job"] for one in aside)],
            "undo_copies": [*_where(kept), *aside],
            "volumes": [where_volume(image) for image in _aside(job.host_id) if image.volume],
            "volumes_cut_off": [image.volume_place for image in _cut_off(job.host_id) if image.volume],
            "volumes_made": recover_without_journal.volumes(job.host_id),
            "groups": [
                {"backend": backend, "group_id": group} for backend, group in sorted(set(_groups(job.host).values()))
            ],
            "images": [*recover_without_journal.where(job.host_id), *recover_without_journal.where_undone(job.host_id)],
            **commit.owed(job.host_id),
        }

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        open_, replaced = set(), False
        seen = {found["job"]: found for found in result["images"]}
        others = _of_others(job, result["recovered"])
        for found in result["recovered"]:
            if not others.isdisjoint((found["job"], found.get("undo_of"))):
                continue
            match found["outcome"]:
                case "busy":
                    open_.add(found["job"])
                    if found["detail"]:
                        _say(found, found["detail"], "warning")
                case "failed":
                    _say(found, found["detail"] or "it could not be recovered; check its files on the host", "error")
                    if Job.objects.filter(uid=found["job"], kind="commit").exists():
                        open_.add(found["job"])  # until it is done, nothing new may stand on its base
                case _:
                    settled = self._settle(job, found, seen)
                    replaced |= settled is Settled.REPLACED
                    if settled is Settled.OPEN:
                        open_.add(found["job"])
        for found in result["images"]:
            if found["job"] not in open_:
                replaced |= self._settle_traceless(job, found)
        silent = [kind for kind, backend in KINDS.items() if backend in result["silent"]]
        away = job.host.pools.filter(kind__in=silent).values_list("pk", flat=True)
        groups = {(one["backend"], one["group_id"]) for one in result["away"]}
        without = [pool for pool, group in _groups(job.host).items() if group in groups]
        self._ask_no_more(job, open_, [*result["unread"], *away, *without])
        return {
            "recovered": [{key: found[key] for key in ("job", "outcome", "detail")} for found in result["recovered"]],
            "replaced": replaced,
        }

    @staticmethod
    def _ask_no_more(job: Job, uids: set[str], unread: list[int]) -> None:
        """Its jobs need no recovery any more.

        Args:
            uids: jobs that do, with those at work on what they left.
            unread: pools into which nobody could look, with all jobs on their images, and those that make some there.
        """
        still = Job.objects.filter(host=job.host_id).filter(
            Q(uid__in=uids)
            | Q(target_kind="image", target_id__in=Image.every.filter(pool__in=unread).values("pk"))
            | Q(target_kind="pool", target_id__in=unread)
            | Q(plan__scratch_pool__in=unread)
        )
        # Only what had ended before the agent looked: it may not have seen what a later one left.
        settled = Job.objects.filter(host=job.host_id, needs_recovery=True, finished__lt=job.started or job.created)
        settled = settled.exclude(pk__in=still.values("pk")).exclude(
            target_kind="job", target_id__in=still.values("pk")
        )
        settled.exclude(state__in=Job.ACTIVE).update(needs_recovery=False)

    @staticmethod
    def _settle(job: Job, found: dict[str, Any], seen: dict[str, dict[str, Any]]) -> Settled:
        """Writes what became of one job.

        Args:
            seen: the files that jobs without a trace may have made or changed, by job.
        """
        lost = Job.objects.select_related("host").filter(uid=found["job"]).first()
        if lost is None or lost.active:
            return Settled.DONE
        if lost.kind in rows.KINDS:
            return Settled.REPLACED if recovery.settle(job, lost, found) else Settled.DONE
        if found["undo_of"] == lost.uid:
            claims.log(lost, "recovered: the image was opened during the swap; the original is in place")
        elif found["undo_of"] is not None:
            _settle_undo(lost, found)
        elif found["outcome"] in {"finished", "kept", "lost"} and _unrecorded(lost):
            _finished_after_all(lost, found)
            return Settled.REPLACED
        elif found["outcome"] == "reverted" and lost.needs_recovery:
            claims.log(lost, f"recovered: {found['detail'] if lost.kind == 'commit' else _cleared(lost)}")
        elif found["outcome"] == "lost" and lost.undo_available:
            return _settle_lost(job, lost, found, seen)
        return Settled.DONE

    @staticmethod
    def _settle_traceless(job: Job, found: dict[str, Any]) -> bool:
        """The same for one that left no journal."""
        done = recover_without_journal.swapped(job, found)
        if done is not None:
            _finished_after_all(*done)
            return True
        recover_without_journal.settle_in_place(job, found)
        return False

    def ended(self, job: Job) -> None:
        job.refresh_from_db(fields=["result"])
        # Only what was changed is read again: a scan submits a recovery, so the two must not go round in circles.
        result = job.result or {}
        outcomes = {found["outcome"] for found in result.get("recovered", [])}
        if result.get("replaced") or outcomes & {"finished", "reverted"}:
            services.rescan(job)
        repointing.settle(job.host_id)


def _of_others(recovery: Job, told: list[dict[str, Any]]) -> set[str]:
    """Of the jobs that a host tells of, those of hosts that share no storage with it: it has no journal of theirs."""
    near = {recovery.host_id, *(pair.other.host_id for pair in shared_storages.shared(recovery.host))}
    named = {uid for found in told for uid in (found["job"], found.get("undo_of"))}
    return set(Job.objects.filter(uid__in=named).exclude(host__in=near).values_list("uid", flat=True))


def _groups(host: Host) -> dict[int, tuple[str, str]]:
    """The volume group or ZFS pool of each of a host's pools, by its backend and its id."""
    pools = host.pools.filter(kind__in=KINDS)
    return {pool.pk: (KINDS[pool.kind], group) for pool in pools if (group := group_id(pool))}


def _where(kept: QuerySet[Job]) -> list[dict[str, str]]:
    """Where these jobs' undo copies should wait: beside their images."""
    jobs = list(kept.filter(target_kind="image").values_list("uid", "target_id"))
    images = Image.every.select_related("pool").in_bulk({image for __, image in jobs})
    return [{"job": uid, **images[image].place} for uid, image in jobs if image in images]


def _where_aside(host_id: int) -> list[dict[str, str]]:
    """Images that are set aside, in the same shape: the jobs that did it, and where each image has its place."""
    return [
        {"job": image.aside_job.uid, **image.place}
        for image in _aside(host_id)
        if not image.volume and image.aside_job is not None
    ]


def _aside(host_id: int) -> QuerySet[Image]:
    images = Image.every.filter(host=host_id, aside_since__isnull=False, aside_job__isnull=False)
    return images.select_related("aside_job", "pool")


def _cut_off(host_id: int) -> QuerySet[Image]:
    """Images at which a job was cut off that sets aside, restores or deletes, and that are not set aside."""
    jobs = Job.objects.filter(host=host_id, needs_recovery=True, kind__in=rows.KINDS, target_kind="image")
    return Image.every.filter(pk__in=jobs.values("target_id"), aside_since=None, deleted_at=None)


def _say(found: dict[str, Any], text: str, level: str) -> None:
    lost = Job.objects.filter(uid=found["job"]).first()
    if lost is not None and not lost.log_lines.filter(text=text).exists():
        claims.log(lost, text, level)


def _cleared(lost: Job) -> str:
    if kinds.get(lost.kind).measures:
        return "its leftover scratch files were removed"
    if lost.target_kind == "pool":
        return "no image was created, and its leftover files were removed"
    return "the original is in place, and leftover files beside it were removed"


def _unrecorded(lost: Job) -> bool:
    """Whether nobody was left, or able, to write down how the job ended; or the storage failed at the last moment."""
    failed = lost.needs_recovery or lost.error_code in _STORAGE_FAILED
    return lost.state == Job.State.INTERRUPTED or (lost.state == Job.State.FAILED and failed)


def _finished_after_all(lost: Job, found: dict[str, Any]) -> None:
    """The image was swapped before the worker died: the job has succeeded, and nobody was left to write it down."""
    waits, gone = found["undo_waits"], found["outcome"] == "lost"
    before = int(found["before_bytes"] or 0) if lost.target_kind == "image" else 0
    ready = lost.kept.get("ready", {})  # of a thin volume that is inactive nobody tells it
    made = int(found["made_bytes"] or found["after_bytes"] or ready.get("made_bytes") or 0)
    goes, given = before - found.get("goes_shared", 0), made - found.get("made_shared", 0)
    freed = goes - given if _in_its_place(lost) and not waits else 0
    if gone and found["put_back"]:
        claims.log(
            lost,
            "recovered: the original was restored outside this dashboard; the job counts as interrupted",
            "warning",
        )
        # Its journal goes with the next recovery, now that this is on record.
        Job.objects.filter(pk=lost.pk).update(undo_state=Job.UndoState.MISSING)
        return
    Job.objects.filter(pk=lost.pk).update(
        state=Job.State.SUCCEEDED, error_code="", error_detail="", progress=100.0, stage="", message="",
        result={
            "before_bytes": before, "after_bytes": made, "held_bytes": found["undo_bytes"],
            "predicted_after_bytes": lost.plan.get("predicted_after_bytes"),
            "freed_bytes": freed, "freed_at": None if waits else timezone.now().isoformat(), "recovered": True,
            "swapped": _in_its_place(lost),
        },
    )  # fmt: skip
    claims.log(lost, "recovered: the verified new image was already in place; the job has succeeded")
    repointing.done_after_all(lost)
    tell_end(lost.pk)
    images = Image.objects.select_related("pool").filter(pk=lost.target_id)
    image = images.first() if lost.target_kind == "image" else None
    if image is not None and found["inode"] is not None and _in_its_place(lost):
        _replaced(image, found)
    pool = image.pool if image is not None else None
    if not _in_its_place(lost):
        where = recover_without_journal.made_at(lost)
        rewriting.write_line_beside(lost, where[0] if where is not None else None, made)
    elif waits:
        rewriting.keep_undo(lost, found["undo_bytes"], timedelta(hours=float(lost.options.get("undo_hours", 24))))
        rewriting.write_held_line(lost, pool, before, made, given)
    elif gone:
        rewriting.keep_undo(lost, goes, timedelta())
        rewriting.write_held_line(lost, pool, before, made, given)
        rewriting.undo_copy_lost(lost, found["detail"], found=found)
    else:
        rewriting.write_line(lost, pool, before, made, freed=freed)


def _in_its_place(job: Job) -> bool:
    """Whether what the job makes takes its image's place; a conversion may leave it, and a new image has none."""
    kind = kinds.get(job.kind)
    return job.target_kind == "image" and (not isinstance(kind, Convert | Move) or kind.replaces("", job.options))


def _replaced(image: Image, found: dict[str, Any]) -> None:
    rewriting.image_replaced(image, found, unb64(found["path_b64"]))


def _settle_lost(recovery: Job, lost: Job, found: dict[str, Any], seen: dict[str, dict[str, Any]]) -> Settled:
    """An undo copy does not wait where it should: our own work was cut off, or somebody else took it away."""
    at_it = Job.objects.filter(target_kind="job", target_id=lost.pk)
    began = recovery.started or recovery.created
    if at_it.filter(Q(state__in=Job.ACTIVE) | Q(finished__gte=began, needs_recovery=False)).exists():
        return Settled.DONE  # at work while the agent looked: its own end tells what it did
    cut_off = at_it.filter(needs_recovery=True).exclude(state__in=Job.ACTIVE)
    undo = cut_off.filter(kind="undo").last()
    ready: dict[str, Any] = undo.kept.get("ready", {}) if undo is not None else {}
    if undo is not None:
        found = found | recover_without_journal.undone(undo, lost, seen.get(undo.uid))
    if found["before_bytes"] is None and found["inode"] is None:  # neither a journal nor the image was there
        image = Image.every.filter(pk=lost.target_id).first()
        if image is None or image.state != Image.State.MISSING:
            # Perhaps only a filesystem that is not mounted: a scan would have told that the image vanished.
            return Settled.OPEN
    is_back = found["inode"] is not None and found["inode"] == ready.get("made_inode")
    if undo is not None and (is_back or _is_another_file(lost, found)):
        # It died when all was done and its traces were gone.
        gone = {"undone_bytes": ready.get("before_bytes"), "undone_shared": ready.get("goes_shared", 0)}
        _settle_undo(undo, found | {"undo_of": lost.uid, "outcome": "finished"} | gone)
        return Settled.REPLACED
    removal = cut_off.filter(kind="discard_undo").last()
    if removal is None:
        rewriting.undo_copy_lost(lost, found["detail"], found=found)
    else:
        _removed_after_all(lost, removal, found["discarded_bytes"])
    return Settled.DONE


def _removed_after_all(lost: Job, removal: Job, told: int | None) -> None:
    """The undo copy was removed before the worker died, which frees what the journal, or else the agent, has told."""
    won = rewriting.won_bytes(lost, removal.kept.get("freed_bytes") if told is None else told)
    rewriting.close_undo(lost, state_after_removal(lost, removal), won)
    Job.objects.filter(pk=removal.pk).update(
        state=Job.State.SUCCEEDED, error_code="", error_detail="", progress=100.0, stage="", message="",
        result={"copy_bytes": lost.undo_bytes, "of_job": lost.pk, "recovered": True},
    )  # fmt: skip
    claims.log(removal, "recovered: the undo copy was already gone; the removal has succeeded")
    tell_end(removal.pk)


def _is_another_file(lost: Job, found: dict[str, Any]) -> bool:
    """Whether there is another file under the image's name than the one that the job has made."""
    image = Image.every.filter(pk=lost.target_id).first()
    there = (str(found["dev"]), str(found["inode"]))
    return image is not None and found["inode"] is not None and there != (image.dev, image.inode)


def _settle_undo(lost: Job, found: dict[str, Any]) -> None:
    undone = Job.objects.filter(uid=found["undo_of"]).first()
    if found["outcome"] == "finished" and undone is None:  # a job of another dashboard (images.kinds.leftover)
        done = Job.objects.filter(pk=lost.pk, state=Job.State.INTERRUPTED)
        done.update(state=Job.State.SUCCEEDED, error_code="", error_detail="", progress=100.0, stage="", message="")
        claims.log(lost, "recovered: the original was already in place; the undo has succeeded")
        return
    if found["outcome"] == "finished" and undone is not None:
        image = Image.objects.select_related("pool").filter(pk=undone.target_id).first()
        if image is not None and found["inode"] is not None:
            _replaced(image, found)
            repointing.restore_declaration(image, undone)
        gone, freed = found["undone_bytes"], rewriting.made_bytes(undone)
        if gone is not None:
            freed = gone - found.get("undone_shared", 0)
        undone_for_good(lost, undone, image, freed if gone is None else gone, freed, found["after_bytes"])
        settled = Job.objects.filter(pk=lost.pk, state=Job.State.INTERRUPTED).update(
            state=Job.State.SUCCEEDED, error_code="", error_detail="", progress=100.0, stage="", message="",
            result={"undone_job": undone.pk, "held_bytes": 0, "freed_bytes": 0, "freed_at": None, "recovered": True},
        )  # fmt: skip
        claims.log(lost, "recovered: the original was already in place; the undo has succeeded")
        if settled:
            tell_end(lost.pk)
    else:
        claims.log(lost, "recovered: nothing had been restored; the undo copy is kept")
