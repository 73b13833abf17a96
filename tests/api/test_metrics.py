"""What Prometheus reads: names by its rules, the database's numbers, and quickly."""

import re
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.test import Client
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from storage_admin.jobs import automation
from storage_admin.jobs.models import Automation, Job
from tests.factories import (
    GIB,
    AlertFactory,
    DeliveryFactory,
    HostFactory,
    ImageFactory,
    JobFactory,
    PolicyRunFactory,
    StoragePoolFactory,
)
from tests.working import at_most_queries

pytestmark = pytest.mark.sql

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
LABELS = {"host", "pool", "path", "kind", "state", "severity", "policy", "le"}
Found = dict[tuple[str, frozenset[str]], float]


def families() -> list[Any]:
    answer = Client().get("/metrics")
    assert answer.status_code == 200
    return list(text_string_to_metric_families(answer.content.decode()))


def samples() -> Found:
    return {
        (sample.name.removeprefix("storage_admin_"), frozenset(sample.labels.values())): sample.value
        for family in families()
        for sample in family.samples
    }


def at(found: Found, name: str, *labels: str) -> float:
    return found[name, frozenset(labels)]


@pytest.fixture
def everything(db: None) -> None:
    """One of everything."""
    now = timezone.now()
    pool = StoragePoolFactory.create(host__slug="alpha", name="fast", reclaimable_bytes=GIB, undo_bytes=2 * GIB)
    image = ImageFactory.create(pool=pool)
    JobFactory.create(kind="analyze", target=image, state="failed", created=now - timedelta(days=3), finished=now)
    JobFactory.create(kind="check", target=image, state="queued", created=now - timedelta(days=2), parked_at=now)
    JobFactory.create(kind="check", target=image, state="running", created=now - timedelta(days=2))
    common = {"kind": "reclaim", "target": image, "created": now - timedelta(hours=2), "started": now}
    for seconds, freed in ((4, 3 * GIB), (70, GIB)):
        JobFactory.create(
            state="succeeded", finished=now + timedelta(seconds=seconds), freed_bytes=freed, freed_at=now, **common
        )
    JobFactory.create(
        state="succeeded", finished=now + timedelta(seconds=8), freed_bytes=0, undo_state="available",
        undo_bytes=2 * GIB, undo_expires=now, **common
    )  # fmt: skip
    JobFactory.create(kind="scan", target=pool.host, state="queued", created=now - timedelta(seconds=100))
    JobFactory.create(kind="scan", target=pool.host, state="queued", created=now - timedelta(seconds=10))
    PolicyRunFactory.create(policy__name="nights", state="finished", due=now - timedelta(days=1))
    PolicyRunFactory.create(policy__name="days", state="failed", due=now)
    AlertFactory.create(key="pool_over_threshold:1", acknowledged=now, acknowledged_by="ann")
    AlertFactory.create(key="pool_over_threshold:2")
    AlertFactory.create(key="broken_chain:1", severity="danger", closed=now)
    DeliveryFactory.create(event__at=now - timedelta(minutes=5))
    DeliveryFactory.create(state="given_up")
    DeliveryFactory.create(state="sent")


@pytest.mark.django_db
@pytest.mark.parametrize(("held", "last_scanned", "shown"), [(0, None, None), (GIB, None, GIB), (0, timezone.now(), 0)])
def test_undo_copies_in_a_pool_that_was_never_scanned_have_no_sample(
    held: int, last_scanned: datetime | None, shown: int | None
) -> None:
    pool = StoragePoolFactory.create(host__slug="alpha", name="fast", undo_bytes=held, last_scanned=last_scanned)
    assert samples().get(("pool_undo_bytes", frozenset({"alpha", "fast", pool.path}))) == shown


@pytest.mark.usefixtures("everything")
def test_jobs_by_kind_and_state_and_how_long_the_queue_is() -> None:
    found = samples()
    assert at(found, "jobs", "queued") == 3
    assert at(found, "jobs_active", "alpha", "scan", "queued") == 2
    assert at(found, "jobs_active", "alpha", "check", "running") == 1
    assert at(found, "jobs_parked", "alpha", "check") == 1
    assert 99 < at(found, "queue_oldest_age_seconds", "alpha", "scan") < 130
    # What waits for somebody to shut a guest down does not make the queue look stuck.
    assert ("queue_oldest_age_seconds", frozenset({"alpha", "check"})) not in found


@pytest.mark.usefixtures("everything")
def test_recent_jobs_are_those_submitted_within_the_window() -> None:
    found = samples()
    assert at(found, "recent_jobs_ended", "reclaim", "succeeded") == 3
    assert at(found, "recent_jobs_median_seconds", "reclaim") == 8
    assert at(found, "recent_jobs_longest_seconds", "reclaim") == 70
    assert at(found, "recent_window_seconds") == pytest.approx(86_400, abs=5)
    assert ("recent_jobs_ended", frozenset({"analyze", "failed"})) not in found


@pytest.mark.usefixtures("everything")
def test_durations_and_bytes_of_the_ledger() -> None:
    found = samples()
    buckets = {bound: at(found, "job_duration_seconds_bucket", "reclaim", bound) for bound in ("1.0", "5.0", "15.0")}
    assert buckets == {"1.0": 0, "5.0": 1, "15.0": 2}
    assert at(found, "job_duration_seconds_bucket", "reclaim", "300.0") == 3
    assert at(found, "job_duration_seconds_bucket", "reclaim", "+Inf") == 3
    assert at(found, "job_duration_seconds_count", "reclaim") == 3
    assert at(found, "job_duration_seconds_sum", "reclaim") == 82
    assert at(found, "ledger_freed_bytes", "reclaim") == 4 * GIB
    assert (at(found, "undo_held_bytes"), at(found, "undo_copies")) == (2 * GIB, 1)


@pytest.mark.usefixtures("everything")
def test_policies_alerts_and_deliveries() -> None:
    Automation.objects.create(paused=True, by="ann")
    assert automation.is_paused()
    found = samples()
    assert at(found, "policy_last_run_state", "days", "failed") == 1
    assert at(found, "policy_last_run_state", "nights", "failed") == 0
    assert at(found, "policy_last_run_timestamp_seconds", "days") == pytest.approx(time.time(), abs=60)
    assert at(found, "policy_enabled", "nights") == at(found, "automation_paused") == 1
    assert at(found, "alerts_open", "pool_over_threshold", "warning") == 2
    assert at(found, "alerts_unacknowledged", "pool_over_threshold", "warning") == 1
    assert at(found, "alerts_open", "broken_chain", "danger") == 0
    assert (at(found, "deliveries_due"), at(found, "deliveries_given_up")) == (1, 1)
    assert 299 < at(found, "deliveries_oldest_due_age_seconds") < 330


@pytest.mark.usefixtures("everything")
def test_names_labels_and_help_are_as_prometheus_wants_them() -> None:
    found = families()
    names = [family.name for family in found]
    assert len(names) == len(set(names)) > 30
    for family in found:
        assert re.fullmatch(r"storage_admin_[a-z0-9_]+", family.name), family.name
        assert family.documentation, family.name
        assert family.type in {"gauge", "histogram"}, family.name
        if family.type == "gauge":  # these endings belong to other types
            assert not family.name.endswith(("_count", "_sum", "_bucket", "_total", "_info")), family.name
        for sample in family.samples:
            assert set(sample.labels) <= LABELS, sample


@pytest.mark.usefixtures("everything")
def test_the_page_of_the_documentation_names_each_metric_and_no_other() -> None:
    told = set(re.findall(r"storage_admin_[a-z_]+", DOCS.read_text()))
    told = {re.sub(r"(duration_seconds)_(bucket|sum|count)$", r"\1", name) for name in told}
    assert told == {family.name for family in families()}


def test_the_sample_rules_are_yaml_with_an_expression_and_a_sentence_each() -> None:
    block = re.search(r"```yaml\n(groups:.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None
    rules = [rule for group in yaml.safe_load(block[1])["groups"] for rule in group["rules"]]
    assert len(rules) >= 8
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule
        assert re.search(r"storage_admin_|\bup\b", rule["expr"]), rule
        assert rule["expr"].count("(") == rule["expr"].count(")"), rule
        assert rule["annotations"]["summary"], rule


@pytest.mark.django_db
def test_the_number_of_questions_does_not_grow_with_what_there_is() -> None:
    host = HostFactory.create()
    PolicyRunFactory.create_batch(10)
    StoragePoolFactory.create_batch(10, host=host)
    now = timezone.now()
    Job.objects.bulk_create(
        Job(kind=f"kind{n % 7}", state="succeeded", host=host, target_kind="host", target_id=host.pk, created=now,
            started=now, finished=now, created_by="x", freed_bytes=n)
        for n in range(3_000)
    )  # fmt: skip
    with at_most_queries(30):
        begin = time.perf_counter()
        families()
        took = time.perf_counter() - begin
    assert took < 3
