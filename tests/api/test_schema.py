"""The schema says what the API does: every endpoint is tried with generated input, within the process."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.db import close_old_connections, transaction
from django.test import Client
from drf_spectacular.generators import SchemaGenerator
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import one_of
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from benchmarks.models import Benchmark, Watch
from images.models import Image
from storage_admin.accounts.models import SavedView, Token, User
from storage_admin.agent.protocol import HostError
from storage_admin.guests.models import Guest
from storage_admin.hosts import asking, ssh
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from storage_admin.wsgi import application
from tests.factories import (
    HostFactory,
    ImageFactory,
    ImageSampleFactory,
    ImageUseFactory,
    JobFactory,
    JobLogFactory,
    PolicyPickFactory,
    PoolSampleFactory,
    SampleFactory,
    SavedViewFactory,
    TokenFactory,
    UserFactory,
    WatchFactory,
)

SEED = 20_261_120
SECRET = "sa_schema"
SIGNED_IN = {"Authorization": f"Bearer {SECRET}"}


@pytest.fixture
def one_connection(db: None) -> Iterator[None]:
    """Requests through WSGI leave the test's connection, and so its transaction, open."""
    signals = (request_started, request_finished)
    for signal in signals:
        signal.disconnect(close_old_connections)
    yield
    for signal in signals:
        signal.connect(close_old_connections)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a generated address is not connected to."""

    def nobody(*_: Any) -> Any:
        raise HostError("nobody is there")

    monkeypatch.setattr(ssh, "scan_keys", nobody)
    monkeypatch.setattr(asking, "ask", nobody)


@pytest.fixture
def api(one_connection: None, no_network: None) -> Any:
    """The schema as it is served, with one of everything behind it."""
    TokenFactory.create(role="admin", secret=SECRET)
    UserFactory.create()
    host = HostFactory.create(slug="local")
    base = ImageFactory.create(pool__host=host, in_use=None)
    image = ImageUseFactory.create(image=ImageFactory.create(backing=base, reclaimable_bytes=5)).image
    ImageSampleFactory.create(image=image)
    PoolSampleFactory.create(pool=base.pool)
    job = JobFactory.create(
        target=image, kind="reclaim", state="failed", error_code="tool_failed", result={"freed_bytes": 5}
    )
    JobLogFactory.create(job=job)
    SampleFactory.create(benchmark__pool=base.pool)
    WatchFactory.create(pool=base.pool)
    SavedViewFactory.create(shared=True)
    run = PolicyPickFactory.create(image=image, job=job, state="failed", code="tool_failed", reason="It broke.").run
    PolicyPickFactory.create(run=run, image=base, state="skipped", code="guests_unknown", reason="Nobody knows.")
    return schemathesis.openapi.from_wsgi("/api/v1/schema/", application, headers=SIGNED_IN)


def operations() -> list[tuple[str, str]]:
    """Every endpoint, read from the code: a test's parameters are made before there is a database."""
    schema: dict[str, Any] = SchemaGenerator().get_schema(public=True)  # type: ignore[no-untyped-call]
    return [(path, method) for path, methods in schema["paths"].items() for method in methods]


def real_id(path: str) -> int | None:
    """The id of a row that the address can be of."""
    models = {"hosts": Host, "pools": StoragePool, "guests": Guest, "images": Image, "jobs": Job, "tokens": Token}
    models |= {"users": User, "benchmarks": Benchmark, "benchmark-watches": Watch, "views": SavedView}
    model: Any = models.get(path.split("/")[3])
    return None if model is None or "{id}" not in path else int(model.objects.latest("pk").pk)


@pytest.mark.parametrize(("path", "method"), operations())
def test_answers_as_the_schema_says_whatever_is_asked(api: Any, path: str, method: str) -> None:
    operation = api[path][method.upper()]
    asked = [operation.as_strategy(mode) for mode in GenerationMode]
    if (found := real_id(path)) is not None:
        asked.append(operation.as_strategy(GenerationMode.POSITIVE, path_parameters={"id": found}))
    # An id that the schema allows need not be there; and the schema and its page are for everybody.
    left_out = [CHECKS.get_one("positive_data_acceptance")]
    if path.endswith(("/schema/", "/docs/")):
        left_out.append(CHECKS.get_one("ignored_auth"))
    answers: Counter[int] = Counter()

    @seed(SEED)
    @settings(
        max_examples=12, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=one_of(asked))
    def probe(case: Any) -> None:
        with transaction.atomic():
            response = case.call_and_validate(headers=SIGNED_IN, excluded_checks=left_out)
            answers[response.status_code] += 1
            transaction.set_rollback(True)

    print(f"seed {SEED}")
    probe()
    assert set(answers) != {401}
    print(dict(answers))


def test_the_schema_is_openapi_3_1_and_needs_no_sign_in(db: None) -> None:
    schema = json.loads(Client().get("/api/v1/schema/").content)
    assert schema["openapi"].startswith("3.1")
    assert set(schema["components"]["schemas"]["Error"]["required"]) == {"code", "detail", "fields"}
