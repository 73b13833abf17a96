"""The job kind ``relink``: an image whose backing file is missing names it by its new path; which files it may be."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from django.db.models import Q
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds import inside
from images.kinds.create import links_of
from images.kinds.flatten import contradicted
from images.kinds.rebase import lock_base, on_another_base
from images.models import Image
from images.rewrite import neighbours, refusals
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting, beside, of_a_copy
from images.rewrite.neighbours import base_of, chain_of, find
from images.rewrite.space import WRITTEN
from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.protocol import FILESYSTEMS, INVALID
from storage_admin.jobs.kinds import Lock, Target
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal

#: So many images are looked at, and so many offered.
_LOOKED_AT, _OFFERED = 500, 8
#: So many earlier jobs are asked for what they found.
_JOBS = 50
#: How those end that would end so again.
_LASTING = frozenset({"filesystem_damaged", "unproven"})
#: Nanoseconds by which programs that restore files round their times.
_ROUNDED = 2_000_000_000


@dataclass(frozen=True)
class Candidate:
    """An image that may be the missing backing file of another one.

    Args:
        proven: it is that file, or a copy of the same owner that nobody has written to since.
        same: it is that file.
        why: what speaks for it, in sentences.
        other: what shows that it is not; empty where nothing does.
        filesystems: what the last job found that checked those of the image on it, since both are as they are: each
            ``device``, ``type``, ``state`` (``sound``, ``damaged`` or ``unknown``) and ``why``.
        refused: why that job did not take it.
    """

    image: Image
    proven: bool
    why: list[str]
    same: bool = False
    other: str = ""
    filesystems: list[dict[str, str]] = field(default_factory=list)
    refused: Refusal | None = None

    @property
    def against(self) -> Refusal | None:
        """Why not even an admin may take it."""
        return Refusal("unproven", self.other) if self.other else self.refused

    @property
    def danger(self) -> str:
        """How dangerous it is to take it; empty where it is proven."""
        if self.proven:
            return ""
        if any(one["state"] == "damaged" for one in self.filesystems):
            return gettext("Its filesystems are damaged with this file. A guest that starts on it loses data.")
        if self.against is not None:
            return gettext("With this file the guest would read a mixture of two disks and damage its filesystems.")
        if self.filesystems:
            return gettext("Its filesystems are sound with this file. What files contain was compared in part only.")
        return gettext(
            "On a wrong file the guest reads a mixture of two disks and damages its filesystems. The job checks them "
            "first, and leaves the image as it is where they do not show that this is the file."
        )


class Relink(Rewriting):
    """Writes the new path of a missing base into a copy of the image's header."""

    name = "relink"
    title = _("Repair chain")
    description = _(
        "Gives an image whose backing file was moved or renamed the new path of that file. A copy of the image with "
        "the new path replaces the image."
    )
    verb = "relink"
    stages = {
        "checking": (0, 2), "starting": (2, 5), "checking filesystems": (5, 20), "copying": (20, 70)
    } | WRITTEN  # fmt: skip
    properties = {
        "base": {
            "type": ["integer", "string", "null"],
            "default": None,
            "description": _(
                "The file that was the backing file: id or full path of an image on the same host. Required."
            ),
        },
        "accept_unproven": {
            "type": "boolean",
            "default": False,
            "description": _(
                "Take the file although it is not known to be the backing file, if data and filesystems, which the job "
                "checks first, show that it is (admin)."
            ),
        },
        **REWRITE_OPTIONS,
    }
    methods = {"relink": _("Repair chain")}

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        return lock_base(super().locks(target, options), base_of(target.host.pk, options))

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:  # noqa: ARG002 (the same for all)
        found = [one for one in refusals.for_rewrite(image) if one.code != "chain_broken"]
        if not is_lost(image):
            told = gettext("{image} has its backing file, or never had one.")
            found.append(Refusal("stale_plan", told.format(image=image.name)))
        return found

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:
        if options["accept_unproven"]:
            actor.require(Role.ADMIN)
        return super().plan_for(actor, image, options)

    def to_type(self, label: str, options: dict[str, Any]) -> str:
        return label if options["accept_unproven"] else ""

    def promise(self, method: str, options: dict[str, Any]) -> str:  # noqa: ARG002 (the same for all)
        return gettext(
            "The original is replaced only after the copy is checked and its own data is verified to be identical. "
            "What a guest reads also depends on the backing file that you choose. If a guest starts, the job stops and "
            "keeps the original."
        )

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:  # noqa: ARG002
        base = base_of(image.host_id, options)
        if base is None:
            asked = Refusal(INVALID, gettext("Choose the file that was the backing file."))
            return Choice("relink", str(self.description), refusals=[asked])
        against, warnings = on_another_base(image, base), list[str]()
        one = judged(image, base, last_seen(image), earlier(image))
        if not one.proven:
            told = gettext("Nothing proves that {base} was the backing file of {image}. {why}").format(
                base=base.name, image=image.name, why=" ".join(one.why)
            )
            if one.against is not None:
                against.append(one.against)
            elif options["accept_unproven"]:
                warnings += [told.strip(), one.danger]
                against += [*inside.off(image), *inside.off(base)]
            else:
                against.append(Refusal("unproven", told.strip()))
        else:
            warnings += one.why
        rename = ["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", base.path, "-F", base.declared_format, beside(image)]
        reason = gettext("A copy of {image} names {base} as its backing file, is checked, and replaces the image.")
        told = reason.format(image=image.name, base=base.path)
        return replace(
            of_a_copy(self.name, image, options, "relink", told, [rename]),
            after=image.allocated_size,
            low=image.allocated_size,
            refusals=[*against, *neighbours.against_standing_alone(image), *contradicted(image)],
            warnings=warnings,
            below={base.pk: gettext("becomes its backing file")},
        )

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        base = base_of(image.host_id, job.options)
        one = judged(image, base, last_seen(image), earlier(image)) if base is not None else None
        proven, same = (one.proven, one.same) if one is not None else (False, False)
        return {"onto": links_of(chain_of(base)), "force": same, "prove": not proven}

    def on_event(self, job: Job, event: dict[str, Any]) -> None:
        if event["event"] != FILESYSTEMS:
            super().on_event(job, event)
            return
        image = find(job.target_id)
        if (base := base_of(image.host_id, job.options)) is not None:
            # It stays also where the job is refused: the page shows it beside the file.
            found = {"base": base.pk, "seen": _seen(image, base), "filesystems": event["filesystems"]}
            job.ours().update(result=found)

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        told = ("compared", "alike", "filesystems")
        return super().record(job, result) | {name: result[name] for name in told if name in result}


def is_lost(image: Image) -> bool:
    """Whether the image's own backing file is missing, not one further down."""
    return image.state == Image.State.CHAIN_BROKEN and image.backing_id is None and bool(image.backing_file)


def candidates(image: Image) -> list[Candidate]:
    """Images of the host that may be the missing backing file, the likeliest first."""
    lost, name = last_seen(image), _name(image)
    likely = Q(name=name) | Q(virtual_size=image.virtual_size)
    if lost is not None:
        likely |= Q(inode=lost.inode, dev=lost.dev) | Q(file_size=lost.file_size, mtime_ns=lost.mtime_ns)
    rows = Image.objects.filter(likely, host=image.host_id, state=Image.State.OK).exclude(pk=image.pk)
    rows = rows.exclude(root_id=image.root_id) if image.root_id is not None else rows
    rows = rows.select_related("host", "pool").defer("estimate")
    jobs = earlier(image)
    found = [judged(image, row, lost, jobs) for row in rows[:_LOOKED_AT]]
    return sorted(found, key=lambda one: (not one.proven, -len(one.why), one.image.name))[:_OFFERED]


def judged(image: Image, base: Image, lost: Image | None, jobs: Sequence[Job]) -> Candidate:
    """What shows that a file was the image's backing file, by all that scans have seen of it, and jobs have found.

    Args:
        lost: what :func:`last_seen` says.
        jobs: what :func:`earlier` says.
    """
    why, proven, same, other = list[str](), False, False, ""
    if lost is not None:
        unwritten = (base.file_size, base.mtime_ns) == (lost.file_size, lost.mtime_ns)
        is_it = (base.dev, base.inode) == (lost.dev, lost.inode)
        if is_it and unwritten:
            proven = same = True
            why.append(gettext("It is the same file (device and inode), and nobody has written to it."))
        elif is_it:
            why.append(gettext("It is the same file (device and inode), but it was written to since."))
        elif unwritten and base.format == lost.format:
            # Times and sizes are what their owner says.
            proven = base.from_header("uid") is not None and base.from_header("uid") == lost.from_header("uid")
            why.append(gettext("It has the size and the time of modification of the missing file, to the nanosecond."))
        elif base.mtime_ns < lost.mtime_ns - _ROUNDED:
            other = gettext("{base} is in an older state than the missing file was when it was last seen.")
        if base.format == lost.format and base.file_size != lost.file_size:
            other = gettext("{base} has another size than the missing file had when it was last seen.")
    if base.name == _name(image):
        why.append(gettext("It has the same name."))
    if base.virtual_size == image.virtual_size:
        why.append(gettext("It has the same virtual size."))
    if image.backing_format and base.format and image.backing_format != base.format:
        why.append(
            gettext("Its format is {format}, not {wanted}.").format(format=base.format, wanted=image.backing_format)
        )
        proven = same = False
    found = Candidate(base, proven, why, same, other.format(base=base.name))
    seen = _seen(image, base)
    last = next((job for job in jobs if (job.result or {}).get("seen") == seen), None)
    if proven or last is None or last.result is None:
        return found
    refused = Refusal(last.error_code, last.error_detail) if last.error_code in _LASTING else None
    return replace(found, filesystems=last.result["filesystems"], refused=refused)


def _seen(image: Image, base: Image) -> list[str]:
    """Both as they are now."""
    return [bytes(one.fingerprint).hex() for one in (image, base)]


def earlier(image: Image) -> list[Job]:
    """The jobs that have checked the filesystems of an image on one file or another, the last one first."""
    jobs = Job.objects.filter(target_kind="image", target_id=image.pk, kind=Relink.name, result__isnull=False)
    return list(jobs.exclude(state__in=Job.ACTIVE).order_by("-pk")[:_JOBS])


def last_seen(image: Image) -> Image | None:
    """What a scan last saw under the name that the image has for its backing file."""
    rows = Image.every.filter(host=image.host_id, path_key=image.backing_key, state=Image.State.MISSING)
    return rows.order_by("-pk").first() if image.backing_key else None


def _name(image: Image) -> str:
    return (image.backing_path or image.backing_file).rpartition("/")[2]
