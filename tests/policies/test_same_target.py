"""Two policies that analyze the same image, or measure the same pool: one after the other, and nothing twice."""

from typing import Any

import pytest
from django.utils import timezone

from images.models import PolicyRun
from images.policies import runs, services, submitting
from images.policies.shape import Rules
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job
from tests.factories import ImageFactory, JobFactory, PolicyFactory, StoragePoolFactory
from tests.harness.patching import do_before
from tests.jobs.test_claims import at_once
from tests.policies.test_runs import MINUTE, NOW, at_work, end, images, picks, stepped
from tests.working import OPERATOR

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet"), pytest.mark.sql]
DD = {"kind": "dd"}


def both_chosen(kind: str, *options: dict[str, Any]) -> list[PolicyRun]:
    """Runs of policies that have all chosen, of which none has submitted anything."""
    found = []
    for wanted in options:
        policy = PolicyFactory.create(kind=kind, options=kinds.get(kind).clean(wanted))
        run = services.run_now(OPERATOR, policy, NOW)
        runs._choose(run, Rules.from_json(run.rules), NOW)
        found.append(run)
    return found


def target_of(kind: str) -> None:
    if kind == "analyze":
        ImageFactory.create(name="one")
    else:
        StoragePoolFactory.create(name="one", available_bytes=90 << 30)


@pytest.mark.parametrize(("kind", "options"), [("analyze", {}), ("benchmark", DD)])
def test_what_another_policy_does_already_waits_and_is_not_done_again(kind: str, options: dict[str, Any]) -> None:
    target_of(kind)
    first, second = both_chosen(kind, options, options)
    runs.work(NOW)
    assert at_work() == ["one"]
    assert (picks(first), picks(second)) == ([("one", "submitted", "")], [("one", "chosen", "busy")])
    end()
    runs.work(timezone.now() + MINUTE)
    assert at_work() == []
    assert (picks(first), picks(second)) == ([("one", "succeeded", "")], [("one", "skipped", "done_meanwhile")])


@pytest.mark.parametrize(("kind", "options"), [("analyze", {}), ("benchmark", DD)])
def test_what_went_wrong_for_another_policy_is_done_when_its_turn_comes(kind: str, options: dict[str, Any]) -> None:
    target_of(kind)
    _first, second = both_chosen(kind, options, options)
    runs.work(NOW)
    end("failed", error_code="bug")
    runs.work(timezone.now() + MINUTE)
    assert (at_work(), picks(second)) == (["one"], [("one", "submitted", "")])


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("benchmark", DD, {"kind": "preallocation"}), ("analyze", {"mode": "sample"}, {"mode": "full"})],
)
def test_another_measurement_or_a_closer_look_is_done_after_the_first_one(
    kind: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    target_of(kind)
    _first, later = both_chosen(kind, first, second)
    assert picks(stepped(later, NOW)) == [("one", "chosen", "busy")]
    end()
    runs.work(timezone.now() + MINUTE)
    assert (at_work(), picks(later)) == (["one"], [("one", "submitted", "")])


def test_what_a_person_analyzes_since_the_run_chose_waits_and_keeps_no_other_from_the_slot() -> None:
    first, _second = images(2)
    (run,) = both_chosen("analyze", {})
    job = JobFactory.create(target=first, kind="analyze", state="running")
    assert sorted(picks(stepped(run, NOW))) == [("disk0", "chosen", "busy"), ("disk1", "submitted", "")]
    Job.objects.filter(pk=job.pk).update(state="succeeded", finished=timezone.now())
    assert min(picks(stepped(run, timezone.now() + MINUTE))) == ("disk0", "chosen", "")


def test_a_job_that_comes_and_ends_between_the_look_and_the_submission_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = ImageFactory.create(name="one")
    (run,) = both_chosen("analyze", {})
    done = {"target": image, "kind": "analyze", "state": "succeeded"}
    with monkeypatch.context() as patched:
        do_before(patched, submitting, "planned", lambda *_, **__: JobFactory.create(**done, finished=timezone.now()))
        runs.work(NOW)
    assert (at_work(), picks(run)) == ([], [("one", "chosen", "")])
    assert picks(stepped(run, timezone.now() + MINUTE)) == [("one", "skipped", "done_meanwhile")]


@pytest.mark.django_db(transaction=True)
def test_of_two_policies_that_submit_at_the_same_moment_one_does() -> None:
    target_of("analyze")
    both = both_chosen("analyze", {}, {})
    answers = at_once(2, lambda number: runs.step(both[number], NOW))
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert at_work() == ["one"]
    assert sorted(pick for run in both for pick in picks(run)) == [("one", "chosen", "busy"), ("one", "submitted", "")]
