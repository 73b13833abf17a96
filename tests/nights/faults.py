"""What goes wrong in a night. Each fault is a step that is taken once, some seconds after the first job began."""

import contextlib
import time
from collections.abc import Callable

import psutil
import redis

from tests.harness.processes import Daemon
from tests.nights.disks import Running
from tests.nights.site import GIB, Place, Site

Fault = Callable[[Site], None]


def kill_worker(site: Site) -> None:
    """The worker and all that it has started are killed, and another worker starts."""
    own = psutil.Process(site.worker.pid)
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    site.start_worker()


def kill_agents(site: Site) -> None:
    """Every agent at work on this machine's own disks is killed."""
    for child in psutil.Process(site.worker.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "/agent-" in " ".join(child.cmdline()):
                child.kill()


def flush_redis(site: Site) -> None:
    """Everything that Redis holds is gone."""
    with contextlib.closing(redis.Redis.from_url(site.redis.url)) as broker:
        broker.flushall()


def restart_redis(site: Site) -> None:
    """Redis is killed, with what it held, and comes back."""
    site.redis.start_again()
    site.redis.wait_for(site.redis.answers, 20, "Redis answers again")


def host_away(site: Site) -> None:
    """A host falls silent for some seconds in the middle of its work: every session ends, and nobody may come in."""
    north = _server(site.places[1])
    for process in [*psutil.Process(north.pid).children(recursive=True), psutil.Process(north.pid)]:
        # Not what runs in the sessions: that finds its connection closed, as when a cable is pulled.
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "sshd":
                process.kill()
    time.sleep(8)
    while True:  # somebody's outgoing connection may have its port for a while
        north.start_again()
        time.sleep(1)
        if north.process.poll() is None:
            return


def disk_full(site: Site) -> None:
    """Somebody else takes nearly all of a filesystem for some seconds, far below what jobs leave free."""
    place = site.places[0]
    file = place.fill(GIB)
    time.sleep(5)
    file.unlink()


def guests_start(site: Site) -> None:
    """Guests start while their images are chosen or worked on, and are shut down again."""
    for place in site.places:
        leaves = [disk for disk in place.disks.every if not disk.overlays]
        for disk in site.rng.sample(leaves, k=min(4, len(leaves))):
            guest = Running(disk)
            time.sleep(site.rng.uniform(0.3, 1.0))
            guest.end()


def _server(place: Place) -> Daemon:
    assert place.server is not None
    return place.server.daemon
