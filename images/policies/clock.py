"""Which windows have opened: each becomes one run, however many schedulers look and however seldom they do.

A window that is still open is begun late, with what remains of it, as long as something may begin in it. One that has
closed, or is in its quiet minutes, is told as missed: nothing is caught up at noon. While automation is paused nothing
is begun; a window that closes meanwhile is missed, and one that is still open when automation goes on is begun then.
What a machine's time has claimed that was ahead by mistake is taken back: no policy waits for that time to come.
"""

import logging
from datetime import datetime, timedelta

from django.db import DatabaseError, transaction
from django.db.models import Q

from images.models import Policy, PolicyRun
from images.policies import alerts, runs
from images.policies.scope import rules_now
from images.policies.shape import Rules, actor_named
from images.policies.windows import Window
from storage_admin.accounts.models import audit
from storage_admin.jobs import automation
from storage_admin.jobs.models import Automation

logger = logging.getLogger(__name__)

#: Of windows that were missed together, the latest are told one by one.
MOST_MISSED = 20
#: What is seen so late after a window opened was not looked for when it did.
_IN_TIME = timedelta(minutes=2)
#: By so much the times of two schedulers may differ.
_SKEW = timedelta(minutes=5)
_AHEAD = "The clock of this machine was ahead and has been corrected. The window had not opened yet."


def advance(now: datetime) -> list[PolicyRun]:
    """Makes a run of every window that opened since somebody last looked.

    A policy whose windows cannot be told is an alert, and keeps no other from its runs.

    Returns:
        The runs that this call has made, those of missed windows among them.
    """
    made: list[PolicyRun] = []
    switch = automation.state()
    for policy in Policy.objects.filter(Q(clock__lt=now) | Q(clock__gt=now + _SKEW), enabled=True):
        try:
            made += _advance(policy, switch, now) if policy.clock < now else _take_back(policy, now)
        except DatabaseError:  # as where it is locked: the next look is seconds away
            logger.exception("the windows of policy %s", policy.pk)
        except Exception as error:
            logger.exception("the windows of policy %s", policy.pk)
            alerts.cannot_be_told(policy, f"{type(error).__name__}: {error}")
    return made


def _take_back(policy: Policy, now: datetime) -> list[PolicyRun]:
    """This machine's time was ahead and was put right: the policy's windows are looked for from now on again.

    Windows that have not come yet were not missed. One that was begun is stopped, and opens when its time has come; one
    that has had its run by then stays as it is.
    """
    with transaction.atomic():
        if Policy.objects.filter(pk=policy.pk, clock=policy.clock, enabled=True).update(clock=now) != 1:
            return []
        ahead = policy.runs.filter(due__gt=now + _SKEW)
        for number, run in enumerate(ahead.filter(state=PolicyRun.State.RUNNING)):
            due = now + timedelta(microseconds=number)
            if ahead.filter(pk=run.pk).update(state=PolicyRun.State.STOPPED, due=due, detail=_AHEAD) == 1:
                runs.close(run, Rules.from_json(run.rules), "policy_stopped", _AHEAD)
        missed = ahead.filter(state=PolicyRun.State.MISSED)
        after = {"clock": now.isoformat(), "windows no longer missed": missed.count()}
        missed.delete()
        before = {"clock": policy.clock.isoformat()}
        audit(actor_named(policy.name), "policy clock put back", policy.name, before=before, after=after)
    return []


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
        listed = missed[-MOST_MISSED:]
        others = len(missed) - len(listed)
        made = [_missed(policy, window, switch, now, others if window is listed[-1] else 0) for window in listed]
        if len(missed) < len(opened):
            made.append(_begin(policy, opened[-1], now))
    return [run for run in made if run is not None]


def _begin(policy: Policy, window: Window, now: datetime) -> PolicyRun | None:
    late = now - window.opens
    detail = ""
    if late > _IN_TIME:
        detail = f"Started {late // timedelta(minutes=1)} minutes late; the rest of the window is used."
    return _run(policy, window, now, state=PolicyRun.State.RUNNING, detail=detail)


def _missed(policy: Policy, window: Window, switch: Automation, now: datetime, others: int) -> PolicyRun | None:
    detail = _why(window, switch, now)
    detail += f" Earlier windows were missed as well and are not listed: {others}." if others else ""
    run = _run(policy, window, now, state=PolicyRun.State.MISSED, detail=detail, finished=now)
    if run is not None and not switch.paused:
        alerts.missed(run)
    return run


def _why(window: Window, switch: Automation, now: datetime) -> str:
    if switch.paused and switch.since < window.closes:
        return f"Automation was paused by {switch.by}."
    if not switch.paused and switch.by and window.last_start <= switch.since <= now:
        return f"Automation was paused until {switch.since:%Y-%m-%d %H:%M} UTC."
    if now < window.closes:
        return (
            f"The scheduler was not running when the window opened. It checked again at {now:%H:%M} UTC, too close "
            "to the end of the window to start jobs."
        )
    return (
        f"The scheduler was not running while the window was open. It checked again at {now:%Y-%m-%d %H:%M} UTC. A "
        "missed run is not repeated."
    )


def _run(policy: Policy, window: Window, now: datetime, **columns: object) -> PolicyRun | None:
    actor = actor_named(policy.name)
    values = {"ends": window.closes, "rules": rules_now(policy).as_json(), "by": actor.name, "started": now} | columns
    run, made = PolicyRun.objects.get_or_create(policy=policy, due=window.opens, defaults=values)
    if not made:  # this machine's time went backwards
        return None
    word = "policy window missed" if run.state == PolicyRun.State.MISSED else "policy run started"
    audit(actor, word, policy.name, after={"run": run.pk, "due": run.due.isoformat(), "detail": run.detail})
    return run
