"""The bytes of an upload, as they come by REST: they go straight to the agent on the pool's host.

The job's row says how many of them are on that host's disk. Whoever sends the next ones has to begin there.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from images import download
from images.kinds.upload import PATIENCE, RECEIVED, TURN, WHOLE, Upload, waiting_for, where
from images.rewrite import space
from storage_admin.accounts.models import Actor, Role
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts import asking
from storage_admin.jobs import claims
from storage_admin.jobs.kinds import BEGUN
from storage_admin.jobs.models import Job
from storage_admin.jobs.routing import ring_now

#: Bytes that the agent is given at once, and the most that one request may send where it says their digest: they count
#: for nothing until all of them have come.
_PIECE, MOST_DIGESTED = 1 << 20, 256 << 20
#: Seconds between two looks whether the job still waits for the bytes.
_LOOK = 5.0
#: What an upload that has ended left is removed so long after: whoever still sends has noticed by then.
_SETTLED = timedelta(minutes=2)
_A_ROUND = 10


class Stream(Protocol):
    """Where the bytes come from."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""


def received(job: Job) -> int:
    """How many bytes of an upload are on the host's disk.

    Raises:
        NotFoundError: the job is no upload.
    """
    if job.kind != Upload.name:
        raise NotFoundError(_("Job {job} is no upload.").format(job=job.pk))
    whole = BEGUN in job.kept or job.state == Job.State.SUCCEEDED
    return int(job.options["size"] if whole else job.kept.get(RECEIVED, 0) if job.active else 0)


def awaits(job: Job) -> bool:
    """Whether a job waits for bytes."""
    return job.kind == Upload.name and job.state == Job.State.QUEUED and BEGUN not in job.kept


def take(
    actor: Actor,
    job: Job,
    offset: int,
    length: int,
    stream: Stream,
    *,
    sha256: str | None = None,
    whole_sha256: str | None = None,
) -> int:
    """Takes the next bytes of an upload.

    Args:
        offset: of the first one; it has to be the one that is missing.
        length: how many of them come.
        stream: gives them.
        sha256: of all of them, in hexadecimal digits.
        whole_sha256: of the whole file. It is compared where these are its last bytes, and the job names none.

    Returns:
        How many bytes of the file are on the host's disk now.

    Raises:
        ForbiddenError: the actor is no operator.
        InvalidError: there are more than the file has, or too many to be compared with a digest at once.
        RefusedError: ``stale_plan``: the job waits for other bytes, or for none; ``wrong_digest``; ``busy``;
            ``host_unreachable``; what the agent refuses.
    """
    actor.require(Role.OPERATOR, job.host.slug)
    _refuse_other(job, offset)
    if offset + length > job.options["size"]:
        raise InvalidError(_("The file has {size:,} bytes.").format(size=job.options["size"]))
    if sha256 is not None and length > MOST_DIGESTED:
        most = _("Send at most {most:,} bytes with a digest.").format(most=MOST_DIGESTED)
        raise InvalidError(most)
    if not length:
        return offset
    download.take_place()
    try:
        whole = whole_sha256 if offset + length == job.options["size"] else None
        turn = _turn(job, offset, whole)
        return _take(job, offset, _reader(job, turn, length, stream), turn, sha256)
    except HostError as error:
        raise RefusedError("host_unreachable", error.detail) from error
    finally:
        download.give_place()


def _turn(job: Job, offset: int, whole_sha256: str | None) -> int:
    """The number of a request that sends bytes. Those of one with a lower number count no more from now on."""
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        _refuse_other(row, offset)
        row.kept[TURN] = int(row.kept.get(TURN, 0)) + 1
        if whole_sha256 is not None:
            row.kept[WHOLE] = whole_sha256
        row.save(update_fields=["kept"])
    return int(row.kept[TURN])


def _reader(job: Job, turn: int, length: int, stream: Stream) -> Callable[[], bytes]:
    left, looked = length, 0.0

    def read() -> bytes:
        nonlocal left, looked
        # Before the first byte, too: the agent may have waited for the end of an earlier request.
        if time.monotonic() - looked > _LOOK:
            looked = time.monotonic()
            _refuse_other(Job.objects.get(pk=job.pk), None, turn)
        piece = stream.read(min(_PIECE, left)) if left else b""
        if left and not piece:
            raise InvalidError(_("The connection ended before all announced bytes had come."))
        left -= len(piece)
        return piece

    return read


def _take(job: Job, offset: int, more: Callable[[], bytes], turn: int, sha256: str | None) -> int:
    asked = {
        "target": where(job), "size": job.options["size"], "offset": offset, "sha256": sha256,
        **space.limits(job),
    }  # fmt: skip
    there = offset
    events = asking.told(job.host, "receive", asked, job=job.uid, more=more)
    try:
        for event in events:
            if event["event"] == protocol.KEPT:
                there = _note(job, there, event["offset"], turn)
            elif event["event"] == protocol.RESULT:
                return _note(job, there, event["data"]["offset"], turn)
    finally:
        events.close()
    raise HostError(_("The agent ended without an answer."), protocol.INTERRUPTED)


def _note(job: Job, before: int, now: int, turn: int) -> int:
    """So many bytes are on the disk; with the last of them the job begins."""
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        _refuse_other(row, before, turn)
        row.kept[RECEIVED] = now
        row.done_bytes, row.wait_until = now, timezone.now() + PATIENCE
        whole = now == row.options["size"]
        if whole:
            # In one transaction: what waits no more must not look as if it did.
            row.kept[BEGUN] = True
            row.parked_at, row.waiting_for, row.rung = None, "", timezone.now()
            claims.log(row, "all bytes have arrived")
        elif row.waiting_for:
            row.waiting_for = waiting_for(row)[:200]
        row.save(update_fields=["kept", "done_bytes", "wait_until", "waiting_for", "parked_at", "rung"])
    if whole:
        ring_now(row.pk)
    return now


def _refuse_other(job: Job, offset: int | None, turn: int | None = None) -> None:
    """Refuse bytes that the job does not wait for, and those of a request that another one has come after."""
    if not awaits(job):
        raise RefusedError("stale_plan", _("Job {job} does not wait for any bytes.").format(job=job.pk))
    there = job.kept.get(RECEIVED, 0)
    if offset is not None and offset != there:
        raise RefusedError("stale_plan", _("{there:,} bytes have arrived; send the next ones.").format(there=there))
    if turn is not None and turn != job.kept.get(TURN):
        raise RefusedError("stale_plan", _("Another request sends the rest of this file now."))


def tidy() -> None:
    """Removes what uploads left that ended without a file."""
    ended = Job.objects.filter(kind=Upload.name, finished__lt=timezone.now() - _SETTLED).exclude(state__in=Job.ACTIVE)
    left = ended.filter(kept__has_key=RECEIVED)
    for job in left.select_related("host").order_by("?")[:_A_ROUND]:  # one whose host hangs does not hold up others
        _forget(job)


def _forget(job: Job) -> None:
    try:
        asked: dict[str, Any] = {"target": where(job)}
        for _event in asking.told(job.host, "forget_upload", asked, job=job.uid):
            pass
    except NotFoundError:
        claims.log(job, "its pool is not registered any more: what was uploaded so far stays there", "warning")
    except (RefusedError, HostError):
        return  # tried again in the next round
    Job.objects.filter(pk=job.pk).update(kept={})
