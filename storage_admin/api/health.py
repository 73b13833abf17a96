"""``/healthz`` for whoever watches, ``/metrics`` for Prometheus."""

from collections.abc import Iterable
from datetime import timedelta
from ipaddress import ip_address

import redis
from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError, connection
from django.db.models import Count
from django.http import HttpRequest, HttpResponse, JsonResponse
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
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job, Worker

#: A worker beats every ten seconds.
WORKER_SILENCE = timedelta(seconds=30)
BROKER_TIMEOUT = 1.0


@require_safe
@login_not_required
def healthz(_request: HttpRequest) -> JsonResponse:
    """200 when database, broker and a live worker are there; else 503. The body says which is missing."""
    database = database_answers()
    parts = {"database": database, "broker": broker_answers(), "worker": database and worker_lives()}
    missing = [name for name, there in parts.items() if not there]
    answer = {"status": "missing" if missing else "ok", "missing": missing, **parts}
    return JsonResponse(answer, status=503 if missing else 200)


def database_answers() -> bool:
    """Whether the database answers a query."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            return bool(cursor.fetchone() == (1,))
    except DatabaseError:
        return False


def broker_answers() -> bool:
    """Whether Redis answers within a second."""
    broker = redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=BROKER_TIMEOUT, socket_connect_timeout=BROKER_TIMEOUT
    )
    try:
        return bool(broker.ping())
    except (redis.RedisError, OSError):
        return False
    finally:
        broker.close()


def worker_lives() -> bool:
    """Whether a worker for every host was alive within the last 30 seconds. One for a single host does not do: what the
    scheduler rings for is not for it.
    """
    try:
        return Worker.objects.filter(general=True, seen__gte=timezone.now() - WORKER_SILENCE).exists()
    except DatabaseError:
        return False


@require_safe
@login_not_required
def metrics(request: HttpRequest) -> HttpResponse:
    """Prometheus text. For this machine itself, for a token (``Authorization: Bearer``), and for who is signed in."""
    if not _may_read(request):
        answer = HttpResponse(
            "Send a token of the role viewer that is limited to no host: Authorization: Bearer TOKEN\n",
            "text/plain",
            status=401,
        )
        answer["WWW-Authenticate"] = "Bearer"
        return answer
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Inventory())
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


class Inventory(Collector):
    """The dashboard's numbers. What is not known has no sample; it is never 0."""

    def collect(self) -> Iterable[Metric]:
        yield from _pools()
        yield _images()
        yield _jobs()
        up = GaugeMetricFamily(
            "storage_admin_host_up", "Whether the host answered when it was last asked", labels=["host"]
        )
        for slug, status in Host.objects.values_list("slug", "status"):
            up.add_metric([slug], float(status != Host.Status.UNREACHABLE))
        yield up
        yield GaugeMetricFamily(
            "storage_admin_worker_up", "Whether a worker was alive in the last 30 seconds", value=float(worker_lives())
        )


POOL_GAUGES = {
    "capacity_bytes": "Size of the pool's filesystem",
    "available_bytes": "Space that is free on it",
    "allocated_bytes": "What the pool's images occupy, each inode once",
    "virtual_bytes": "What they promise to guests",
    "reclaimable_bytes": "What could be won back from those that were analyzed",
    "undo_bytes": "What undo copies hold",
    "images_count": "Images in the pool",
}


def _pools() -> Iterable[Metric]:
    gauges = {
        column: GaugeMetricFamily(
            f"storage_admin_pool_{column.removesuffix('_count')}", text, labels=["host", "pool", "path"]
        )
        for column, text in POOL_GAUGES.items()
    }
    for pool in StoragePool.objects.select_related("host").order_by("id"):
        for column, gauge in gauges.items():
            value = getattr(pool, column)
            if value is not None:
                gauge.add_metric([pool.host.slug, pool.name, pool.path], value)
    return gauges.values()


def _images() -> Metric:
    gauge = GaugeMetricFamily("storage_admin_images", "Images by state", labels=["state"])
    counts = dict(Image.objects.order_by().values_list("state").annotate(Count("id")))
    for state in Image.State.values:
        gauge.add_metric([state], counts.get(state, 0))
    return gauge


def _jobs() -> Metric:
    gauge = GaugeMetricFamily("storage_admin_jobs", "Jobs by state", labels=["state"])
    counts = dict(Job.objects.order_by().values_list("state").annotate(Count("id")))
    for state in Job.State.values:
        gauge.add_metric([state], counts.get(state, 0))
    return gauge
