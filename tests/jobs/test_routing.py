"""Which queue a job is rung into, and which jobs a worker takes."""

from datetime import timedelta
from typing import Any

import pytest
from celery import current_app
from django.db import connection
from django.utils import timezone
from pytest_django import Settings

from images.rewrite.libvirt_events import watchers
from images.tasks import look_at_guests, look_at_guests_of
from storage_admin.agent.protocol import HostError
from storage_admin.hosts import transport
from storage_admin.hosts.libvirt import control, uri
from storage_admin.hosts.models import Host
from storage_admin.hosts.services import ensure_local_host
from storage_admin.jobs import claims, routing
from storage_admin.jobs.models import Job, Worker
from tests.factories import HostFactory, ImageFactory, JobFactory, WorkerFactory
from tests.harness.patching import do_before
from tests.jobs.test_claims import claimed
from tests.working import reread

pytestmark = [pytest.mark.django_db, pytest.mark.sql]

ELSEWHERE = {"machine_id": "0" * 32, "hostname": "elsewhere"}


@pytest.fixture
def rung(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str | None]]:
    """The messages that were sent: task, its one argument, queue."""
    sent: list[tuple[str, int, str | None]] = []

    monkeypatch.setattr(
        current_app, "send_task", lambda name, args, queue=None, **_: sent.append((name, args[0], queue))
    )
    return sent


@pytest.fixture(autouse=True)
def general_post(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own process as a general worker; what it decides on is forgotten afterwards."""
    monkeypatch.setattr(routing, "_post", routing.Post(general=True))


def an_ssh_host(slug: str, **columns: Any) -> Host:
    return HostFactory.create(slug=slug, kind=Host.Kind.SSH, transport=Host.Transport.SSH, **columns)


def queue_of(job: Job, rung: list[tuple[str, int, str | None]]) -> str | None:
    routing.ring_now(job.pk)
    name, job_id, queue = rung.pop()
    assert (name, job_id, rung) == (routing.RUN_JOB, job.pk, [])
    return queue


def test_a_job_is_rung_into_its_hosts_queue_while_a_worker_for_it_is_alive(rung: list[Any]) -> None:
    job, other = (JobFactory.create(target=an_ssh_host(slug)) for slug in ("a", "b"))
    assert (queue_of(job, rung), queue_of(other, rung)) == (None, None)
    worker = WorkerFactory.create(host="a", general=False)
    assert (queue_of(job, rung), queue_of(other, rung)) == ("host.a", None)
    Worker.objects.filter(pk=worker.pk).update(seen=timezone.now() - routing.ALIVE - timedelta(seconds=1))
    assert queue_of(job, rung) is None


def test_a_job_that_is_no_longer_there_is_rung_for_where_it_does_no_harm(rung: list[Any]) -> None:
    WorkerFactory.create(host="a", general=False)
    routing.ring_now(4711)
    assert rung == [(routing.RUN_JOB, 4711, None)]


def test_a_worker_for_a_host_takes_the_jobs_of_no_other(settings: Settings) -> None:
    settings.WORKER_HOST = "a"
    routing.take_post()
    own, foreign = (JobFactory.create(target=an_ssh_host(slug)) for slug in ("a", "b"))
    local = JobFactory.create(target=HostFactory.create(slug="local"))
    before = list(Job.objects.filter(pk__in=[foreign.pk, local.pk]).order_by("pk").values())
    assert [claims.claim(job.pk, "w") for job in (foreign, local)] == [None, None]
    assert list(Job.objects.filter(pk__in=[foreign.pk, local.pk]).order_by("pk").values()) == before
    assert transport.is_here(claimed(own).host)


def test_a_general_worker_takes_the_jobs_of_every_host_but_those_of_another_local_machine() -> None:
    here = JobFactory.create(target=HostFactory.create(slug="local", capabilities=transport.machine_facts()))
    by_ssh = JobFactory.create(target=an_ssh_host("a", capabilities=ELSEWHERE))
    elsewhere = JobFactory.create(target=HostFactory.create(slug="other", name="Other", capabilities=ELSEWHERE))
    taken = [claims.claim(job.pk, "w") for job in (here, by_ssh, elsewhere)]
    assert [job is not None for job in taken] == [True, True, False]
    assert (reread(elsewhere).state, elsewhere.waiting_for) == ("queued", "a worker on Other")
    WorkerFactory.create(host="other", general=True)
    Job.objects.filter(pk=elsewhere.pk).update(waiting_for="")
    assert claims.claim(elsewhere.pk, "w") is None
    assert reread(elsewhere).waiting_for == ""


def test_a_process_that_is_told_so_is_on_no_host(settings: Settings) -> None:
    host = HostFactory.create(slug="local", capabilities=transport.machine_facts())
    assert transport.is_here(host)
    settings.LOCAL_MACHINE = False
    assert not transport.is_here(host)
    assert claims.claim(JobFactory.create(target=host).pk, "w") is None
    assert routing.take_post() == routing.Post(general=True)


def test_a_general_worker_listens_for_the_machine_that_it_runs_on_as_well() -> None:
    HostFactory.create(slug="other", capabilities=ELSEWHERE)
    assert routing.take_post().queues == ["celery"]
    HostFactory.create(slug="local", capabilities=transport.machine_facts())
    assert routing.take_post().queues == ["celery", "host.local"]


def test_a_worker_for_a_host_listens_to_its_queue_alone(settings: Settings) -> None:
    HostFactory.create(slug="local", capabilities=transport.machine_facts())
    settings.WORKER_HOST = "a"
    assert routing.take_post().queues == ["host.a"]


def test_local_is_the_machine_that_said_so_first_unless_the_database_is_a_file_on_this_one() -> None:
    assert transport.machine_of(ensure_local_host()) == transport.this_machine() != ""
    Host.objects.update(capabilities=ELSEWHERE)
    moved = transport.is_this_machine(ensure_local_host())
    assert moved == (connection.vendor == "sqlite")
    assert (transport.machine_of(Host.objects.get()) == transport.this_machine()) == moved


def test_libvirt_on_another_local_machine_is_unknown_and_not_absent() -> None:
    host = HostFactory.create(slug="local", capabilities=ELSEWHERE)
    with pytest.raises(HostError, match="Only a worker on that machine"), uri.uri_of(host):
        pass


def test_guests_are_looked_at_by_the_worker_of_their_host(
    rung: list[Any], monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    asked, task = list[str](), look_at_guests_of
    monkeypatch.setattr(control, "states", lambda host: {"g": "running"})
    do_before(monkeypatch, control, "states", lambda host: asked.append(host.slug))
    # Nobody listens to libvirt in a thread that outlives the test.
    monkeypatch.setattr(watchers, "attend", lambda host_ids: None)
    monkeypatch.setattr(task, "apply_async", lambda args, queue, **_: rung.append((task.name, args[0], queue)))
    hosts = [an_ssh_host(slug) for slug in ("a", "b")]
    for host in hosts:
        now = timezone.now()
        JobFactory.create(
            kind="reclaim", target=ImageFactory.create(pool__host=host), options={"wait_hours": 1}, parked_at=now,
            wait_until=now + timedelta(hours=1), waited_guests=[{"kind": "domain", "uid": "g", "name": "g"}],
        )  # fmt: skip
    WorkerFactory.create(host="a", general=False)
    look_at_guests()
    assert (asked, rung) == (["b"], [(look_at_guests_of.name, hosts[0].pk, "host.a")])
    settings.WORKER_HOST = "a"
    asked.clear()
    for host in hosts:
        look_at_guests_of(host.pk)
    assert asked == ["a"]
