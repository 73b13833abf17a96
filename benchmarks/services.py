"""Writes: a benchmark is started, old results are pasted, a pool is watched. Roles are checked here, whoever calls."""

from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from benchmarks.models import Benchmark, BenchmarkKind, Sample, Watch
from benchmarks.parsers import bonnie
from benchmarks.parsers.bonnie import BonnieRun
from benchmarks.parsers.readings import UnreadableError
from benchmarks.steps import WATCHABLE
from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.errors import InvalidError, NotFoundError, of_field, of_fields
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services

#: Of a paste, in characters and in result lines.
LONGEST_PASTE, MOST_LINES = 65_536, 100
LONGEST_WAIT_HOURS = 24 * 90


def submit(
    actor: Actor, kind: str, pool_id: int, options: dict[str, Any] | None = None, *, idempotency_key: str = ""
) -> Benchmark:
    """Queues a run.

    Args:
        options: of the job kind ``benchmark``, without ``kind``.

    Raises:
        ForbiddenError: the actor is no operator.
        InvalidError: unknown kind or option.
        NotFoundError: there is no such pool.
        RefusedError: as the plan says.
    """
    wanted = dict(options or {})
    if "kind" in wanted:
        raise InvalidError(
            _("Specify kind beside the options, not in them."), {"options": _("kind belongs beside the options.")}
        )
    job = services.submit(actor, "benchmark", pool_id, wanted | {"kind": kind}, idempotency_key=idempotency_key)
    return Benchmark.objects.select_related("host", "pool", "pool__host", "job", "job__host").get(job=job)


def paste(actor: Actor, text: str) -> Benchmark:
    """Keeps result lines of bonnie++, of any machine and any age, as a run of its own; several lines are repetitions.

    Args:
        text: CSV lines, all with the same machine name and size.

    Raises:
        ForbiddenError: the actor is no operator, or limited to some hosts: these are of none.
        InvalidError: a line cannot be read; it says which, and why.
    """
    actor.require_everywhere(Role.OPERATOR)
    if len(text) > LONGEST_PASTE:
        raise of_field("text", _("Enter at most {longest:,} characters at once.").format(longest=LONGEST_PASTE))
    try:
        runs = bonnie.parse(text)
    except UnreadableError as error:
        raise of_field("text", error.detail) from None
    _alike(runs)
    first = runs[0]
    told = {"bonnie++": first.version, "format": first.format_version}
    with transaction.atomic():
        pasted = Benchmark.objects.create(
            source=Benchmark.Source.PASTED, kind=BenchmarkKind.BONNIE, quick=False, label=_printable(first.name),
            environment={"tools": told}, notes=["Pasted: the measured machine is unknown."],
            created_by=actor.name, finished=timezone.now(),
        )  # fmt: skip
        Sample.objects.bulk_create(
            Sample(
                benchmark=pasted, setting=_setting(run), metric=reading.metric, unit=reading.unit, value=reading.value,
                note=reading.note, repetition=number,
            )
            for number, run in enumerate(runs, 1)
            for reading in run.readings
        )  # fmt: skip
        audit(actor, "benchmark pasted", pasted.label or "bonnie++", after={"benchmark": pasted.pk, "lines": len(runs)})
    return pasted


def _alike(runs: list[BonnieRun]) -> None:
    if len(runs) > MOST_LINES:
        raise of_field("text", _("Enter at most {most} lines at once.").format(most=MOST_LINES))
    if len({(run.name, run.size, run.files) for run in runs}) > 1:
        detail = _(
            "The lines are from different machines or sizes. Paste each group separately, then compare the runs."
        )
        raise of_field("text", detail)
    if not any(run.readings for run in runs):
        raise of_field("text", _("The text contains no results."))


def _setting(run: BonnieRun) -> dict[str, str | int]:
    setting: dict[str, str | int] = {"size": _printable(run.size)} if run.size else {}
    return setting | ({"files": _printable(run.files)} if run.files else {})


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:200]


def watch(actor: Actor, pool: StoragePool, kind: str, every_hours: int) -> Watch:
    """Has the quick profile of a kind run on a pool again and again; a second call changes how often.

    Raises:
        ForbiddenError: the actor is no operator.
        InvalidError: there are no steps for that kind, or the time is out of range; it names both.
    """
    actor.require(Role.OPERATOR, pool.host.slug)
    wrong = {}
    if kind not in WATCHABLE:
        wrong["kind"] = _("One of {watchable}.").format(watchable=", ".join(WATCHABLE))
    if not 1 <= every_hours <= LONGEST_WAIT_HOURS:
        wrong["every_hours"] = _("Enter a number from 1 to {longest}.").format(longest=LONGEST_WAIT_HOURS)
    if wrong:
        raise of_fields(wrong)
    with transaction.atomic():
        was = Watch.objects.filter(pool=pool, kind=kind).values("kind", "every_hours").first()
        try:
            with transaction.atomic():
                row, _made = Watch.objects.update_or_create(
                    pool=pool, kind=kind, defaults={"every_hours": every_hours},
                    create_defaults={"every_hours": every_hours, "created_by": actor.name},
                )  # fmt: skip
        except IntegrityError:
            raise NotFoundError(_("There is no pool {pool}.").format(pool=pool.pk)) from None
        audit(actor, "benchmark watch set", pool.name, before=was, after={"kind": kind, "every_hours": every_hours})
    return row


def unwatch(actor: Actor, row: Watch) -> None:
    """Ends a watch; what it measured stays.

    Raises:
        ForbiddenError: the actor is no operator.
    """
    actor.require(Role.OPERATOR, row.pool.host.slug)
    with transaction.atomic():
        audit(actor, "benchmark watch ended", row.pool.name, before={"kind": row.kind, "every_hours": row.every_hours})
        row.delete()
