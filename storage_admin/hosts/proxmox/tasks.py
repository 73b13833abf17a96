"""Tasks of Proxmox VE: a call that takes long answers with a task's id, and how it went is in the task alone.

A 200 says that the task began. Progress stands in its log and nowhere else.
"""

import re
import time
from collections.abc import Callable

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, StoppedError
from storage_admin.hosts.proxmox import errors
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.errors import UNREACHABLE, ApiError

#: PVE::UPID: node, process, its start, time, kind of task, what it is about, who.
_UPID = re.compile(
    r"UPID:([A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?):[0-9A-Fa-f]{8}:[0-9A-Fa-f]{8,9}:[0-9A-Fa-f]{8}:[^:\s/]+:[^:\s/]*:"
    r"[^:\s/]+:",
    re.ASCII,
)
_PERCENT = re.compile(r"\btransferred .*\((\d{1,3}(?:\.\d+)?)\s?%\)")
_WARNED = re.compile(r"WARNINGS: (\d+)", re.ASCII)
_LINES = 500
#: Seconds between two looks, and how long the API may be away while a task goes on.
INTERVAL = 1.0
PATIENCE = 120.0
_STOP_LIMIT = 60.0

_NOTHING = "no content"  # what an empty log shows as its first line


def node_of(upid: str) -> str:
    """The node that a task runs on.

    Raises:
        ApiError: that is no task's id.
    """
    found = _UPID.fullmatch(upid) if isinstance(upid, str) else None
    if found is None:
        raise ApiError(_("{upid!r} is not a task ID of Proxmox VE.").format(upid=str(upid)[:80]))
    return found[1]


def follow(
    client: Client,
    upid: str,
    *,
    progress: Callable[[float], None] = lambda __: None,
    log: Callable[[str], None] = lambda __: None,
    check: Callable[[], None] = lambda: None,
    stops: bool = True,
    interval: float = INTERVAL,
    patience: float = PATIENCE,
) -> int:
    """Waits for a task's end.

    Args:
        upid: as the call answered.
        progress: told the percentage that the task's log names, whenever it grows.
        log: told every line of the task's log, once.
        check: raises StoppedError where the work is to be given up; the task is stopped then.
        stops: or, without, goes on by itself: what it does must not be cut off.
        interval: seconds between two looks.
        patience: seconds that the API may not answer meanwhile.

    Returns:
        How many warnings Proxmox VE counted.

    Raises:
        RefusedError: ``guest_locked``, ``stale_plan``, ``busy``: the task found that only when it had begun.
        HostError: the task failed, with its own words; or the API stayed away: then the task may go on.
        StoppedError: from ``check``, when the task has ended without having done it.
    """
    watched = _Task(client, upid, progress, log)
    heard = time.monotonic()
    while True:
        try:
            check()
        except StoppedError:
            if not stops:
                raise
            stopped = watched.stop()
            if _did(stopped):
                return watched.judged(stopped)  # it was quicker
            raise
        try:
            ended = watched.look()
            heard = time.monotonic()
        except HostError as error:
            if error.code != UNREACHABLE or time.monotonic() - heard > patience:
                raise HostError(
                    _("{detail} The task {upid} may still be running there.").format(detail=error.detail, upid=upid),
                    error.code,
                ) from None
            ended = None
        if ended is not None:
            return watched.judged(ended)
        time.sleep(interval)


class _Task:
    """A task that is watched; it knows how much of its log was read."""

    def __init__(
        self, client: Client, upid: str, progress: Callable[[float], None], log: Callable[[str], None]
    ) -> None:
        self._client = client
        self._upid = upid
        self._path = ("nodes", node_of(upid), "tasks", upid)
        self._progress = progress
        self._log = log
        self._read = 0
        self._percent = -1.0

    def look(self) -> str | None:
        """One look: what is new in the log, and the exit status where it has ended."""
        status = self._client.fields(*self._path, "status")
        ended = status.get("status") == "stopped"
        # After the status: whatever a task that has ended had to say is there.
        self._read_log()
        return str(status.get("exitstatus") or "it ended without an exit status") if ended else None

    def _read_log(self) -> None:
        while True:
            rows = self._client.rows(*self._path, "log", params={"start": self._read, "limit": _LINES})
            for row in rows:
                text = str(row.get("t") or "")
                if self._read == 0 and text == _NOTHING:
                    return
                self._read += 1
                self._line(text)
            if len(rows) < _LINES:
                return

    def _line(self, text: str) -> None:
        self._log(text)
        found = _PERCENT.search(text)
        if found is not None and self._percent < float(found[1]) <= 100:
            self._percent = float(found[1])
            self._progress(self._percent)

    def judged(self, exit_status: str) -> int:
        """How many warnings it had; raises HostError where it failed, RefusedError where something was in its way."""
        if not _did(exit_status):
            refused = errors.in_the_way(self._client.who, exit_status)
            if refused is not None:
                raise refused
            raise HostError(_("The Proxmox VE task failed: {said}").format(said=" ".join(exit_status.split())[:600]))
        warned = _WARNED.fullmatch(exit_status)
        return int(warned[1]) if warned else 0

    def stop(self) -> str:
        """Asks for the task's end, and waits until it has ended; its exit status."""
        self._client.delete(*self._path)
        end = time.monotonic() + _STOP_LIMIT
        while (ended := self.look()) is None:
            if time.monotonic() > end:
                raise HostError(
                    _("The task {upid} was told to stop, but continues. Stop it in Proxmox VE.").format(upid=self._upid)
                )
            time.sleep(0.2)
        return ended


def _did(exit_status: str) -> bool:
    return exit_status == "OK" or _WARNED.fullmatch(exit_status) is not None
