"""The job kind ``convert``: an image is written in another format or with other options, beside it or in its place."""

import os
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds import creation
from images.models import Image
from images.rewrite import (
    forecasts,
    guest_locks,
    linked_clones,
    mount,
    needed_as_it_is,
    neighbours,
    readers,
    record,
    refusals,
    repointing,
)
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting, beside
from images.rewrite.neighbours import find, locks_on_chain
from images.rewrite.space import WRITTEN
from storage_admin.accounts.models import Actor
from storage_admin.agent.folders.pools import ENDINGS, wrong_name, wrong_name_for
from storage_admin.agent.rewrite.conversion import OPTIONS
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import display, path_key
from storage_admin.jobs.kinds import Lock, Target
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal


class Convert(Rewriting):
    """Writes the whole of an image, its chain included, into a new file; the image stays, or becomes an undo copy."""

    name = "convert"
    title = _("Convert")
    description = _(
        "Writes the image to a new, verified file with another format or other options. The file stays beside the "
        "original, or replaces it."
    )
    verb = "convert"
    stages = {"checking": (0, 2), "copying": (2, 70)} | WRITTEN
    properties = {
        "format": {"enum": list(OPTIONS), "default": "qcow2", "description": _("The format of the new file.")},
        "format_options": {
            "type": "object",
            "additionalProperties": {"type": ["string", "integer", "boolean"]},
            "default": {},
            "description": "Creation options of the format, by their names in qemu-img: "
            + "; ".join(f"{form}: {', '.join(sorted(names))}" for form, names in OPTIONS.items())
            + ".",
        },
        "target_pool": {
            "type": ["integer", "null"],
            "default": None,
            "description": _("Id of a pool on the same host; null for the folder of the image."),
        },
        "target_name": {
            "type": ["string", "null"],
            "default": None,
            "description": _(
                "Name of the new file; null for the name of the image with another extension, or with -copy."
            ),
        },
        "replace": {
            "type": "boolean",
            "default": False,
            "description": _(
                "Replace the image with the new file. Only the extension of its name changes. The original is kept "
                "as undo copy for undo_hours."
            ),
        },
        "repoint_guest": {
            "type": "boolean",
            "default": False,
            "description": _(
                "With replace: update path and driver type in the definitions of libvirt guests that use the "
                "image. An undo restores them."
            ),
        },
        **REWRITE_OPTIONS,
    }
    forecasts = True
    no_undo = _("the image is not changed")
    guarantee = _(
        "The image is only read. The new file gets its name only when it is complete and verified to be identical."
    )
    unchanged = _("stays unchanged")

    def replaces(self, method: str, options: dict[str, Any]) -> bool:  # noqa: ARG002 (the options say it)
        return bool(options.get("replace"))

    def place(self, image: Image, options: dict[str, Any]) -> tuple[StoragePool, bytes]:
        """The pool and the path of the new file; raises NotFoundError where there is no such pool on the host."""
        return target_of(image, options)

    def wrong(self, options: dict[str, Any]) -> dict[str, str]:
        form = options["format"]
        fields = creation.wrong(form, words(options["format_options"]))
        if options["replace"]:
            beside = {"target_pool", "target_name"} & {name for name, value in options.items() if value is not None}
            fields |= dict.fromkeys(
                beside, gettext("with replace, the new file takes the folder and name of the image. Leave this out.")
            )
        if options["repoint_guest"] and not options["replace"]:
            fields["repoint_guest"] = gettext("requires replace. Without it, no guest definition changes.")
        if options["repoint_guest"] and form not in repointing.DRIVERS:
            fields["repoint_guest"] = gettext(
                "libvirt has no driver for {form}, so its guests could not use the image."
            ).format(form=form)
        if why := wrong_target(options["target_name"], form):
            fields["target_name"] = why
        return fields

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        image = find(target.id)
        __, path = self.place(image, options)
        chain = locks_on_chain(image, exclusive=self.replaces("", options))
        return [*chain, Lock(f"path:{image.host_id}:{path_key(path)}", exclusive=True)]

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:
        found = refusals.for_rewrite(image)
        pool, path = self.place(image, options)
        if self.replaces("", options):
            found += _against_replacing(image, options)
        else:
            # The image itself is only read, and what a copy does not carry stays in it.
            found = [one for one in found if one.code not in {"has_internal_snapshots", "hard_linked", "immutable"}]
        found += refusals.for_pool(pool) if pool.pk != image.pool_id else []
        found += mount.unwritable(pool)
        other = Image.objects.filter(host=image.host, path_key=path_key(path), missing_since=None).exclude(pk=image.pk)
        if other.exists() or (path == bytes(image.path_bytes) and options.get("format") != image.declared_format):
            found.append(refusals.target_exists(path))
        return found

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:
        try:
            self.place(image, options)
        except NotFoundError as error:
            raise InvalidError(f"target_pool: {error.detail}", {"target_pool": error.detail}) from error
        return super().plan_for(actor, image, options)

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        if self.replaces("", job.options):
            image = find(job.target_id)
            repointing.look(image, _move(image, job.options))

    def before_swap(self, job: Job) -> None:
        if self.replaces("", job.options):
            image = find(job.target_id)
            repointing.lead_to_the_new_one(job, image, _move(image, job.options))
            super().before_swap(job)

    def ended(self, job: Job) -> None:
        guest_locks.give_back(job)
        repointing.agree(job)
        super().ended(job)

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        pool, path = self.place(image, options)
        form, given = options["format"], words(options["format_options"])
        whole = sum(one.occupied_bytes for one in (image, *below))
        fixed = given.get("subformat") == "fixed" or given.get("preallocation") in {"full", "falloc"}
        foreign, allowed = readers.for_taken(image, below)
        replaces, guests = options["replace"], []
        warnings = mount.warnings(self.place(image, options)[0], options["format_options"])
        if replaces:
            guests = image.guest_names if options["repoint_guest"] else []
            warnings += [
                gettext("The definition of guest {name} is updated to use the new file. An undo restores it.").format(
                    name=name
                )
                for name in guests
            ]
        if given.get("subformat") == "streamOptimized" and replaces:
            warnings.append(gettext("Guests cannot write to a streamOptimized vmdk. The format is for transport only."))
        if image.snapshots and not replaces:
            told = gettext(
                "The {count} internal snapshots of the image are not copied. They remain only in the original."
            )
            warnings.append(told.format(count=len(image.snapshots)))
        size = forecasts.converted(image, below, form, given)
        if not fixed and size.high is None:
            warnings.append(
                gettext(
                    "The size of the new file is not known in advance, because zeros and unused clusters are left out."
                )
            )
        reason = gettext(
            "{image} is written in full as {form} to {path} and compared with the image. Only then "
            "does the new file get its name."
        )
        if below:
            reason = gettext(
                "{image} and its backing chain are written in full as {form} to {path} and compared with the "
                "image. Only then does the new file get its name."
            )
        reason = reason.format(image=image.name, form=form, path=display(path))
        return Choice(
            "convert",
            f"{reason} {gettext('It then replaces the image.') if replaces else gettext('The image is unchanged.')}",
            _commands(image, path, form, given, options) + (_place_commands(image, path, guests) if replaces else []),
            after=size.guess,
            low=size.low,
            high=size.high,
            took=forecasts.seconds(
                image, self.name, whole + (size.guess or size.high or whole), options["bandwidth_bytes_sec"]
            ),
            scratch=(image.virtual_size if fixed else whole) or whole,
            refusals=foreign,
            by_hand=allowed,
            warnings=warnings,
            below={
                image.pk: gettext("replaced by {path}").format(path=display(path))
                if replaces
                else gettext("read, not changed")
            },
            space_in=None if replaces else pool,
        )

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        pool, path = self.place(image, job.options)
        form, options = job.options["format"], words(job.options["format_options"])
        goes = job.options["replace"] and _goes(image, _move(image, job.options))
        return {
            "target": {
                **pool.place_of(path),
                "format": form,
                "options": options,
                "replaces": job.options["replace"],
            },
            **(needed_as_it_is.pools(image) if goes else {}),
        }

    def made_at(self, job: Job) -> tuple[StoragePool, bytes] | None:
        image = Image.every.select_related("pool", "host").filter(pk=job.target_id).first()
        try:
            return self.place(image, job.options) if image is not None else None
        except NotFoundError:
            return None

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        image = find(job.target_id)
        pool, path = self.place(image, job.options)
        if job.options["replace"]:
            told = super().record(job, result)
            _declare(find(job.target_id), result["format"])
            return told | {
                "format": result["format"], "path": display(path), "pool": pool.pk, "inode": result["inode"],
            }  # fmt: skip
        record.write_line_beside(job, pool, result["after_bytes"])
        return {
            "before_bytes": result["before_bytes"], "after_bytes": result["after_bytes"], "held_bytes": 0,
            "freed_bytes": 0, "freed_at": None, "method": result["method"], "format": result["format"],
            "path": display(path), "pool": pool.pk, "inode": result["inode"], "seconds": result["seconds"],
            "swapped": False,
        }  # fmt: skip


def _move(image: Image, options: dict[str, Any]) -> repointing.Move:
    __, path = target_of(image, options)
    return repointing.Move(bytes(image.path_bytes), path, options["format"], options["repoint_guest"])


def _against_replacing(image: Image, options: dict[str, Any]) -> list[Refusal]:
    move = _move(image, options)
    found = neighbours.against_standing_alone(image)
    found += [*repointing.refusals(image, move), *linked_clones.against_replacing(image)]
    if _goes(image, move):
        found += needed_as_it_is.refusals(
            image, gettext("Convert to a new file beside the original instead, or flatten the overlays first.")
        )
    return found


def _goes(image: Image, move: repointing.Move) -> bool:
    """Whether the image's name or format is another one afterwards, so that what needs it would not find it."""
    return move.after != move.before or move.format != image.declared_format


def _declare(image: Image, form: str) -> None:
    """The format that the new file was written in holds before the scan that reads it."""
    image.format = image.declared_format = form
    image.admin_format = form if image.admin_format else ""
    image.save(update_fields=["format", "declared_format", "admin_format"])


def words(options: dict[str, Any]) -> dict[str, str]:
    """Options as qemu-img takes them."""
    return {
        name: {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }


def wrong_target(name: str | None, form: str) -> str:
    """What is wrong with the name of a new file, as a sentence; empty where nothing is.

    Args:
        form: the format, which the name must not contradict; empty where it is not known yet.
    """
    if name is None:
        return ""
    if not name.isprintable():
        return gettext("Enter a name without control characters.")
    raw = os.fsencode(name)
    why = wrong_name(raw) or (wrong_name_for(raw, form) if form else "")
    return f"{why}." if why else ""


def target_of(image: Image, options: dict[str, Any]) -> tuple[StoragePool, bytes]:
    """The pool and the path that a conversion goes to.

    Raises:
        NotFoundError: there is no such pool on the image's host.
    """
    pool, raw = image.pool, bytes(image.path_bytes)
    folder, name = os.path.split(raw)
    if options["target_pool"] is not None and options["target_pool"] != pool.pk:
        found = StoragePool.objects.filter(pk=options["target_pool"], host=image.host_id).first()
        if found is None:
            told = gettext("Pool {target_pool} does not exist on {host}.")
            raise NotFoundError(told.format(target_pool=options["target_pool"], host=image.host.name))
        pool, folder = found, bytes(found.path_bytes).rstrip(b"/")
    if options["target_name"] is not None:
        return pool, folder + b"/" + os.fsencode(options["target_name"])
    path = folder + b"/" + stem_of(name) + ENDINGS[options["format"]][0].encode()
    if path == raw and not options["replace"]:
        stem, __, extension = name.rpartition(b".")
        path = folder + b"/" + stem + b"-copy." + extension
    return pool, path


def stem_of(name: bytes) -> bytes:
    """The name of an image without the extension of a format."""
    stem, dot, extension = name.rpartition(b".")
    known = extension.lower() in {b"qcow2", b"raw", b"img", b"vmdk", b"vdi", b"vhdx", b"vhd", b"vpc", b"qed"}
    return stem if dot and known else name


def _commands(image: Image, path: bytes, form: str, given: dict[str, str], options: dict[str, Any]) -> list[list[str]]:
    source, target = image.declared_format, display(path)
    if not source:
        return []
    convert = ["qemu-img", "convert", "-p", "-m", "8", "-W"]
    convert += ["-c"] if "compression_type" in given or given.get("subformat") == "streamOptimized" else []
    convert += ["-r", str(options["bandwidth_bytes_sec"])] if options["bandwidth_bytes_sec"] else []
    convert += ["-f", source, "-O", form]
    wanted = given | ({"force_size": "on"} if form == "vpc" else {})
    convert += ["-o", ",".join(f"{name}={value}" for name, value in sorted(wanted.items()))] if wanted else []
    compare = ["qemu-img", "compare", "-p", "-f", source, "-F", form, image.path, target]
    return [[*convert, image.path, target], compare]


def _place_commands(image: Image, path: bytes, guests: list[str]) -> list[list[str]]:
    """What taking the image's place amounts to, as an admin would type it."""
    copy, target = beside(image), display(path)
    original = copy.removesuffix("new") + "orig"
    commands = [["virsh", "dumpxml", "--inactive", "--security-info", name] for name in guests]
    commands += [["virsh", "define", f"{name}.xml"] for name in guests]
    if target == image.path:
        return [*commands, ["ln", image.path, original], ["mv", copy, target]]
    return [*commands, ["ln", image.path, original], ["ln", copy, target], ["rm", image.path, copy]]
