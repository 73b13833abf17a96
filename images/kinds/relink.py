"""The job kind ``relink``: an image whose backing file is missing names it by its new path; which files it may be."""

from dataclasses import dataclass, replace
from typing import Any

from django.db.models import Q
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds.create import links_of
from images.kinds.flatten import contradicted
from images.kinds.rebase import base_of, chain_of, lock_also, on_another_base
from images.kinds.stages import WRITTEN
from images.models import Image
from images.rewrite import neighbours, refusals
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting, beside, of_a_copy
from images.rewrite.neighbours import find
from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.protocol import INVALID
from storage_admin.jobs.kinds import Lock, Target
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal

#: So many images are looked at, and so many offered.
_LOOKED_AT, _OFFERED = 500, 8


@dataclass(frozen=True)
class Candidate:
    """An image that may be the missing backing file of another one.

    Args:
        proven: it is that file, or a copy of the same owner that nobody has written to since.
        same: it is that file.
        why: what speaks for it, in sentences.
    """

    image: Image
    proven: bool
    why: list[str]
    same: bool = False


class Relink(Rewriting):
    """Writes the new path of a missing base into a copy of the image's header."""

    name = "relink"
    title = _("Repair chain")
    description = _(
        "Gives an image whose backing file was moved or renamed the new path of that file. A copy of the image with "
        "the new path replaces the image."
    )
    verb = "relink"
    stages = {"checking": (0, 2), "copying": (2, 70)} | WRITTEN
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
            "description": _("Take the file although nothing proves that it was the backing file (admin)."),
        },
        **REWRITE_OPTIONS,
    }
    methods = {"relink": _("Repair chain")}

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        return lock_also(super().locks(target, options), chain_of(base_of(find(target.id), options)))

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

    def promise(self, method: str, options: dict[str, Any]) -> str:  # noqa: ARG002 (the same for all)
        return gettext(
            "The original is replaced only after the copy is checked and its own data is verified to be identical. "
            "What a guest reads also depends on the backing file that you choose. If a guest starts, the job stops and "
            "keeps the original."
        )

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:  # noqa: ARG002
        base = base_of(image, options)
        if base is None:
            asked = Refusal(INVALID, gettext("Choose the file that was the backing file."))
            return Choice("relink", str(self.description), refusals=[asked])
        against, warnings = on_another_base(image, base), list[str]()
        one = judged(image, base, last_seen(image))
        if not one.proven:
            told = gettext("Nothing proves that {base} was the backing file of {image}. {why}").format(
                base=base.name, image=image.name, why=" ".join(one.why)
            )
            danger = gettext("With another file the guest reads a mixture of two disks. Boot it from a copy first.")
            if options["accept_unproven"]:
                warnings += [told.strip(), danger]
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
        base = base_of(image, job.options)
        same = base is not None and judged(image, base, last_seen(image)).same
        return {"onto": links_of(chain_of(base)), "force": job.options["accept_unproven"] or same}

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        return super().record(job, result) | {name: result[name] for name in ("compared", "alike")}


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
    found = [judged(image, row, lost) for row in rows[:_LOOKED_AT]]
    return sorted(found, key=lambda one: (not one.proven, -len(one.why), one.image.name))[:_OFFERED]


def judged(image: Image, base: Image, lost: Image | None) -> Candidate:
    """What shows that a file was the image's backing file, by all that scans have seen of it.

    Args:
        lost: what :func:`last_seen` says.
    """
    why, proven, same = list[str](), False, False
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
    if base.name == _name(image):
        why.append(gettext("It has the same name."))
    if base.virtual_size == image.virtual_size:
        why.append(gettext("It has the same virtual size."))
    if image.backing_format and base.format and image.backing_format != base.format:
        why.append(
            gettext("Its format is {format}, not {wanted}.").format(format=base.format, wanted=image.backing_format)
        )
        proven = same = False
    return Candidate(base, proven, why, same)


def last_seen(image: Image) -> Image | None:
    """What a scan last saw under the name that the image has for its backing file."""
    rows = Image.every.filter(host=image.host_id, path_key=image.backing_key, state=Image.State.MISSING)
    return rows.order_by("-pk").first() if image.backing_key else None


def _name(image: Image) -> str:
    return (image.backing_path or image.backing_file).rpartition("/")[2]
