"""Somebody else deletes or changes a policy at the moment in which it is changed, run, stopped or deleted."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any

import pytest

from images.models import Policy, PolicyRun
from images.policies import clock, services
from storage_admin.accounts.models import Actor, AuditEntry, ForbiddenError, Role
from storage_admin.errors import NotFoundError
from tests.factories import HostFactory, PolicyFactory, PolicyRunFactory
from tests.harness.patching import do_before
from tests.jobs.test_claims import at_once
from tests.policies.test_runs import NOW, begun
from tests.working import ADMIN, OPERATOR, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize(
    "act",
    [
        lambda policy: services.change(ADMIN, policy, {"enabled": False}),
        lambda policy: services.run_now(OPERATOR, policy, NOW + timedelta(minutes=1)),
        lambda policy: services.remove(ADMIN, policy),
    ],
    ids=["change", "run", "remove"],
)
def test_what_somebody_has_deleted_is_not_there_for_who_has_read_it_before(act: Callable[[Policy], Any]) -> None:
    policy = PolicyFactory.create()
    read = Policy.objects.get()
    services.remove(ADMIN, policy)
    with pytest.raises(NotFoundError):
        act(read)
    assert not Policy.objects.exists()
    assert AuditEntry.objects.filter(what="policy deleted").count() == 1


def test_a_run_that_went_with_its_policy_is_not_there_to_be_stopped() -> None:
    begun(PolicyFactory.create())
    run = PolicyRun.objects.select_related("policy").get()
    services.remove(ADMIN, Policy.objects.get())
    with pytest.raises(NotFoundError):
        services.stop(OPERATOR, run)


@pytest.mark.parametrize(
    "act",
    [
        lambda actor, run: services.change(actor, run.policy, {"hosts": run.policy.hosts, "enabled": False}),
        lambda actor, run: services.run_now(actor, run.policy, NOW + timedelta(minutes=1)),
        services.stop,
        lambda actor, run: services.remove(actor, run.policy),
    ],
    ids=["change", "run", "stop", "remove"],
)
def test_what_somebody_has_widened_is_left_alone_by_who_sees_only_a_part_of_it(
    act: Callable[[Actor, PolicyRun], Any],
) -> None:
    mine = HostFactory.create()
    run = PolicyRunFactory.create(policy=PolicyFactory.create(hosts=[mine.pk]), due=NOW)
    services.change(ADMIN, Policy.objects.get(), {"hosts": []})
    with pytest.raises(ForbiddenError):
        act(Actor("lea", Role.ADMIN, hosts=frozenset({mine.slug})), run)
    row = Policy.objects.get()
    assert (row.hosts, row.enabled, reread(run).state) == ([], True, run.state)


@pytest.mark.django_db(transaction=True)
def test_a_policy_that_is_deleted_while_it_is_being_changed_stays_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, threads = PolicyFactory.create(), list[Thread]()

    def meanwhile(*_: Any) -> None:
        # In the middle of the change; it may have to wait until that is over.
        threads.append(in_background(lambda: services.remove(ADMIN, Policy.objects.get(pk=policy.pk))))

    do_before(monkeypatch, services, "clean", meanwhile)
    services.change(ADMIN, policy, {"max_jobs_per_host": 2})
    for thread in threads:
        thread.join()
    assert not Policy.objects.exists()


def in_background(act: Callable[[], Any]) -> Thread:
    thread = Thread(target=at_once, args=(1, lambda _number: act()))
    thread.start()
    thread.join(0.3)
    return thread


def test_a_change_keeps_what_the_scheduler_and_others_have_written_since_the_policy_was_read() -> None:
    PolicyFactory.create(clock=datetime(2026, 5, 1, 12, tzinfo=UTC))
    read = Policy.objects.get()
    clock.advance(datetime(2026, 5, 10, 12, tzinfo=UTC))
    services.change(ADMIN, Policy.objects.get(), {"min_age_hours": 7})
    services.change(ADMIN, read, {"max_jobs_per_host": 2})
    row = Policy.objects.get()
    assert row.clock == datetime(2026, 5, 9, 22, tzinfo=UTC)
    assert (row.min_age_hours, row.max_jobs_per_host) == (7, 2)
