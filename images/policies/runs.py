"""A run at work: what it chose, what of that is submitted as slots come free, and what became of each.

Every step is a compare-and-set on the row that it changes, and begins with what the rows say: two schedulers do each
once, and what a crash has cut off is taken up by the next step.
"""

import logging
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q, QuerySet

from images.models import PolicyPick, PolicyRun
from images.policies import alerts, forgetting, looking, submitting
from images.policies.reasons import Skip
from images.policies.rules import Candidate, Choice
from images.policies.shape import Rules
from storage_admin.accounts.models import audit
from storage_admin.batches import batched
from storage_admin.jobs import automation
from storage_admin.jobs import services as jobs
from storage_admin.jobs.models import Job

logger = logging.getLogger(__name__)

#: With this begins what a run's detail says of its last step's failure; what stands before it stays.
_STUCK = "The run cannot continue for now: "
#: Picks that one transaction writes, and after how long somebody who writes them is taken to be gone.
AT_ONCE, CHOOSES_WITHIN = 1000, timedelta(minutes=5)
#: The image was not as the plan knew it: the job's refusal leaves it out, and nothing has failed.
_WORLD_MOVED = frozenset(
    {
        "guest_running", "guest_off", "image_in_use", "guests_unknown", "guest_locked", "stale_plan",
        "not_enough_space", "busy", "has_internal_snapshots", "hard_linked", "shared_pool", "chain_broken",
        "format_mismatch", "merged", "unsupported_pool",
    }
)  # fmt: skip


def work(now: datetime) -> None:
    """Takes every run that is not settled one step further. What is wrong with one does not keep the others."""
    unsettled = Q(state=PolicyRun.State.RUNNING) | Q(state=PolicyRun.State.STOPPED, finished=None)
    for run in PolicyRun.objects.filter(unsettled).select_related("policy").order_by("due", "id"):
        try:
            step(run, now)
        except Exception as error:
            logger.exception("policy run %s", run.pk)
            stuck = f"{_unstuck(run.detail)} {_STUCK}{type(error).__name__}: {error}"
            PolicyRun.objects.filter(pk=run.pk, state=PolicyRun.State.RUNNING).update(detail=stuck.strip()[:1000])


def step(run: PolicyRun, now: datetime) -> None:
    """One step of a run."""
    rules = Rules.from_json(run.rules)
    running = run.state == PolicyRun.State.RUNNING
    if running and run.chosen_at is None and now < run.ends:
        _choose(run, rules, now)
    if running and run.chosen_at is None and now < run.ends:
        return  # somebody else is writing down what it chose
    _settle(run, now)
    if running and now >= last_start(run, rules):
        _end_window(run, rules, now)
    elif running and automation.is_paused():
        _hold_back(run, rules)
    elif running:
        submitting.submit(run, rules, now)
    elif not running:
        # What another scheduler submitted, or held back, while this run was being stopped.
        close(run, rules, "policy_stopped", run.detail)
    if running and run.chosen_at is not None:
        _says(run, _unstuck(run.detail))
    _finish(run, now)


def _unstuck(detail: str) -> str:
    return detail.partition(_STUCK)[0].rstrip()


def _says(run: PolicyRun, detail: str) -> None:
    """Writes the detail of a run at work, unless somebody else has changed it since it was read."""
    same = PolicyRun.objects.filter(pk=run.pk, state=PolicyRun.State.RUNNING, detail=run.detail)
    if detail != run.detail and same.update(detail=detail) == 1:
        run.detail = detail


def last_start(run: PolicyRun, rules: Rules) -> datetime:
    """From when on a run begins nothing new."""
    return run.ends - timedelta(minutes=rules.quiet_minutes)


def _choose(run: PolicyRun, rules: Rules, now: datetime) -> None:
    """Writes a run's picks, some at a time: a hundred thousand in one transaction would keep all others from writing.

    One scheduler does it. One that does not come to its end is followed by another, which begins anew.
    """
    mine = uuid.uuid4().hex
    taken = Q(chooser_since__gte=now - CHOOSES_WITHIN, chooser_since__lte=now + CHOOSES_WITHIN)
    free = Q(chooser="") | ~taken  # a time that was ahead and was put right keeps nobody out either
    ours = PolicyRun.objects.filter(pk=run.pk, state=PolicyRun.State.RUNNING, chosen_at=None)
    if ours.filter(free).update(chooser=mine, chooser_since=now) != 1:
        return
    run.picks.all().delete()  # of one who was cut off
    choice = looking.choose(rules, now)
    ours = ours.filter(chooser=mine)
    for picks in _picks(run, rules, choice):
        with transaction.atomic():
            if ours.update(chooser=mine) != 1:
                return
            PolicyPick.objects.bulk_create(picks)
    if ours.update(chosen_at=now, left_out=dict(choice.not_meant)) == 1:
        run.chosen_at = now


def _picks(run: PolicyRun, rules: Rules, choice: Choice) -> Iterator[list[PolicyPick]]:
    """The picks of a choice, as many at a time as one transaction takes."""
    behind = len(choice.chosen) + 1
    for part in batched(enumerate(choice.chosen, 1), AT_ONCE):
        yield [PolicyPick(run=run, place=place, predicted_bytes=one.gain, **_target(rules, one)) for place, one in part]
    for skips in batched(choice.skips, AT_ONCE):
        yield [
            PolicyPick(
                run=run, place=behind, state=PolicyPick.State.SKIPPED, code=one.code, reason=one.reason,
                **_target(rules, one),
            )
            for one in skips
        ]  # fmt: skip


def _target(rules: Rules, one: Candidate | Skip) -> dict[str, Any]:
    where = {"host_id": one.host_id, "pool_id": one.pool_id, "label": one.label}
    return where | {f"{rules.target_kind}_id": one.id}


def _settle(run: PolicyRun, now: datetime) -> None:
    """Writes how jobs that have ended ended."""
    for pick in run.picks.filter(state=PolicyPick.State.SUBMITTED).select_related("job"):
        found = _became(pick.job, patient=now < run.ends)
        if found is not None:
            state, code, reason = found
            PolicyPick.objects.filter(pk=pick.pk, state=PolicyPick.State.SUBMITTED, job=pick.job_id).update(
                state=state, code=code, reason=reason
            )


def _became(job: Job | None, *, patient: bool) -> tuple[str, str, str] | None:
    """A pick's state, code and reason by its job; ``None`` while that is not decided."""
    states = PolicyPick.State
    if job is None:
        return states.FAILED, "gone", "The job was deleted together with its host."
    if job.active or (job.state == Job.State.INTERRUPTED and job.needs_recovery and patient):
        return None  # a recovery may find that it was done after all
    if job.state == Job.State.SUCCEEDED:
        return states.SUCCEEDED, "", ""
    if job.state == Job.State.CANCELLED:
        return states.SKIPPED, "cancelled", f"Job {job.pk} was cancelled."
    code = job.error_code or job.state
    state = states.SKIPPED if code in _WORLD_MOVED and not job.needs_recovery else states.FAILED
    return state, code, job.error_detail or f"Job {job.pk} was {job.state}."


def _end_window(run: PolicyRun, rules: Rules, now: datetime) -> None:
    """Nothing more begins; where a pause has held something back until now, the run says so."""
    why, switch = _closed(run, rules, now), automation.state()
    if switch.paused:
        why = f"Automation was paused by {switch.by}. {why}"
        if run.picks.filter(state=PolicyPick.State.CHOSEN).exists() or _not_begun(run).exists():
            _says(run, f"{_unstuck(run.detail)} Automation was paused by {switch.by} until its window closed.".strip())
    close(run, rules, "window_closed", why)


def _closed(run: PolicyRun, rules: Rules, now: datetime) -> str:
    if now >= run.ends or not rules.quiet_minutes:
        return "The window closed before its turn came."
    return (
        f"No new job starts in the last {rules.quiet_minutes} minutes of the window. They began before its turn came."
    )


def close(run: PolicyRun, rules: Rules, code: str, why: str) -> None:
    """Nothing more begins in a run: what waits for its turn is left out, jobs that have not begun are withdrawn.

    Jobs at work are never cut.
    """
    waiting = run.picks.filter(state=PolicyPick.State.CHOSEN)
    waiting.filter(code="").update(state=PolicyPick.State.SKIPPED, code=code, reason=why)
    held = waiting.filter(code="busy", reason=submitting.HELD)
    held.update(state=PolicyPick.State.SKIPPED, reason=f"Another job was using it. {why}")
    waiting.update(state=PolicyPick.State.SKIPPED)  # those that another job kept waiting say so
    for pick in _not_begun(run):
        _withdraw(pick, rules, why, state=PolicyPick.State.SKIPPED, code=code, reason=why)


def _hold_back(run: PolicyRun, rules: Rules) -> None:
    """Automation is paused: jobs that have not begun go back to those that wait for their turn."""
    for pick in _not_begun(run):
        _withdraw(pick, rules, "automation is paused", state=PolicyPick.State.CHOSEN, job=None)


def _not_begun(run: PolicyRun) -> QuerySet[PolicyPick]:
    queued = run.picks.filter(state=PolicyPick.State.SUBMITTED, job__state=Job.State.QUEUED)
    return queued.select_related("job__host")


def _withdraw(pick: PolicyPick, rules: Rules, why: str, **columns: Any) -> None:
    with transaction.atomic():
        if pick.job is not None and jobs.withdraw(rules.actor, pick.job, why):
            PolicyPick.objects.filter(pk=pick.pk, state=PolicyPick.State.SUBMITTED, job=pick.job_id).update(**columns)


def _finish(run: PolicyRun, now: datetime) -> None:
    """Ends a run in which nothing waits and nothing is at work any more, or which could not begin at all."""
    states, picks = PolicyRun.State, run.picks
    if picks.filter(state__in=(PolicyPick.State.CHOSEN, PolicyPick.State.SUBMITTED)).exists():
        return
    with transaction.atomic():
        mine = PolicyRun.objects.filter(pk=run.pk, finished=None)
        if mine.filter(state=states.STOPPED).update(finished=now) == 1:
            run.refresh_from_db()
            alerts.ended(run)
            return
        if run.chosen_at is None and now < run.ends:
            return
        state = _end_state(run)
        if mine.filter(state=states.RUNNING).update(state=state, finished=now) != 1:
            return
        run.refresh_from_db()
        if state == states.FAILED:
            run.detail = _all_failed(run)
            run.save(update_fields=["detail"])
        audit(
            Rules.from_json(run.rules).actor, "policy run ended", run.policy.name, after={"run": run.pk, "state": state}
        )
        alerts.ended(run)
    forgetting.forget(run.policy_id, now)


def _end_state(run: PolicyRun) -> str:
    states = PolicyRun.State
    if run.chosen_at is None:
        return states.FAILED
    ends = set(run.picks.order_by().values_list("state", flat=True).distinct())
    failed, succeeded = PolicyPick.State.FAILED in ends, PolicyPick.State.SUCCEEDED in ends
    return states.FAILED if failed and not succeeded else states.FINISHED


def _all_failed(run: PolicyRun) -> str:
    """What a run that has failed says, behind what it said before."""
    if run.chosen_at is not None:
        return f"{run.detail} All of its jobs failed.".strip()
    if _STUCK in run.detail:
        return run.detail
    return f"{run.detail} No job could be submitted before the window closed.".strip()
