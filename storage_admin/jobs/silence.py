"""What a job does while a storage that it needs does not answer.

Its agent is held up in the kernel, or its tool is, and neither can be ended until the server is back. The row says so,
and so do pool, host and an alert. The job takes no slot meanwhile. One that only looks fails at once; one that rewrites
waits, unless it is cancelled: then its row ends, and the agent puts everything back when the storage answers.
"""

import logging
from collections.abc import Collection
from datetime import datetime
from typing import Any

from django.db import InterfaceError, OperationalError, connection
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin.accounts.roles import SYSTEM
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, StoppedError, unb64
from storage_admin.hosts import silence as pools
from storage_admin.hosts.session import AgentSession
from storage_admin.jobs import claims, services
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.recorder import Recorder

logger = logging.getLogger(__name__)

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
                _("{who} stopped answering; run it again when the storage is back.").format(who=self._named),
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
            raise StoppedError(
                protocol.INTERRUPTED,
                _(
                    "Stopped while {who} did not answer, right when the image was to be replaced. A recovery says "
                    "which of both files it is as soon as the storage answers."
                ).format(who=self._named),
            )
        raise StoppedError(
            protocol.CANCELLED,
            _(
                "Cancelled while {who} did not answer. The image is as it was; what the job has left beside it is "
                "removed as soon as the storage answers."
            ).format(who=self._named),
        )

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
            claims.log(self._job, "the storage answers again: the work goes on")
            return
        since = self._since or timezone.now()
        names = sorted(pools.fall_silent(host, silent, since)) if silent != UNKNOWN else []
        self._named = f"The storage pool {' and '.join(names)}" if names else f"The agent on {host.name}"
        if not names:
            services.submit(SYSTEM, "scan", host.pk, {})
        self._since = since
        said = f"{self._named} has not answered since {since:%H:%M} UTC. The job goes on when it does."
        self._job.ours().update(stalled_since=since, message=said, bytes_per_sec=None, eta_seconds=None)
        claims.log(self._job, said, JobLog.Level.WARNING)
