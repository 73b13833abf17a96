"""Which windows have opened: each becomes one run, however many schedulers look and however seldom they do.

A window that is still open is begun late, with what remains of it, as long as something may begin in it. One that has
closed, or is in its quiet minutes, is told as missed: nothing is caught up at noon. While automation is paused nothing
is begun; a window that closes meanwhile is missed, and one that is still open when automation goes on is begun then.
"""

from datetime import datetime, timedelta

from django.db import transaction

from images.models import Policy, PolicyRun
from images.policies import telling
from images.policies.shape import Rules, actor_named
from images.policies.windows import Window
from storage_admin.accounts.services import audit
from storage_admin.jobs import automation
from storage_admin.jobs.models import Automation

#: Of windows that were missed together, the latest are told one by one.
MOST_MISSED = 20
#: What is seen so late after a window opened was not looked for when it did.
_IN_TIME = timedelta(minutes=2)


def advance(now: datetime) -> list[PolicyRun]:
    """Makes a run of every window that opened since somebody last looked.

    Returns:
        The runs that this call has made, those of missed windows among them.
    """
    made: list[PolicyRun] = []
    switch = automation.state()
    for policy in Policy.objects.filter(enabled=True, clock__lt=now):
        made += _advance(policy, switch, now)
    return made


def _advance(policy: Policy, switch: Automation, now: datetime) -> list[PolicyRun]:
    opened = list(Rules.of(policy).schedule.opened(policy.clock, now))
    if switch.paused and opened and now < opened[-1].last_start:
        opened.pop()  # perhaps automation goes on before it is too late
    if not opened:
        return []
    with transaction.atomic():
        # Of two schedulers, one moves the clock; the other finds the runs made.
        unmoved = Policy.objects.filter(pk=policy.pk, clock=policy.clock, enabled=True)
        if unmoved.update(clock=opened[-1].opens) != 1:
            return []
        missed = opened if switch.paused or now >= opened[-1].last_start else opened[:-1]
        others = max(len(missed) - MOST_MISSED, 0)
        runs = [_missed(policy, window, switch, now, others) for window in missed[-MOST_MISSED:]]
        if len(missed) < len(opened):
            runs.append(_begin(policy, opened[-1], now))
    return [run for run in runs if run is not None]


def _begin(policy: Policy, window: Window, now: datetime) -> PolicyRun | None:
    late = now - window.opens
    detail = ""
    if late > _IN_TIME:
        detail = f"Begun {late // timedelta(minutes=1)} minutes late, with what remains of its window."
    return _run(policy, window, now, state=PolicyRun.State.RUNNING, detail=detail)


def _missed(policy: Policy, window: Window, switch: Automation, now: datetime, others: int) -> PolicyRun | None:
    detail = _why(window, switch, now)
    detail += f" So were {others} more, the earlier ones, which are not listed." if others else ""
    run = _run(policy, window, now, state=PolicyRun.State.MISSED, detail=detail, finished=now)
    if run is not None and not switch.paused:
        telling.missed(run)
    return run


def _why(window: Window, switch: Automation, now: datetime) -> str:
    if switch.paused and switch.since < window.closes:
        return f"Automation was paused by {switch.by}."
    if not switch.paused and switch.by and window.last_start <= switch.since <= now:
        return f"Automation was paused until {switch.since:%Y-%m-%d %H:%M} UTC."
    if now < window.closes:
        return (
            f"The scheduler was not at work when it opened, and looked again at {now:%H:%M} UTC: only its last minutes "
            "remained, in which nothing new begins."
        )
    return (
        "The scheduler was not at work while it was open: it looked again at "
        f"{now:%Y-%m-%d %H:%M} UTC. It is not caught up."
    )


def _run(policy: Policy, window: Window, now: datetime, **columns: object) -> PolicyRun | None:
    actor = actor_named(policy.name)
    values = {"ends": window.closes, "rules": Rules.of(policy).as_json(), "by": actor.name, "started": now} | columns
    run, made = PolicyRun.objects.get_or_create(policy=policy, due=window.opens, defaults=values)
    if not made:  # this machine's time went backwards
        return None
    word = "policy window missed" if run.state == PolicyRun.State.MISSED else "policy run started"
    audit(actor, word, policy.name, after={"run": run.pk, "due": run.due.isoformat(), "detail": run.detail})
    return run
