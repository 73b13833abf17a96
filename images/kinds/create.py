"""The job kind ``create``: a new image in a pool, empty or as an overlay on another image of the host."""

import os
import shlex
from itertools import pairwise
from typing import Any

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.kinds import creation
from images.kinds.commit import half_merged
from images.kinds.convert import words, wrong_target
from images.kinds.grow import SECTOR, SIZE
from images.models import Image
from images.rewrite import mount, passphrases, record, refusals, space
from images.rewrite.kind import format_below
from images.rewrite.neighbours import base_of, chain_of, facts, locks_on_chain
from storage_admin.accounts.models import Actor
from storage_admin.agent.measure.new_image import ON, room
from storage_admin.agent.protocol import SPACE, RefusedError
from storage_admin.agent.rewrite.conversion import OPTIONS
from storage_admin.agent.rewrite.creation import LOCKABLE
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import display, path_key
from storage_admin.hosts.selectors import find_pool
from storage_admin.jobs import services
from storage_admin.jobs.kinds import JobKind, Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Affected, Plan, Refusal, refuse

#: Formats whose images can stand on a base here.
OVERLAYS = ("qcow2",)


class Create(JobKind):
    """Makes a new image under a name that no file has."""

    name = "create"
    title = _("Create image")
    description = _(
        "Creates an image in the pool, empty or as an overlay on another image. It gets its name only when it is "
        "complete and checked. No file is overwritten."
    )
    target = "pool"
    verb = "create"
    rewrites = True
    stages = {"checking": (0, 2), "creating": (2, 70)} | space.WRITTEN
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The image was created completely, or there is no file of its name."),
            gettext_noop("No image was created. The job removed what it had written."),
        )
    }
    properties = {
        "name": {"type": "string", "description": _("Name of the new file, with the extension of its format.")},
        "format": {"enum": list(OPTIONS), "default": "qcow2", "description": _("The format of the new image.")},
        "virtual_size": SIZE
        | {"description": _("Size of the disk in bytes, as the guest sees it; null with a base for the size of that.")},
        "format_options": {
            "type": "object",
            "additionalProperties": {"type": ["string", "integer", "boolean"]},
            "default": {},
            "description": _("Creation options of the format, as for the kind convert."),
        },
        "encryption": {
            "enum": ["none", "luks"],
            "default": "none",
            "description": _(
                "luks: the image is encrypted with the secret `new_passphrase` (qcow2 and raw). Without the passphrase "
                "nobody can read it, and it is not kept here."
            ),
        },
        "libvirt_secret": {
            "type": "boolean",
            "default": False,
            "description": _("Define a secret of libvirt with the passphrase, for the guest that gets this disk."),
        },
        "iter_time": {
            "type": ["integer", "null"],
            "minimum": 10,
            "maximum": 60_000,
            "default": None,
            "description": _(
                "Milliseconds that it takes this host to try a passphrase: more makes guessing slower. Null for QEMU's "
                "own choice of 2000."
            ),
        },
        "base": {
            "type": ["integer", "null"],
            "default": None,
            "description": _(
                "Id of an image on the same host. The new image is an overlay on it: it starts with the content of the "
                "base, and the base must not change any more."
            ),
        },
        **record.SPEED_OPTIONS,
    }

    def wrong(self, options: dict[str, Any]) -> dict[str, str]:
        form, given = options["format"], words(options["format_options"])
        fields = creation.wrong(form, given)
        if why := wrong_target(options["name"], form):
            fields["name"] = why
        if options["encryption"] != "none" and (form not in LOCKABLE or (form == "raw" and given)):
            fields["encryption"] = gettext("only qcow2 images, and raw ones without further options, are encrypted.")
        if options["base"] is None and options["virtual_size"] is None:
            fields["virtual_size"] = gettext("required without a base.")
        if options["base"] is not None:
            if form not in OVERLAYS:
                fields["format"] = gettext("an overlay has the format {formats}.").format(formats=", ".join(OVERLAYS))
            if given.get("preallocation", "off") != "off" and given.get("extended_l2") not in ON:
                fields["preallocation"] = gettext("requires extended_l2=on for an overlay.")
        return fields

    def secrets(self, options: dict[str, Any]) -> tuple[str, ...]:
        return ("new_passphrase",) if options.get("encryption", "none") != "none" else ()

    def resolve(self, target_id: int) -> Target:
        pool = find_pool(target_id)
        return Target(kind="pool", id=pool.pk, host=pool.host, label=pool.name)

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        found = [Lock(f"path:{target.host.pk}:{path_key(path_in(find_pool(target.id), options))}", exclusive=True)]
        base = base_of(target.host.pk, options)
        return found if base is None else [*found, *locks_on_chain(base, exclusive=False)]

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        pool = find_pool(target_id)
        base = base_of(pool.host_id, options)
        size, path = _size(base, options), path_in(pool, options)
        against, below = [*refusals.for_host(pool.host), *refusals.for_new_file(pool, path)], list[Image]()
        try:
            below = chain_of(base)
        except RefusedError as error:
            against.append(Refusal(error.code, error.detail))
        if base is not None:
            against += [*refusals.for_base(base), *refusals.for_bases(base, below[1:]), *half_merged(below)]
            if size < (base.virtual_size or 0):
                smaller = gettext("The overlay would be smaller than its base, which has {size:,} bytes.")
                against.append(Refusal("invalid", smaller.format(size=base.virtual_size)))
        locked = bool(self.secrets(options))
        after = room(options["format"], words(options["format_options"]), size, locked=locked)
        need = space.Need(pool.host_id, after.high, after.high)
        return Plan(
            method="overlay" if base is not None else "empty",
            reason=_reason(base, path, options, size),
            commands=(shlex.join(_command(base, path, options, size)),),
            facts_at=pool.last_scanned,
            before_bytes=0,
            predicted_after_bytes=after.after,
            predicted_low=after.low,
            predicted_high=after.high,
            scratch_bytes=after.high,
            scratch_pool=pool.pk,
            lasting_bytes=after.high,
            refusals=tuple(against or space.Admitted().against(pool, pool.host, need)),
            warnings=(*_warnings(base, pool, options, size), *mount.warnings(pool, options["format_options"])),
            affected_images=tuple(Affected(one.pk, one.name, gettext("read, not changed")) for one in below),
            options=options,
        )

    def admit(self, target: Target, plan: Plan) -> None:
        refuse(space.Admitted().against(find_pool(target.id), target.host, space.planned_need(plan, target.host)))

    def waits_for_storage(self, job: Job) -> str:
        pool = StoragePool.objects.filter(pk=job.target_id, state=StoragePool.SILENT).first()
        return f"the storage pool {pool.name} to answer"[:200] if pool is not None else ""

    def request(self, job: Job) -> dict[str, Any]:
        pool, options = find_pool(job.target_id), job.options
        base = base_of(pool.host_id, options)
        below = chain_of(base)
        if base is not None:
            refuse([*refusals.for_base(base), *refusals.for_bases(base, below[1:])])
        links = links_of(below)
        return {
            "target": place(pool, options) | {"format": options["format"], "options": words(options["format_options"])},
            "virtual_size": _size(base, options),
            "secrets": {"passphrase": job.secrets["new_passphrase"]} if job.secrets else {},
            "iter_time": options["iter_time"],
            **({"base": links[0], "chain": links[1:]} if links else {}),
            **record.limits(job),
        }  # fmt: skip

    def note_ready(self, job: Job, ready: dict[str, Any]) -> None:
        record.note_ready(job, ready)

    def made_at(self, job: Job) -> tuple[StoragePool, bytes] | None:
        """The pool and the path of the file that the job makes; ``None`` where its pool is gone."""
        pool = StoragePool.objects.filter(pk=job.target_id).first()
        return (pool, path_in(pool, job.options)) if pool is not None else None

    def on_event(self, job: Job, event: dict[str, Any]) -> None:
        if event["event"] != SPACE:  # what it needs is in its plan
            super().on_event(job, event)

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        pool = find_pool(job.target_id)
        record.write_line_beside(job, pool, result["after_bytes"])
        return {
            "method": job.plan["method"], "path": display(path_in(pool, job.options)), "pool": pool.pk,
            "format": result["format"], "virtual_size": result["virtual_size"], "inode": result["inode"],
            "predicted_after_bytes": job.plan.get("predicted_after_bytes"), "after_bytes": result["after_bytes"],
            "seconds": result["seconds"],
        }  # fmt: skip

    def ended(self, job: Job) -> None:
        if job.options.get("libvirt_secret") and job.secrets and succeeded(job):
            pool = find_pool(job.target_id)
            passphrases.tell(job, display(path_in(pool, job.options)), job.secrets["new_passphrase"], define=True)
        services.rescan(job)
        record.ring_policies_after(job)


def succeeded(job: Job) -> bool:
    """Whether a job that was worked on here has ended well, as its row says."""
    return Job.objects.filter(pk=job.pk, state=Job.State.SUCCEEDED).exists()


def links_of(chain: list[Image]) -> list[dict[str, Any]]:
    """An image and what it stands on, from above, as the agent is told of them."""
    lower = [facts(one) | {"format": format_below(above, one)} for above, one in pairwise(chain)]
    return [*(facts(one) for one in chain[:1]), *lower]


def place(pool: StoragePool, options: dict[str, Any]) -> dict[str, str]:
    """The path of the new file, as the agent is told of it."""
    return pool.place_of(path_in(pool, options))


def path_in(pool: StoragePool, options: dict[str, Any]) -> bytes:
    """The path of the new file."""
    return bytes(pool.path_bytes).rstrip(b"/") + b"/" + os.fsencode(options["name"])


def _size(base: Image | None, options: dict[str, Any]) -> int:
    size: int = options["virtual_size"] or (base.virtual_size if base is not None else 0) or SECTOR
    return size


def _reason(base: Image | None, path: bytes, options: dict[str, Any], size: int) -> str:
    if base is None:
        reason = gettext("{path} is created as an empty {format} image of {size:,} bytes, and checked.")
        return reason.format(path=display(path), format=options["format"], size=size)
    reason = gettext("{path} is created as an overlay of {size:,} bytes on {base}, and checked.")
    return reason.format(path=display(path), size=size, base=base.name)


def _command(base: Image | None, path: bytes, options: dict[str, Any], size: int) -> list[str]:
    """What an admin would type."""
    chosen_options = words(options["format_options"])
    form, secret = options["format"], list[str]()
    if options["encryption"] != "none":
        form, prefix = ("luks", "") if form == "raw" else (form, "encrypt.")
        chosen_options |= {f"{prefix}key-secret": "s"} | ({"encrypt.format": "luks"} if prefix else {})
        secret = ["--object", "secret,id=s,file=PASSPHRASE"]
    given = ",".join(f"{name}={value}" for name, value in sorted(chosen_options.items()))
    below = ["-b", base.path, "-F", base.declared_format] if base is not None else []
    chosen = ["-o", given] if given else []
    return ["qemu-img", "create", *secret, "-f", form, *chosen, *below, display(path), str(size)]


def _warnings(base: Image | None, pool: StoragePool, options: dict[str, Any], size: int) -> list[str]:
    found = []
    if options["encryption"] != "none":
        found.append(gettext("Without the passphrase the data is lost. It is forgotten here when the job starts."))
    given = words(options["format_options"])
    grows = given.get("preallocation") not in {"falloc", "full"}
    if grows and pool.available_bytes is not None and size > pool.available_bytes:
        told = gettext("The image can grow to {size:,} bytes. {pool} has {available:,} free.")
        found.append(told.format(size=size, pool=pool.name, available=pool.available_bytes))
    if base is None:
        return found
    found += could_write(base)
    if base.pool_id != pool.pk:
        found.append(gettext("The base is in another pool, so the overlay names it by its full path."))
    return found


def could_write(base: Image) -> list[str]:
    """Guests that are off and would damage what stands on their image."""
    told = gettext(
        "Guest {guest} uses {base}. As soon as it starts and writes to it, the overlay is damaged. Let the guest use "
        "the overlay instead, or leave it off."
    )
    return [told.format(guest=name, base=base.name) for name in base.guest_names]
