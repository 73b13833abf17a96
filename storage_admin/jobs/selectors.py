"""Reads: jobs and their logs, as far as they exist for the actor."""

from collections.abc import Iterable

from django.db.models import QuerySet

from storage_admin.accounts.models import Actor
from storage_admin.hosts.selectors import in_scope
from storage_admin.jobs.models import IdempotentAnswer, Job, JobLog


def jobs_for(actor: Actor) -> QuerySet[Job]:
    """The jobs on hosts that exist for ``actor``, newest first, each with its host."""
    # Of hosts that were removed lines of the ledger are left; the condition holds for rows of hosts that are there.
    rows = Job.objects.filter(host__slug__isnull=False)
    return in_scope(rows.select_related("host").defer("host__capabilities"), actor)


def log_of(job: Job, after: int = 0) -> QuerySet[JobLog]:
    """A job's log in order.

    Args:
        after: only lines whose ``id`` is larger, as when it was read up to there before.
    """
    return job.log_lines.filter(pk__gt=after).order_by("pk")


def answered_keys(actor: Actor, keys: Iterable[str]) -> set[str]:
    """Which of these Idempotency-Keys of an actor were answered with a job already."""
    answers = IdempotentAnswer.objects.filter(actor=actor.name, key__in=[key for key in keys if key])
    return set(answers.values_list("key", flat=True))
