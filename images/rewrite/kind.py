"""What job kinds on images share, and those that rewrite one: options, plan, the agent's request, what is recorded."""

import shlex
from abc import abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from django.utils.translation import gettext, gettext_noop, ngettext
from django.utils.translation import gettext_lazy as _

from images import backups
from images.models import Image
from images.orphans.evidence import READS_ON
from images.rewrite import forecasts, guest_locks, in_use, mount, neighbours, refusals, space, volumes, wait_for_guests
from images.rewrite import record as rewriting
from images.rewrite.neighbours import ancestors, facts, find, locks_on_chain, silent_storage
from images.scan import look
from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import OCCUPIED, SPACE, RefusedError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.kinds import JobKind, Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Affected, LastBackup, Plan, Refusal, refuse
from storage_admin.words import Translatable

#: Options that every rewriting kind takes.
REWRITE_OPTIONS: dict[str, dict[str, Any]] = {
    "undo_hours": {
        "type": "number",
        "minimum": 0,
        "maximum": 8760,
        "default": 24,
        "description": _("Hours to keep the original beside the new image; 0 keeps none."),
    },
    **rewriting.SPEED_OPTIONS,
    **wait_for_guests.WAIT_OPTIONS,
}


class ImageKind(JobKind):
    """A kind whose target is an image."""

    target = "image"
    #: Whether space is what it is for: an image's page offers it first, its plan says what is freed, known or not.
    frees_space: ClassVar[bool] = False
    #: Kinds of pools with volumes that it works on.
    volumes: ClassVar[frozenset[str]] = frozenset()
    #: Whether it frees more where the guest has filled its free space with zeros.
    wants_zeros: ClassVar[bool] = False

    def resolve(self, target_id: int) -> Target:
        image = find(target_id)
        return Target(kind="image", id=image.pk, host=image.host, label=image.name)

    def look(self, target_id: int, job: Job | None = None) -> None:
        look.at([find(target_id)], job)

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        return self.plan_for(actor, find(target_id), options)

    def last_backups(self, target: Target, plan: Plan) -> tuple[LastBackup, ...]:
        return backups.of_image(find(target.id), [one.id for one in plan.affected_guests]) if self.rewrites else ()

    @abstractmethod
    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:
        """What the job would do to an image whose row is fetched already, perhaps with those of others
        (:func:`images.rewrite.neighbours.share`).
        """


class RewriteKind(ImageKind):
    """A kind that replaces an image: alone on it, together with others on its ancestors."""

    rewrites = True
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The image is the original or the finished result, never a mixture."),
            gettext_noop("This job did not replace the image. It removed the files that it had written."),
        ),
        "in_place": Unsuccessful(
            gettext_noop("The image's contents are unchanged. Some of its zero blocks may have been freed."),
            gettext_noop("This job did not change what is read from the image."),
        ),
        "check": Unsuccessful(*[gettext_noop("This job only reads the image.")] * 2),
    }

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:  # noqa: ARG002 (the same for all)
        return locks_on_chain(find(target.id), exclusive=True)

    def waits_for_storage(self, job: Job) -> str:
        return silent_storage(job.target_id)


@dataclass(frozen=True)
class Choice:
    """What a kind would do to an image with these options. Sizes are in bytes, ``None`` where it is not known.

    Args:
        after, low, high: allocated bytes afterwards: the best guess, at least, at most.
        scratch: what the work may take beside the original; ``None`` where only the agent can tell.
        below: how each base is affected, by its id, where that is not just being read.
        space_in: the pool that the new file comes into, where that is not the image's own.
        by_hand: what keeps policies from it; a user may choose it.
    """

    method: str
    reason: str
    commands: list[list[str]] = field(default_factory=list)
    after: int | None = None
    low: int | None = None
    high: int | None = None
    #: Bytes that are free afterwards and were not before, where that is what the job is for.
    won: int | None = None
    #: Seconds that it takes.
    took: forecasts.Range = forecasts.UNKNOWN
    scratch: int | None = None
    refusals: list[Refusal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    below: dict[int, str] = field(default_factory=dict)
    space_in: StoragePool | None = None
    by_hand: list[Refusal] = field(default_factory=list)


#: What a job promises that compares its copy with the image as a whole.
IDENTICAL = _(
    "The original is replaced only after the new image is complete, checked and verified to have identical content, "
    "byte for byte. If a guest starts, the job stops and keeps the original."
)


class Rewriting(wait_for_guests.WaitsForGuests, RewriteKind):
    """A kind whose verb puts another file in an image's place by protocol P.

    ``templates/images/rewrite/NAME.html`` explains it beside its plan.
    """

    #: Whether its plans foretell how large the result is and how long the job takes.
    forecasts: ClassVar[bool] = False
    #: Where it does not replace the image: why no undo copy is needed, what holds at every moment, and what becomes of
    #: the image, as in "disk.qcow2 …".
    no_undo: ClassVar[Translatable] = ""
    guarantee: ClassVar[Translatable] = ""
    unchanged: ClassVar[Translatable] = ""
    #: Of volumes, which :meth:`against` and :meth:`choose` tell from files: what the agent is asked, by the kinds of
    #: pools of :attr:`volumes`; why it does not work on those of others, by their kinds, where there is more to say;
    #: the options that there are for them, too; and what holds while it works on one, by the method of its plan.
    volume_verbs: ClassVar[dict[str, str]] = {}
    no_volumes: ClassVar[dict[str, Translatable]] = {}
    volume_options: ClassVar[frozenset[str]] = frozenset()
    volume_promises: ClassVar[dict[str, Translatable]] = {}

    def replaces(self, method: str, options: dict[str, Any]) -> bool:  # noqa: ARG002 (for those where it depends)
        """Whether another file takes the image's place, so that its original would be gone without an undo copy."""
        return method not in self.volume_promises

    def changes_content(self, options: dict[str, Any]) -> bool:  # noqa: ARG002 (for those where it depends)
        """Whether overlays on the image may read other bytes afterwards."""
        return False

    def promise(self, method: str, options: dict[str, Any]) -> str:
        """What holds while it works."""
        own = IDENTICAL if self.replaces(method, options) else self.guarantee
        return str(self.volume_promises.get(method) or own)

    @abstractmethod
    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        """What would be done, from the database alone.

        Args:
            below: the image's ancestors, the immediate base first.
        """

    @abstractmethod
    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:
        """The verb's own arguments."""

    def asked_of_volume(self, image: Image, job: Job) -> dict[str, Any]:
        """All arguments of a verb for volumes."""
        is_thin = image.pool.kind == StoragePool.Kind.LVMTHIN
        return volumes.place(image) | (asdict(rewriting.speed_for(job)) if is_thin else {})

    def verb_for(self, job: Job) -> str:
        return self.volume_verbs.get(find(job.target_id).pool.kind, self.verb) if self.volume_verbs else self.verb

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:  # noqa: ARG002 (for those that need it)
        """What stands against it whatever is chosen."""
        return refusals.for_rewrite(image)

    def against_volume(self, image: Image) -> list[Refusal]:
        """What stands against work on a volume."""
        if image.pool.kind in self.volume_verbs:
            return volumes.for_change(image)
        told = gettext("{image} is a volume of a {kind} pool. This job does not work on such volumes.")
        told = str(self.no_volumes.get(image.pool.kind, told))
        return [Refusal("unsupported_pool", told.format(kind=image.pool.kind, image=image.name))]

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        near = neighbours.of(image)
        against = self.against(image, options)
        below: list[Image] = []
        try:
            below = near.below
        except RefusedError as error:
            against.append(Refusal(error.code, error.detail))
        choice = self.choose(image, below, options)
        replaces = self.replaces(choice.method, options) and not image.is_volume
        keeps_undo = bool(replaces and options["undo_hours"])
        pool, need = _need(image, choice, keeps_undo=keeps_undo)
        against += [
            *refusals.for_bases(image, below),
            *(guest_locks.refusals(image, options["undo_hours"]) if replaces else ()),
            *(mount.against_replacing(image.pool) if replaces and image.pool.mount else ()),
            *choice.refusals,
            *near.admitted.against(pool, image.host, need),
        ]
        against, patience = wait_for_guests.set_aside(image, against, options)
        return Plan(
            method=choice.method,
            reason=choice.reason,
            commands=tuple(shlex.join(command) for command in choice.commands),
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            predicted_after_bytes=choice.after,
            predicted_low=choice.low,
            predicted_high=choice.high,
            won_bytes=choice.won,
            predicted_seconds=choice.took.guess,
            predicted_seconds_low=choice.took.low,
            predicted_seconds_high=choice.took.high,
            scratch_bytes=choice.scratch,
            scratch_pool=pool.pk,
            lasting_bytes=need.lasting,
            undo_bytes=image.occupied_bytes if keeps_undo else 0,
            refusals=tuple({(refusal.code, refusal.detail): refusal for refusal in against}.values()),
            by_hand=tuple(choice.by_hand),
            warnings=(
                *patience,
                *refusals.age_warning(image),
                *choice.warnings,
                *(guest_locks.warnings(image) if replaces else ()),
                *(one.detail for one in choice.by_hand),
                *_lasting([] if self.changes_content(options) else near.above, options, replaces=replaces),
            ),
            affected_images=(
                Affected(image.pk, image.name, choice.below.get(image.pk, "rewritten")),
                *(
                    Affected(base.pk, base.name, choice.below.get(base.pk, gettext("read, not changed")))
                    for base in below
                ),
                *(Affected(overlay.pk, overlay.name, READS_ON) for overlay in near.above),
            ),
            affected_guests=tuple(
                # One of another host, on a storage that both mount, may not exist for whoever reads the plan.
                Affected(guest.pk, guest.name, guest.state)
                for guest in near.guests
                if guest.host_id == image.host_id
            ),
            options=options,
        )

    def admit(self, target: Target, plan: Plan) -> None:
        if not plan.scratch_bytes or plan.scratch_pool is None:
            return
        pool = StoragePool.objects.filter(pk=plan.scratch_pool).first()
        if pool is None:
            raise RefusedError(
                "stale_plan", gettext("The pool of the image is no longer registered. Scan the host, then try again.")
            )
        refuse(space.Admitted().against(pool, target.host, space.planned_need(plan, target.host)))

    def prepare(self, job: Job) -> None:
        image = find(job.target_id)
        in_use.check_guests_off(image)
        if not image.is_volume:
            in_use.refuse_used_elsewhere(image)

    def before_swap(self, job: Job) -> None:
        guest_locks.take(job, find(job.target_id))

    def exchanged(self, job: Job) -> None:
        in_use.look_again_elsewhere(job, find(job.target_id))
        guest_locks.look_again(job)

    def request(self, job: Job) -> dict[str, Any]:
        image = find(job.target_id)
        below = ancestors(image)
        against = [*self.against(image, job.options), *refusals.for_bases(image, below)]
        refuse([*against, *self.choose(image, below, job.options).refusals])
        if image.is_volume:
            return self.asked_of_volume(image, job)
        return facts(image) | {
            "virtual_size": image.virtual_size,
            "chain": [
                facts(base) | {"format": format_below(image, base), "for_all": base.pool.share_bases} for base in below
            ],
            "children_known": True,
            "undo_hours": float(job.options.get("undo_hours", 0)),
            **rewriting.limits(job),
            **guest_locks.asked(image),
            **in_use.asked_elsewhere(image),
            **self.asked(image, below, job),
        }

    def note_ready(self, job: Job, ready: dict[str, Any]) -> None:
        if "made_inode" in ready:  # nothing takes a volume's place
            rewriting.note_ready(job, ready)

    def written(self, job: Job) -> Image | None:
        """The image whose file the job replaces or changes; ``None`` where it is not known any more."""
        return Image.every.select_related("pool").filter(pk=job.target_id).first()

    def made_at(self, job: Job) -> tuple[StoragePool, bytes] | None:
        """The pool and the path of the file that the job makes; ``None`` where its image is not known any more."""
        image = self.written(job)
        return (image.pool, bytes(image.path_bytes)) if image is not None else None

    def on_event(self, job: Job, event: dict[str, Any]) -> None:
        if event["event"] == OCCUPIED and "after_bytes" in event:
            image = self.written(job)
            won = event["before_bytes"], event["after_bytes"], event.get("freed_bytes")
            rewriting.write_line_in_place(job, image.pool if image is not None else None, *won)
        elif event["event"] == OCCUPIED:
            rewriting.begin_line_in_place(job, event["before_bytes"])
        elif event["event"] != SPACE:
            super().on_event(job, event)
        elif event["needed_bytes"] > (job.plan.get("scratch_bytes") or 0):
            # The plan knew less, as of bases that are compressed: jobs that come after count with the larger one.
            job.plan = job.plan | {"scratch_bytes": event["needed_bytes"]}
            job.ours().update(plan=job.plan)

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        return rewriting.replaced(job, find(job.target_id), result)

    def ended(self, job: Job) -> None:
        guest_locks.give_back(job)
        services.rescan(job)
        rewriting.ring_policies_after(job)


def _need(image: Image, choice: Choice, *, keeps_undo: bool) -> tuple[StoragePool, space.Need]:
    """Where the new file comes to, and what the job takes there."""
    # A file with a name of its own stays, and so does an original that waits as an undo copy.
    goes = not keeps_undo and choice.space_in is None
    lasting = space.lasting_bytes(choice.scratch, image.occupied_bytes, goes=goes)
    return choice.space_in or image.pool, space.Need(image.host_id, choice.scratch or 0, lasting)


def format_below(image: Image, base: Image) -> str:
    """A base's format as its overlay declares it, which is what qemu goes by."""
    return base.declared_format or image.backing_format


def beside(image: Image) -> str:
    """The new file's path, as commands show it."""
    return image.path.rpartition("/")[0] + "/.sa-JOB.new"


def swap_commands(image: Image) -> list[list[str]]:
    """What the swap amounts to, as an admin would type it."""
    copy = beside(image)
    return [["ln", image.path, copy.removesuffix("new") + "orig"], ["mv", copy, image.path]]


def verify_commands(image: Image) -> list[list[str]]:
    """How the new file is looked at before the swap."""
    form, copy = image.declared_format, beside(image)
    check = [["qemu-img", "check", "-f", form, copy]] if form != "raw" else []
    return [*check, ["qemu-img", "compare", "-p", "-f", form, "-F", form, image.path, copy]]


def of_a_copy(
    name: str, image: Image, options: dict[str, Any], method: str, reason: str, changes: list[list[str]]
) -> Choice:
    """The choice of the kind of that name, which makes ``changes`` (commands) to a copy of the whole file."""
    return Choice(
        method,
        reason,
        [["cp", "--reflink=auto", image.path, beside(image)], *changes, *swap_commands(image)],
        low=0,
        high=image.occupied_bytes,
        took=forecasts.seconds(image, name, 2 * image.occupied_bytes, options["bandwidth_bytes_sec"]),
        scratch=image.occupied_bytes + (1 << 20),
    )


def _lasting(above: list[Image], options: dict[str, Any], *, replaces: bool) -> list[str]:
    """Warnings that hold for every replacement."""
    told = ngettext(
        "{count:,} overlay uses this image. The data that it reads from the image stays identical.",
        "{count:,} overlays use this image. The data that they read from the image stays identical.",
        len(above),
    )
    warnings = [told.format(count=len(above))] if above else []
    if replaces and not options["undo_hours"]:
        warnings.append(gettext("No undo copy: the original is deleted as soon as the verified new image is in place."))
    elif replaces:
        warnings.append(gettext("The pool holds both files until the undo copy is removed. Only then is space freed."))
    return warnings
