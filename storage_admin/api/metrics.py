"""``/metrics`` for Prometheus: who may read it, and the numbers of the inventory.

Everything is worked out from the database when it is asked for, so that it does not matter which of several web
processes answers. What is not known has no sample; it is never 0.
"""

from collections.abc import Iterable
from ipaddress import ip_address

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from images.models import Image
from storage_admin.accounts.authentication import TokenAuthentication
from storage_admin.accounts.models import User
from storage_admin.api.health import worker_lives
from storage_admin.api.work_metrics import work
from storage_admin.hosts.models import Host, StoragePool


@require_safe
@login_not_required
def metrics(request: HttpRequest) -> HttpResponse:
    """Prometheus text. For this machine itself, for a token (``Authorization: Bearer``), and for who is signed in."""
    if not _may_read(request):
        answer = HttpResponse(
            "Send a token that is not limited to some hosts: Authorization: Bearer TOKEN\n",
            "text/plain",
            status=401,
        )
        answer["WWW-Authenticate"] = "Bearer"
        return answer
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Numbers())
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


def _may_read(request: HttpRequest) -> bool:
    """Whoever says who they are is judged by that: the numbers are of all hosts, and not for who is limited to some."""
    if isinstance(request.user, User):
        return request.user.actor.hosts is None
    return _has_token(request) if "Authorization" in request.headers else _from_this_machine(request)


def _from_this_machine(request: HttpRequest) -> bool:
    """Not so behind a proxy, which makes every request look local."""
    if settings.HTTPS or any(name in request.headers for name in ("X-Forwarded-For", "Forwarded", "X-Real-Ip", "Via")):
        return False
    try:
        return ip_address(request.META.get("REMOTE_ADDR", "")).is_loopback
    except ValueError:
        return False


def _has_token(request: HttpRequest) -> bool:
    """Only a token that is limited to no host: the numbers are of all of them."""
    try:
        found = TokenAuthentication().authenticate(Request(request))
    except AuthenticationFailed:
        return False
    return found is not None and found[0].actor.hosts is None


class Numbers(Collector):
    """The dashboard's numbers."""

    def collect(self) -> Iterable[Metric]:
        yield from _pools()
        yield _images()
        yield from work(timezone.now())
        up = GaugeMetricFamily("storage_admin_host_up", "1 if the host answered at the last contact", labels=["host"])
        for slug, status in Host.objects.values_list("slug", "status"):
            up.add_metric([slug], float(status != Host.Status.UNREACHABLE))
        yield up
        yield GaugeMetricFamily(
            "storage_admin_worker_up", "1 if a worker was alive in the last 30 seconds", value=float(worker_lives())
        )


POOL_GAUGES = {
    "capacity_bytes": "Size of the pool's filesystem",
    "available_bytes": "Available space on the pool's filesystem",
    "reserved_bytes": "Free space on the pool's filesystem that is reserved for root",
    "allocated_bytes": "Space that the pool's images occupy, with each inode counted once",
    "virtual_bytes": "Virtual (provisioned) size of the pool's images",
    "reclaimable_bytes": "Reclaimable space of the pool's analyzed images",
    "undo_bytes": "Space held by undo copies",
    "images": "Images in the pool",
    "warn_percent": "Usage above which an alert opens, in percent of the usable space",
}
#: What the row has as 0 where nobody has looked yet.
POOL_COUNTED = {"undo_bytes": "known_undo_bytes", "images": "known_count"}


def _pools() -> Iterable[Metric]:
    gauges = {
        name: GaugeMetricFamily(f"storage_admin_pool_{name}", text, labels=["host", "pool", "path"])
        for name, text in POOL_GAUGES.items()
    }
    scanned = GaugeMetricFamily(
        "storage_admin_pool_last_scan_timestamp_seconds",
        "Time of the pool's last scan",
        labels=["host", "pool", "path"],
    )
    for pool in StoragePool.objects.select_related("host").order_by("id"):
        labels = [pool.host.slug, pool.name, pool.path]
        for name, gauge in gauges.items():
            value = getattr(pool, POOL_COUNTED.get(name, name))
            if value is not None:
                gauge.add_metric(labels, value)
        if pool.last_scanned is not None:
            scanned.add_metric(labels, pool.last_scanned.timestamp())
    return [*gauges.values(), scanned]


def _images() -> Metric:
    gauge = GaugeMetricFamily("storage_admin_images", "Images by state", labels=["state"])
    counts = dict(Image.objects.order_by().values_list("state").annotate(Count("id")))
    for state in Image.State.values:
        gauge.add_metric([state], counts.get(state, 0))
    return gauge
