"""Runs one job: claim it, have the agent do it, record how it ended.

Where a storage does not answer, an agent is held up in the kernel, or its tool is, and neither can be ended until the
server is back. The row says so, and so do pool, host and an alert. The job takes no slot meanwhile. One that only looks
fails at once; one that rewrites waits, unless it is cancelled: then its row ends, and the agent puts everything back
when the storage answers.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import datetime
from functools import cache
from typing import Any

from django.db import InterfaceError, OperationalError, connection, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin.accounts.models import SYSTEM
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError, Request, StoppedError, unb64
from storage_admin.hosts import services as hosts
from storage_admin.hosts import silence as pools
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox.errors import TOKEN_REFUSED
from storage_admin.hosts.session import AgentMissingError, AgentSession
from storage_admin.hosts.transport import agent_bundle, agent_command
from storage_admin.jobs import claims, kinds, routing, services
from storage_admin.jobs.kinds import GoesOnError, JobKind
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.plan_and_progress import Recorder, plain
from storage_admin.jobs.routing import heart

logger = logging.getLogger(__name__)

#: How long the end of a job is tried to be written when this fails although heartbeats can be, or when the worker is
#: told to end, in seconds. After that its lease runs out, and recovery tells from the host's journals how it ended.
#: While the database is away for all, it is tried for as long as that takes: nobody else knows as well how it ended.
FINISH_PATIENCE = 60.0
#: Seconds between two attempts.
FINISH_AGAIN = 1.0

#: What a database says that is away or locked. Anything else it says is a bug, and trying again would not mend it.
DATABASE_AWAY = (OperationalError, InterfaceError)

#: Set when this worker is told to end: what is at work is put back and recorded instead of being cut off.
stopping = threading.Event()

CODES = {
    protocol.CANCELLED: Job.State.CANCELLED,
    protocol.INTERRUPTED: Job.State.INTERRUPTED,
    protocol.NO_GO: Job.State.INTERRUPTED,
}


def run(job_id: int) -> None:
    """Claims the job and does it. Returns at once where somebody else has it, or it has to wait."""
    if stopping.is_set():
        return  # it stays queued for the next worker
    heart.start()
    job = claims.claim(job_id, heart.name)
    if job is None:
        return
    kind = kinds.get(job.kind)
    with heart.holding(job):
        recorder = Recorder(job, kind.stages, in_bytes=kind.progress_in_bytes, at_most=kind.at_most(job))
        try:
            result = _work(job, kind, recorder)
        except GoesOnError as left:
            _hand_over(job, recorder, str(left))
            return
        except (RefusedError, HostError, StoppedError) as error:
            passing = stopping.is_set() or kind.passes(job, error.code)
            if kinds.goes_on(job) and passing and not recorder.cancel_requested:
                _hand_over(job, recorder, "the worker is stopped" if stopping.is_set() else error.detail)
                return
            _end_badly(job, recorder, error.code, error.detail)
        except DATABASE_AWAY as error:
            if kinds.goes_on(job):
                _hand_over(job, recorder, "the database went away")
                return
            why = f"The connection to the database was lost while the job ran: {error}"
            _end_badly(job, recorder, protocol.INTERRUPTED, why)
        except Exception as error:
            # Whatever else happens is a bug. It must show as one, and the row must not stay "running".
            logger.exception("job %s", job.pk)
            recorder.log(traceback.format_exc(), JobLog.Level.ERROR)
            why = f"This is a bug in Storage Admin: {error!r}. The log has the details."
            _end_badly(job, recorder, protocol.BUG, why)
        else:
            _end_well(job, kind, recorder, result)
    try:
        kind.ended(job)
    finally:
        routing.ring_next(job)


def _work(job: Job, kind: JobKind, recorder: Recorder) -> dict[str, Any]:
    kind.look(job.target_id, job)
    kind.prepare(job)
    if kind.in_controller(job):
        recorder.flush()
        if recorder.cancel_requested and not kinds.goes_on(job):
            raise StoppedError(protocol.CANCELLED, _("Cancelled before the job started."))
        return kind.work(job, recorder)

    @cache
    def request() -> Request:
        return Request(
            verb=kind.verb_for(job),
            job=job.uid,
            generation=job.generation,
            args=kind.request(job),
            roots=job.host.roots(),
        )

    try:
        return _by_agent(job, kind, recorder, request)
    except AgentMissingError:  # installed once more, as after the host was set up anew
        return _by_agent(job, kind, recorder, request)


def _by_agent(job: Job, kind: JobKind, recorder: Recorder, request: Callable[[], Request]) -> dict[str, Any]:
    with agent_command(job.host) as command, AgentSession(command, agent_bundle().hash) as session:
        # The agent starts while its request is gathered: a scan asks libvirt for that.
        asked = request()
        recorder.flush()
        if recorder.cancel_requested:
            raise StoppedError(protocol.CANCELLED, _("Cancelled before the agent started."))
        session.send(asked)
        silence = Silence(job, kind, session, recorder)
        for event in session.events():
            recorder.tick()
            silence.look(event)
            if recorder.cancel_requested or stopping.is_set():
                silence.end_cancelled()
                session.cancel()
            if event is None or event["event"] == protocol.STORAGE:
                continue
            if event["event"] == protocol.RESULT:
                return dict(event["data"])
            if event["event"] == protocol.READY:
                if event.get("exchanged"):
                    _look_again(job, kind, session, recorder)
                elif not session.cancelled:
                    _let_go(job, kind, session, event)
            else:
                _take(job, kind, recorder, event)
    raise HostError(_("The agent ended without an answer."), protocol.INTERRUPTED)


def _let_go(job: Job, kind: JobKind, session: AgentSession, ready: dict[str, Any]) -> None:
    def is_ours() -> bool:
        kind.prepare(job)  # the guest's state, after the work as before it
        return claims.may_swap(job)

    def is_still_ours() -> bool:
        kind.note_ready(job, ready)
        return claims.may_swap(job)

    if _patiently(is_ours):
        _patiently(lambda: kind.before_swap(job))
        # That may have taken its time.
        if _patiently(is_still_ours):
            session.go(job.generation)
            return
    session.cancel()


def _look_again(job: Job, kind: JobKind, session: AgentSession, recorder: Recorder) -> None:
    try:
        _patiently(lambda: kind.exchanged(job))
    except (RefusedError, HostError) as error:
        session.say_no(error)
        # Not written at once: whether the database is there must not decide which file gets the name.
        recorder.log(error.detail, JobLog.Level.WARNING)
    else:
        session.go(job.generation)


def _patiently(ask: Callable[[], Any], when_stopped: float = 0.0) -> Any:
    """Asks again while the database is away or locked; an agent is pinged meanwhile, and has done its work.

    Args:
        when_stopped: seconds for which it is asked again although this worker was told to end.

    Raises:
        OperationalError, InterfaceError: it still is, and this worker is told to end; or for a minute, in which the
            database was there for others.
    """
    began: float | None = None
    others_since: float | None = None
    while True:
        others_can = heart.is_beating()
        try:
            return ask()
        except DATABASE_AWAY as error:
            now = time.monotonic()
            if began is None:
                began = now
                logger.warning("the database is away; a job waits for it: %s", error)
            others_since = None if not others_can else now if others_since is None else others_since
            if others_since is not None and now - others_since > FINISH_PATIENCE:
                raise
            if stopping.is_set() and now - began >= when_stopped:
                raise
            connection.close()
            time.sleep(FINISH_AGAIN)


def _take(job: Job, kind: JobKind, recorder: Recorder, event: dict[str, Any]) -> None:
    match event["event"]:
        case protocol.HELLO:
            pass
        case protocol.PROGRESS:
            recorder.progress(event)
        case protocol.LOG:
            recorder.log(str(event.get("text", "")), str(event.get("level", JobLog.Level.INFO)))
        case protocol.COMMAND:
            recorder.command(event)
        case protocol.ERROR:
            _raise(event)
        case _ if job.rewrites:
            _patiently(lambda: kind.on_event(job, event))
        case _:
            kind.on_event(job, event)


def _raise(event: dict[str, Any]) -> None:
    code, detail = str(event.get("code")), str(event.get("detail"))
    if code in CODES:
        raise StoppedError(code, detail)
    if code in protocol.REFUSALS or code == protocol.INVALID:
        raise RefusedError(code, detail)
    raise HostError(detail, code)


def _end_well(job: Job, kind: JobKind, recorder: Recorder, result: dict[str, Any]) -> None:
    def write() -> None:
        recorder.flush()
        with transaction.atomic():
            if claims.take_back(job):
                claims.log(job, "its worker was still running the job and has now reported the result")
            shown = kind.record(job, result)
            if not claims.finish(
                job, Job.State.SUCCEEDED, result=shown, progress=100.0, stage="", message="",
                needs_recovery=False,
            ):  # fmt: skip
                transaction.set_rollback(True)
                logger.warning("job %s was taken away before its result could be recorded", job.pk)

    try:
        _persist(write)
    except DATABASE_AWAY:
        raise
    except Exception as error:
        logger.exception("job %s: recording its result", job.pk)
        recorder.log(traceback.format_exc(), JobLog.Level.ERROR)
        _end_badly(job, recorder, protocol.BUG, f"The work is done, but its result could not be recorded: {error!r}.")


def _hand_over(job: Job, recorder: Recorder, why: str) -> None:
    def write() -> None:
        recorder.flush()
        claims.hand_over(job, why)

    _persist(write)


def _end_badly(job: Job, recorder: Recorder, code: str, detail: str) -> None:
    if code == protocol.CANCELLED and stopping.is_set() and not recorder.cancel_requested:
        code, detail = protocol.INTERRUPTED, f"The dashboard was stopped, and the job reverted everything. {detail}"
    code, detail, state = code[:40], plain(detail), CODES.get(code, Job.State.FAILED)
    recorder.log(f"{code}: {detail}", JobLog.Level.ERROR)
    unsettled = state == Job.State.INTERRUPTED or code == protocol.BUG or recorder.agent_left

    def write() -> None:
        recorder.flush()
        with transaction.atomic():
            claims.finish(
                job, state, error_code="" if state == Job.State.CANCELLED else code, error_detail=detail,
                needs_recovery=unsettled and kinds.leaves_traces(job),
            )  # fmt: skip

    _persist(write)
    if code in ("host_unreachable", TOKEN_REFUSED):
        # This machine itself is there, and so is who refuses a token: what is missing are rights on it.
        hosts.host_failed(job.host, detail, degraded=job.host.kind == Host.Kind.LOCAL or code == TOKEN_REFUSED)


def _persist(write: Callable[[], None]) -> None:
    """Writes the end of a job, again and again while the database is away."""
    _patiently(write, FINISH_PATIENCE)


POOL_SILENT = "pool_silent"
#: Seconds without any word from an agent that tells of its storages every three: it is held up as a whole. A scan
#: is asked for then, which tells by what.
UNHEARD = 12.0
#: Stands for what an agent that says nothing at all is held up by.
UNKNOWN = frozenset([b""])


class Silence:
    """Looks at what the agent of one job tells of its storages."""

    def __init__(self, job: Job, kind: JobKind, session: AgentSession, recorder: Recorder) -> None:
        self._job, self._kind, self._session, self._recorder = job, kind, session, recorder
        self._pools: frozenset[bytes] = frozenset()
        self._since: datetime | None = None
        self._named = ""

    def look(self, event: dict[str, Any] | None) -> None:
        """Takes one event, or that there was none; writes what has changed.

        Raises:
            HostError: ``pool_silent``: a job that only looks waits for no storage.
        """
        if event is not None and event["event"] == protocol.STORAGE:
            self._note(frozenset(map(unb64, event["silent"])))
        elif event is not None and event["event"] == protocol.RESULT:
            self._note(frozenset())  # it came to its end
        elif self._session.unheard > UNHEARD and not self._pools:
            self._note(UNKNOWN)
        if self._since is not None and not self._kind.rewrites:
            self._leave()
            raise HostError(
                _("{who} stopped answering. Run the job again when the storage is back.").format(who=self._named),
                POOL_SILENT,
            )

    def end_cancelled(self) -> None:
        """Ends a job that is to stop, and whose agent cannot; nothing where that can.

        Raises:
            StoppedError: the agent is left to itself; it puts everything back as soon as the storage answers.
        """
        if self._since is None:
            return
        self._leave()
        if self._session.let_go or not self._kind.asks:
            told = _(
                "Stopped because {who} did not answer at the moment when the image was to be replaced. A recovery "
                "finds out which of the two files is in place as soon as the storage answers."
            )
            raise StoppedError(protocol.INTERRUPTED, told.format(who=self._named))
        told = _(
            "Cancelled while {who} did not answer. The image is unchanged. Files that the job left beside it are "
            "removed as soon as the storage answers."
        )
        raise StoppedError(protocol.CANCELLED, told.format(who=self._named))

    def _leave(self) -> None:
        self._recorder.agent_left = True
        self._session.leave()

    def _note(self, silent: frozenset[bytes]) -> None:
        if silent == self._pools:
            return
        try:
            self._write(silent)
        except (OperationalError, InterfaceError) as error:  # what the agent tells next is written then
            logger.warning("job %s: the database is away: %s", self._job.pk, error)
            connection.close()
        else:
            self._pools = silent

    def _write(self, silent: Collection[bytes]) -> None:
        host = self._job.host
        if back := self._pools - UNKNOWN - set(silent):
            pools.answer_again(host, back)
        if not silent:
            self._since = None
            self._job.ours().update(stalled_since=None, message="")
            claims.log(self._job, "the storage answers again; the job continues")
            return
        since = self._since or timezone.now()
        names = sorted(pools.fall_silent(host, silent, since)) if silent != UNKNOWN else []
        self._named = f"The storage pool {' and '.join(names)}" if names else f"The agent on {host.name}"
        if not names:
            services.submit(SYSTEM, "scan", host.pk, {})
        self._since = since
        said = f"{self._named} has not answered since {since:%H:%M} UTC. The job continues when it does."
        self._job.ours().update(stalled_since=since, message=said, bytes_per_sec=None, eta_seconds=None)
        claims.log(self._job, said, JobLog.Level.WARNING)
