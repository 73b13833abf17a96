"""Picks that a rule left out are kept for a while, and then only how many there were of each."""

from collections import Counter
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Count

from images.models import PolicyPick, PolicyRun
from images.policies.reasons import NOT_MEANT

#: So long after their run.
KEPT_SKIPS = timedelta(days=30)
#: Before a code that also says what a policy is not for, as ``gone``: so both can be told.
_PICKED = "picked:"


def forget(policy_id: int, now: datetime) -> None:
    """Picks without a job that a policy's runs left out long ago become a number in their run."""
    old = PolicyRun.objects.filter(policy=policy_id, finished__lt=now - KEPT_SKIPS)
    skips = PolicyPick.objects.filter(state=PolicyPick.State.SKIPPED, job=None).order_by()
    for run_id in skips.filter(run__in=old).values_list("run", flat=True).distinct():
        with transaction.atomic():
            # Of two who forget the same run, the second finds nothing left to count.
            run = PolicyRun.objects.select_for_update().filter(pk=run_id).first()
            if run is None:
                continue
            mine = skips.filter(run=run)
            counts = Counter(run.left_out)
            for code, count in mine.values("code").annotate(n=Count("pk")).values_list("code", "n"):
                counts[f"{_PICKED}{code}" if code in NOT_MEANT else code] += count
            run.left_out = dict(counts)
            run.save(update_fields=["left_out"])
            mine.delete()


def picked(run: PolicyRun) -> Counter[str]:
    """How many of a run's picks have been forgotten, by their code."""
    codes = {code.removeprefix(_PICKED): count for code, count in run.left_out.items() if code not in NOT_MEANT}
    return Counter(codes)


def not_meant(run: PolicyRun) -> Counter[str]:
    """How many the policy was not for, by the code of why."""
    return Counter({code: count for code, count in run.left_out.items() if code in NOT_MEANT})
