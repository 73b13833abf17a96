"""The schema says what the API does, to everybody: every endpoint is tried with generated input, within the process.

``SCHEMA_EXAMPLES=200`` in the environment tries that many inputs for each endpoint and each who asks, not a few.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import schemathesis
from axes.models import AccessAttempt
from django.core.signals import request_finished, request_started
from django.db import close_old_connections, transaction
from django.test import Client
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import one_of
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from benchmarks.models import Benchmark, Watch
from images.models import Image, Policy, PolicyRun
from storage_admin.accounts.models import SavedView, Token, User
from storage_admin.agent.protocol import HostError
from storage_admin.api.docs import schema
from storage_admin.events.models import Alert, Delivery, Webhook
from storage_admin.guests.models import Guest
from storage_admin.hosts import asking, ssh
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job
from storage_admin.wsgi import application
from tests.api.test_roles import ADMIN, ANYBODY, CASES, OPERATOR, RANKS, VIEWER, Case
from tests.benchmarks.factories import SampleFactory, WatchFactory
from tests.factories import (
    AlertFactory,
    DeliveryFactory,
    HostFactory,
    ImageFactory,
    ImageSampleFactory,
    ImageUseFactory,
    JobFactory,
    JobLogFactory,
    PolicyPickFactory,
    PoolSampleFactory,
    SavedViewFactory,
    TokenFactory,
    UserFactory,
)
from tests.harness.patching import raising

SEED = 20_261_120
#: How many inputs of each sort are tried.
EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "0"))
#: For everybody: the schema and its page.
OPEN = ("/schema/", "/docs/")
#: Who asks, how many inputs each sends to an endpoint, and the role that this is.
ASKERS = {
    "anonymous": (1, ANYBODY),
    "viewer": (3, VIEWER),
    "operator": (3, OPERATOR),
    "admin": (8, ADMIN),
    "elsewhere": (3, ADMIN),
}


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
    for module, name in ((ssh, "scan_keys"), (asking, "ask")):
        monkeypatch.setattr(module, name, raising(HostError("nobody is there")))


@pytest.fixture
def api(one_connection: None, no_network: None) -> Any:
    """The API by its schema, with one of everything behind it."""
    for role in (VIEWER, OPERATOR, ADMIN):
        TokenFactory.create(role=role, secret=f"sa_{role}")
    HostFactory.create(slug="elsewhere")  # before the others: the one that is asked for is the last
    TokenFactory.create(role=ADMIN, secret="sa_elsewhere", hosts=["elsewhere"])
    UserFactory.create()
    host = HostFactory.create(slug="local")
    base = ImageFactory.create(pool__host=host, in_use=None)
    image = ImageUseFactory.create(image=ImageFactory.create(backing=base, reclaimable_bytes=5)).image
    ImageSampleFactory.create(image=image)
    PoolSampleFactory.create(pool=base.pool)
    job = JobFactory.create(
        target=image, kind="reclaim", state="failed", error_code="tool_failed", result={"freed_bytes": 5}
    )
    JobFactory.create(target=base.pool, kind="upload", options={"name": "x", "size": 9}, kept={"received": 0})
    JobLogFactory.create(job=job)
    SampleFactory.create(benchmark__pool=base.pool)
    WatchFactory.create(pool=base.pool)
    SavedViewFactory.create(shared=True)
    AlertFactory.create(host="local")
    DeliveryFactory.create(state="given_up")
    AccessAttempt.objects.create(username="ann", ip_address="192.0.2.7", failures_since_start=6)
    run = PolicyPickFactory.create(image=image, job=job, state="failed", code="tool_failed", reason="It broke.").run
    PolicyPickFactory.create(run=run, image=base, state="skipped", code="guests_unknown", reason="Nobody knows.")
    return served()


@cache
def served() -> Any:
    """The schema as it is served; it takes a second to be read and is the same for all tests."""
    return schemathesis.openapi.from_wsgi("/api/v1/schema/", application)


def operations() -> list[tuple[str, str]]:
    """Every endpoint, read from the code: a test's parameters are made before there is a database."""
    return [(path, method) for path, methods in schema()["paths"].items() for method in methods]


def real_ids(path: str) -> dict[str, int]:
    """Ids of rows that the address can be of; none where it has no id."""
    models: dict[str, Any] = {
        "hosts": Host, "pools": StoragePool, "guests": Guest, "images": Image, "jobs": Job, "tokens": Token,
        "users": User, "benchmarks": Benchmark, "benchmark-watches": Watch, "views": SavedView, "policies": Policy,
        "alerts": Alert, "webhooks": Webhook, "lockouts": AccessAttempt, "uploads": Job,
    }  # fmt: skip
    if "{id}" not in path or "{uid}" in path:
        return {}
    kind = path.split("/")[3]
    rows = models[kind].objects.filter(kind="upload") if kind == "uploads" else models[kind].objects
    found = {"id": int(rows.latest("pk").pk)}
    for name, model in (("run", PolicyRun), ("delivery", Delivery)):
        if f"{{{name}}}" in path:
            found[name] = int(model._default_manager.latest("pk").pk)
    return found


def needed(method: str, path: str, status: int, body: Any) -> str:
    """The role that such an answer takes, by the table of roles; of a job also by its kind."""
    cases = [case for case in CASES if case.method == method and same_address(case.path, path) and case.answer < 300]
    fitting = [case for case in cases if case.answer == status] or cases
    assert fitting, f"{method} {path} is in no case"
    given = body if isinstance(body, dict) else {}
    fitting.sort(key=lambda one: (len(switches(one)), -RANKS.index(one.role)), reverse=True)
    case = next((one for one in fitting if all(given.get(name) is True for name in switches(one))), fitting[-1])
    if path.endswith("/jobs/") and status == 202:
        return max(case.role, kinds.get(given["kind"]).role.label, key=RANKS.index)
    return case.role


def changes_nothing(method: str, path: str, body: Any) -> bool:
    """Whether a shared view was asked for no change but which view a list begins with: that is each user's own."""
    given = body.keys() if isinstance(body, dict) else set()
    return method.upper() == "PATCH" and path.endswith("/views/{id}/") and not given - {"default"}


def switches(case: Case) -> list[str]:
    """What is true in the case's body, and so decides what it is."""
    return [name for name, value in case.body.items() if value is True]


def same_address(case_path: str, path: str) -> bool:
    parts, others = case_path.partition("?")[0].split("/"), path.removeprefix("/api/v1/").split("/")
    return len(parts) == len(others) and all(
        one == other or (one.startswith("{") and other.startswith("{"))
        for one, other in zip(parts, others, strict=True)
    )


@pytest.mark.fuzz
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("path", "method"), operations())
def test_answers_as_the_schema_says_and_no_more_than_the_role_may_whatever_is_asked(
    api: Any, path: str, method: str
) -> None:
    found = real_ids(path)
    answers = {asker: probed(api[path][method.upper()], asker, found) for asker in ASKERS}
    print(f"seed {SEED}", answers)
    if not path.endswith(OPEN):
        assert set(answers.pop("anonymous")) == {401}
    assert {status for counted in answers.values() for status in counted} != {401}


def probed(operation: Any, asker: str, found: dict[str, int]) -> Counter[int]:
    """How often each status came, of inputs that are as the schema says, and of others."""
    count, role = ASKERS[asker]
    method, path = operation.method, operation.path
    asked = [operation.as_strategy(mode) for mode in GenerationMode]
    if found:
        asked.append(operation.as_strategy(GenerationMode.POSITIVE, path_parameters=found))
    # An id that the schema allows need not be there. That a wrong token opens nothing is tried as admin.
    left_out = [CHECKS.get_one("positive_data_acceptance")]
    if path.endswith(OPEN) or asker != ADMIN:
        left_out.append(CHECKS.get_one("ignored_auth"))
    headers = {} if asker == "anonymous" else {"Authorization": f"Bearer sa_{asker}"}
    answers: Counter[int] = Counter()

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES or count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=one_of(asked))
    def probe(case: Any) -> None:
        with transaction.atomic():
            status = case.call_and_validate(headers=headers, excluded_checks=left_out).status_code
            answers[status] += 1
            if 200 <= status < 300 and not changes_nothing(method, path, case.body):
                least = needed(method, path, status, case.body)
                assert RANKS.index(role) >= RANKS.index(least), f"{asker} got {status}; that takes {least}"
                where = (case.path_parameters or {}).get("id")
                assert asker != "elsewhere" or where != found.get("id", -1), f"{where} is on another host"
            transaction.set_rollback(True)

    probe()
    return answers


def test_the_schema_is_openapi_3_1_and_needs_no_sign_in(db: None) -> None:
    schema = json.loads(Client().get("/api/v1/schema/").content)
    assert schema["openapi"].startswith("3.1")
    assert set(schema["components"]["schemas"]["Error"]["required"]) == {"code", "detail", "fields"}
