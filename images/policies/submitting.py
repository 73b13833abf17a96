"""Jobs of a run are submitted as its slots come free on each host, in the order of gain."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import QuerySet

from images.models import Policy, PolicyPick, PolicyRun
from images.policies import guests, history, looking
from images.policies import rules as choosing
from images.policies.backups import Backups
from images.policies.planned import Planned, planned
from images.policies.reasons import told
from images.policies.rules import Candidate
from images.policies.shape import ALONE, Rules
from images.rewrite.space import Admitted
from storage_admin.accounts.models import ForbiddenError
from storage_admin.agent.protocol import RefusedError
from storage_admin.batches import batched
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts.models import Host
from storage_admin.jobs import automation, services
from storage_admin.jobs.models import Job

#: Picks that are planned together, and that one step looks at on one host.
TOGETHER, MOST = 20, 200
#: The scheduler makes a step so often.
_STEP_SECONDS = 15
#: A scan that follows a job tells how much space there is now: the next one waits for it, but not for ever.
_SCAN_WITHIN = timedelta(minutes=5)
#: What a pick says whose image, pool or guest another job has, and how many ids stand in one query.
HELD, _AT_ONCE = "Another job is using it. The policy waits until that job has ended.", 5000


def submit(run: PolicyRun, rules: Rules, now: datetime) -> None:
    """Fills the run's free slots on every host."""
    waiting = run.picks.filter(state=PolicyPick.State.CHOSEN)
    waiting.filter(host=None).update(state=PolicyPick.State.SKIPPED, code="gone", reason="It no longer exists.")
    _note_held(waiting, rules)
    hosts = [
        host_id
        for host_id in waiting.order_by().values_list("host", flat=True).distinct()
        if _free(run, rules, host_id) > 0 and not _is_being_scanned(rules, host_id, now)
    ]
    first = [_due(run, host_id).values_list("image", flat=True)[:TOGETHER] for host_id in hosts]
    looks = looking.Looks(rules, [pk for ids in first for pk in ids if pk is not None])
    for host_id in hosts:
        _fill(run, rules, host_id, now, looks)


def _due(run: PolicyRun, host_id: int) -> QuerySet[PolicyPick]:
    """The picks of a host that could be next, in their order."""
    waiting = run.picks.filter(state=PolicyPick.State.CHOSEN, host=host_id).order_by("place", "id")
    return waiting.exclude(code="busy", reason=HELD)


def _note_held(waiting: QuerySet[PolicyPick], rules: Rules) -> None:
    """Those that other jobs have say so, and keep nobody behind them from a slot; it ends with the job."""
    column, held = rules.target_kind, _held(rules)
    marked = waiting.filter(code="busy", reason=HELD)
    over = [pk for pk, target in marked.values_list("pk", column) if target not in held]
    for ids in batched(over, _AT_ONCE):
        marked.filter(pk__in=ids).update(code="", reason="")
    for ids in batched(sorted(held), _AT_ONCE):
        some = waiting.filter(**{f"{column}__in": ids})
        some.exclude(code="busy").update(code="busy", reason=HELD)


def _held(rules: Rules) -> frozenset[int]:
    """Ids of the targets that wait for jobs of others: of any kind, or of the same where the kind needs no lock."""
    if rules.kind in ALONE:
        return history.held_images()
    return frozenset(history.at_work(rules.kind, rules.target_kind))


def _free(run: PolicyRun, rules: Rules, host_id: int) -> int:
    """Slots of the policy on a host; earlier runs of it may still have jobs at work."""
    taken = PolicyPick.objects.filter(run__policy=run.policy_id, host=host_id, state=PolicyPick.State.SUBMITTED)
    # Those that wait for a guest to be shut down take none.
    return rules.max_jobs_per_host - taken.exclude(job__state=Job.State.QUEUED, job__parked_at__isnull=False).count()


def _is_being_scanned(rules: Rules, host_id: int, now: datetime) -> bool:
    scans = Job.objects.filter(kind="scan", host=host_id, state__in=Job.ACTIVE, created__gt=now - _SCAN_WITHIN)
    return rules.kind in ALONE and scans.exists()


def _fill(run: PolicyRun, rules: Rules, host_id: int, now: datetime, looks: looking.Looks) -> None:
    admitted, free = Admitted(), _free(run, rules, host_id)
    for batch in _batches(_due(run, host_id), rules, now):
        looks.also(host_id, [pick.image_id for pick in batch])
        picks = _still_due(run, rules, batch, now)
        found = planned(rules, [_candidate(rules, pick) for pick in picks], admitted, until=run.ends, now=now)
        for pick, plan in zip(picks, found, strict=True):
            if free <= 0:
                return
            taken = _take(run, rules, pick, plan)
            if taken is None:
                return
            free -= taken


def _batches(waiting: QuerySet[PolicyPick], rules: Rules, now: datetime) -> Iterator[list[PolicyPick]]:
    """The picks in their order: first as many as there are slots, then more at once, as those were refused."""
    ids = _looked_at(waiting, now)
    begin, length = 0, min(rules.max_jobs_per_host, TOGETHER)
    while begin < len(ids):
        part = ids[begin : begin + length]
        found = {pick.pk: pick for pick in PolicyPick.objects.filter(pk__in=part, state=PolicyPick.State.CHOSEN)}
        yield [found[pk] for pk in part if pk in found]
        begin, length = begin + length, TOGETHER


def _looked_at(waiting: QuerySet[PolicyPick], now: datetime) -> list[int]:
    """Ids of the picks that this step looks at, in their order.

    Of too many, half are the first ones. The others are those behind them that no step has looked at yet, then those
    that it has, from a place that moves on with the time: who waits for space in front keeps nobody from a slot.
    """
    half, places = MOST // 2, waiting.values_list("place", "pk")
    front = list(places[: MOST - half])
    behind = places.exclude(pk__in=[pk for _place, pk in front])
    others = list(behind.filter(code="")[:half])
    if len(others) < half:
        tried = list(behind.exclude(code=""))  # in vain: that left them a code
        turn = int(now.timestamp()) // _STEP_SECONDS * half % max(len(tried), 1)
        others += (tried[turn:] + tried[:turn])[: half - len(others)]
    return [pk for _place, pk in sorted(front + others)]


def _still_due(run: PolicyRun, rules: Rules, picks: list[PolicyPick], now: datetime) -> list[PolicyPick]:
    """Those that the rules still choose: others, as another run or a person, may have changed that since."""
    found = _left_out_by_now(run, rules, [_candidate(rules, pick).id for pick in picks], now)
    due = []
    for pick in picks:
        code, reason = found.get(_candidate(rules, pick).id, ("", ""))
        if code:
            _end(pick, PolicyPick.State.SKIPPED, code, reason)
        else:
            due.append(pick)
    return due


def _left_out_by_now(run: PolicyRun, rules: Rules, ids: list[int], now: datetime) -> dict[int, tuple[str, str]]:
    """The code and the reason of each target that is not to be worked on any more, by its id."""
    found = {} if rules.target_kind == "pool" else choosing.left_out_by_now(rules, ids, now)
    if rules.target_kind == "guest":
        backups = Backups(rules, now, ids)
        for target in ids:
            if lacking := backups.lacking(target):
                found[target] = told(*lacking)
    meanwhile = _done_meanwhile(run, rules, ids)
    for target, last in history.last_jobs(rules.kind, rules.target_kind, ids).items():
        lately, done = choosing.done_lately(rules, last, now), meanwhile.get(target)
        if lately is None and done is not None:
            # However short the policy's own interval is: nothing is done twice.
            ended = f"{done.finished:%Y-%m-%d %H:%M} UTC"
            found[target] = (
                "done_meanwhile",
                f"Job {done.job_id} ({rules.kind}) did the same in the meantime. It ended at {ended}.",
            )
        elif lately is not None and not rules.on_images:
            found[target] = told(*lately)
    return found


def _done_meanwhile(run: PolicyRun, rules: Rules, ids: list[int]) -> dict[int, history.Last]:
    """What others have done to each target since the run chose it, by the target's id."""
    same = history.as_thorough(rules.kind, rules.options)
    last = history.last_jobs(rules.kind, rules.target_kind, ids, same)
    return {target: done for target, done in last.items() if run.chosen_at and done.finished >= run.chosen_at}


def _candidate(rules: Rules, pick: PolicyPick) -> Candidate:
    target = getattr(pick, f"{rules.target_kind}_id")
    return Candidate(target or 0, pick.host_id or 0, pick.pool_id, pick.label, pick.predicted_bytes)


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
        # Whoever submits a job has its host's row: so another policy, or a person, comes before or after this look.
        Host.objects.select_for_update().filter(pk=found.candidate.host_id).first()
        if found.candidate.id in history.at_work(rules.kind, rules.target_kind, [found.candidate.id]):
            raise RefusedError("busy", HELD)
        if _done_meanwhile(run, rules, [found.candidate.id]):
            return 0  # it ended since this step looked: the next one leaves it out, and says so
        mine = PolicyPick.objects.filter(pk=pick.pk, state=PolicyPick.State.CHOSEN)
        if mine.update(state=PolicyPick.State.SUBMITTED, code="", reason="") != 1:
            return 0
        options = guests.options_for(rules, found.candidate.id)
        job = services.submit(rules.actor, rules.kind, found.candidate.id, options, by_hand=False, look=False)
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
