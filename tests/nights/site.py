"""Three hosts with their disks, and a dashboard for them: this machine, and two behind SSH servers of their own."""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import django
from django.core.management import call_command

import storage_admin.celery  # noqa: F401 (the app that jobs are sent by)
from tests.agent.harness import age
from tests.harness.filesystems import loop_filesystem, new_folder
from tests.harness.processes import Daemon
from tests.harness.services import ROOT, RedisServer
from tests.harness.sshd import Sshd, sshd
from tests.nights import clock
from tests.nights.disks import Disks

GIB = 1 << 30
#: A roomy filesystem, in MiB; files on it take no more of this machine's disk than what is written to them.
ROOMY = 8 * 1024
#: One of which nine tenths are taken from the start: a tenth is little more than what jobs have to leave free.
FULL, FREE_AT_FIRST = 20 * 1024 + 960, 0.1
#: What the files of jobs beside images may take, in bytes.
JOURNALS = 256 * 1024
#: What its images take is several times what is then left for jobs and their undo copies, in MiB.
MORE_THAN_FITS = 200


@dataclass
class Place:
    """A host's pool, on a filesystem of its own."""

    slug: str
    disks: Disks
    server: Sshd | None = None
    #: By how much less was free on it in a night than jobs have to leave, in bytes at most, and when.
    overdrawn: int = 0
    overdrawn_at: datetime | None = None

    @property
    def pool(self) -> Path:
        return self.disks.pool

    def free(self) -> int:
        about = os.statvfs(self.pool)
        return about.f_bavail * about.f_frsize

    def fill(self, left: int) -> Path:
        """A file of somebody else's that leaves so many bytes free."""
        file = self.pool.parent / "somebody-elses"
        taken = file.stat().st_size if file.exists() else 0
        subprocess.run(["fallocate", "-l", str(taken + self.free() - left), str(file)], check=True)
        return file


@dataclass
class Site:
    """The hosts and the dashboard's processes."""

    folder: Path
    clock: clock.Clock
    redis: RedisServer
    places: list[Place]
    worker: Daemon
    rng: random.Random
    _watching: threading.Event = field(default_factory=threading.Event)

    def move_to(self, moment: datetime) -> None:
        """From now on it is that time, on the hosts as well."""
        passes = (moment - self.clock.now()).total_seconds()
        self.clock.move_to(moment)
        for journal in [path for place in self.places for path in place.pool.glob(".sa-*.journal")]:
            age(journal, boottime=passes, wall=passes)

    def start_worker(self) -> None:
        """A worker as after a restart of the dashboard."""
        self.worker.start_again()
        self.ready()

    def ready(self) -> None:
        log, before = self.worker, self.worker.said().count(" ready.")
        log.wait_for(lambda: log.said().count(" ready.") >= max(before, 1), 60, "the worker is ready")

    @contextlib.contextmanager
    def watched(self, reserve: int) -> Iterator[None]:
        """Looks all the time whether each filesystem has free what jobs have to leave, ``reserve`` bytes.

        Guests that wrote by day may have gone below that themselves: jobs take nothing then, but for the blocks of
        their journals, and once there was more free, that is what they leave.
        """
        self._watching.clear()
        floors = {place.slug: min(reserve, place.free() - JOURNALS) for place in self.places}

        def look() -> None:
            while not self._watching.is_set():
                for place in self.places:
                    free = place.free()
                    floors[place.slug] = min(reserve, max(floors[place.slug], free - JOURNALS))
                    if floors[place.slug] - free > place.overdrawn:
                        place.overdrawn, place.overdrawn_at = floors[place.slug] - free, self.clock.now()
                time.sleep(0.01)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._watching.set()
            thread.join()


def prepare(folder: Path, database: str) -> clock.Clock:
    """Sets up Django on a data folder of its own; call it before any model is imported."""
    data = new_folder(folder / "data", mode=0o700)
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "tests.nights.settings",
        "STORAGE_ADMIN_DATA_DIR": str(data),
        "DATABASE_URL": database or f"sqlite:///{data}/db.sqlite3",
        "REDIS_URL": f"unix://{folder}/redis.sock",
        "LOG_LEVEL": "WARNING",
        "ALLOWED_HOSTS": "testserver",
        "PYTHONUNBUFFERED": "1",
        clock.VARIABLE: str(folder / "clock"),
    }
    moved = clock.Clock(folder / "clock")
    django.setup()
    call_command("migrate", interactive=False, verbosity=0)
    return moved


@contextlib.contextmanager
def site(folder: Path, moved: clock.Clock, images: int, rng: random.Random) -> Iterator[Site]:
    """Hosts with so many images in all, two fifths on each of the first two, and a worker for them."""
    with contextlib.ExitStack() as stack:
        places = []
        for slug, share in (("local", 0.4), ("north", 0.4), ("south", 0.2)):
            room = new_folder(folder / slug)
            mounted = stack.enter_context(loop_filesystem(room, FULL if slug == "south" else ROOMY))
            disks = Disks(mounted / "images", folder, rng)
            disks.pool.mkdir()
            server = None if slug == "local" else stack.enter_context(sshd(folder / f"sshd-{slug}"))
            places.append(Place(slug, disks, server))
            count = round(images * share)
            size = max(6, MORE_THAN_FITS * 3 // (2 * count))
            disks.make(count, (size, size + 2) if slug == "south" else (4, 8))
        full = os.statvfs(places[-1].pool)
        places[-1].fill(round(FREE_AT_FIRST * full.f_blocks * full.f_frsize))
        redis = stack.enter_context(RedisServer(folder, folder / "redis.sock"))
        yield Site(folder, moved, redis, places, stack.enter_context(_worker(folder)), rng)


def _worker(folder: Path) -> Daemon:
    argv = [sys.executable, "-m", "celery", "-A", "storage_admin.celery", "worker", "--pool", "threads"]
    argv += ["--concurrency", "8", "--without-gossip", "--without-mingle", "--loglevel", "INFO"]
    worker = Daemon(argv, folder / "worker.log", cwd=ROOT, grace=30)
    worker.wait_for(lambda: " ready." in worker.said(), 60, "the worker is ready")
    return worker
