"""/healthz and /metrics."""

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import Client
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from storage_admin.api import health
from tests.factories import GIB, ImageFactory, JobFactory, StoragePoolFactory, WorkerFactory, an_hour_ago
from tests.harness.patching import raising
from tests.harness.services import RedisServer
from tests.working import client_as


@pytest.fixture
def broker(redis_server: RedisServer, settings: Any) -> RedisServer:
    settings.REDIS_URL = redis_server.url
    return redis_server


@pytest.fixture
def no_broker(tmp_path: Path, settings: Any) -> None:
    settings.REDIS_URL = f"unix://{tmp_path / 'nothing.sock'}"


@pytest.fixture
def silent_broker(tmp_path: Path, settings: Any) -> Iterator[None]:
    """Takes the connection and never answers."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        settings.REDIS_URL = f"unix://{tmp_path / 's'}"
        yield


def ask() -> tuple[int, list[str]]:
    response = Client().get("/healthz")
    return response.status_code, response.json()["missing"]


@pytest.mark.services
@pytest.mark.django_db
def test_healthy_with_database_broker_and_a_live_worker(broker: RedisServer) -> None:
    WorkerFactory.create(seen=an_hour_ago())
    assert ask() == (503, ["worker"])
    WorkerFactory.create(seen=timezone.now() - timedelta(seconds=20))
    assert ask() == (200, [])


@pytest.mark.django_db
def test_a_broker_that_is_away_is_named(no_broker: None) -> None:
    WorkerFactory.create()
    assert ask() == (503, ["broker"])


@pytest.mark.django_db
def test_a_broker_that_hangs_is_named_within_seconds(silent_broker: None) -> None:
    WorkerFactory.create()
    start = timezone.now()
    assert ask() == (503, ["broker"])
    assert timezone.now() - start < timedelta(seconds=10)


@pytest.mark.django_db
def test_a_database_that_is_away_is_named(no_broker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "cursor", raising(OperationalError("connection refused")))
    assert ask() == (503, ["database", "broker", "worker"])


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.values()))] = sample.value
    return found


@pytest.mark.django_db
def test_metrics_are_the_databases_numbers_and_the_unknown_has_no_sample() -> None:
    pool = StoragePoolFactory.create(
        host__slug="local", name="fast", path="/srv/fast", allocated_bytes=7 * GIB, reserved_bytes=GIB
    )
    ImageFactory.create(pool=pool)
    ImageFactory.create(pool=pool, state="missing")
    JobFactory.create(target=pool.host, state="failed")
    WorkerFactory.create()
    response = Client().get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain")
    found = samples(response.content.decode())
    labels = ("/srv/fast", "fast", "local")
    assert found["storage_admin_pool_allocated_bytes", labels] == 7 * GIB
    assert found["storage_admin_pool_available_bytes", labels] == 40 * GIB
    assert found["storage_admin_pool_reserved_bytes", labels] == GIB
    assert ("storage_admin_pool_reclaimable_bytes", labels) not in found
    assert (found["storage_admin_images", ("ok",)], found["storage_admin_images", ("missing",)]) == (1, 1)
    assert (found["storage_admin_jobs", ("failed",)], found["storage_admin_jobs", ("queued",)]) == (1, 0)
    assert (found["storage_admin_host_up", ("local",)], found["storage_admin_worker_up", ()]) == (1, 1)


@pytest.mark.django_db
def test_a_pools_name_cannot_forge_a_metric() -> None:
    StoragePoolFactory.create(name='x"} 1\nstorage_admin_worker_up 5\n#')
    found = samples(Client().get("/metrics").content.decode())
    assert found["storage_admin_worker_up", ()] == 0


@pytest.mark.parametrize(
    "seen_as", [{"REMOTE_ADDR": "192.0.2.7"}, {"HTTP_X_FORWARDED_FOR": "192.0.2.7"}, {"REMOTE_ADDR": ""}]
)
def test_metrics_from_elsewhere_need_a_token(client_of: Callable[..., Any], seen_as: dict[str, str]) -> None:
    assert Client().get("/metrics", **seen_as).status_code == 401  # type: ignore[arg-type]
    assert client_of("viewer").get("/metrics", **seen_as).status_code == 200
    assert client_of("viewer", expires=an_hour_ago()).get("/metrics", **seen_as).status_code == 401
    assert client_of("viewer", hosts=["local"]).get("/metrics", **seen_as).status_code == 401
    browser = client_as()
    assert browser.get("/metrics", **seen_as).status_code == 200  # type: ignore[arg-type]


@pytest.mark.django_db
def test_neither_is_changed_by_a_post() -> None:
    assert Client().post("/healthz").status_code == Client().post("/metrics").status_code == 405
    assert health.worker_lives() is False


@pytest.mark.django_db
def test_the_page_to_try_the_api_has_no_inline_script_or_style() -> None:
    page = Client().get("/api/v1/docs/")
    text = page.content.decode()
    assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    assert "<style" not in text
    assert " style=" not in text
    assert text.count("<script") == text.count("<script src=") == 3
    script = Client().get("/api/v1/docs/?script=")
    assert (script.status_code, script.headers["Content-Type"].split(";")[0]) == (200, "application/javascript")
