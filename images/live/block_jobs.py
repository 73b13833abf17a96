"""The job kinds ``live_flatten`` and ``live_merge``: QEMU shortens the chain of a disk while its guest runs.

The states of such a job are planned, started, mirroring, ready, pivoting, and at its end done or aborted. It goes on in
QEMU when dashboard, worker or libvirtd end: the next worker finds it by what the row keeps, and takes it over. Nothing
counts as done before the chain, read again from the running guest, is the planned one.
"""

import os
import shlex
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.live.disks import Layers, drop, files, images_of, layers_of, occupied
from images.live.follow import Follower, keep, kept, settled
from images.live.kind import LiveGuestKind, running_guest
from images.models import Image
from images.rewrite import neighbours, record, refusals
from storage_admin.accounts.models import Actor
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.kinds.vm_disks import find
from storage_admin.guests.models import Guest
from storage_admin.hosts import qemu_bugs
from storage_admin.hosts.libvirt import running
from storage_admin.hosts.libvirt.block_jobs import Wanted
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.jobs.kinds import BEGUN, Unsuccessful
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.plan_and_progress import Affected, Plan, Recorder, Refusal

DISK = {"type": "string", "minLength": 1, "maxLength": 40, "description": _("The disk (its target), such as vda.")}
_PATH: dict[str, Any] = {"type": ["string", "null"], "maxLength": 4096, "default": None}


@dataclass(frozen=True)
class Choice:
    """What would be done to a chain. ``top`` and ``base`` are places in it, as of :class:`block_jobs.Wanted`."""

    reason: str
    command: list[str]
    top: int = 0
    base: int | None = None
    #: What a copy is written to: ``path`` and ``format``.
    target: dict[str, str] | None = None
    #: Where an image grows: bytes that it has, and may have at most afterwards; ``None`` where nobody knows.
    pool: StoragePool | None = None
    before: int | None = None
    most: int | None = None
    refusals: tuple[Refusal, ...] = ()
    warnings: tuple[str, ...] = ()


class LiveKind(LiveGuestKind):
    """A kind that has QEMU change what a running libvirt guest's disk stands on."""

    goes_on = no_way_back = True
    op: ClassVar[str]
    #: Refusals that do not concern it.
    bears: ClassVar[frozenset[str]] = frozenset()
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The guest's data is whole; after a scan, its page shows the chain of its disk."),
            gettext_noop("The guest's data is whole, and its disk has the same chain as before."),
        )
    }

    @property
    def options_schema(self) -> dict[str, Any]:
        return super().options_schema | ({} if "default" in self.properties["disk"] else {"required": ["disk"]})

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        guest = find(target_id)
        layers, choice, against = self._chosen(guest, options)
        by_hand = [Refusal("qemu_bug", one) for one in qemu_bugs.against(guest.host, self.name)]
        grown = None if choice.most is None or choice.before is None else choice.most - choice.before
        return Plan(
            method=self.name,
            reason=choice.reason,
            commands=(shlex.join(choice.command),) if choice.command else (),
            facts_at=guest.last_seen,
            before_bytes=choice.before,
            predicted_low=choice.before,
            predicted_high=choice.most,
            scratch_bytes=grown,
            scratch_pool=None if choice.pool is None else choice.pool.pk,
            lasting_bytes=grown,
            refusals=tuple(against),
            by_hand=tuple(by_hand),
            warnings=(*(one.detail for one in by_hand), *choice.warnings),
            affected_images=tuple(Affected(image.pk, image.name) for image in (layers.images if layers else ())),
            affected_guests=(Affected(guest.pk, guest.name, guest.state),),
            options=options,
        )

    def _chosen(self, guest: Guest, options: dict[str, Any]) -> tuple[Layers | None, Choice, list[Refusal]]:
        """The chain as the running guest has it now, what would be done to it, and all that stands against it."""
        nothing = Choice(gettext("{title}: {guest}.").format(title=self.title, guest=guest.name), [])
        try:
            layers = _layers(guest, options["disk"] or _longest(guest))
        except (RefusedError, HostError) as error:
            return None, nothing, [Refusal(error.code, error.detail)]
        choice = self.choose(guest, layers, options)
        stands = [one for one in layers.refusals if one.code not in self.bears]
        return layers, choice, [*stands, *choice.refusals, *_room(choice)]

    @abstractmethod
    def choose(self, guest: Guest, layers: Layers, options: dict[str, Any]) -> Choice:
        """What would be done to a disk's chain as it is now."""

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest = find(job.target_id)
        begun = BEGUN in job.kept
        wanted, before = kept(job) if begun else self._begin(job, guest)
        follower = Follower(job, recorder, guest, wanted, lambda: self.against_switching(guest, wanted))
        ended = follower.run(taken_over=begun)
        # Of a guest that has ended only its definition tells whether it had been switched over by then.
        if ended.chain == wanted.chain or (not ended.active and ended.later == wanted.chain[0]):
            self.came_to_nothing(job, guest, wanted, recorder)
        if follower.refused and ended.chain == wanted.chain:
            raise HostError(follower.refused)
        result = settled(guest, wanted, ended, cancelled=recorder.cancel_requested)
        after = self._allocated(guest, wanted)
        words = result["words"]
        recorder.log(words)
        freed = None if before is None or after is None else before - after
        return result | {"before_bytes": before, "after_bytes": after, "freed_bytes": freed}

    def against_switching(self, guest: Guest, wanted: Wanted) -> str:  # noqa: ARG002 (for those that have a target)
        """Why the guest must not be switched over now that all is copied; empty for nothing."""
        return ""

    def came_to_nothing(self, job: Job, guest: Guest, wanted: Wanted, recorder: Recorder) -> None:
        """Removes what is left of a block job that has changed nothing; most leave nothing."""

    def _begin(self, job: Job, guest: Guest) -> tuple[Wanted, int | None]:
        """Plans anew, and keeps what is begun before it is."""
        layers, choice, against = self._chosen(guest, job.options)
        for refusal in against:
            raise RefusedError(refusal.code, refusal.detail)
        chain = [] if layers is None else layers.chain
        speed = self.at_most(job) or 0
        disk = job.options["disk"] if layers is None else layers.disk
        wanted = Wanted(guest.uid, disk, self.op, chain, choice.top, choice.base, speed, choice.target)
        keep(job, "planned", wanted, choice.before)
        return wanted, choice.before

    def _allocated(self, guest: Guest, wanted: Wanted) -> int | None:
        """What the disk's image occupies now, where that is the one that has grown."""
        try:
            return occupied(guest, running.look(guest.host, guest.uid)).get(wanted.disk)
        except (RefusedError, HostError):
            return None

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        if result["before_bytes"] is not None and result["after_bytes"] is not None:
            grown = path_key(os.fsencode(result.get("grown", result["chain"][0])))
            image = Image.objects.filter(host=job.host, path_key=grown).first()
            record.write_line(job, image.pool if image else None, result["before_bytes"], result["after_bytes"])
        return result


class LiveFlatten(LiveKind):
    """Block pull: what the images below hold moves up into the image that the guest writes to."""

    name = "live_flatten"
    title = _("Flatten while the guest runs")
    description = _(
        "Shortens the backing chain of a running guest's disk: QEMU copies the data of the images below into the "
        "disk's own image (block pull), which then stands alone or on a lower image."
    )
    op = "pull"
    properties = {
        "disk": DISK
        | {
            "minLength": 0,
            "default": "",
            "description": _("The disk (its target), such as vda; empty for the one with the longest chain."),
        },
        "down_to": _PATH | {"description": _("Path of the image below that stays its backing file; null for none.")},
        "bandwidth_bytes_sec": record.SPEED_OPTIONS["bandwidth_bytes_sec"],
    }

    def choose(self, guest: Guest, layers: Layers, options: dict[str, Any]) -> Choice:
        base, against = None, list[Refusal]()
        if len(layers.chain) < 2:
            against.append(
                Refusal(
                    "stale_plan",
                    gettext("{disk} has no backing file: there is nothing to flatten.").format(disk=layers.disk),
                )
            )
        elif options["down_to"] is not None:
            if options["down_to"] not in layers.chain[2:]:
                sentence = gettext("{path} is not an image below the direct backing file of {disk}.")
                against.append(Refusal("stale_plan", sentence.format(path=options["down_to"], disk=layers.disk)))
            else:
                base = layers.chain.index(options["down_to"])
        taken = layers.images_at(range(1, len(layers.chain) if base is None else base))
        own = layers.images_at([0])
        before = layers.allocated
        held = None if None in (known := [image.allocated_size for image in taken]) else sum(filter(None, known))
        most = None if before is None or held is None or len(taken) < len(layers.chain[1:base]) else before + held
        reason = gettext(
            "QEMU copies what the {count} images below hold into {image}, whose backing file is then: {base}. {guest} "
            "goes on running, and the images below stay as they are."
        ).format(
            count=len(layers.chain[1:base]), image=layers.names[0],
            base=gettext("no backing file") if base is None else layers.names[base], guest=guest.name,
        )  # fmt: skip
        command = ["virsh", "blockpull", guest.name, layers.disk]
        command += [] if base is None else ["--base", layers.chain[base]]
        return Choice(
            reason, command, 0, base, None, own[0].pool if own else None, before, most, tuple(against),
            (gettext("There is no undo: the image holds all data itself afterwards. The guest sees no difference."),),
        )  # fmt: skip


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
        "layer": _PATH | {"description": _("Path of the overlay to merge; null for the one that the guest writes to.")},
        "into": _PATH | {"description": _("Path of the image that it is merged into; null for the one right below.")},
        "delete_merged": {
            "type": "boolean",
            "default": False,
            "description": _("Delete the files of the merged overlays once the guest's chain is without them."),
        },
        "bandwidth_bytes_sec": record.SPEED_OPTIONS["bandwidth_bytes_sec"],
    }

    def choose(self, guest: Guest, layers: Layers, options: dict[str, Any]) -> Choice:
        chain, against = layers.chain, list[Refusal]()
        top = 0 if options["layer"] is None else _place(layers, options["layer"], against)
        base = top + 1 if options["into"] is None else _place(layers, options["into"], against)
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
        held = [image.allocated_size for image in layers.images_at(range(top, base))]
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

    def _allocated(self, guest: Guest, wanted: Wanted) -> int | None:
        """What the image that has grown occupies now."""
        [file] = files(guest, [wanted.chain[wanted.base or 0]])
        if file is None:
            return super()._allocated(guest, wanted) if wanted.top == 0 else None
        return file["bytes"]

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        result, wanted = super().work(job, recorder), kept(job)[0]
        result["grown"] = wanted.chain[wanted.base or 0]
        if not job.options["delete_merged"]:
            return result
        deleted = _deleted(find(job.target_id), wanted.chain[wanted.top : wanted.base], recorder)
        result["deleted"] = list(deleted)
        if result["before_bytes"] is not None and result["after_bytes"] is not None:
            result["before_bytes"] += sum(deleted.values())
            result["freed_bytes"] = result["before_bytes"] - result["after_bytes"]
        return result


def _longest(guest: Guest) -> str:
    """The disk with the longest chain as of the last scan."""
    images = images_of(guest)
    return max(sorted(images), key=lambda disk: images[disk].chain_depth, default="")


def _deleted(guest: Guest, paths: list[str], recorder: Recorder) -> dict[str, int]:
    """Deletes the files of overlays that nothing of the chain names any more; bytes that each gave back.

    One that is used, or has another name, stays, which the log says.
    """
    found, keys = dict[str, int](), [path_key(os.fsencode(path)) for path in paths]
    images = Image.objects.filter(host=guest.host_id, path_key__in=keys).select_related("pool")
    pools = {image.path_key: image.pool for image in images}
    for path, key in zip(paths, keys, strict=True):
        try:
            found[path] = drop(guest, path, pools.get(key), needed=True)
            recorder.log(f"deleted {path}, which was merged: {found[path]:,} bytes")
        except (RefusedError, HostError) as error:
            recorder.log(f"{path} was merged and is left, delete it: {error.detail}", JobLog.Level.WARNING)
    return found


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
        found.append(
            Refusal(
                "outside_pool",
                gettext("Not all images of {disk} are known: scan the host, or register their folders.").format(
                    disk=layers.disk
                ),
            )
        )
    for place, image in layers.found(range(top, base + 1)):
        near = neighbours.of(image)
        # One overlay is the layer above, one guest's disk the disk itself.
        above, itself = min(place, 1), (layers.guest_id, layers.disk)
        # Of several files that a section names for a disk, the later ones are "vda #2" and so on.
        own = [disk for disk in near.own_disks if (disk.guest_id, disk.target.partition(" #")[0]) != itself]
        others = [
            *near.needed_by,
            *(gettext("Guest {guest} uses it as a disk.").format(guest=disk.guest.name) for disk in own),
        ]
        if image.overlays_count > above or others:
            sentence = gettext("{image} is needed by others as it is: {others}").format(
                image=image.name,
                others=" ".join(others) or gettext("{count} overlays stand on it.").format(count=image.overlays_count),
            )
            found.append(Refusal("shared_base", sentence))
        if why := near.needs_unknown or image.pool.owners_unknown or image.host.owners_unknown:
            found.append(
                Refusal(
                    "guests_unknown", gettext("{why} Nobody knows who needs {image}.").format(why=why, image=image.name)
                )
            )
        found += refusals.for_pool(image.pool)
    return found


def _layers(guest: Guest, disk: str) -> Layers:
    """A disk's chain as the running guest has it now; raises RefusedError or HostError."""
    now = running_guest(guest)
    found = next((one for one in now.disks if one.target == disk), None)
    if found is None:
        sentence = gettext("{guest} has no disk {disk} that can be written to; it has {targets}.").format(
            guest=guest.name, disk=disk, targets=", ".join(one.target for one in now.disks) or "none"
        )
        raise RefusedError(protocol.INVALID, sentence)
    return layers_of(guest, now, found)


def _room(choice: Choice) -> list[Refusal]:
    """Whether the pool of the image that grows has room for that."""
    if choice.pool is None or choice.most is None or choice.before is None:
        return []
    return refusals.for_space(choice.pool, choice.most - choice.before)
