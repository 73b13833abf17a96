"""The job kind ``upload``: a file comes from a browser or by REST, and gets its name in a pool when it is whole.

It is queued first and waits for the bytes (:mod:`images.uploads`), which agents gather in a file beside. Then it reads
that back, compares its digest, and gives it its name.
"""

from dataclasses import asdict
from datetime import timedelta
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.kinds.create import Create, path_in, place
from images.rewrite import record, refusals, space
from storage_admin.accounts.models import Actor
from storage_admin.agent.folders.pools import wrong_name
from storage_admin.hosts.names import display, path_key
from storage_admin.hosts.selectors import find_pool
from storage_admin.jobs.kinds import BEGUN, Lock, Target, Unsuccessful, Wait
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan
from storage_admin.words import size

#: An upload of which nothing has come for so long is given up.
PATIENCE = timedelta(hours=24)
#: What the row keeps: how many bytes are on the host's disk. It goes when nothing is left there but the finished file.
RECEIVED = "received"
#: What it keeps besides: the SHA-256 that whoever sent the last bytes says the whole file has.
WHOLE = "whole_sha256"
#: And the number of the last request that began to send bytes.
TURN = "turn"
#: How a read-back may end that says nothing of the file.
_PASSING = frozenset({"interrupted", "tool_failed", "host_unreachable", "busy", "pool_silent"})


class Upload(Create):
    """Takes a file that somebody sends, in as many pieces and over as many days as that takes."""

    name = "upload"
    title = _("Upload file")
    description = _(
        "Takes a file that is sent by a browser or by REST, in pieces, and goes on where it broke off. The file gets "
        "its name only when all of it is on the disk and has been read back. No file is overwritten."
    )
    verb = "upload"
    rewrites = False
    goes_on = True
    given_up = "upload_incomplete"
    stages = {"checking": (0, 98), "swapping": (98, 100)}
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The file was uploaded completely, or there is no file of its name."),
            gettext_noop("No file was made. What was uploaded so far is removed."),
        )
    }
    properties = {
        "name": {"type": "string", "description": _("Name of the new file.")},
        "size": {
            "type": "integer", "minimum": 1, "maximum": (1 << 63) - 1,
            "description": _("Size of the file that will be sent, in bytes."),
        },
        "sha256": {
            "type": ["string", "null"],
            "pattern": "^[0-9a-fA-F]{64}$",
            "default": None,
            "description": _("SHA-256 that the file must have; null to take it as it comes."),
        },
        **record.SPEED_OPTIONS,
    }  # fmt: skip

    def wrong(self, options: dict[str, Any]) -> dict[str, str]:
        name = options["name"].encode("utf-8", "surrogatepass")
        if not (wrong_name(name) or "\0" in options["name"] or "/" in options["name"] or name.startswith(b".")):
            return {}
        return {"name": gettext("Enter a name of 1 to 255 bytes without a slash, which does not begin with a dot.")}

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        written = path_key(path_in(find_pool(target.id), options))
        return [Lock(f"path:{target.host.pk}:{written}", exclusive=True)]

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        pool = find_pool(target_id)
        path, length = path_in(pool, options), options["size"]
        against = [*refusals.for_host(pool.host), *refusals.for_new_file(pool, path)]
        reason = gettext("{size:,} bytes are sent, written beside {path}, and read back. Then the file gets its name.")
        need = space.Need(pool.host_id, length, length)
        return Plan(
            method="upload",
            reason=reason.format(size=length, path=display(path)),
            facts_at=pool.last_scanned,
            before_bytes=0,
            predicted_after_bytes=length,
            predicted_low=0,
            predicted_high=length,
            scratch_bytes=length,
            scratch_pool=pool.pk,
            lasting_bytes=length,
            refusals=tuple(against or space.Admitted().against(pool, pool.host, need)),
            options=options,
        )

    def submitted(self, job: Job) -> None:
        Job.objects.filter(pk=job.pk).update(
            kept={RECEIVED: 0}, done_bytes=0, total_bytes=job.options["size"], wait_until=timezone.now() + PATIENCE
        )

    def must_wait(self, job: Job, *, ask: bool) -> Wait | None:  # noqa: ARG002 (nobody has to be asked)
        if BEGUN in job.kept:
            return None
        until = job.wait_until or timezone.now() + PATIENCE
        return Wait(waiting_for(job), until, parked_for=Job.ParkedFor.BYTES)

    def passes(self, job: Job, code: str) -> bool:
        return code in _PASSING and (job.wait_until is None or timezone.now() < job.wait_until)

    def request(self, job: Job) -> dict[str, Any]:
        ready = job.kept.get("ready") or {}
        return {
            "target": where(job), "size": job.options["size"], "sha256": job.options["sha256"] or job.kept.get(WHOLE),
            "inode": ready.get("made_inode"), **asdict(record.speed_for(job)),
        }  # fmt: skip

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        pool = find_pool(job.target_id)
        record.write_line_beside(job, pool, result["after_bytes"])
        Job.objects.filter(pk=job.pk).update(kept={})
        return {
            "method": job.plan["method"], "path": display(path_in(pool, job.options)), "pool": pool.pk,
            "format": result["format"], "inode": result["inode"], "file_size": result["file_size"],
            "sha256": result["sha256"], "after_bytes": result["after_bytes"], "seconds": result["seconds"],
        }  # fmt: skip


def where(job: Job) -> dict[str, Any]:
    """The place of the file that an upload becomes, as the agent is told of it.

    Raises:
        NotFoundError: its pool is gone.
    """
    return place(find_pool(job.target_id), job.options)


def waiting_for(job: Job) -> str:
    """What an upload waits for, as in "waits for …"."""
    return f"the rest of the file: {size(job.kept.get(RECEIVED, 0))} of {size(job.options['size'])} have arrived"
