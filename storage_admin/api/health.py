"""``/healthz`` for whoever watches."""

from datetime import timedelta

import redis
from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError, connection
from django.http import HttpRequest, JsonResponse
from django.utils import timezone
from django.views.decorators.http import require_safe

from storage_admin.jobs.models import Worker

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
