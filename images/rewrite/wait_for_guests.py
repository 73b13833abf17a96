"""Jobs that wait for a guest to be shut down, and that start it again in the end. Nothing here ever shuts one down.

Waiting. With ``when_running: wait`` a plan whose only refusals are running guests is accepted (:func:`set_aside`).
Where the claim finds one running (:class:`WaitsForGuests`), the job is parked: queued, with its locks and without a
slot. :func:`look` asks libvirt every few seconds which guests are off by now, and has the host scanned when they are,
because a guest that ran has changed its images. After a scan that knows of no running guest any more, the job goes on
to its next claim, which asks libvirt again. After ``wait_hours`` from its submission it is given up.

Starting. With ``start_after`` the guests that a job waited for are started when it has ended, and where it waited for
none, the one guest whose own disk the image is. They are started after success, and after a failure that left the
original as it was: they were shut down for this job alone. They stay off after a cancel, because somebody is there who
decides; where the image was found damaged; while a recovery has yet to tell what stands in the image's place; and as
long as another job that needs their images is queued or at work. A start that fails is a warning.
"""

import contextlib
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.rewrite import in_use
from images.rewrite.neighbours import ancestors
from storage_admin.accounts.models import SYSTEM, audit
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.models import OFF_STATES, Guest
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.libvirt.relay import why_read_only
from storage_admin.hosts.models import Host
from storage_admin.jobs import claims, services
from storage_admin.jobs.kinds import Wait
from storage_admin.jobs.models import Job, JobLog, ResourceLock
from storage_admin.jobs.plan_and_progress import Refusal
from storage_admin.jobs.routing import ring_now

#: Options of every rewriting job.
WAIT_OPTIONS: dict[str, dict[str, Any]] = {
    "when_running": {
        "enum": ["refuse", "wait"],
        "default": "refuse",
        "description": _(
            "If a guest that uses the image is running: refuse the job, or wait until the guest has been shut down."
        ),
    },
    "wait_hours": {
        "type": "number",
        "minimum": 0,
        "maximum": 168,
        "default": 24,
        "description": _("Hours to wait before the job fails."),
    },
    "start_after": {
        "type": "boolean",
        "default": False,
        "description": _("Start the guest again when the job has ended and the image is intact."),
    },
}

#: Jobs that wait for guests.
PARKED = Q(state=Job.State.QUEUED, parked_at__isnull=False, parked_for=Job.ParkedFor.GUESTS)
#: Refusals that a guest's end takes away.
OF_GUESTS = frozenset({"guest_running", "image_in_use"})
#: After these failures nothing is started: the image is damaged, or it is not known what stands there.
NO_START_AFTER = frozenset({"dirty_or_corrupt", "chain_broken", "chain_cycle", "format_mismatch", "bug"})
#: After a scan that failed, the next one is asked for after so long.
SCAN_AGAIN = timedelta(minutes=1)
#: A guest that is off in time is in time, if the host can be scanned within so long.
SCAN_WITHIN = timedelta(hours=1)
#: A reason names so many guests, and so many characters of each name.
NAMED, NAME_LENGTH = 2, 60


def waits(options: dict[str, Any]) -> bool:
    """Whether a job with these options waits for guests."""
    return options.get("when_running") == "wait"


def set_aside(
    image: Image, against: list[Refusal], options: dict[str, Any]
) -> tuple[list[Refusal], tuple[str, ...]]:  # fmt: skip
    """Takes out of a plan's refusals those that the job would wait away.

    Args:
        image: what would be rewritten.
        against: all refusals of the plan.
        options: the job's, cleaned.

    Returns:
        The refusals that are left, and warnings for the plan that say what is waited for.
    """
    if options.get("start_after") and (why := why_read_only(image.host)):
        told = gettext("No guest can be started again after this job. {why}").format(why=why)
        against = [*against, Refusal("tool_missing", told)]
    if not waits(options) or not any(refusal.code in OF_GUESTS for refusal in against):
        return against, ()
    running = in_use.guests_known_to_run(image)
    if not running:
        return against, ()
    who = _guests([_name(guest, image) for guest in running])
    warning = gettext(
        "The job waits until {who} has been shut down, for at most {hours} hours. It does not shut down any guest "
        "itself."
    ).format(who=who, hours=f"{options['wait_hours']:g}")
    return [refusal for refusal in against if refusal.code not in OF_GUESTS], (warning,)


class WaitsForGuests:
    """What makes a kind that rewrites an image wait: put it before ``RewriteKind``."""

    def must_wait(self, job: Job, *, ask: bool) -> Wait | None:
        """See :meth:`storage_admin.jobs.kinds.JobKind.must_wait`."""
        if not waits(job.options) or job.target_kind != "image":
            return None
        image = Image.objects.select_related("host", "pool").filter(pk=job.target_id).first()
        if image is None:
            return None  # the job's own request tells so
        until = job.wait_until or job.created + timedelta(hours=float(job.options["wait_hours"]))
        if not ask:
            return _wait(_known_to_run(image), until)
        try:
            found = in_use.running_domains(image)
        except RefusedError:
            return Wait(_libvirt(job, until), until)
        return _wait([{"kind": Guest.Kind.DOMAIN, "uid": domain.uid, "name": domain.name} for domain in found], until)


def _known_to_run(image: Image) -> list[dict[str, str]]:
    known = in_use.guests_known_to_run(image)
    return [{"kind": guest.kind, "uid": guest.uid, "name": _name(guest, image)} for guest in known]


def _wait(guests: list[dict[str, str]], until: datetime) -> Wait | None:
    if not guests:
        return None
    return Wait(_shut_down([guest["name"] for guest in guests], until), until, tuple(guests))


def _shut_down(names: list[str], until: datetime) -> str:
    return f"{_guests(names)} to be shut down ({_until(until)})"


def _libvirt(job: Job, until: datetime) -> str:
    return f"libvirt on {job.host.name[:NAME_LENGTH]} to answer ({_until(until)})"


def _until(until: datetime) -> str:
    return f"until {until:%Y-%m-%d %H:%M} UTC"


def _name(guest: Guest, image: Image) -> str:
    """Its name; empty for a guest of another host, which may not exist for whoever reads of it."""
    return guest.name if guest.host_id == image.host_id else ""


def _guests(names: Sequence[str]) -> str:
    cut = [name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…" for name in names if name]
    more, elsewhere = len(cut) - NAMED, len(names) - len(cut)
    shown = ", ".join(cut[:NAMED]) + (f" and {more} more" if more > 0 else "")
    parts = [f"{'guest' if len(cut) == 1 else 'guests'} {shown}"] if cut else []
    if elsewhere:
        parts.append("a guest of another host" if elsewhere == 1 else f"{elsewhere} guests of other hosts")
    return " and ".join(parts)


def look(
    host_id: int | None = None,
    *,
    but_not: Collection[int] = (),
    starts: bool = True,
    states: dict[str, str] | None = None,
) -> None:
    """Lets jobs go on whose guests are off, gives up those that waited too long, and starts guests that are due.

    Args:
        host_id: look at one host alone.
        but_not: ids of hosts that are left out: their own workers look at them.
        starts: start guests as well; after a scan, the next round does.
        states: of the host's domains, where libvirt has told them just now; else it is asked.
    """
    chosen = Job.objects.exclude(host__in=but_not) if host_id is None else Job.objects.filter(host=host_id)
    parked = chosen.filter(PARKED).select_related("host").order_by("id")
    told: dict[int, dict[str, str] | None] = {}
    if host_id is not None and states is not None:
        told[host_id] = states
    for job in parked:
        if _needs_libvirt(job) and job.host_id not in told:
            told[job.host_id] = _states(job.host)
        _look_at(job, told.get(job.host_id, {}))
    if starts:
        for job in chosen.filter(start_due=True).exclude(state__in=Job.ACTIVE).select_related("host"):
            _start_guests_of(job)


def hosts_that_wait(*, but_not: Collection[int] = ()) -> list[int]:
    """Ids of the hosts on which jobs wait for what libvirt tells."""
    parked = Job.objects.filter(PARKED).exclude(host__in=but_not)
    return sorted({job.host_id for job in parked.only("host_id", "waited_guests") if _needs_libvirt(job)})


def _needs_libvirt(job: Job) -> bool:
    """Whether libvirt tells what the job waits for. The other guests are as the last scan knew them, also that of
    another host.
    """
    domains = [guest for guest in job.waited_guests if guest["kind"] == Guest.Kind.DOMAIN]
    return not job.waited_guests or any(guest["name"] for guest in domains)


def _states(host: Host) -> dict[str, str] | None:
    try:
        return control.states(host)
    except HostError:
        return None


def _look_at(job: Job, states: dict[str, str] | None) -> None:
    known, is_scanned = _known(job), _is_scanned(job)
    if is_scanned and not known:
        if claims.let_go_on(
            job, f"a scan after {job.parked_at:%H:%M:%S} UTC found no running guest: the job continues"
        ):
            ring_now(job.pk)
        return
    # Also one that nobody knew of when the job began to wait, or that has moved: that the others are off is no reason
    # for a scan again and again.
    if is_scanned and (waited := claims.waited(job.waited_guests, known)) != job.waited_guests:
        job.waited_guests = waited
        claims.parked(job).update(waited_guests=waited)
    until = job.wait_until or job.created
    running = [guest["name"] for guest in job.waited_guests if states is None or _runs(job, guest, states, known)]
    off = states is not None and not running
    if timezone.now() >= (until + SCAN_WITHIN if off else until):
        _give_up(job, "guests_unknown" if states is None else "guest_running" if running else "stale_plan")
        return
    if states is None:
        reason = _libvirt(job, until)
    elif running:
        reason = _shut_down(running, until)
    else:
        names = [guest["name"] for guest in job.waited_guests]
        since = f"{_guests(names)} {'are' if len(names) > 1 else 'is'} off" if names else "libvirt answers"
        reason = f"a scan of {job.host.name[:NAME_LENGTH]}, now that {since}"
        _have_scanned(job)
    if reason != job.waiting_for:
        claims.parked(job).update(waiting_for=reason[:200])


def _give_up(job: Job, code: str) -> None:
    detail = (
        f"The job gave up: it waited {float(job.options['wait_hours']):g} hours for {job.waiting_for}. Nothing was "
        "changed. Shut the guest down and submit the job again, or allow more time."
    )
    if claims.give_up(job, code, detail):
        audit(SYSTEM, f"{job.kind} given up", job.target_label, after={"job": job.pk, "waited_for": job.waiting_for})


def _runs(job: Job, guest: dict[str, str], states: dict[str, str], known: list[dict[str, str]]) -> bool:
    if not guest["name"]:  # of another host, which its own scans tell of
        return guest in known
    if guest["kind"] == Guest.Kind.DOMAIN:
        return guest["uid"] in states and states[guest["uid"]] not in OFF_STATES
    row = Guest.objects.filter(host=job.host_id, kind=guest["kind"], uid=guest["uid"]).first()
    return row is not None and not row.off


def _known(job: Job) -> list[dict[str, str]]:
    """The running guests that need the image, as the last scans know them."""
    image = Image.objects.select_related("host").filter(pk=job.target_id).first()
    return [] if image is None else _known_to_run(image)


def _is_scanned(job: Job) -> bool:
    """Whether its host was scanned since it began to wait."""
    scans = Job.objects.filter(kind="scan", host=job.host_id, state=Job.State.SUCCEEDED, started__gt=job.parked_at)
    return scans.exists()


def _have_scanned(job: Job) -> None:
    scans = Job.objects.filter(kind="scan", host=job.host_id)
    if scans.filter(state__in=Job.ACTIVE).exists():
        return
    failed = scans.exclude(state=Job.State.SUCCEEDED).filter(finished__gt=timezone.now() - SCAN_AGAIN)
    if not failed.exists():
        with contextlib.suppress(RefusedError):
            services.submit(SYSTEM, "scan", job.host_id, {})


def _start_guests_of(job: Job) -> None:
    """Starts what an ended job owes a start, once; see the module's words for when."""
    if job.needs_recovery or job.repoint_due or job.unlock_due:
        return
    guests, why_not = _to_be_started(job)
    if guests and _others_need(job, guests):
        return
    if Job.objects.filter(pk=job.pk, start_due=True).update(start_due=False) != 1:
        return  # another round was first
    if why_not:
        claims.log(job, f"no guest is started: {why_not}", JobLog.Level.WARNING)
        return
    for guest in guests:
        _start(job, guest)
    services.rescan(job)


def _to_be_started(job: Job) -> tuple[list[Guest], str]:
    """The guests, or why none."""
    if job.state == Job.State.CANCELLED:
        return [], "the job was cancelled"
    if job.state != Job.State.SUCCEEDED and job.error_code in NO_START_AFTER:
        return [], f"the job has failed ({job.error_code}); check the image first"
    domains = Guest.objects.filter(host=job.host_id, kind=Guest.Kind.DOMAIN)
    if job.waited_guests:
        waited = list(domains.filter(uid__in=[guest["uid"] for guest in job.waited_guests]))
        return waited, "" if waited else "libvirt no longer knows the guest that the job waited for"
    users = list(domains.filter(disks__use__image=job.target_id).distinct())
    if len(users) == 1:
        return users, ""
    return [], f"{len(users)} libvirt guests have the image as their disk; the job waited for none of them"


def _others_need(job: Job, guests: list[Guest]) -> bool:
    """Whether a job that can go on writes to an image of these guests; one that waits for a guest itself does not."""
    images = list(Image.objects.filter(uses__disk__guest__in=guests).select_related("host", "pool"))
    below: list[Image] = []
    for image in images:
        with contextlib.suppress(RefusedError):  # a chain without an end is no job's
            below += ancestors(image)
    keys = {f"image:{image.pk}" for image in [*images, *below]}
    held = ResourceLock.objects.filter(key__in=keys, exclusive=True, job__state__in=Job.ACTIVE, job__parked_at=None)
    return held.exclude(job=job).exists()


def _start(job: Job, guest: Guest) -> None:
    try:
        outcome = control.start(job.host, guest.uid)
    except HostError as error:
        claims.log(job, f"guest {guest.name} could not be started: {error.detail}", JobLog.Level.WARNING)
        audit(SYSTEM, "guest start failed", guest.name, after={"job": job.pk, "error": error.detail})
        return
    if outcome == "started":
        claims.log(job, f"guest {guest.name} was started")
        audit(SYSTEM, "guest started", guest.name, after={"job": job.pk})
    else:
        claims.log(job, f"guest {guest.name} is {outcome}")
