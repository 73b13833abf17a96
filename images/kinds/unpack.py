"""The job kind ``unpack``: a packed image in a pool (an OVA, compressed, in parts) becomes an image."""

import os
import shlex
from typing import Any

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.kinds.convert import wrong_target
from images.kinds.create import Create, path_in, place
from images.models import Image
from images.rewrite import record, refusals
from images.rewrite.space import WRITTEN
from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import b64
from storage_admin.agent.rewrite.conversion import OPTIONS
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import display, path_key
from storage_admin.hosts.selectors import find_pool
from storage_admin.jobs.kinds import Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal


class Unpack(Create):
    """Makes an image of what is packed in another file, which is only read."""

    name = "unpack"
    title = _("Import file")
    description = _(
        "Makes an image of a packed one: the disk of an OVA archive, a file packed by gzip, xz or zstd, or one that "
        "was split into parts. It is written where the image is to be, nothing in between. No file is overwritten."
    )
    verb = "unpack"
    stages = {"checking": (0, 5), "unpacking": (5, 70), "creating": (5, 70)} | WRITTEN
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The image was written completely, or there is no file of its name."),
            gettext_noop("No image was made. The job removed what it had written. The packed file is unchanged."),
        )
    }
    properties = {
        "source": {
            "type": "string",
            "description": _("Full path of the packed file in a pool of the host; of one in parts, the first part."),
        },
        "name": {"type": "string", "description": _("Name of the new file, with the extension of its format.")},
        "format": {
            "enum": list(OPTIONS),
            "default": "qcow2",
            "description": _("The format of the new image: of an archive the wanted one, else the one that is packed."),
        },
        "member": {
            "type": ["string", "null"],
            "default": None,
            "description": _("Name of the disk in an archive that holds several; null for the only one."),
        },
        "sha256": {
            "type": ["string", "null"],
            "pattern": "^[0-9a-fA-F]{64}$",
            "default": None,
            "description": _("SHA-256 that the packed file must have; null to take it as it is."),
        },
        **record.SPEED_OPTIONS,
    }

    def wrong(self, options: dict[str, Any]) -> dict[str, str]:
        fields = {"name": wrong_target(options["name"], options["format"])}
        if not options["source"].startswith("/") or "\0" in options["source"]:
            fields["source"] = gettext("Enter a full path, which begins with a slash.")
        return fields

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        host, written = target.host.pk, path_key(path_in(find_pool(target.id), options))
        read = path_key(os.fsencode(options["source"]))
        return [Lock(f"path:{host}:{written}", exclusive=True)] + (
            [Lock(f"path:{host}:{read}", exclusive=False)] if read != written else []
        )

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        pool = find_pool(target_id)
        source, path = options["source"], path_in(pool, options)
        against = [*refusals.for_host(pool.host), *refusals.for_new_file(pool, path)]
        if _pool_of(pool.host_id, source) is None:
            told = gettext("{path} is in no pool of this host. Copy the file into one, or register its folder.")
            against.append(Refusal("outside_pool", told.format(path=source)))
        read = Image.objects.filter(host=pool.host, path_key=path_key(os.fsencode(source))).first()
        if read is not None:
            against += refusals.for_undo(read)  # an image of a guest, which may be at it
        reason = gettext("What {source} holds is written to {path} and checked. Only then does the file get its name.")
        return Plan(
            method="unpack",
            reason=reason.format(source=source, path=display(path)),
            commands=tuple(map(shlex.join, _commands(source, display(path), options))),
            facts_at=pool.last_scanned,
            before_bytes=0,
            refusals=tuple(against),
            warnings=(
                gettext(
                    "How large the image becomes is known when the file is read. The reserve of the pool stays free."
                ),
            ),
            options=options,
        )

    def request(self, job: Job) -> dict[str, Any]:
        pool, options = find_pool(job.target_id), job.options
        holds = _pool_of(pool.host_id, options["source"])
        return {
            "source": {
                "pool_path_b64": b64(bytes(holds.path_bytes)) if holds is not None else "",
                "path_b64": b64(os.fsencode(options["source"])),
            },
            "target": place(pool, options) | {"format": options["format"]},
            "member": options["member"],
            "sha256": options["sha256"],
            **record.limits(job),
        }  # fmt: skip

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        told = {name: result[name] for name in ("packed", "packed_bytes", "parts", "content_sha256")}
        return super().record(job, result) | told | {"source": job.options["source"]}


def _pool_of(host_id: int, path: str) -> StoragePool | None:
    """The pool of the host that a path is in, the innermost one."""
    folders = refusals.FOLDERS
    found = [
        pool for pool in StoragePool.objects.filter(host=host_id, kind__in=folders)
        if os.fsencode(path).startswith(bytes(pool.path_bytes).rstrip(b"/") + b"/")
    ]  # fmt: skip
    return max(found, key=lambda pool: len(pool.path_bytes), default=None)


def _commands(source: str, path: str, options: dict[str, Any]) -> list[list[str]]:
    """What an admin would type."""
    packers = {"gz": "gzip", "xz": "xz", "zst": "zstd"}
    ending = source.rpartition(".")[2].lower()
    if ending == "ova":
        disk = options["member"] or "DISK.vmdk"
        return [
            ["tar", "-xf", source, disk],
            ["qemu-img", "convert", "-f", "vmdk", "-O", options["format"], disk, path],
        ]
    return [[packers.get(ending, "cat"), *(["-dc"] if ending in packers else []), source]]
