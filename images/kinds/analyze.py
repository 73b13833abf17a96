"""The job kinds ``analyze`` (one image, on request) and ``sample`` (what changed on a host, in the background)."""

from typing import Any

from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.rewrite import record, refusals, space, volumes
from images.rewrite.kind import ImageKind
from images.rewrite.neighbours import facts, find
from storage_admin.accounts.models import SYSTEM, Actor
from storage_admin.jobs import services
from storage_admin.jobs.kinds import HostKind
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal

#: Images that one background job samples, and for how long each at most, in seconds.
SAMPLE_IMAGES = 100
SAMPLE_SECONDS = 1.0


_REASONS = {
    "sample": "Reads up to 2,000 clusters, spread over the image.",
    "full": "Reads all allocated data at idle I/O priority.",
}


def sampled(image: Image) -> dict[str, Any]:
    """The image as the agent wants it for an analysis."""
    found, base = _place(image), image.backing
    if base is not None and base.state not in Image.NOT_THERE and base.declared_format in {"raw", "qcow2"}:
        found["base"] = _place(base)
    return found


def _place(image: Image) -> dict[str, Any]:
    known = facts(image)
    return {name: known[name] for name in ("path_b64", "pool_path_b64", "format", "dev", "inode")}


class Analyze(ImageKind):
    """Looks at one image's data: what each method could win back, with a range."""

    name = "analyze"
    title = _("Analyze")
    description = _(
        "Estimates the space that each method could reclaim, from a sample or from all data. Changes nothing."
    )
    verb = "analyze"
    volumes = frozenset({"lvmthin"})
    looks = True
    stages = {"reading": (0, 80), "zeros": (80, 100)}
    properties = {
        "mode": {
            "enum": ["sample", "full"],
            "default": "sample",
            "description": _(
                "sample: takes about a second and gives a range. full: reads all allocated data at idle I/O "
                "priority and gives an upper bound that the space check of a reclaim can rely on."
            ),
        },
        "compression": {
            "enum": ["auto", "zlib", "zstd", "all"],
            "default": "auto",
            "description": _(
                "With full: the compression that is measured on all data; the others are estimated from a sample. "
                "auto measures the one that a reclaim with auto would use. zlib takes six times as long as "
                "everything else together."
            ),
        },
    }

    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        return Plan(
            method=options["mode"],
            reason=_REASONS[options["mode"]],
            facts_at=image.last_scanned,
            before_bytes=image.allocated_size,
            refusals=tuple(self._refusals(image)),
        )

    @staticmethod
    def _refusals(image: Image) -> list[Refusal]:
        if image.is_volume and image.pool.kind in Analyze.volumes:
            return volumes.for_look(image)
        host = refusals.without_agent(image.host)
        if against := [*host, *refusals.not_a_file(image), *refusals.silent(image.pool)]:
            return against
        if image.state in {*Image.NOT_THERE, Image.State.UNREADABLE, Image.State.FORMAT_MISMATCH}:
            own = {Image.State.FORMAT_MISMATCH: "format_mismatch", Image.State.SET_ASIDE: "set_aside"}
            code = own.get(Image.State(image.state), "stale_plan")
            return [Refusal(code, image.state_detail)]
        if not image.declared_format:
            told = gettext("{image} cannot be analyzed, because its format is not declared. Declare it first.")
            return [Refusal("format_undeclared", told.format(image=image.name))]
        if image.declared_format not in space.SAMPLED_FORMATS:
            known = ", ".join(space.SAMPLED_FORMATS)
            told = gettext("{format} images cannot be analyzed. Supported formats: {known}.")
            return [Refusal("unsupported_subformat", told.format(format=image.declared_format, known=known))]
        return []

    def __init__(self) -> None:
        #: What each job's image was when the agent was asked, by the job's id.
        self._asked: dict[int, bytes] = {}

    def verb_for(self, job: Job) -> str:
        return "analyze_volume" if find(job.target_id).is_volume else self.verb

    def request(self, job: Job) -> dict[str, Any]:
        image = find(job.target_id)
        self._asked[job.pk] = bytes(image.fingerprint)
        if image.is_volume:
            return volumes.place(image)
        return sampled(image) | {name: job.options[name] for name in ("mode", "compression")}

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        image = find(job.target_id)
        space.record_estimate(image, self._asked[job.pk], result, timezone.now())
        space.write_totals([image.pool])
        return result

    def ended(self, job: Job) -> None:
        self._asked.pop(job.pk, None)
        record.ring_policies_after(job)


class Sample(HostKind):
    """Samples the images of a host that changed, the largest first, at idle priority."""

    name = "sample"
    title = _("Sample changed images")
    description = _("Samples the images that changed since their last analysis, largest first, at idle I/O priority.")
    verb = "sample"
    looks = True
    single = True
    share = 0.25
    progress_in_bytes = False
    stages = {"sampling": (0, 100)}

    def __init__(self) -> None:
        #: What the images were when the agent was asked: fingerprints by the image's id, by the job's id.
        self._asked: dict[int, dict[int, bytes]] = {}

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        return Plan(
            method="sample",
            reason=gettext("{count} images changed since they were last analyzed.").format(
                count=space.due_for_estimates(target_id).count()
            ),
            refusals=tuple(refusals.without_agent(self.resolve(target_id).host)),
        )  # fmt: skip

    def request(self, job: Job) -> dict[str, Any]:
        chosen = list(space.due_for_estimates(job.host_id)[:SAMPLE_IMAGES])
        self._asked[job.pk] = {image.pk: bytes(image.fingerprint) for image in chosen}
        return {
            "images": [sampled(image) | {"id": image.pk} for image in chosen],
            "seconds": SAMPLE_SECONDS,
        }

    def on_event(self, job: Job, event: dict[str, Any]) -> None:
        if event["event"] != "estimate":
            super().on_event(job, event)
        image = Image.objects.filter(pk=event["id"], host=job.host_id).first()
        asked = self._asked[job.pk].get(event["id"])
        if image is not None and asked is not None:
            space.record_estimate(image, asked, event["data"], timezone.now())

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        space.write_totals(job.host.pools.all())
        return result

    def ended(self, job: Job) -> None:
        self._asked.pop(job.pk, None)
        job.refresh_from_db(fields=["state", "result"])
        if (
            job.state == Job.State.SUCCEEDED
            and (job.result or {}).get("analyzed")
            and space.due_for_estimates(job.host_id).exists()
        ):
            services.submit(SYSTEM, self.name, job.host_id, {})
