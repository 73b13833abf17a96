"""What is wrong and wants a look, the worst first."""

from collections.abc import Iterable
from datetime import timedelta

from django.db.models import Count, Exists, OuterRef, QuerySet
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.orphans.host_facts import could_have_guests
from images.selectors.lists import images_for, ordered
from images.selectors.overview_shapes import Concern, ConcernItem, PoolRow
from images.selectors.totals import each_file_once
from storage_admin.accounts.models import Actor
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from storage_admin.jobs.selectors import jobs_for

#: How many of a kind are named; the rest are counted.
NAMED = 5
FAILED_WITHIN = timedelta(days=7)

IMAGE_STATES = {
    Image.State.CHAIN_BROKEN: (_("Chains with a missing base"), "danger"),
    Image.State.CHAIN_CYCLE: (_("Circular backing chains"), "danger"),
    Image.State.FORMAT_MISMATCH: (_("Content contradicts the declared format"), "danger"),
    Image.State.MERGED: (_("Merged overlays that were left: delete them"), "warning"),
    Image.State.OUTSIDE_POOL: (_("Backing files outside every pool"), "warning"),
    Image.State.UNREADABLE: (_("Images that cannot be read"), "warning"),
    Image.State.MISSING: (_("Images that vanished"), "warning"),
}


def concerns(actor: Actor, hosts: list[Host], pools: list[StoragePool], rows: Iterable[PoolRow]) -> tuple[Concern, ...]:
    """Everything that wants a look, as far as it exists for ``actor``.

    Args:
        hosts, pools, rows: the hosts and pools that exist for the actor, and what is shown of the pools.
    """
    images = images_for(actor).select_related(None).prefetch_related(None)
    found = [
        *_hosts(hosts),
        *_pools(pools, rows),
        *_image_states(images),
        *_jobs(jobs_for(actor)),
        *_orphans(images, hosts, pools),
    ]
    return tuple(sorted(found, key=lambda concern: concern.severity != "danger"))


def _concern(code: str, title: str, severity: str, items: list[ConcernItem], count: int | None = None) -> list[Concern]:
    if not items:
        return []
    return [Concern(code, title, severity, len(items) if count is None else count, tuple(items[:NAMED]))]


def _hosts(hosts: list[Host]) -> list[Concern]:
    def items(status: str) -> list[ConcernItem]:
        return [ConcernItem("host", host.pk, host.name, host.status_detail) for host in hosts if host.status == status]

    return [
        *_concern("host_unreachable", gettext("Hosts that do not answer"), "danger", items(Host.Status.UNREACHABLE)),
        *_concern("host_degraded", gettext("Degraded hosts"), "warning", items(Host.Status.DEGRADED)),
    ]


def _pools(pools: list[StoragePool], rows: Iterable[PoolRow]) -> list[Concern]:
    full = [
        ConcernItem(
            "pool",
            row.id,
            f"{row.host} / {row.name}",
            gettext("{used_percent} % used, warning at {warn_percent} %").format(
                used_percent=row.used_percent, warn_percent=row.warn_percent
            ),
        )
        for row in rows
        if row.over_threshold
    ]
    bad = [
        ConcernItem("pool", pool.pk, str(pool), pool.state_detail) for pool in pools if pool.state not in {"ok", "new"}
    ]
    return [
        *_concern("pool_over_threshold", gettext("Pools over their threshold"), "danger", full),
        *_concern("pool_unreadable", gettext("Pools that cannot be read"), "danger", bad),
    ]


def _image_states(images: QuerySet[Image]) -> list[Concern]:
    images = images.exclude(state=Image.State.OK)  # in the words of the index of the few that are not
    counts = images.filter(state__in=IMAGE_STATES).order_by().values_list("state").annotate(Count("id"))
    found = []
    for state, count in sorted(counts, key=lambda pair: list(IMAGE_STATES).index(Image.State(pair[0]))):
        title, severity = IMAGE_STATES[Image.State(state)]
        first = ordered(images.filter(state=state), "-allocated_size").only("name", "state_detail")[:NAMED]
        items = [ConcernItem("image", image.pk, image.name, image.state_detail) for image in first]
        found += _concern(state, str(title), severity, items, count)
    return found


def _orphans(images: QuerySet[Image], hosts: list[Host], pools: list[StoragePool]) -> list[Concern]:
    # Where no hypervisor could have guests, that none uses an image is no news.
    having = {host.pk for host in hosts if could_have_guests(host)}
    rows = images.filter(orphan=True, host__in=having)
    orphans = each_file_once(rows, [pool for pool in pools if pool.host_id in having])
    first = ordered(orphans, "-allocated_size").only("name", "orphan_evidence")[:NAMED]
    items = [ConcernItem("image", image.pk, image.name, "; ".join(map(str, image.orphan_evidence))) for image in first]
    return _concern("orphan", gettext("Unused images (orphans)"), "warning", items, orphans.count() if items else 0)


def _jobs(jobs: QuerySet[Job]) -> list[Concern]:
    """Jobs that went wrong lately, unless the same was done successfully since."""
    done_since = Job.objects.filter(
        kind=OuterRef("kind"),
        target_kind=OuterRef("target_kind"),
        target_id=OuterRef("target_id"),
        state=Job.State.SUCCEEDED,
        id__gt=OuterRef("id"),
    )
    recent = jobs.filter(finished__gte=timezone.now() - FAILED_WITHIN).exclude(Exists(done_since))
    found = []
    titles = {
        Job.State.FAILED: gettext("Jobs that failed in the last 7 days"),
        Job.State.INTERRUPTED: gettext("Jobs that were interrupted in the last 7 days"),
    }
    counts = dict(recent.filter(state__in=titles).order_by().values_list("state").annotate(Count("id")))
    for state, title in titles.items():
        if state in counts:
            first = recent.filter(state=state).select_related(None).only("kind", "target_label", "error_detail")[:NAMED]
            items = [ConcernItem("job", job.pk, str(job), job.error_detail) for job in first]
            found += _concern(f"job_{state}", title, "danger", items, counts[state])
    return found
