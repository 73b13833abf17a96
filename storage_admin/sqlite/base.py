"""SQLite where threads that write take turns.

SQLite lets one connection write. The others ask again and again, and its lock goes to whoever asks in the right moment:
of thirty jobs that write at once, some have no luck for longer than anybody waits, and fail with "database is locked".
Here a thread waits for its turn before it asks. Other processes (web server, scheduler) ask as they always did.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.db import OperationalError
from django.db.backends.sqlite3 import base

from storage_admin.sqlite import turns
from storage_admin.sqlite.flush import DatabaseOperations

#: Seconds for which a thread waits for its turn. It is in a queue and moves up: so it may take longer than a lock.
PATIENCE = 60.0
#: What reads, or is part of a transaction that has its turn already.
_NO_WRITE = ("SELECT", "PRAGMA", "EXPLAIN", "WITH", "BEGIN", "SAVEPOINT", "RELEASE", "ROLLBACK", "COMMIT", "VALUES")


class Cursor(base.SQLiteCursorWrapper):
    """Takes a turn for a statement that writes by itself, outside of a transaction."""

    def __init__(self, connection: Any, turn: Callable[[str], Any]) -> None:
        super().__init__(connection)
        self._turn = turn

    def execute(self, query: str, params: Any = None) -> Any:
        """As Django's."""
        with self._turn(query):
            return super().execute(query, params)

    def executemany(self, query: str, param_list: Any) -> Any:
        """As Django's."""
        with self._turn(query):
            return super().executemany(query, param_list)


def _file_of(name: Any) -> tuple[int, int] | None:
    """Device and inode of a database's file; ``None`` where there is none, as of one in memory."""
    try:
        found = Path(name).stat()
    except (OSError, TypeError, ValueError):
        return None
    return found.st_dev, found.st_ino


class DatabaseWrapper(base.DatabaseWrapper):
    """A connection that holds its process's turn while it writes."""

    ops_class = DatabaseOperations

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: turns.Turns | None = None
        self._opened: tuple[int, int] | None = None

    def get_new_connection(self, conn_params: Any) -> Any:
        """A connection, and which file it is that has the database's name now."""
        made = super().get_new_connection(conn_params)
        self._opened = _file_of(self.settings_dict["NAME"])
        return made

    def is_usable(self) -> bool:
        """Whether a connection that was kept is one to the file of that name: a restore puts another one there."""
        return not self.errors_occurred and self._opened == _file_of(self.settings_dict["NAME"])

    def create_cursor(self, name: str | None = None) -> Any:  # noqa: ARG002 (Django's signature)
        """A cursor that takes turns."""
        return self.connection.cursor(factory=lambda connection: Cursor(connection, self._turn_for))

    @contextmanager
    def _turn_for(self, query: str) -> Iterator[None]:
        if self.in_atomic_block or self._held is not None or query.lstrip().upper().startswith(_NO_WRITE):
            yield
            return
        self._take()
        try:
            yield
        finally:
            self._give()

    def _take(self) -> None:
        own = turns.of(str(self.settings_dict["NAME"]))
        if not own.take(PATIENCE):
            raise OperationalError("database is locked: others of this process have written for too long")
        self._held = own

    def _give(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            held.give()

    def _start_transaction_under_autocommit(self) -> None:
        self._take()
        try:
            super()._start_transaction_under_autocommit()  # type: ignore[misc]  # its stubs leave it out
        except BaseException:
            self._give()
            raise

    def _commit(self) -> Any:
        done = super()._commit()  # type: ignore[misc]  # its stubs leave it out
        self._give()
        return done

    def _rollback(self) -> Any:
        try:
            return super()._rollback()  # type: ignore[misc]  # its stubs leave it out
        finally:
            # Where even that fails, Django closes the connection, which ends the transaction as well.
            self._give()

    def _close(self) -> Any:
        try:
            return super()._close()  # type: ignore[misc]  # its stubs leave it out
        finally:
            self._give()
