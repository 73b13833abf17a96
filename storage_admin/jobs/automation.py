"""The switch for all that starts by itself and changes something."""

from datetime import datetime

from django.db import transaction
from django.utils import timezone

from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.jobs.models import Automation, Job

#: The id of the only row.
_ONLY = 1
#: Under this name a job's row keeps until when it may begin.
BEGIN_BEFORE = "begin_before"


def state() -> Automation:
    """The switch as it stands; a row that is not saved where nobody has touched it yet."""
    return Automation.objects.filter(pk=_ONLY).first() or Automation(pk=_ONLY)


def is_paused() -> bool:
    """Whether nothing that is scheduled may start now, but for scans and their samples."""
    return Automation.objects.filter(pk=_ONLY, paused=True).exists()


def switch(actor: Actor, *, paused: bool, reason: str = "") -> Automation:
    """Pauses everything that is scheduled, or lets it go on. What is at work already ends as it would.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
    """
    actor.require_everywhere(Role.ADMIN)
    with transaction.atomic():
        before = state()
        now, _made = Automation.objects.update_or_create(
            pk=_ONLY,
            defaults={"paused": paused, "by": actor.name, "reason": reason[:300], "since": timezone.now()},
        )
        audit(
            actor, "automation paused" if paused else "automation resumed",
            before={"paused": before.paused}, after={"paused": paused, "reason": now.reason},
        )  # fmt: skip
    return now


def begin_before(job: Job, moment: datetime) -> None:
    """Says until when a job may begin that was submitted by itself. Call it in the transaction that submits it."""
    job.kept = job.kept | {BEGIN_BEFORE: moment.isoformat()}
    Job.objects.filter(pk=job.pk).update(kept=job.kept)
