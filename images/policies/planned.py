"""What the job kind's own plan says of images that the rules have chosen: a few at a time, in the order of gain."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from images import selectors
from images.models import Image
from images.policies import guests
from images.policies import rules as choosing
from images.policies.reasons import told
from images.policies.rules import Candidate
from images.policies.shape import Rules
from images.rewrite import neighbours, planning, space
from images.rewrite.space import Admitted
from storage_admin.accounts.models import SYSTEM
from storage_admin.errors import NotFoundError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal
from storage_admin.words import seconds, size

#: A host's speed is known from so many jobs of a kind at least, and from the last ones, of images of some size.
_FEWEST, _MOST, _SMALLEST = 3, 20, 64 * 1024**2


@dataclass(frozen=True)
class Planned:
    """A candidate with its plan.

    Args:
        plan: ``None`` where there is no such image any more.
        refusal: why no job is submitted; ``None`` where one is.
    """

    candidate: Candidate
    plan: Plan | None
    refusal: Refusal | None

    @property
    def won_bytes(self) -> int | None:
        """What it would win, where that is known."""
        return self.plan.won_bytes if self.plan else None


def planned(
    rules: Rules, candidates: Sequence[Candidate], admitted: Admitted, *, until: datetime, now: datetime
) -> list[Planned]:
    """Plans candidates one after the other: for each counts what those before it need, as if they were queued.

    Args:
        admitted: what jobs need; what is planned is added.
        until: the window's end: what would not be done by then is refused, where the host's speed is known.
    """
    images = _images(rules, candidates, admitted)
    speeds = Speeds(rules)
    found = []
    for candidate in candidates:
        plan = _plan(rules, candidate, images)
        if plan is None:
            found.append(Planned(candidate, None, Refusal("gone", _("It no longer exists."))))
            continue
        against = (*plan.refusals, *plan.by_hand)
        refusal = against[0] if against else _not_worth(rules, plan)
        refusal = refusal or speeds.too_long(candidate.host_id, plan.before_bytes, until - now)
        if refusal is None:
            _add(admitted, candidate, plan, images)
        found.append(Planned(candidate, plan, refusal))
    return found


def _images(rules: Rules, candidates: Sequence[Candidate], admitted: Admitted) -> dict[int, Image]:
    if not rules.on_images:
        return {}
    rows: QuerySet[Image] = selectors.images_for(SYSTEM).defer(None)
    images = list(rows.filter(pk__in=[candidate.id for candidate in candidates]))
    neighbours.share(images, admitted)
    return {image.pk: image for image in images}


def _plan(rules: Rules, candidate: Candidate, images: dict[int, Image]) -> Plan | None:
    if not rules.on_images:
        kind = kinds.get(rules.kind)
        try:
            return kind.plan(rules.actor, candidate.id, kind.clean(guests.options_for(rules, candidate.id)))
        except NotFoundError:
            return None
    image = images.get(candidate.id)
    if image is None:
        return None
    return planning.plan_for(rules.actor, planning.image_kind(rules.kind), image, rules.options)


def _add(admitted: Admitted, candidate: Candidate, plan: Plan, images: dict[int, Image]) -> None:
    if not plan.scratch_bytes or plan.scratch_pool is None:
        return
    image = images.get(candidate.id)
    pool = image.pool if image is not None else None
    if pool is None or pool.pk != plan.scratch_pool:
        pool = StoragePool.objects.select_related("host").get(pk=plan.scratch_pool)
    host = image.host if image is not None else pool.host
    admitted.add(pool, host, space.planned_need(plan, host))


def _not_worth(rules: Rules, plan: Plan) -> Refusal | None:
    """What the plan's method would win may be less than what the best one would."""
    if rules.kind != "reclaim":
        return None
    found = choosing.gains_too_little(rules, plan.won_bytes, plan.before_bytes)
    return Refusal(*told(*found)) if found else None


class Speeds:
    """How many bytes a second jobs of a kind went through on each host; asked once for each."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._of = cache(self._measured)

    def too_long(self, host_id: int, read: int | None, left: timedelta) -> Refusal | None:
        """Whether a job would not be done before the window ends, as far as the host's speed is known.

        Args:
            read: bytes that it goes through.
        """
        speed = self._of(host_id) if read and self._rules.on_images else None
        if not read or not speed or read / speed <= left.total_seconds():
            return None
        detail = _(
            "The job would take about {seconds} at {speed}/s, the speed of the last {kind} jobs there. The window "
            "ends in {left}."
        ).format(
            seconds=seconds(read / speed),
            speed=size(int(speed)),
            kind=self._rules.kind,
            left=seconds(max(left.total_seconds(), 0)),
        )
        return Refusal("too_long", detail)

    def _measured(self, host_id: int) -> float | None:
        done = Job.objects.filter(
            kind=self._rules.kind, host=host_id, state=Job.State.SUCCEEDED, result__before_bytes__gte=_SMALLEST
        )
        rows = list(done.order_by("-id").values_list("result__before_bytes", "result__seconds")[:_MOST])
        took = sum(took or 0 for _size, took in rows)
        if len(rows) < _FEWEST or not took:
            return None
        speed = sum(read for read, _took in rows) / took
        limit = self._rules.options.get("bandwidth_bytes_sec")
        limit = limit or Host.objects.filter(pk=host_id).values_list("bandwidth_bytes_sec", flat=True).first()
        return float(min(speed, limit)) if limit else float(speed)
