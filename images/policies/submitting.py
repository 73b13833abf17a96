"""Jobs of a run are submitted as its slots come free on each host, in the order of gain."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import QuerySet

from images.models import Policy, PolicyPick, PolicyRun
from images.policies import history
from images.policies import rules as choosing
from images.policies.planned import Planned, planned
from images.policies.reasons import Skip
from images.policies.rules import Candidate
from images.policies.shape import ALONE, Rules
from images.space import Admitted
from storage_admin.accounts.roles import ForbiddenError
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.errors import InvalidError, NotFoundError
from storage_admin.jobs import automation, services
from storage_admin.jobs.models import Job

#: Picks that are planned together, and that one step looks at on one host.
TOGETHER, MOST = 20, 200
#: A scan that follows a job tells how much space there is now: the next one waits for it, but not for ever.
_SCAN_WITHIN = timedelta(minutes=5)


def submit(run: PolicyRun, rules: Rules, now: datetime) -> None:
    """Fills the run's free slots on every host."""
    waiting = run.picks.filter(state=PolicyPick.State.CHOSEN)
    lost = "It is not there any more."
    waiting.filter(host=None).update(state=PolicyPick.State.SKIPPED, code="gone", reason=lost)
    for host_id in list(waiting.order_by().values_list("host", flat=True).distinct()):
        if _free(run, rules, host_id) > 0 and not _is_being_scanned(rules, host_id, now):
            _fill(run, rules, host_id, now)


def _free(run: PolicyRun, rules: Rules, host_id: int) -> int:
    """Slots of the policy on a host; earlier runs of it may still have jobs at work."""
    taken = PolicyPick.objects.filter(run__policy=run.policy_id, host=host_id, state=PolicyPick.State.SUBMITTED)
    return rules.max_jobs_per_host - taken.count()


def _is_being_scanned(rules: Rules, host_id: int, now: datetime) -> bool:
    scans = Job.objects.filter(kind="scan", host=host_id, state__in=Job.ACTIVE, created__gt=now - _SCAN_WITHIN)
    return rules.kind in ALONE and scans.exists()


def _fill(run: PolicyRun, rules: Rules, host_id: int, now: datetime) -> None:
    waiting = run.picks.filter(state=PolicyPick.State.CHOSEN, host=host_id).order_by("place", "id")
    admitted, free = Admitted(), _free(run, rules, host_id)
    for batch in _batches(waiting, rules):
        picks = _still_due(rules, batch, now)
        found = planned(rules, [_candidate(rules, pick) for pick in picks], admitted, until=run.ends, now=now)
        for pick, plan in zip(picks, found, strict=True):
            if free <= 0:
                return
            taken = _take(run, rules, pick, plan)
            if taken is None:
                return
            free -= taken


def _batches(waiting: QuerySet[PolicyPick], rules: Rules) -> Iterator[list[PolicyPick]]:
    """The picks in their order: first as many as there are slots, then more at once, as those were refused."""
    ids = list(waiting.values_list("pk", flat=True)[:MOST])
    begin, length = 0, min(rules.max_jobs_per_host, TOGETHER)
    while begin < len(ids):
        part = ids[begin : begin + length]
        found = {pick.pk: pick for pick in PolicyPick.objects.filter(pk__in=part, state=PolicyPick.State.CHOSEN)}
        yield [found[pk] for pk in part if pk in found]
        begin, length = begin + length, TOGETHER


def _still_due(rules: Rules, picks: list[PolicyPick], now: datetime) -> list[PolicyPick]:
    """Those that nobody else, as another run or a person, has done or undone since the run chose them."""
    candidates = [_candidate(rules, pick) for pick in picks]
    target = "pool" if rules.on_pools else "image"
    last = history.last_jobs(rules.kind, target, [one.id for one in candidates])
    due = []
    for pick, one in zip(picks, candidates, strict=True):
        done = last.get(one.id)
        found = choosing.done_lately(rules, done, now) if done else None
        if found is None:
            due.append(pick)
        else:
            code, *facts = found
            skip = Skip(one.id, one.host_id, one.pool_id, one.label, code, tuple(facts))
            _end(pick, PolicyPick.State.SKIPPED, code, skip.reason)
    return due


def _candidate(rules: Rules, pick: PolicyPick) -> Candidate:
    target = pick.pool_id if rules.on_pools else pick.image_id
    return Candidate(target or 0, pick.host_id or 0, pick.pool_id or 0, pick.label, pick.predicted_bytes)


def _take(run: PolicyRun, rules: Rules, pick: PolicyPick, found: Planned) -> int | None:
    """Submits a pick's job, or writes why not.

    Returns:
        How many slots that took; ``None`` where the host has none left, or the run is over.
    """
    try:
        if found.refusal is not None:
            raise RefusedError(found.refusal.code, found.refusal.detail)
        return _submitted(run, rules, pick, found)
    except RefusedError as error:
        _refused(pick, error.code, error.detail)
    except NotFoundError as error:
        _end(pick, PolicyPick.State.SKIPPED, "gone", error.detail)
    except (InvalidError, ForbiddenError) as error:
        _end(pick, PolicyPick.State.FAILED, "invalid", str(error))
    return 0


def _submitted(run: PolicyRun, rules: Rules, pick: PolicyPick, found: Planned) -> int | None:
    with transaction.atomic():
        # Slots of a policy are given one after the other: whoever comes second counts what the first has taken.
        Policy.objects.select_for_update().get(pk=run.policy_id)
        if automation.is_paused() or not PolicyRun.objects.filter(pk=run.pk, state=PolicyRun.State.RUNNING).exists():
            return None
        if _free(run, rules, found.candidate.host_id) <= 0:
            return None
        mine = PolicyPick.objects.filter(pk=pick.pk, state=PolicyPick.State.CHOSEN)
        if mine.update(state=PolicyPick.State.SUBMITTED, code="", reason="") != 1:
            return 0
        job = services.submit(rules.actor, rules.kind, found.candidate.id, rules.options)
        automation.begin_before(job, run.ends - timedelta(minutes=rules.quiet_minutes))
        predicted = pick.predicted_bytes if found.won_bytes is None else found.won_bytes
        PolicyPick.objects.filter(pk=pick.pk).update(job=job, predicted_bytes=predicted)
    return 1


def _refused(pick: PolicyPick, code: str, detail: str) -> None:
    """Left out, unless only jobs at work are in the way: then it waits for a later step, and says for what."""
    others = Job.objects.filter(host=pick.host_id, rewrites=True, state__in=Job.ACTIVE)
    if code == "busy" or (code == "not_enough_space" and others.exists()):
        PolicyPick.objects.filter(pk=pick.pk, state=PolicyPick.State.CHOSEN).update(code=code, reason=detail)
    else:
        _end(pick, PolicyPick.State.SKIPPED, code, detail)


def _end(pick: PolicyPick, state: str, code: str, reason: str) -> None:
    PolicyPick.objects.filter(pk=pick.pk, state=PolicyPick.State.CHOSEN).update(state=state, code=code, reason=reason)
