"""The job kind ``live_flatten``, and what it shares with others that have QEMU change a disk while its guest runs.

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

from images.live.disks import Layers, about_bitmaps, images_of, in_the_clear, layers_of, occupied, room_gone
from images.live.follow import PIVOTING, Follower, doubts, ended_unseen, keep, kept, settle, settled, unseen_switch
from images.live.kind import LiveGuestKind, bugs, running_guest
from images.models import Image
from images.rewrite import record, refusals
from storage_admin.accounts.models import Actor
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.kinds.vm_disks import find
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import running
from storage_admin.hosts.libvirt.block_jobs import Ended, Program, Wanted
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.jobs.kinds import BEGUN, Unsuccessful, in_doubt
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Affected, Plan, Recorder, Refusal, refuse

DISK = {"type": "string", "minLength": 1, "maxLength": 40, "description": _("The disk (its target), such as vda.")}
PATH: dict[str, Any] = {"type": ["string", "null"], "maxLength": 4096, "default": None}


@dataclass(frozen=True)
class Choice:
    """What would be done to a chain. ``top`` and ``base`` are places in it, as of :class:`block_jobs.Wanted`."""

    reason: str
    command: list[str]
    top: int = 0
    base: int | None = None
    #: What a copy is written to: ``path`` and ``format``; and ``format_before``, that of the image that is left.
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
        "": Unsuccessful(gettext_noop("The guest's data is whole; after a scan, its page shows the chain of its disk."))
    }

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        guest = find(target_id)
        layers, choice, against = self._chosen(guest, options)
        by_hand = bugs(guest, self.name) + doubts([guest.pk], layers.chain if layers else [])
        images = layers.images if layers else []
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
            warnings=(*(one.detail for one in by_hand), *choice.warnings, *about_bitmaps(images)),
            affected_images=tuple(Affected(image.pk, image.name) for image in images),
            affected_guests=(Affected(guest.pk, guest.name, guest.state),),
            options=options,
        )

    def _chosen(
        self, guest: Guest, options: dict[str, Any], by: Program | None = None
    ) -> tuple[Layers | None, Choice, list[Refusal]]:
        """The chain as the running guest has it now, what would be done to it, and all that stands against it."""
        nothing = Choice(gettext("{title}: {guest}.").format(title=self.title, guest=guest.name), [])
        try:
            layers = _layers(guest, options["disk"] or _longest(guest), by)
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
        with Program(guest.host) as program:
            wanted, before = kept(job) if begun else self._begin(job, guest, program)
            grown = self.pool_of_grown(job, wanted)
            follower = Follower(
                job, recorder, program, wanted,
                against=lambda: self.against_switching(guest, wanted), watch=lambda: room_gone(guest, grown),
            )  # fmt: skip
            ended = follower.run(taken_over=begun)
        if unseen_switch(job, wanted, ended):
            keep(job, PIVOTING, wanted, before)
            raise ended_unseen(guest, in_doubt(job))
        settle(job)
        # Of a guest that has ended only its definition tells whether it had been switched over by then.
        if ended.chain == wanted.result or (not ended.active and self.has_happened(job, wanted, ended)):
            self.came_to_pass(job, guest, wanted)
        elif ended.chain == wanted.chain or (not ended.active and ended.later == wanted.chain[0]):
            self.came_to_nothing(job, guest, wanted, recorder)
        if follower.refused is not None and ended.chain == wanted.chain:
            raise follower.refused
        result = settled(guest, wanted, ended, cancelled=recorder.cancel_requested)
        after = self._allocated(guest, wanted, ended.allocated)
        words = result["words"]
        recorder.log(words)
        freed = None if before is None or after is None else before - after
        return result | {"before_bytes": before, "after_bytes": after, "freed_bytes": freed}

    def look_ahead(self, guest: Guest, options: dict[str, Any]) -> object:  # noqa: ARG002 (most have nothing to look at)
        """Looks, while libvirt is asked for the chain, at what no scan may have seen yet, by the chain as of the last
        one; what :meth:`look_again` gets.
        """
        return None

    def look_again(self, guest: Guest, layers: Layers, wanted: Wanted, ahead: object) -> None:
        """Looks right before it begins at what was not looked at ahead; raises RefusedError or HostError."""

    def against_switching(self, guest: Guest, wanted: Wanted) -> str:  # noqa: ARG002 (for those that have a target)
        """Why the guest must not be switched over now that all is copied; empty for nothing."""
        return ""

    def pool_of_grown(self, job: Job, wanted: Wanted) -> StoragePool | None:
        """The pool of the image that QEMU writes to, where it is known."""
        grown = wanted.chain[wanted.base or 0] if wanted.op == "commit" else wanted.chain[0]
        image = Image.every.filter(host=job.host_id, path_key=path_key(os.fsencode(grown))).first()
        return None if image is None else image.pool

    def has_happened(self, job: Job, wanted: Wanted, ended: Ended) -> bool:  # noqa: ARG002 (for inner merges)
        """Whether a guest that has ended stands on what was wanted."""
        return wanted.result[0] != wanted.chain[0] and ended.later == wanted.result[0]

    def came_to_nothing(self, job: Job, guest: Guest, wanted: Wanted, recorder: Recorder) -> None:
        """Removes what is left of a block job that has changed nothing; most leave nothing."""

    def came_to_pass(self, job: Job, guest: Guest, wanted: Wanted) -> None:
        """Writes down at once what must not be lost, whatever else may be wrong by then."""

    def _begin(self, job: Job, guest: Guest, by: Program) -> tuple[Wanted, int | None]:
        """Plans anew, and keeps what is begun before it is."""
        by.ask(guest.uid)
        ahead = self.look_ahead(guest, job.options)
        layers, choice, against = self._chosen(guest, job.options, by)
        refuse(against)
        chain = [] if layers is None else layers.chain
        speed = self.at_most(job) or 0
        disk = job.options["disk"] if layers is None else layers.disk
        wanted = Wanted(guest.uid, disk, self.op, chain, choice.top, choice.base, speed, choice.target)
        if layers is not None:
            self.look_again(guest, layers, wanted, ahead)
        keep(job, "planned", wanted, choice.before)
        return wanted, choice.before

    def _allocated(self, guest: Guest, wanted: Wanted, told: int | None) -> int | None:
        """What the disk's image occupies now, where that is the one that has grown.

        Args:
            told: by libvirt at the end; of raw images it tells nothing.
        """
        try:
            return told if told is not None else occupied(guest, running.look(guest.host, guest.uid)).get(wanted.disk)
        except (RefusedError, HostError):
            return None

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        if result["before_bytes"] is not None and result["after_bytes"] is not None:
            pool = self.pool_of_grown(job, kept(job)[0])
            record.write_line(job, pool, result["before_bytes"], result["after_bytes"])
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
        "down_to": PATH | {"description": _("Path of the image below that stays its backing file; null for none.")},
        "bandwidth_bytes_sec": record.SPEED_OPTIONS["bandwidth_bytes_sec"],
    }

    def choose(self, guest: Guest, layers: Layers, options: dict[str, Any]) -> Choice:
        base, against = None, list[Refusal]()
        if len(layers.chain) < 2:
            told = gettext("{disk} has no backing file: there is nothing to flatten.")
            against.append(Refusal("stale_plan", told.format(disk=layers.disk)))
        elif options["down_to"] is not None:
            if options["down_to"] not in layers.chain[2:]:
                sentence = gettext("{path} is not an image below the direct backing file of {disk}.")
                against.append(Refusal("stale_plan", sentence.format(path=options["down_to"], disk=layers.disk)))
            else:
                base = layers.chain.index(options["down_to"])
        taken = layers.images_at(range(1, len(layers.chain) if base is None else base))
        own = layers.images_at([0])
        against += [] if own and own[0].encrypted else in_the_clear(taken, layers.names[0])
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


def _longest(guest: Guest) -> str:
    """The disk with the longest chain as of the last scan."""
    images = images_of(guest)
    return max(sorted(images), key=lambda disk: images[disk].chain_depth, default="")


def _layers(guest: Guest, disk: str, by: Program | None) -> Layers:
    """A disk's chain as the running guest has it now; raises RefusedError or HostError."""
    now = running_guest(guest, by)
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
