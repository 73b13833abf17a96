"""Reads: runs of policies with what they were meant to win and have won, and their picks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import Count, Q, QuerySet, Sum, Window
from django.db.models.functions import RowNumber

from images.models import Policy, PolicyPick, PolicyRun
from images.policies import forgetting, windows
from images.policies.preview import LeftOut
from images.policies.reasons import NOT_MEANT, word_of
from images.policies.scope import runs_for
from images.policies.shape import Rules
from storage_admin.accounts.models import Actor
from storage_admin.errors import InvalidError

State = PolicyPick.State
#: Of picks whose jobs came to something, or may yet.
_DONE = (State.SUBMITTED, State.SUCCEEDED, State.FAILED)
#: What a policy is not for though it is on its hosts and in its pools.
_OF_ITS_HOSTS = frozenset({"other_name", "other_format"})


@dataclass(frozen=True)
class Sums:
    """Of a run. Sizes in bytes.

    Args:
        counts: picks by their state, those that are kept as a number only among them.
        predicted: what its ``jobs`` were expected to win; ``None`` where nothing is won by such jobs.
        won: what they have freed, by their lines of the ledger; what undo copies hold is not won yet.
        held: what undo copies of its jobs hold.
    """

    counts: dict[str, int] = field(default_factory=dict)
    predicted: int | None = None
    won: int = 0
    held: int = 0

    @property
    def jobs(self) -> int:
        """How many jobs it has submitted that came to something, or may yet."""
        return sum(self.counts.get(state, 0) for state in _DONE)


def sums_of(runs: Iterable[PolicyRun]) -> dict[int, Sums]:
    """The sums of runs, by their ids, in two queries for any number."""
    runs = list(runs)
    ids = [run.pk for run in runs]
    counts: dict[int, dict[str, int]] = {pk: {} for pk in ids}
    picks = PolicyPick.objects.filter(run__in=ids).order_by()
    for run, state, count in picks.values("run", "state").annotate(n=Count("pk")).values_list("run", "state", "n"):
        counts[run][state] = count
    for one in runs:
        if forgotten := forgetting.picked(one).total():
            counts[one.pk]["skipped"] = counts[one.pk].get("skipped", 0) + forgotten
    found = {}
    with_job = picks.filter(job__isnull=False).values("run").annotate(
        predicted=Sum("predicted_bytes", filter=Q(state__in=_DONE)), won=Sum("job__freed_bytes"),
        held=Sum("job__undo_bytes"),
    )  # fmt: skip
    for row in with_job:
        found[row["run"]] = Sums(counts[row["run"]], row["predicted"], row["won"] or 0, row["held"] or 0)
    return {pk: found.get(pk) or Sums(counts[pk]) for pk in ids}


def coming(policy: Policy, now: datetime, count: int) -> tuple[list[windows.Window], str]:
    """The windows of a policy that open next, and why that cannot be told, where it cannot.

    Returns:
        No window of a policy that is switched off, or whose times cannot be read: a sentence then says why.
    """
    if not policy.enabled:
        return [], ""
    try:
        return Rules.of(policy).schedule.next(now, count), ""
    except InvalidError as error:
        return [], error.detail


def last_runs(actor: Actor, policies: Iterable[Policy]) -> dict[int, PolicyRun]:
    """The run of each policy whose window opened last, of those that exist for the actor, by the policy's id."""
    place = Window(RowNumber(), partition_by="policy", order_by=["-due", "-id"])
    mine = runs_for(actor, policies).annotate(number=place)
    return {run.policy_id: run for run in mine.filter(number=1)}


def runs_of(actor: Actor, policy: Policy) -> QuerySet[PolicyRun]:
    """A policy's runs that exist for the actor, the latest first."""
    return runs_for(actor, [policy]).select_related("policy").order_by("-due", "-id")


def picks_of(run: PolicyRun, *, state: str = "", code: str = "", left_out: bool | None = None) -> QuerySet[PolicyPick]:
    """What a run looked at: the chosen in their order, then those left out by name.

    Args:
        left_out: only those that were left out, also after a job was submitted, or only the others.
    """
    picks = run.picks.select_related("job__host", "host", "image", "pool").order_by("place", "label", "id")
    picks = picks.defer("job__plan", "job__commands", "image__header", "image__estimate")
    if left_out is not None:
        picks = picks.filter(state=State.SKIPPED) if left_out else picks.exclude(state=State.SKIPPED)
    values: dict[str, Any] = {name: value for name, value in (("state", state), ("code", code)) if value}
    return picks.filter(**values)


def jobs_of(runs: Iterable[PolicyRun], most: int = 100) -> dict[int, list[PolicyPick]]:
    """The first picks with a job of each run, by its id, in one query."""
    ids = [run.pk for run in runs]
    place = Window(RowNumber(), partition_by="run", order_by=["place", "id"])
    picks = PolicyPick.objects.filter(run__in=ids, job__isnull=False).annotate(number=place).filter(number__lte=most)
    found: dict[int, list[PolicyPick]] = {}
    for pick in picks.select_related("job").defer("job__plan", "job__commands").order_by("run", "place", "id"):
        found.setdefault(pick.run_id, []).append(pick)
    return found


def skips_of(runs: Iterable[PolicyRun], *, limited: bool = False) -> dict[int, list[LeftOut]]:
    """How many each run has left out, by the code of why: those it was for, then those that it was not for.

    Args:
        limited: who asks is limited to some hosts, and does not read how many there are on others.
    """
    runs = list(runs)
    skips = PolicyPick.objects.filter(run__in=[run.pk for run in runs], state=State.SKIPPED).order_by()
    counted = {run.pk: forgetting.picked(run) for run in runs}
    for run_id, code, count in skips.values("run", "code").annotate(n=Count("pk")).values_list("run", "code", "n"):
        counted[run_id][code] += count
    found: dict[int, list[LeftOut]] = {}
    for run in runs:
        meant = sorted(counted[run.pk].items(), key=lambda one: (-one[1], one[0]))
        found[run.pk] = [LeftOut(code, word_of(code), count, meant=True) for code, count in meant]
        found[run.pk] += [
            LeftOut(code, str(NOT_MEANT[code]), count, meant=False)
            for code, count in forgetting.not_meant(run).items()
            if not limited or code in _OF_ITS_HOSTS
        ]
    return found
