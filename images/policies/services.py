"""Writes: policies are made, changed, removed, run by hand; runs are stopped. Roles are checked here, whoever calls."""

from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from images.models import Policy, PolicyRun
from images.policies import alerts, runs
from images.policies.scope import require_reach, rules_now
from images.policies.shape import Rules
from images.policies.validation import clean
from images.rewrite import record
from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import NotFoundError, of_field
from storage_admin.jobs import automation


def create(actor: Actor, values: dict[str, Any]) -> Policy:
    """Makes a policy.

    Args:
        values: columns of :class:`images.models.Policy`; what is not given has its default.

    Raises:
        ForbiddenError: the actor is no admin, or it would reach hosts that the actor does not see.
        InvalidError: by field, what is wrong.
    """
    actor.require(Role.ADMIN)
    policy = clean(Policy(created_by=actor.name, **values), actor)
    require_reach(actor, policy, Role.ADMIN)
    return _save(actor, policy, "policy created", before=None)


def change(actor: Actor, policy: Policy, values: dict[str, Any]) -> Policy:
    """Changes a policy. A run at work goes on as it began, unless the policy is switched off: then it is stopped.

    Raises:
        ForbiddenError, InvalidError: as for :func:`create`.
        NotFoundError: somebody has deleted it.
    """
    with transaction.atomic():
        row = _locked(actor, policy, Role.ADMIN)
        before = Rules.of(row)
        was_enabled, shown_before = row.enabled, shown(row)
        for name, value in values.items():
            setattr(row, name, value)
        row = clean(row, actor)
        require_reach(actor, row, Role.ADMIN)
        at_other_times = (row.cron, row.timezone) != (before.cron, before.timezone)
        if at_other_times or (row.enabled and not was_enabled):
            # What the new times would have been before is not made up for.
            row.clock = timezone.now()
        saved = _save(actor, row, "policy changed", before=shown_before)
        if was_enabled and not row.enabled:
            for run in row.runs.filter(state=PolicyRun.State.RUNNING):
                _stop(run, f"The policy was disabled by {actor.name}.")
            alerts.ended_for_good(row.pk)
    return saved


def _locked(actor: Actor, policy: Policy, role: Role) -> Policy:
    """The policy's row as it is now; until the transaction's end nobody else changes, widens or deletes it.

    Raises:
        ForbiddenError: the actor does not have the role on all that it reaches by now.
        NotFoundError: somebody has deleted it.
    """
    row = Policy.objects.select_for_update().filter(pk=policy.pk).first()
    if row is None:
        raise NotFoundError(_("Policy {policy} no longer exists.").format(policy=policy.pk))
    require_reach(actor, row, role)
    return row


def remove(actor: Actor, policy: Policy) -> None:
    """Deletes a policy with its history. Its jobs at work end as they would; those that have not begun are withdrawn.

    Raises:
        ForbiddenError: the actor is no admin, or does not see all that it reaches.
        NotFoundError: somebody has deleted it already.
    """
    with transaction.atomic():
        # Whoever submits a job of it has this row too: so no job is left of which nobody knows the run.
        policy = _locked(actor, policy, Role.ADMIN)
        for run in policy.runs.filter(finished=None):
            _stop(run, f"The policy was deleted by {actor.name}.")
        audit(actor, "policy deleted", policy.name, before=shown(policy))
        alerts.ended_for_good(policy.pk)
        policy.delete()


def run_now(actor: Actor, policy: Policy, now: datetime | None = None) -> PolicyRun:
    """Begins a run by hand; its window opens now and is as long as any other. It also runs what is switched off.

    Raises:
        ForbiddenError: the actor is no operator, or does not see all that the policy reaches.
        RefusedError: ``automation_paused``; ``busy`` where a run is at work.
        NotFoundError: somebody has deleted the policy.
    """
    now = now or timezone.now()
    with transaction.atomic():
        policy = _locked(actor, policy, Role.OPERATOR)
        switch = automation.state()
        if switch.paused:
            told = _("Automation was paused by {by}. Resume it first.")
            raise RefusedError("automation_paused", told.format(by=switch.by))
        rules = rules_now(policy)
        at_work = policy.runs.filter(state=PolicyRun.State.RUNNING).first()
        if at_work is not None:
            told = _("The run of {due:%Y-%m-%d %H:%M} UTC is still running. Wait for it, or stop it.")
            raise RefusedError("busy", told.format(due=at_work.due))
        run = PolicyRun.objects.create(
            policy=policy, due=now, ends=rules.schedule.by_hand(now).closes, rules=rules.as_json(), by=actor.name,
            by_hand=True, started=now,
        )  # fmt: skip
        audit(actor, "policy run by hand", policy.name, after={"run": run.pk})
        record.ring_policies()
    return run


def stop(actor: Actor, run: PolicyRun) -> PolicyRun:
    """Ends a run early: nothing more begins in it, and what is at work goes on to its end.

    Raises:
        ForbiddenError: as for :func:`run_now`.
        RefusedError: ``ended``: there is nothing to stop.
        NotFoundError: it was deleted with its policy.
    """
    with transaction.atomic():
        _locked(actor, run.policy, Role.OPERATOR)
        if not _stop(run, f"Stopped by {actor.name}."):
            run.refresh_from_db()
            told = _("This run is already {state}. There is nothing to stop.")
            raise RefusedError("ended", told.format(state=run.state))
        audit(actor, "policy run stopped", run.policy.name, after={"run": run.pk})
    run.refresh_from_db()
    return run


def _stop(run: PolicyRun, why: str) -> bool:
    with transaction.atomic():
        mine = PolicyRun.objects.filter(pk=run.pk, state=PolicyRun.State.RUNNING)
        if mine.update(state=PolicyRun.State.STOPPED, detail=why) != 1:
            return False
        runs.close(run, Rules.from_json(run.rules), "policy_stopped", why)
    return True


def shown(policy: Policy) -> dict[str, Any]:
    """A policy as the audit trail keeps it."""
    return {"enabled": policy.enabled} | Rules.of(policy).as_json()


def _save(actor: Actor, policy: Policy, what: str, *, before: dict[str, Any] | None) -> Policy:
    try:
        with transaction.atomic():
            policy.save(force_insert=before is None, force_update=before is not None)
            audit(actor, what, policy.name, before=before, after=shown(policy))
    except IntegrityError:
        detail = _("Another policy is already named {policy}. Choose another name.").format(policy=policy.name)
        raise of_field("name", detail) from None
    return policy
