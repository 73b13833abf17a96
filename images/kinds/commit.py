"""The job kind ``commit``: an overlay that no running guest uses is merged into its backing file."""

import contextlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.kinds.flatten import contradicted
from images.live.follow import doubts
from images.models import Image
from images.rewrite import forecasts, in_use, needed_as_it_is, neighbours, readers, refusals, repointing
from images.rewrite import record as rewriting
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting
from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.jobs.kinds import Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal, refuse
from storage_admin.words import plural

#: Formats of backing files that can be written to.
BASES = ("qcow2", "raw")


class Commit(Rewriting):
    """Writes what an overlay holds into its base, and leads its guest there."""

    name = "commit"
    title = _("Merge into backing file")
    description = _(
        "Writes the data of an overlay into its backing file and switches its guest over to that file. There is no "
        "undo: the backing file changes. The overlay can only be deleted afterwards."
    )
    verb = "commit"
    no_way_back = True
    stages = {"checking": (0, 5), "merging": (5, 60), "verifying": (60, 98), "swapping": (98, 100)}
    properties = {name: option for name, option in REWRITE_OPTIONS.items() if name != "undo_hours"}
    methods = {"commit": _("Merge")}
    no_undo = _("the backing file is written to, and cannot be what it was")
    guarantee = _(
        "Until everything is written and compared, guests read the same through the overlay at every moment. If the "
        "work is interrupted, recovery finishes it."
    )
    unchanged = _("is merged into its backing file, which grows by at most what it occupies")
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The overlay reads as before. A recovery finishes what was written into its backing file."),
            gettext_noop("The overlay reads as before. What it holds was perhaps written into its backing file, too."),
        )
    }

    def replaces(self, method: str, options: dict[str, Any]) -> bool:  # noqa: ARG002 (the same for all)
        return False

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:  # noqa: ARG002 (the same for all)
        image = neighbours.find(target.id)
        below = neighbours.ancestors(image)
        return [
            lock for place, one in enumerate([image, *below]) for lock in neighbours.locks_on(one, exclusive=place < 2)
        ]

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        if not below:
            told = gettext("{image} has no backing file to merge into.").format(image=image.name)
            return Choice("commit", str(self.description), refusals=[Refusal("stale_plan", told)])
        base, most = below[0], None
        if base.allocated_size is not None and image.allocated_size is not None:
            most = base.allocated_size + image.allocated_size
        foreign, allowed = readers.for_taken(base, [image])
        told = gettext("The data of {image} is written into {base} and compared.")
        if image.disks:
            told = gettext("The data of {image} is written into {base} and compared. Then {guest} uses {base}.")
        warnings = [
            gettext("There is no undo: {base} is written to.").format(base=base.name),
            gettext("{image} must never be attached to a guest again: delete it.").format(image=image.name),
        ]
        command = ["qemu-img", "commit", "-d", "-p", "-f", image.declared_format or "qcow2", image.path]
        return Choice(
            "commit",
            told.format(image=image.name, base=base.name, guest=next(iter(image.guest_names), "")),
            [command],
            low=base.allocated_size,
            high=most,
            took=forecasts.seconds(image, self.name, 2 * image.occupied_bytes, options["bandwidth_bytes_sec"]),
            scratch=image.occupied_bytes,
            refusals=[*_against(image, base), *foreign],
            by_hand=[*allowed, *doubts([disk.guest_id for disk in image.disks], [image.path])],
            warnings=warnings,
            below={base.pk: gettext("is written to"), image.pk: gettext("is merged, and can only be deleted")},
            space_in=base.pool,
        )

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        image = neighbours.find(target_id)
        plan = self.plan_for(actor, image, options)
        return replace(plan, refusals=(*plan.refusals, *_needs(image)))

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:
        plan = super().plan_for(actor, image, options)
        return replace(plan, before_bytes=image.backing.allocated_size) if image.backing is not None else plan

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        return needed_as_it_is.pools(image, below[0])

    def written(self, job: Job) -> Image | None:
        image = super().written(job)
        return image.backing if image is not None else None

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        image = neighbours.find(job.target_id)
        base = neighbours.ancestors(image)[0]
        refuse(_needs(image))
        in_use.check_guests_off(base)
        in_use.refuse_used_elsewhere(base)

    def note_ready(self, job: Job, ready: dict[str, Any]) -> None:
        """Nothing: no new file has been made, and what the base has grown by is told by events."""

    def before_swap(self, job: Job) -> None:
        image = neighbours.find(job.target_id)
        move = _move(image, neighbours.ancestors(image)[0])
        guests = repointing.look(image, move)
        if len(guests) > 1:
            raise RefusedError(
                "shared_base", gettext("Several guests use {image}, which is merged.").format(image=image.name)
            )
        Image.every.filter(pk=image.pk).update(
            merged={"job": job.pk, "file": f"{image.dev}:{image.inode}:{image.mtime_ns}"}
        )
        try:
            repointing.lead_to_the_base(job, image, move)
        except (RefusedError, HostError):
            # What libvirt did not answer it may have done. An overlay that is called merged is only left alone.
            with contextlib.suppress(RefusedError, HostError):
                if in_use.domains_that_name(image) or not guests:
                    Image.every.filter(pk=image.pk).update(merged=None)
            raise

    def ended(self, job: Job) -> None:
        job.refresh_from_db()
        if job.state != Job.State.SUCCEEDED and job.before_bytes is not None and job.freed_bytes is None:
            # The base may have been written to: until that is finished, nothing new may stand on it.
            Job.objects.filter(pk=job.pk).update(needs_recovery=True)
        super().ended(job)

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        base = self.written(job)
        rewriting.write_line(
            job, base.pool if base is not None else None, result["before_bytes"], result["after_bytes"]
        )
        return result | {"swapped": False, "grown": base.path if base is not None else ""}


def _move(image: Image, base: Image) -> repointing.Move:
    before, after = bytes(image.path_bytes), bytes(base.path_bytes)
    return repointing.Move(before, after, base.declared_format or image.backing_format or "raw", repoint=True)


def _against(image: Image, base: Image) -> list[Refusal]:
    """What stands against it: who else needs one of the two as it is, and what would be lost."""
    found = [one for one in refusals.for_rewrite(base) if one.code != "has_internal_snapshots"]
    form = base.declared_format or image.backing_format
    if form not in BASES:
        told = gettext("{base} is {format}, which cannot be merged into.")
        found.append(Refusal("unsupported_subformat", told.format(base=base.name, format=form)))
    if image.bitmaps:
        told = gettext("{image} has bitmaps, which would be lost. Remove them first.")
        found.append(Refusal("unsupported_subformat", told.format(image=image.name)))
    if (image.virtual_size or 0) < (base.virtual_size or 0):
        told = gettext("{image} is smaller than {base}. Enlarge it first.")
        found.append(Refusal("stale_plan", told.format(image=image.name, base=base.name)))
    if base.overlays_count > 1 or base.disks:
        used = [gettext("Guest {guest} uses it.").format(guest=name) for name in base.guest_names]
        why = " ".join(used) or gettext("{overlays} besides {image}.").format(
            overlays=plural(base.overlays_count - 1, gettext("overlay,overlays")), image=image.name
        )
        found.append(_needed(base, why))
    if image.overlays_count:
        told = gettext("Overlays use {image}. Merge or flatten those first.").format(image=image.name)
        found.append(Refusal("shared_base", told))
    if len({disk.guest_id for disk in image.disks}) > 1:
        found.append(Refusal("shared_base", gettext("Several guests use {image}.").format(image=image.name)))
    found += [*neighbours.against_standing_alone(image), *neighbours.against_rewriting(base), *contradicted(image)]
    return [*found, *repointing.refusals(image, _move(image, base))]


def _needed(base: Image, why: str) -> Refusal:
    told = gettext("{image} is needed by others as it is: {others}")
    return Refusal("shared_base", told.format(image=base.name, others=why))


def _needs(image: Image) -> list[Refusal]:
    """Who else needs the base by what no row links: data files, extents, descriptions, other folders."""
    if image.backing is None:
        return []
    base, near = image.backing, neighbours.of(image)
    below = near.of_base(base)
    found = [_needed(base, " ".join(below.needed_by))] if below.needed_by else []
    if why := below.needs_unknown or near.needs_unknown:
        told = gettext("{why} Nobody knows who needs {image}.").format(why=why, image=base.name)
        found.append(Refusal("guests_unknown", told))
    return found


def owed(host_id: int) -> dict[str, list[Any]]:
    """What a recovery does with merges that were cut off: the agent's arguments.

    A merge is done again only while the overlay is still what its guest uses, and nobody else uses the base: once a
    guest is led to the base, what it writes there is newer. Of hosts whose guests cannot be asked now, neither is said.
    """
    again, over = list[dict[str, str]](), list[str]()
    jobs = Job.objects.filter(kind=Commit.name, host=host_id).exclude(state__in=Job.ACTIVE)
    over += jobs.filter(state=Job.State.SUCCEEDED).values_list("uid", flat=True)
    for job in jobs.filter(needs_recovery=True).exclude(state=Job.State.SUCCEEDED):
        image = (
            Image.every.select_related("host", "pool", "backing__pool", "backing__host")
            .filter(pk=job.target_id)
            .first()
        )
        if image is None or image.deleted_at is not None or not image.backing_file:
            over.append(job.uid)
            continue
        if (base := image.backing) is None:
            continue  # one of the two is away: what becomes of the merge shows when it is back
        try:
            on_base, on_overlay = in_use.domains_that_name(base), in_use.domains_that_name(image)
            in_use.check_guests_off(base)
        except (RefusedError, HostError):
            continue
        if on_base or base.disks or (image.merged is not None and not on_overlay):
            over.append(job.uid)
        elif base.overlays_count <= 1 and not _needs(image):
            Image.every.filter(pk=image.pk).update(merged=None)
            paths = {"overlay_b64": b64(bytes(image.path_bytes)), "base_b64": b64(bytes(base.path_bytes))}
            again.append({"job": job.uid, **paths})
    return {"merges": again, "merges_over": over}


def half_merged(images: Collection[Image]) -> list[Refusal]:
    """Images into which an overlay was merged in part: nothing new may stand on them."""
    jobs = Job.objects.filter(kind=Commit.name, needs_recovery=True, target_kind="image")
    found = jobs.filter(target_id__in=Image.every.filter(backing__in=images).values("pk")).first()
    if found is None:
        return []
    told = gettext("A merge of {image} into its backing file was interrupted. Recover the host first.")
    return [Refusal("busy", told.format(image=found.target_label))]
