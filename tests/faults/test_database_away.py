"""The database goes away while a job is at work, or as it ends, and comes back later (fault F11).

All of it is real: `manage.py up` with its own Redis, worker and scheduler on a PostgreSQL server of its own, which is
stopped at once or killed.
"""

import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import leftovers
from tests.e2e.rest import Rest
from tests.faults.scene import Scene
from tests.faults.trials import Trial, Trials
from tests.harness.filesystems import new_folder
from tests.harness.services import Dashboard, PostgresServer, running_dashboard

pytestmark = [pytest.mark.faults, pytest.mark.services]

#: Seconds after the database's return within which a row has to tell how its job ended.
TRUE_WITHIN = 60
SLOW = {"bandwidth_bytes_sec": 2 << 20}


@dataclass(frozen=True)
class Way:
    """A kind of job with its options, and what tells that it has done its work."""

    name: str
    kind: str
    options: dict[str, Any]
    based: bool = False

    def done(self, scene: Scene) -> bool:
        """Whether the result stands, by the files alone."""
        if self.kind == "convert":
            return scene.image.with_name("converted.raw").exists()
        if self.kind == "undo":
            return scene.image.stat().st_ino == scene.original.st_ino
        return scene.image.stat().st_ino != scene.original.st_ino


COMPRESS = Way("reclaim by compress", "reclaim", {"method": "compress", **SLOW})
WITHOUT_UNDO = Way("reclaim without undo copy", "reclaim", {"method": "copy", "undo_hours": 0})
CONVERT = Way("convert to raw", "convert", {"format": "raw", "target_name": "converted.raw"})
UNDO = Way("undo of a reclaim", "undo", {})
WAYS = [
    COMPRESS,
    WITHOUT_UNDO,
    CONVERT,
    UNDO,
    Way("repair of leaks", "check", {"repair": "leaks", "undo_hours": 0}),
    Way("flatten", "flatten", {"method": "rebase", **SLOW}, based=True),
]


@dataclass(frozen=True)
class Outage:
    """When the database goes, and for how many seconds (from, to)."""

    moment: str
    seconds: tuple[float, float]
    way: Way | None = None

    @classmethod
    def of(cls, trial: Trial) -> "Outage":
        """The first ones are chosen: each moment, and one that lasts longer than a lease."""
        if trial.number < len(CHOSEN):
            return CHOSEN[trial.number]
        lengths = [*[(1, 10)] * 7, *[(40, 55)] * 2, (65, 90)]
        return cls(trial.rng.choice([COPYING, READY, SWAPPED]), trial.rng.choice(lengths))


COPYING, READY, SWAPPED = "while it copies", "before it may swap", "when it has swapped"
CHOSEN = [
    Outage(READY, (2, 5), COMPRESS),
    Outage(SWAPPED, (62, 65), WITHOUT_UNDO),
    Outage(COPYING, (2, 6)),
    Outage(SWAPPED, (2, 5), CONVERT),
    Outage(SWAPPED, (1, 5), UNDO),
]


@dataclass
class Site:
    """A dashboard on a PostgreSQL, with one pool."""

    database: PostgresServer
    rest: Rest
    folder: Path
    said: Callable[[], str]
    waited: list[float] = field(default_factory=list)

    @property
    def pool(self) -> Path:
        return self.folder / "pool"

    def row(self, job_id: int) -> dict[str, Any]:
        """A job's row, as the database has it."""
        with self.database.connect() as connection:
            row = connection.execute("SELECT * FROM jobs_job WHERE id = %s", [job_id]).fetchone()
        assert row is not None
        return row


def with_one_pool(dashboard: Dashboard, folder: Path) -> Rest:
    """The dashboard over REST, once it knows the folder's pool."""
    rest = Rest(dashboard)
    path = new_folder(folder / "pool")
    rest.post("pools/", {"host": rest.local()["id"], "path": str(path)}, expect=201)
    return rest


def image_at(rest: Rest, path: Path) -> dict[str, Any]:
    rows = rest.get("images/", limit=1000)["results"]
    return next(row for row in rows if row["path"] == str(path))


@pytest.fixture
def site(shared_folder: Path) -> Iterator[Site]:
    with (
        PostgresServer(new_folder(shared_folder / "pg")) as database,
        running_dashboard(shared_folder / "data", DATABASE_URL=database.url) as dashboard,
    ):
        yield Site(database, with_one_pool(dashboard, shared_folder), shared_folder, dashboard.daemon.said)


def test_the_row_tells_how_the_job_ended_once_the_database_is_back(
    site: Site, by_format: dict[str, list[Path]]
) -> None:
    trials = Trials("F11", "PostgreSQL goes away while an image is rewritten", patience=2)
    for trial in trials:
        with trial:
            outage = Outage.of(trial)
            way = outage.way or trial.rng.choice(WAYS)
            template = by_format["qcow2"][-1 if way.based else 0]
            scene = Scene(trial.folder(site.folder), template, site.pool / str(trial.number))
            trial.note(way.name, outage.moment)
            one_outage(site, scene, way, outage, trial)
            shutil.rmtree(scene.pool)
    print(f"true {max(site.waited, default=0):.1f} s after the database's return at the latest: {site.waited}")
    assert not trials.all or len(trials.numbers) < len(CHOSEN) or trials.tally["succeeded"] >= len(CHOSEN)


def test_a_rewrite_that_is_finished_outlasts_a_lock_on_sqlite(
    shared_folder: Path, by_format: dict[str, list[Path]]
) -> None:
    """It is held for longer than a statement waits, as by a backup or a tool that has the file open."""
    trials = Trials("F11 locked", "SQLite is locked when a rewrite is finished", patience=2)
    with running_dashboard(shared_folder / "data") as dashboard:
        rest = with_one_pool(dashboard, shared_folder)
        for trial in trials:
            with trial:
                _outlast_a_lock(rest, shared_folder, trial, by_format["qcow2"][0])


def _outlast_a_lock(rest: Rest, folder: Path, trial: Trial, template: Path) -> None:
    scene = Scene(trial.folder(folder), template, folder / "pool" / str(trial.number))
    rest.scan()
    rest.quiet()
    image = image_at(rest, scene.image)
    job = rest.post("jobs/", {"kind": "reclaim", "image": image["id"], "options": COMPRESS.options})
    with sqlite3.connect(f"file:{folder}/data/db.sqlite3", uri=True, isolation_level=None) as database:
        [scene.job] = database.execute("SELECT uid FROM jobs_job WHERE id = ?", [job["id"]]).fetchone()
        at_moment(READY, scene, COMPRESS, scene.job, trial.rng)
        database.execute("BEGIN IMMEDIATE")
        time.sleep(22 if trial.number == 0 else trial.rng.uniform(22, 60))
        database.execute("ROLLBACK")
    database.close()
    ended = rest.finished(job)
    assert (ended["state"], ended["error"], scene.swapped) == ("succeeded", None, True)
    trial.note(ended["state"])
    scene.verify()
    rest.quiet()
    shutil.rmtree(scene.pool)


def one_outage(site: Site, scene: Scene, way: Way, outage: Outage, trial: Trial) -> None:
    """Lets the database be away at a moment of a job, and sees to it that the job's row is true soon after."""
    site.rest.scan()
    site.rest.quiet()
    job = submit(site, scene, way)
    at_moment(outage.moment, scene, way, job["uid"], trial.rng)
    seconds = trial.rng.uniform(*outage.seconds)
    site.database.go_away(killed=trial.rng.random() < 0.5)
    gone = time.time()
    time.sleep(seconds)
    site.database.come_back()
    back = time.monotonic()
    row = site.row(job["id"])
    if row["finished"] is not None and row["finished"].timestamp() < gone:
        trial.note("recorded before")
    while row["state"] in {"queued", "running"} or row["needs_recovery"]:
        assert time.monotonic() - back < TRUE_WITHIN, (row["state"], row["stage"], site.said()[-4000:])
        time.sleep(0.1)
        row = site.row(job["id"])
    site.waited.append(round(time.monotonic() - back, 1))
    trial.note(row["state"])
    site.rest.quiet()
    tell_the_truth(site, scene, way, site.row(job["id"]))


def submit(site: Site, scene: Scene, way: Way) -> dict[str, Any]:
    """Submits the job, after the one that it undoes; its id and the name of its files."""
    image = image_at(site.rest, scene.image)
    if way.kind == "undo":
        reclaimed = site.rest.finished(site.rest.post("jobs/", {"kind": "reclaim", "image": image["id"]}))
        assert (reclaimed["state"], scene.swapped) == ("succeeded", True)
        site.rest.quiet()
        scene.job = site.row(reclaimed["id"])["uid"]
        job = site.rest.post(f"jobs/{reclaimed['id']}/undo/")
    else:
        job = site.rest.post("jobs/", {"kind": way.kind, "image": image["id"], "options": way.options})
        scene.job = site.row(job["id"])["uid"]
    return {"id": job["id"], "uid": scene.job}


def at_moment(moment: str, scene: Scene, way: Way, uid: str, rng: random.Random) -> None:
    """Returns at a moment of a job's work, by what its files tell; each look takes some microseconds."""
    journal = scene.pool / f".sa-{uid}.journal"
    deadline = time.monotonic() + 60

    def ready() -> bool:
        try:
            told = journal.read_bytes()
        except FileNotFoundError:
            return way.done(scene)
        return b'"undo"' in told.rpartition(b'"step"')[2] if way.kind == "undo" else b'"ready"' in told

    def wait_for(happened: Callable[[], bool]) -> None:
        while not happened():
            assert time.monotonic() < deadline, f"{moment}: {leftovers(scene.pool)}"
            time.sleep(0.0002 if moment == SWAPPED else 0.002)

    if moment == COPYING:
        wait_for(lambda: (scene.pool / f".sa-{uid}.new").exists() or ready())
        time.sleep(rng.uniform(0, 1))
    elif moment == READY:
        wait_for(ready)
    else:
        wait_for(lambda: way.done(scene))


def tell_the_truth(site: Site, scene: Scene, way: Way, row: dict[str, Any]) -> None:
    """The row, the image's row and the files say the same; the image is the original or the result, and no more."""
    assert row["state"] in {"succeeded", "interrupted"}, (row["state"], row["error_code"], row["error_detail"])
    assert (row["state"] == "succeeded") == way.done(scene), (row["state"], row["error_detail"])
    assert row["error_code"] == ("" if row["state"] == "succeeded" else row["error_code"])
    scene.verify()
    image = image_at(site.rest, scene.image)
    with site.database.connect() as connection:
        known = connection.execute("SELECT inode FROM images_image WHERE id = %s", [image["id"]]).fetchone()
        copies = connection.execute(
            "SELECT uid FROM jobs_job WHERE undo_state = 'available' AND target_kind = 'image' AND target_id = %s",
            [image["id"]],
        ).fetchall()
        locks = connection.execute("SELECT * FROM jobs_resourcelock").fetchall()
        twice = connection.execute(
            "SELECT at, text, count(*) FROM jobs_joblog WHERE job_id = %s GROUP BY at, text HAVING count(*) > 1",
            [row["id"]],
        ).fetchall()
    assert leftovers(scene.pool) == {f".sa-{copy['uid']}{end}" for copy in copies for end in (".journal", ".orig")}
    assert known == {"inode": str(scene.image.stat().st_ino)}
    assert (locks, twice) == ([], [])
