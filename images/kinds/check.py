"""The job kind ``check``: an image's metadata is looked through, and repaired on a copy."""

from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.rewrite import neighbours, refusals
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting, beside, swap_commands, verify_commands
from images.rewrite.space import WRITTEN
from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.qemu.img import CHECKED, REPAIRED
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal


class Check(Rewriting):
    """``qemu-img check``; a repair works on a copy that takes the image's place."""

    name = "check"
    title = _("Check")
    description = _(
        "Checks the internal tables of an image. Repairs leaks, or all errors, on a copy that then replaces the image."
    )
    verb = "check"
    stages = {"checking": (0, 20), "copying": (20, 60), "repairing": (60, 70)} | WRITTEN
    properties = {
        "repair": {
            "enum": ["none", "leaks", "all"],
            "default": "none",
            "description": _(
                "leaks: frees clusters that nothing refers to. all: also repairs errors, after which a guest may "
                "read different data (admin)."
            ),
        },
        **REWRITE_OPTIONS,
    }
    no_undo = _("nothing is written")
    guarantee = _("Nothing is written.")
    unchanged = _("is only read")

    def replaces(self, method: str, options: dict[str, Any]) -> bool:  # noqa: ARG002 (the options say it)
        return not self.only_looks(options)

    def changes_content(self, options: dict[str, Any]) -> bool:
        return options.get("repair") == "all"

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:
        # An image with these is what a check is for, and a copy of the file keeps them.
        found = refusals.for_rewrite(image)
        kept = {"dirty_or_corrupt", "has_internal_snapshots"}
        kept |= {"immutable"} if options["repair"] == "none" else set()  # it is read alone
        found = [one for one in found if one.code not in kept or image.unreadable]
        return found + ([] if options["repair"] == "none" else neighbours.against_rewriting(image))

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:
        if options["repair"] == "all":
            actor.require(Role.ADMIN)
        return super().plan_for(actor, image, options)

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:  # noqa: ARG002
        level, form = options["repair"], image.declared_format
        against = []
        if form and form not in (CHECKED if level == "none" else REPAIRED):
            why = gettext("qemu-img cannot repair {form} images.")
            why = gettext("qemu-img cannot check {form} images.") if level == "none" else why
            against.append(Refusal("unsupported_subformat", why.format(form=form)))
        look = ["qemu-img", "check", "-f", form, image.path]
        if level == "none":
            return Choice(
                "check", gettext("Checks the tables of the image for errors and leaks. Writes nothing."), [look],
                scratch=0, refusals=against, below={image.pk: gettext("read, not changed")},
            )  # fmt: skip
        copy = beside(image)
        verify = verify_commands(image) if level == "leaks" else verify_commands(image)[:1]
        reason = gettext(
            "qemu-img repairs all errors that it can on a copy of the file. The copy is checked again and then "
            "replaces the image."
        )
        if level == "leaks":
            reason = gettext(
                "qemu-img frees clusters that nothing refers to, on a copy of the file. The copy is checked again "
                "and then replaces the image."
            )
        mend = ["qemu-img", "check", "-r", level, "-f", form, copy]
        return Choice(
            f"repair {level}",
            reason,
            [look, ["cp", "--sparse=always", image.path, copy], mend, *verify, *swap_commands(image)],
            scratch=image.occupied_bytes + (image.file_size or 0) // 64,
            refusals=against,
            warnings=[] if level == "leaks" else [str(_UNSURE)],
        )

    def promise(self, method: str, options: dict[str, Any]) -> str:
        if options["repair"] != "all":
            return super().promise(method, options)
        return gettext(
            "The original is replaced only after the repaired copy is checked again. Its content is not compared. If a "
            "guest starts, the job stops and keeps the original."
        )

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002
        return {"repair": job.options["repair"]}

    def only_looks(self, options: dict[str, Any]) -> bool:
        return bool(options.get("repair", "none") == "none")

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        if job.options["repair"] == "none":
            return {"found": result["found"], "swapped": False}
        return super().record(job, result)


_UNSURE = _(
    "Where tables are wrong, nothing tells which data belongs where. A guest may read different data than before. "
    "Check the result before the undo copy is removed."
)
