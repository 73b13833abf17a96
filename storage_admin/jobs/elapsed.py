"""Time that has surely passed: seconds that some machine of the dashboard's has counted itself, whatever a clock says.

A clock on the wall may be set. So each machine counts by the one that runs on since its boot, and the most that any of
them has counted counts for all. What nobody saw, while every machine was off, has not passed. Undo copies and the times
of guests go by this; beside it, a clock that was set is noticed.
"""

from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from storage_admin.agent.swap.journal import STEP, Moment
from storage_admin.jobs.models import Elapsed

#: Seconds after which a clock that was set, and left like that, counts as right.
SETTLED = 24 * 3600.0


def now() -> float:
    """Seconds that have surely passed since the dashboard began to count."""
    moment = Moment.now()
    own = Elapsed.objects.filter(boot_id=moment.boot_id).first()
    most = Elapsed.objects.aggregate(most=Max("seconds"))["most"] or 0.0
    return float(most if own is None else max(most, own.seconds + moment.boottime - own.boottime))


def tick() -> float:
    """Write down how far this machine has counted, and notice whether its clock was set; returns :func:`now`."""
    with transaction.atomic():
        moment, wall = Moment.now(), timezone.now().timestamp()
        seconds, offset = now(), wall - moment.boottime
        own = Elapsed.objects.select_for_update().filter(boot_id=moment.boot_id).first()
        if own is None:
            own = Elapsed(boot_id=moment.boot_id, offset=offset, seconds=seconds)
        own.boottime, own.seconds = moment.boottime, max(seconds, own.seconds)
        jump = offset - own.offset
        if abs(jump) <= STEP or (own.jumped_at is not None and seconds - own.jumped_at > SETTLED):
            own.offset, own.jumped_at, own.jump = offset, None, 0.0
        else:
            own.jumped_at, own.jump = seconds if own.jumped_at is None else own.jumped_at, jump
        own.save()
        return own.seconds


def jump() -> float:
    """Seconds by which this machine's clock was set, as long as nobody has put it right; 0 where it was not."""
    moment = Moment.now()
    own = Elapsed.objects.filter(boot_id=moment.boot_id).first()
    step = 0.0 if own is None else timezone.now().timestamp() - moment.boottime - own.offset
    return step if abs(step) > STEP else 0.0
