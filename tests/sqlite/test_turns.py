"""Many threads that write into one SQLite database: each gets its turn, none is told that the database is locked."""

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from django.db.utils import ConnectionHandler

from storage_admin.sqlite import turns
from tests.harness.processes import wait_until
from tests.jobs.test_claims import at_once

#: Milliseconds for which SQLite itself asks again; one transaction of these tests takes longer.
IMPATIENT = 20
WRITING = 0.05


@pytest.fixture
def database(tmp_path: Path, django_db_blocker: Any) -> Iterator[Any]:
    """A database of its own, not the dashboard's; each thread has its own connection."""
    options = {"transaction_mode": "IMMEDIATE", "timeout": IMPATIENT / 1000, "init_command": "PRAGMA journal_mode=WAL"}
    handler = ConnectionHandler(
        {"default": {"ENGINE": "storage_admin.sqlite", "NAME": str(tmp_path / "a.sqlite3"), "OPTIONS": options}}
    )
    with django_db_blocker.unblock():
        with handler["default"].cursor() as cursor:
            cursor.execute("CREATE TABLE told (who INTEGER)")
        yield handler
        handler["default"].close()


def begin(connection: Any) -> None:
    """As ``transaction.atomic`` begins, for a connection that is none of the settings'."""
    connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
    connection.in_atomic_block = True


def end(connection: Any, how: str = "commit") -> None:
    connection.in_atomic_block = False
    getattr(connection, how)()
    connection.set_autocommit(True)


def told(connection: Any) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM told")
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize("alone", [False, True], ids=["transactions", "single statements among transactions"])
def test_none_of_many_that_write_at_once_is_told_that_it_is_locked(database: Any, alone: bool) -> None:
    def write(number: int) -> None:
        connection = database["default"]
        for _ in range(3):
            if not (alone and number % 2):
                begin(connection)
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO told VALUES (%s)", [number])
                time.sleep(WRITING)
            if not (alone and number % 2):
                end(connection)
        connection.close()

    assert at_once(12, write) == [None] * 12
    assert told(database["default"]) == 36


@pytest.mark.parametrize("how", ["commit", "rollback", "close"])
def test_a_turn_ends_with_the_transaction_however_that_ends(database: Any, how: str) -> None:
    connection = database["default"]
    begin(connection)
    if how == "close":
        connection.in_atomic_block = False
        connection.close()
    else:
        end(connection, how)
    assert turns.of(str(connection.settings_dict["NAME"])).take(0)


def test_a_transaction_that_another_process_keeps_from_beginning_gives_its_turn_back(database: Any) -> None:
    connection = database["default"]
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    other = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OperationalError, match="locked"):
        begin(connection)
    other.execute("ROLLBACK")
    other.close()
    assert turns.of(str(connection.settings_dict["NAME"])).take(0)


def test_who_reads_needs_no_turn(database: Any) -> None:
    connection = database["default"]
    begin(connection)

    def read(_number: int) -> int:
        seen = told(database["default"])
        database["default"].close()
        return seen

    assert at_once(2, read) == [0, 0]
    end(connection, "rollback")


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    line = turns.Turns()
    order: list[int] = []

    def take(number: int) -> None:
        assert line.take(60)
        order.append(number)
        line.give()

    assert line.take(0)
    threads = []
    for number in range(8):
        thread = threading.Thread(target=take, args=(number,))
        thread.start()
        threads.append(thread)
        wait_until(lambda: len(line._waiting) == len(threads), 30, "it waits")
    line.give()
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_who_has_waited_for_too_long_is_told_so_and_leaves_the_queue() -> None:
    line = turns.Turns()
    assert line.take(0)
    assert not line.take(0.01)
    line.give()
    assert line.take(0)
