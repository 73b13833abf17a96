"""Writes: a job is submitted, cancelled, retried, undone. Roles are checked here, whoever calls."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin.accounts.models import SYSTEM, Actor, Role, audit
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts.models import Host
from storage_admin.jobs import claims, kinds, sealed
from storage_admin.jobs.kinds import JobKind, Lock, Target
from storage_admin.jobs.models import IdempotentAnswer, Job, ResourceLock
from storage_admin.jobs.plan_and_progress import Plan
from storage_admin.jobs.routing import ring

#: Of an Idempotency-Key, in characters.
LONGEST_KEY = 255


def plan(actor: Actor, kind: str, target_id: int, options: dict[str, Any], *, look: bool = False) -> Plan:
    """What a job would do. Nothing is written but what a look finds.

    Args:
        look: look at the target again on its host, for a second at most.

    Raises:
        ForbiddenError, InvalidError, NotFoundError: as for :func:`submit`.
    """
    chosen = kinds.get(kind)
    target = _target(actor, chosen, target_id, Role.VIEWER)
    options = chosen.clean(options)
    if look:
        chosen.look(target_id)
    return _planned(actor, chosen, target, options)


def _planned(actor: Actor, kind: JobKind, target: Target, options: dict[str, Any]) -> Plan:
    """The plan, with what is known of backups: only Proxmox VE tells of any."""
    predicted = kind.plan(actor, target.id, options)
    return replace(predicted, backups=kind.last_backups(target, predicted)) if target.host.runs_proxmox else predicted


def submit(
    actor: Actor,
    kind: str,
    target_id: int,
    options: dict[str, Any],
    *,
    secrets: Mapping[str, str] = MappingProxyType({}),
    idempotency_key: str = "",
    by_hand: bool = True,
    look: bool = True,
    check: Callable[[Plan], None] = lambda _plan: None,
) -> Job:
    """Queues a job with its locks, and rings.

    Args:
        target_id: id of the image, host, pool, guest or job that the kind works on.
        options: as the kind's ``options_schema`` says; what is not given has its default.
        secrets: passphrases that the kind needs; without them the job waits, and asks for them.
        idempotency_key: the same key of the same actor gets the job of the first call again.
        by_hand: whether a user asks for it: a policy may not do what its plan leaves to users.
        look: look at the target again on its host first, for a second at most; whoever has done so leaves that out.
        check: gets the plan before it is refused or queued; what it raises is raised.

    Raises:
        ForbiddenError: the role, or a token's scope, does not allow it.
        InvalidError: unknown kind or option, or the key was used for something else.
        NotFoundError: there is no such target.
        RefusedError: the plan says no; ``busy`` where another job holds what this one needs.
    """
    chosen = kinds.get(kind)
    target = _target(actor, chosen, target_id, chosen.role)
    options = chosen.clean(options)
    if secrets:  # without any, the job asks later
        sealed.check(chosen, options, secrets)
    if len(idempotency_key) > LONGEST_KEY or not idempotency_key.isprintable():
        told = _("Use at most {longest} printable characters for an Idempotency-Key.").format(longest=LONGEST_KEY)
        raise InvalidError(told, {"Idempotency-Key": told})
    request_digest = hashlib.sha256(json.dumps([kind, target_id, options], sort_keys=True).encode()).hexdigest()
    if idempotency_key and (first := _first_answer(actor, idempotency_key, request_digest)):
        return first
    if chosen.single and not idempotency_key and (queued := _queued_already(chosen, target)):
        return queued  # its plan is there
    if look:
        chosen.look(target_id)
    predicted = _planned(actor, chosen, target, options)
    check(predicted)
    against = predicted.refusals if by_hand else (*predicted.refusals, *predicted.by_hand)
    if against:
        refusal = against[0]
        audit(actor, f"{kind} refused", target.label, after={"code": refusal.code, "options": options}, refused=True)
        raise RefusedError(refusal.code, refusal.detail)
    try:
        with transaction.atomic():
            Host.objects.select_for_update().get(pk=target.host.pk)
            # Whoever waited here for the same request finds its answer now.
            if idempotency_key and (first := _first_answer(actor, idempotency_key, request_digest)):
                return first
            queued = _queued_already(chosen, target) if chosen.single else None
            job = queued or _create(actor, chosen, target, options, predicted, secrets)
            if idempotency_key:
                IdempotentAnswer.objects.create(
                    actor=actor.name, key=idempotency_key, request_digest=request_digest, job=job
                )
    except IntegrityError:
        # Another request with the same key, for another host, won the race between our look and our write.
        if idempotency_key and (first := _first_answer(actor, idempotency_key, request_digest)):
            return first
        raise
    return job


def rescan(job: Job) -> None:
    """Has the host scanned after a job, so that what it has changed is read from the host itself."""
    with contextlib.suppress(RefusedError):  # a host that is gone is scanned when it is back
        submit(SYSTEM, "scan", job.host_id, {})


def _target(actor: Actor, kind: JobKind, target_id: int, role: Role) -> Target:
    target = None
    with contextlib.suppress(NotFoundError):  # told in the same words as what exists for others alone
        target = kind.resolve(target_id)
    if target is None or not actor.sees(target.host.slug):
        raise NotFoundError(_("There is no {kind} with id {id}.").format(kind=kind.target, id=target_id))
    actor.require(role, target.host.slug)
    return target


def _first_answer(actor: Actor, key: str, request_digest: str) -> Job | None:
    answer = IdempotentAnswer.objects.select_related("job__host").filter(actor=actor.name, key=key).first()
    if answer is None:
        return None
    if answer.request_digest != request_digest:
        raise InvalidError(
            _("This Idempotency-Key was already used for a different request. Use a new key for each request.")
        )
    return answer.job


def _queued_already(kind: JobKind, target: Target) -> Job | None:
    same = Job.objects.filter(kind=kind.name, target_kind=target.kind, target_id=target.id, state=Job.State.QUEUED)
    return same.select_related("host").first()


def _create(
    actor: Actor, kind: JobKind, target: Target, options: dict[str, Any], predicted: Plan, secrets: Mapping[str, str]
) -> Job:
    kind.admit(target, predicted)
    job = Job.objects.create(
        kind=kind.name, rewrites=kind.rewrites, host=target.host, target_kind=target.kind, target_id=target.id,
        target_label=target.label, options=options, plan=predicted.as_json(), created_by=actor.name,
    )  # fmt: skip
    _lock(job, kind.locks(target, options))
    kind.submitted(job)
    if secrets:
        sealed.keep(job, secrets)
    claims.log(job, f"queued by {actor.name}")
    audit(actor, f"{kind.name} queued", target.label, after={"job": job.pk, "options": options})
    ring(job)
    return job


def _lock(job: Job, wanted: list[Lock]) -> None:
    keys = {lock.key for lock in wanted}
    exclusive = {lock.key for lock in wanted if lock.exclusive}
    for held in ResourceLock.objects.select_related("job").filter(key__in=keys):
        if held.exclusive or held.key in exclusive:
            other = held.job
            # On a storage that hosts share it may be another host's, which may not exist for who reads this.
            who = _("A job on another host")
            if other.host_id == job.host_id:
                who = _("Job {other} ({kind})").format(other=other.pk, kind=other)
            told = _("{who} needs the same image. Wait until it ends, or cancel it.")
            raise RefusedError("busy", told.format(who=who))
    ResourceLock.objects.bulk_create(ResourceLock(job=job, key=key, exclusive=key in exclusive) for key in keys)


def cancel(actor: Actor, job: Job) -> Job:
    """Cancels a job: a queued one at once; a running one stops, puts everything back and says so.

    Raises:
        ForbiddenError: the actor is no operator.
        InvalidError: it has ended already.
    """
    actor.require(Role.OPERATOR, job.host.slug)
    with transaction.atomic():
        waited = _cancelled_unbegun(job)
        if not waited and Job.objects.filter(pk=job.pk, state__in=Job.ACTIVE).update(cancel_requested=True) != 1:
            raise InvalidError(_("Job {job} has already ended. There is nothing to cancel.").format(job=job.pk))
        claims.log(job, f"cancel requested by {actor.name}")
        audit(actor, "job cancelled", job, after={"job": job.pk})
        if waited:
            claims.close(job)
    job.refresh_from_db()
    return job


def _cancelled_unbegun(job: Job) -> bool:
    """Cancels a job of which nothing is begun, and says whether it was one: it was queued, and nothing of it goes on
    without a worker.
    """
    unbegun = Job.objects.filter(pk=job.pk, state=Job.State.QUEUED).exclude(kept__has_key=kinds.BEGUN)
    now = timezone.now()
    return unbegun.update(state=Job.State.CANCELLED, finished=now, cancel_requested=True, waiting_for="") == 1


def withdraw(actor: Actor, job: Job, why: str) -> bool:
    """Cancels a job that has not begun; one that is at work is left alone, and so is one that has ended.

    Args:
        why: a sentence for its log.

    Returns:
        Whether it had not begun, and now never will.

    Raises:
        ForbiddenError: the actor is no operator.
    """
    actor.require(Role.OPERATOR, job.host.slug)
    with transaction.atomic():
        if not _cancelled_unbegun(job):
            return False
        claims.log(job, f"withdrawn by {actor.name}: {why}")
        audit(actor, "job cancelled", job, after={"job": job.pk, "why": why})
        claims.close(job)
    return True


def tell_secrets(actor: Actor, job: Job, given: Mapping[str, str]) -> Job:
    """Tells a job that waits for them its passphrases, and lets it go on; raises as :func:`sealed.give`."""
    job = sealed.give(actor, job, given)
    if job.parked_at is not None:
        claims.let_go_on(job, f"its passphrase was entered by {actor.name}")
    ring(job)
    job.refresh_from_db()
    return job


def retry(actor: Actor, job: Job) -> Job:
    """Submits the same job again, planned anew. A warning that nobody knows where a guest has gone on refuses it, as
    nobody sees it.

    Raises:
        InvalidError: it has not failed.
        ForbiddenError, NotFoundError, RefusedError: as for :func:`submit`.
    """
    if job.active or job.state == Job.State.SUCCEEDED:
        told = _("Job {job} is {state}. Only a failed, cancelled or interrupted job can be retried.")
        raise InvalidError(told.format(job=job.pk, state=job.state))
    return submit(actor, job.kind, job.target_id, job.options, by_hand=not kinds.in_doubt(job))


def undo(actor: Actor, job: Job, *, force: bool = False) -> Job:
    """Puts the original of a finished job back, from its undo copy.

    Args:
        force: also when the new image was written to since, which is then lost (admin).

    Raises:
        ForbiddenError, NotFoundError, RefusedError: as for :func:`submit`.
    """
    if force:
        actor.require(Role.ADMIN, job.host.slug)
    return submit(actor, "undo", job.pk, {"force": force})


def discard_undo(actor: Actor, job: Job, *, force: bool = False) -> Job:
    """Removes a finished job's undo copy, which frees what it holds.

    Args:
        force: also where the image is gone or damaged, or somebody wrote to the copy: it may be all that is left.

    Raises:
        ForbiddenError, NotFoundError, RefusedError: as for :func:`submit`.
    """
    return submit(actor, "discard_undo", job.pk, {"force": force})
