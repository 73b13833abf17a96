"""The tables: made by one process at a time, and waited for by the others."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from storage_admin.supervisor.backups import KEYS
from storage_admin.supervisor.errors import SetupError

#: PostgreSQL's advisory lock: a number of our own, "storage" and "admin" being too long for it.
LOCK = 0x5A_AD_4D_16
#: How long tables are waited for, in seconds; whoever keeps a service running starts it again after that.
PATIENCE = 120.0
#: Looks, a second apart, in which a database may look older than this version before it is refused.
OLDER_LOOKS = 10
#: Our apps, whose first migration of version 1.0 stands for many.
OURS = ("accounts", "benchmarks", "events", "guests", "hosts", "images", "jobs")


def refuse_emptied(data_dir: Path) -> None:
    """Refuses to begin anew where a database was: its file is there and empty, beside the keys of an installation.

    A disk that was full, or a restore that failed, leaves it so. Tables that were made in it would hide that.

    Raises:
        SetupError: it is.
    """
    if connection.vendor != "sqlite":
        return
    file = Path(connection.settings_dict["NAME"])
    log = file.with_name(f"{file.name}-wal")  # what was written last may still be there alone
    if not file.is_file() or file.stat().st_size or (log.is_file() and log.stat().st_size):
        return
    keys = [name for name in KEYS if (data_dir / name).is_file()]
    if keys:
        raise SetupError(
            f"The database {file} is empty, but {data_dir} has the keys of an installation ({', '.join(keys)}). "
            "Restore the database from a backup; or remove the empty file, if this is to be a new installation."
        )


def refuse_older() -> None:
    """Refuses a database that a version before 1.0 made and that its last one has not brought up to date.

    Raises:
        SetupError: it is.
        django.db.DatabaseError: it does not answer.
    """
    recorded = set(MigrationRecorder(connection).applied_migrations())
    known = MigrationLoader(None).disk_migrations
    for (app, _), migration in sorted(known.items()):
        earlier = {(app, name) for _, name in migration.replaces} if app in OURS else set()
        if recorded & earlier and (lacks := sorted(earlier - recorded)):
            raise SetupError(
                f"This database is older than version 1.0 can read ({app} lacks {lacks[0][1]}). "
                "Start the last version before 1.0 on it once, then this one. Nothing was changed."
            )


@contextlib.contextmanager
def alone(data_dir: Path) -> Iterator[None]:
    """Keeps out every other process that prepares this data folder or, with PostgreSQL, this database.

    Raises:
        django.db.DatabaseError: it does not answer.
    """
    with (data_dir / "prepare.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute("SELECT pg_advisory_lock(%s)", [LOCK])
            yield
        finally:
            connection.close()  # the lock in the database goes with it


def wait_for_tables(say: Callable[[str], None], patience_seconds: float = PATIENCE) -> None:
    """Waits until the database answers and has all tables, which the web server makes where it starts.

    Raises:
        SetupError: it has not within ``patience_seconds``, or is older than this version can read.
    """
    deadline, said, older = time.monotonic() + patience_seconds, "", 0
    while True:
        try:
            if not (missing := _missing()):
                return
        except SetupError:
            # Whoever makes the tables records their migrations one by one: half of them look like an older database.
            older += 1
            if older > OLDER_LOOKS:
                raise
            missing = said
        if time.monotonic() > deadline:
            raise SetupError(f"{missing} Start `manage.py web`, or run `manage.py migrate`, and check DATABASE_URL.")
        if missing != said:
            say(f"{missing} Waiting for at most {patience_seconds:.0f} s.")
            said = missing
        time.sleep(min(1.0, patience_seconds))


def _missing() -> str:
    """What is not there yet, in a sentence; empty when all is."""
    if connection.vendor == "sqlite" and not Path(connection.settings_dict["NAME"]).exists():
        return "There is no database yet."  # and looking into it would make an empty file
    try:
        refuse_older()
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError as error:
        return f"The database of DATABASE_URL cannot be used: {' '.join(str(error).split())}."
    finally:
        connection.close()
    return f"The database has not all tables of this version yet ({len(plan)} migrations are missing)." if plan else ""
