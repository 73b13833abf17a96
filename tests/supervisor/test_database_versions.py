"""A database of before version 1.0: the last one goes on with its rows, an older one is refused and stays as it is."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from storage_admin.hosts.models import Host
from storage_admin.supervisor import database
from storage_admin.supervisor.errors import SetupError
from tests.factories import HostFactory

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def recorded() -> set[tuple[str, str]]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT app, name FROM django_migrations")
        return {(app, name) for app, name in cursor.fetchall()}


def squashed() -> dict[tuple[str, str], Any]:
    known = MigrationLoader(None).disk_migrations
    return {key: one for key, one in known.items() if key[0] in database.OURS and one.replaces}


@pytest.fixture
def earlier() -> set[tuple[str, str]]:
    """What the last version before 1.0 has recorded, in the place of what this one has."""
    names = {name for one in squashed().values() for name in one.replaces}
    with connection.cursor() as cursor:
        for key in squashed():
            cursor.execute("DELETE FROM django_migrations WHERE app = %s AND name = %s", key)
        for app, name in names:
            cursor.execute(
                "INSERT INTO django_migrations (app, name, applied) VALUES (%s, %s, CURRENT_TIMESTAMP)", [app, name]
            )
    return names


def lacking(earlier: set[tuple[str, str]], app: str) -> str:
    """Takes an app's last migration of before 1.0 out of the record; its name."""
    last = max(name for of, name in earlier if of == app)
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE app = %s AND name = %s", [app, last])
    return last


def test_each_of_our_apps_has_one_migration_for_those_before_1_0() -> None:
    assert {app for app, _ in squashed()} == set(database.OURS)
    assert len(squashed()) == len(database.OURS)


def test_a_database_of_the_last_version_goes_on_with_its_rows(earlier: set[tuple[str, str]]) -> None:
    host = HostFactory.create(slug="kept")
    database.refuse_older()
    call_command("migrate", interactive=False, verbosity=0)
    assert set(squashed()) <= recorded()
    assert Host.objects.get(pk=host.pk).slug == "kept"


@pytest.mark.parametrize("app", ["images", "jobs"])
def test_an_older_one_is_refused_and_stays_as_it_is(earlier: set[tuple[str, str]], app: str) -> None:
    last = lacking(earlier, app)
    before = recorded()
    with pytest.raises(SetupError, match=last):
        database.refuse_older()
    assert recorded() == before


def test_one_of_this_version_is_taken() -> None:
    database.refuse_older()


def with_sleep(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> None:
    """Who waits for tables sleeps like this, and keeps the test's own transaction."""
    monkeypatch.setattr(f"{database.__name__}.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setattr(connection, "close", lambda: None)


def test_one_whose_migrations_are_being_recorded_is_waited_for(
    earlier: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = lacking(earlier, "jobs")
    looks = []

    def a_moment(_seconds: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            MigrationRecorder(connection).record_applied("jobs", last)
            call_command("migrate", interactive=False, verbosity=0)

    with_sleep(monkeypatch, a_moment)
    database.wait_for_tables(lambda _text: None)
    assert len(looks) == 2


def test_an_older_one_is_refused_by_who_waits_for_tables(
    earlier: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = lacking(earlier, "jobs")
    with_sleep(monkeypatch, lambda _seconds: None)
    with pytest.raises(SetupError, match=last):
        database.wait_for_tables(lambda _text: None)
