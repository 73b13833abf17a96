"""The job kind ``exclusive``: what deleting each volume of a host's thin pools would free."""

from typing import Any

from django.db.models import F
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.rewrite import refusals, space
from storage_admin.accounts.models import Actor
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.jobs.kinds import HostKind
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan


class Exclusive(HostKind):
    """Counts the blocks that no other volume of its thin pool shares, by a snapshot of the pool's metadata."""

    name = "exclusive"
    title = _("Measure exclusive sizes")
    description = _(
        "Measures how many bytes each volume of the host's thin pools shares with no other volume or snapshot, at "
        "idle I/O priority. Needs a snapshot of the pool's metadata for as long as it is read."
    )
    verb = "exclusive"
    looks = True
    leaves = True
    single = True
    share = 0.25
    progress_in_bytes = False

    def __init__(self) -> None:
        #: What was told of pools that were skipped, by the job's id.
        self._skipped: dict[int, list[dict[str, str]]] = {}

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        host = self.resolve(target_id).host
        return Plan(reason=str(self.description), refusals=tuple(refusals.without_agent(host)))

    def request(self, job: Job) -> dict[str, Any]:
        self._skipped[job.pk] = []
        return {}

    def on_event(self, job: Job, event: dict[str, Any]) -> None:
        if event["event"] != self.verb:
            super().on_event(job, event)
        group, pool, why = event["group"], event["pool"], event["why"]
        if why:
            self._skipped[job.pk].append({"pool": f"{group}/{pool}", "detail": why})
            return
        # By the keys of their paths, of which one that is set aside has that of the name that it has now.
        alone = {path_key(f"/dev/{group}/{name}".encode()): size for name, size in event["volumes"].items()}
        now, paths = timezone.now(), [f"/dev/{group}/{pool}", f"lvmthin {group}/{pool}"]
        volumes = space.thin_volumes(job.host_id).filter(pool__path__in=paths)
        images = list(volumes.only("path_key", "pool"))
        for image in images:
            image.alone_bytes = alone.get(image.path_key)
            image.alone_at = None if image.alone_bytes is None else now
        Image.objects.bulk_update(images, ["alone_bytes", "alone_at"], batch_size=500)
        for name in space.OFFERED_BYTES:  # zeros that others share free nothing
            volumes.filter(**{f"{name}__gt": F("alone_bytes")}).update(**{name: F("alone_bytes")})
        space.write_totals(StoragePool.objects.filter(pk__in={image.pool_id for image in images}))

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        return result | {"skipped": self._skipped[job.pk]}

    def ended(self, job: Job) -> None:
        self._skipped.pop(job.pk, None)
