"""Waiting jobs hear of a guest's end from libvirt itself, instead of at the next look every ten seconds.

A worker that looks at a host's waiting jobs (:func:`images.tasks.look_at_guests`) also keeps a connection to its
libvirt as long as jobs or undo copies wait there and no longer: a thread, and a process that says when a state changes.
What it tells makes the worker look at once; where it fails, the next of the looks every ten seconds finds the same, and
a minute later it is tried again. When guests ran is written down as well (:mod:`storage_admin.guests.services`): where
nobody saw that, an undo copy of an image that was changed stays.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Collection

from django.db import Error, close_old_connections, connection

from images.rewrite import holding, wait_for_guests
from storage_admin.agent.protocol import HostError
from storage_admin.guests import services as guests
from storage_admin.guests.models import OFF_STATES, Guest
from storage_admin.hosts.libvirt import watch as libvirt_watch
from storage_admin.hosts.models import Host
from storage_admin.jobs import runner

logger = logging.getLogger(__name__)

#: Seconds after which it is tried again where it has failed, and between two looks whether jobs still wait.
TRY_AGAIN, STILL_WANTED = 60.0, 5.0
#: Seconds between two notes of which guests run.
NOTED = 30.0
#: Connections that one worker keeps; jobs on more hosts are looked at every ten seconds.
MOST = 50


class Watchers:
    """The watched hosts of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}
        self._failed: dict[int, float] = {}

    def attend(self, host_ids: list[int]) -> None:
        """Begins to watch hosts on which jobs wait, unless they are watched already or that has failed lately."""
        now = time.monotonic()
        with self._lock:
            for host_id in host_ids:
                lately = now - self._failed.get(host_id, float("-inf")) < TRY_AGAIN
                if host_id in self._threads or lately or len(self._threads) >= MOST:
                    continue
                thread = threading.Thread(target=self._run, args=(host_id,), name=f"watch-{host_id}", daemon=True)
                self._threads[host_id] = thread
                thread.start()

    def _run(self, host_id: int) -> None:
        failed = True
        try:
            watch(host_id)
            failed = False
        except HostError as error:
            logger.info("guests of host %s are polled about every ten seconds: %s", host_id, error.detail)
        except Error as error:
            logger.warning("guests of host %s are not watched while the database is away: %s", host_id, error)
        finally:
            connection.close()
            with self._lock:
                self._threads.pop(host_id, None)
                if failed:
                    self._failed[host_id] = time.monotonic()
                else:
                    self._failed.pop(host_id, None)


def watch(host_id: int) -> None:
    """Looks at the waiting jobs of a host whenever one of its guests has ended; returns when none waits any more.

    Raises:
        HostError: libvirt there cannot be watched.
    """
    host = Host.objects.filter(pk=host_id).first()
    if host is None:
        return
    checked = time.monotonic()
    ran: set[str] | None = None
    known: dict[str, str] | None = None
    noted = float("-inf")
    with contextlib.closing(libvirt_watch.changes(host)) as changes:
        for states in changes:
            if runner.stopping.is_set():
                return
            if states is not None:
                runs = {uid for uid, state in states.items() if state not in OFF_STATES}
                if ran is None or ran - runs:
                    close_old_connections()
                    wait_for_guests.look(host_id, starts=False, states=states)
                ran = runs
            known = states if states is not None else known
            if known is not None and (states is not None or time.monotonic() - noted > NOTED):
                noted = time.monotonic()
                close_old_connections()
                domain = str(Guest.Kind.DOMAIN)
                guests.saw_run(host, [domain], {(domain, uid): state for uid, state in known.items()})
            if time.monotonic() - checked > STILL_WANTED:
                checked = time.monotonic()
                close_old_connections()
                if host_id not in wanted():
                    return


def wanted(*, but_not: Collection[int] = ()) -> list[int]:
    """Ids of the hosts whose libvirt is watched: jobs wait for what it tells, or undo copies for their end."""
    return sorted(
        {*wait_for_guests.hosts_that_wait(but_not=but_not), *holding.hosts_with_copies(but_not=but_not, libvirt=True)}
    )


watchers = Watchers()
