"""Passphrases that jobs need, between their submission and their claim: a quarter of an hour at most.

They are encrypted with a key that is not in the database (:mod:`storage_admin.sealing`), stand in no plan, log, trail,
message or backup, and are read once: with the claim their row goes. A job without them waits, and asks for them.
"""

import json
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin import sealing
from storage_admin.accounts.models import Actor, audit
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import of_fields
from storage_admin.jobs import kinds
from storage_admin.jobs.kinds import JobKind, Wait
from storage_admin.jobs.models import Job, Sealed

#: How long they are kept for a job that does not begin, and how long such a job then waits to be told them again.
KEEP, PATIENCE = timedelta(minutes=15), timedelta(hours=24)
#: Characters of each.
LONGEST = 512


def check(kind: JobKind, options: dict[str, object], given: Mapping[str, str]) -> None:
    """Refuse what is given and not what the job needs.

    Raises:
        InvalidError: it names each.
    """
    needed = kind.secrets(options)
    wrong = {name: _("This job takes no such secret.") for name in given if name not in needed}
    wrong |= {name: _("Enter it as well.") for name in needed if not given.get(name)}
    wrong |= {
        name: _("Use 1 to {longest} printable characters.").format(longest=LONGEST)
        for name, text in given.items()
        if name in needed and text and not (text.isprintable() and len(text.encode("utf-8", "replace")) <= LONGEST)
    }
    if wrong:
        raise of_fields({f"secrets.{name}": text for name, text in wrong.items()})


def keep(job: Job, given: Mapping[str, str]) -> None:
    """Keep them for a job; those that it had are forgotten."""
    content = sealing.lock(json.dumps(dict(given)))
    Sealed.objects.update_or_create(job=job, defaults={"content": content, "since": timezone.now()})


def missing(job: Job) -> Wait | None:
    """What a job that needs secrets has to wait for where they are not there, or not any more."""
    if _there().filter(job=job).exists():
        return None
    return Wait(_("its passphrase to be entered"), timezone.now() + PATIENCE, parked_for=Job.ParkedFor.SECRETS)


def take(job: Job) -> Mapping[str, str] | None:
    """The secrets of a job that begins and needs some, which are forgotten by that; ``None`` where they are missing.

    Call it within the transaction that claims the job.
    """
    row = _there().filter(job=job).first()
    if row is None:
        return None
    Sealed.objects.filter(job=job).delete()
    try:
        return {str(name): str(text) for name, text in json.loads(sealing.unlock(row.content)).items()}
    except sealing.SealError:
        return None  # of another key: it is asked for again


def forget(job: Job) -> None:
    """A job that needed secrets has ended, perhaps without having begun."""
    Sealed.objects.filter(job=job).delete()


def give(actor: Actor, job: Job, given: Mapping[str, str]) -> Job:
    """Tells a job that waits for them its secrets.

    Raises:
        ForbiddenError: the role does not allow it.
        InvalidError: they are not those that it needs.
        RefusedError: ``stale_plan``: it waits for none.
    """
    kind = kinds.get(job.kind)
    actor.require(kind.role, job.host.slug)
    if not given:
        check(kind, job.options, dict.fromkeys(kind.secrets(job.options), ""))
    check(kind, job.options, given)
    with transaction.atomic():
        free = Job.objects.select_for_update().filter(pk=job.pk, state=Job.State.QUEUED).first()
        if free is None or not awaited(free):
            raise RefusedError("stale_plan", _("Job {job} does not wait for a passphrase.").format(job=job.pk))
        keep(free, given)
        audit(actor, "job given its passphrase", job, after={"job": job.pk})
    return free


def awaited(job: Job) -> Collection[str]:
    """The secrets that a job waits for; none where it has them, or needs none."""
    if job.state != Job.State.QUEUED or _there().filter(job=job).exists():
        return ()
    return kinds.get(job.kind).secrets(job.options)


def tidy(now: datetime) -> None:
    """Forgets what was kept for too long."""
    Sealed.objects.filter(since__lte=now - KEEP).delete()


def _there() -> QuerySet[Sealed]:
    return Sealed.objects.filter(since__gt=timezone.now() - KEEP)
