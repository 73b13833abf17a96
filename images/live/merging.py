"""The job kind ``live_merge``: QEMU writes what overlays hold into an image below them while their guest runs.

Such an overlay stands on what has changed under it: it is marked as merged, and can only be deleted.
"""

import contextlib
import os
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.live.block_jobs import DISK, PATH, Choice, LiveKind
from images.live.disks import Layers, as_scanned, drop, files, in_the_clear, not_known, refuse_needed
from images.live.follow import kept
from images.models import Image
from images.rewrite import neighbours, record, refusals
from images.scan import look
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.kinds.vm_disks import find
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt.block_jobs import Ended, Wanted
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import path_key
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.plan_and_progress import Recorder, Refusal


class LiveMerge(LiveKind):
    """Block commit: what an overlay holds moves down into the image below it."""

    name = "live_merge"
    title = _("Merge while the guest runs")
    description = _(
        "Shortens the backing chain of a running guest's disk: QEMU writes what an overlay holds into the image below "
        "it (block commit). Merging the top one switches the guest over to the image below."
    )
    op = "commit"
    properties = {
        "disk": DISK,
        "layer": PATH | {"description": _("Path of the overlay to merge; null for the one that the guest writes to.")},
        "into": PATH | {"description": _("Path of the image that it is merged into; null for the one right below.")},
        "delete_merged": {
            "type": "boolean",
            "default": False,
            "description": _("Delete the files of the merged overlays once the guest's chain is without them."),
        },
        "bandwidth_bytes_sec": record.SPEED_OPTIONS["bandwidth_bytes_sec"],
    }

    def choose(self, guest: Guest, layers: Layers, options: dict[str, Any]) -> Choice:
        chain, against = layers.chain, list[Refusal]()
        top, base = _places(layers, options, against)
        if not against and not 0 <= top < base < len(chain):
            sentence = gettext(
                "Nothing can be merged there: {disk} has {count} images below, and the other must be below."
            )
            against.append(Refusal("stale_plan", sentence.format(disk=layers.disk, count=len(chain) - 1)))
        if against:
            return Choice(
                gettext("{title}: {guest}.").format(title=self.title, guest=guest.name), [], refusals=tuple(against)
            )
        against += needed_by_others(layers, top, base)
        deletes = options["delete_merged"]
        against += refusals.without_agent(guest.host) if deletes else []
        grows = layers.images_at([base])
        merged = layers.images_at(range(top, base))
        against += [] if grows and grows[0].encrypted else in_the_clear(merged, layers.names[base])
        # What the guest writes to has grown since the scan.
        held = [
            layers.allocated if place == 0 else image.allocated_size for place, image in layers.found(range(top, base))
        ]
        before = grows[0].allocated_size if grows else None
        known = before is not None and len(held) == base - top and None not in held
        most = (before or 0) + sum(filter(None, held)) if known else None
        reason = gettext(
            "QEMU writes what {layer} holds into {image}. {guest} goes on running; afterwards its chain has "
            "{count} images fewer."
        ).format(layer=layers.names[top], image=layers.names[base], guest=guest.name, count=base - top)
        command = ["virsh", "blockcommit", guest.name, layers.disk, "--base", chain[base], "--top", chain[top]]
        command += ["--active", "--pivot"] if top == 0 else []
        told = gettext("There is no undo: {image} is written to.").format(image=layers.names[base])
        if deletes:
            after = gettext("Once the chain is without them, the files of the merged overlays are deleted.")
        else:
            after = gettext(
                "The files of the merged overlays stay, and must never be attached to a guest again: delete them."
            )
        return Choice(
            reason, command, top, base, None, grows[0].pool if grows else None, before, most, tuple(against),
            (told, after),
        )  # fmt: skip

    def look_ahead(self, guest: Guest, options: dict[str, Any]) -> object:
        layers, against = as_scanned(guest, options["disk"]), list[Refusal]()
        top, base = _places(layers, options, against)
        if against or not 0 <= top < base < len(layers.chain):
            return None
        with contextlib.suppress(RefusedError, HostError):  # of what may be no more: it is looked at again
            refuse_needed(guest, layers, top, base)
            return layers.chain, top, base
        return None

    def look_again(self, guest: Guest, layers: Layers, wanted: Wanted, ahead: object) -> None:
        if ahead != (wanted.chain, wanted.top, wanted.base):
            refuse_needed(guest, layers, wanted.top, wanted.base or 0)

    def _allocated(self, guest: Guest, wanted: Wanted, told: int | None) -> int | None:
        """What the image that has grown occupies now."""
        if wanted.top == 0 and told is not None:
            return told
        [file] = files(guest, [wanted.chain[wanted.base or 0]])
        if file is None:
            return super()._allocated(guest, wanted, told) if wanted.top == 0 else None
        return file["bytes"]

    def has_happened(self, job: Job, wanted: Wanted, ended: Ended) -> bool:
        if wanted.top == 0:
            return super().has_happened(job, wanted, ended)
        # What the guest writes to is the same: the header of the image above tells.
        above = Image.objects.filter(
            host=job.host_id, path_key=path_key(os.fsencode(wanted.chain[wanted.top - 1]))
        ).select_related("host")
        below = path_key(os.fsencode(wanted.chain[wanted.base or 0]))
        return job.host_id in look.at(above, job) and above.filter(backing_key=below).exists()

    def came_to_pass(self, job: Job, guest: Guest, wanted: Wanted) -> None:
        """What the overlays stood on has changed under them: the scan that follows calls them merged."""
        paths = wanted.chain[wanted.top : wanted.base]
        rows, scan = _rows(guest, paths), Host.objects.values_list("resolved_scan", flat=True).get(pk=guest.host_id) + 1
        for path, file in zip(paths, files(guest, paths), strict=True):
            if (row := rows.get(path_key(os.fsencode(path)))) is not None:
                dev, inode, written = (row.dev, row.inode, row.mtime_ns) if file is None else _identity(file)
                one = f"{dev}:{inode}:{written}"
                Image.every.filter(pk=row.pk).update(merged={"job": job.pk, "file": one}, changed_scan=scan)

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        result, wanted = super().work(job, recorder), kept(job)[0]
        if not job.options["delete_merged"]:
            return result
        deleted = _deleted(find(job.target_id), wanted.chain[wanted.top : wanted.base], recorder)
        result["deleted"] = list(deleted)
        if result["before_bytes"] is not None and result["after_bytes"] is not None:
            result["before_bytes"] += sum(deleted.values())
            result["freed_bytes"] = result["before_bytes"] - result["after_bytes"]
        return result


def _identity(file: dict[str, int]) -> tuple[int, int, int]:
    """What a file is known by again: a new one may get the inode of one that is gone, but was written later."""
    return file["dev"], file["inode"], file["mtime_ns"]


def _deleted(guest: Guest, paths: list[str], recorder: Recorder) -> dict[str, int]:
    """Deletes the files of overlays that nothing of the chain names any more; bytes that each gave back.

    One that is used, or has another name, stays, which the log says.
    """
    found, rows = dict[str, int](), _rows(guest, paths)
    for path in paths:
        row = rows.get(path_key(os.fsencode(path)))
        try:
            found[path] = drop(guest, path, None if row is None else row.pool, needed=True)
            recorder.log(f"deleted {path}, which was merged: {found[path]:,} bytes")
        except (RefusedError, HostError) as error:
            recorder.log(f"{path} was merged and is left, delete it: {error.detail}", JobLog.Level.WARNING)
    return found


def _rows(guest: Guest, paths: list[str]) -> dict[str, Image]:
    """The images of a guest's host with these paths, by the paths' keys."""
    keys = [path_key(os.fsencode(path)) for path in paths]
    images = Image.objects.filter(host=guest.host_id, path_key__in=keys).select_related("pool")
    return {image.path_key: image for image in images}


def _places(layers: Layers, options: dict[str, Any], against: list[Refusal]) -> tuple[int, int]:
    """The places of the uppermost layer that is merged, and of the image that it is merged into."""
    top = 0 if options["layer"] is None else _place(layers, options["layer"], against)
    return top, top + 1 if options["into"] is None else _place(layers, options["into"], against)


def _place(layers: Layers, path: str, against: list[Refusal]) -> int:
    if path in layers.chain:
        return layers.chain.index(path)
    sentence = gettext("{path} is not in the chain of {disk}.").format(disk=layers.disk, path=path)
    against.append(Refusal("stale_plan", sentence))
    return -1


def needed_by_others(layers: Layers, top: int, base: int) -> list[Refusal]:
    """Who else needs what a merge changes or leaves behind: the images between, and the one that is written to."""
    found: list[Refusal] = []
    if len(layers.images_at(range(top, base + 1))) != base - top + 1:
        found.append(Refusal("outside_pool", not_known(layers.disk)))
    for place, image in layers.found(range(top, base + 1)):
        near = neighbours.of(image)
        # One overlay is the layer above, one guest's disk the disk itself.
        above, itself = min(place, 1), (layers.guest_id, layers.disk)
        # Of several files that a section names for a disk, the later ones are "vda #2" and so on.
        own = [disk for disk in near.own_disks if (disk.guest_id, disk.target.partition(" #")[0]) != itself]
        others = [
            *near.needed_by,
            *(gettext("{who} uses it as a disk.").format(who=refusals.named(disk.guest, image)) for disk in own),
        ]
        if image.overlays_count > above or others:
            sentence = gettext("{image} is needed by others as it is: {others}").format(
                image=image.name,
                others=" ".join(others) or gettext("{count} overlays stand on it.").format(count=image.overlays_count),
            )
            found.append(Refusal("shared_base", sentence))
        if why := near.needs_unknown or image.pool.owners_unknown or image.host.owners_unknown:
            told = gettext("{why} Nobody knows who needs {image}.")
            found.append(Refusal("guests_unknown", told.format(why=why, image=image.name)))
        found += refusals.for_pool(image.pool)
    return found
