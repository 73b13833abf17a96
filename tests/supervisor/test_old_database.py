"""A database that a version before 1.0 really made, with rows in every table: the start takes it as it is.

How the dumps in ``tests/data`` were made: in a checkout of the last commit before the migrations became one an app
(the parent of ``git log --format=%h --diff-filter=A -- storage_admin/jobs/migrations/0001_version_1.py``),
``manage.py migrate``; a row by each factory of its ``tests/factories.py``; in each table that then had none, a row made
by the types of its columns; a value in every nullable column. Then ``sqlite3 db.sqlite3 .dump`` and ``pg_dump --inserts
--no-owner --no-privileges``, without comments and settings, all dates moved to one day. The condition of the index
``unique_authenticator_type`` is as Django writes it: PostgreSQL tells it in other words when a dump has been loaded.
Names, paths, passwords and keys are the factories' inventions.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.db import connection, connections
from django.test import Client
from django.urls import reverse

from images import preparing
from images.models import Image
from storage_admin.accounts.models import AuditEntry, User
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job
from storage_admin.supervisor.errors import SetupError
from tests.factories import JobFactory

pytestmark = [pytest.mark.django_db, pytest.mark.sql]

DATA = Path(__file__).parents[1] / "data"
DUMPS = {"sqlite": DATA / "database_before_1.sql", "postgresql": DATA / "database_before_1_postgresql.sql"}
#: Where a start may add a row for each thing that the new version has and the old one had not.
GROWING = {"django_migrations", "django_content_type", "auth_permission"}
LISTS = ("overview", "images", "orphans", "jobs", "hosts", "guests", "ledger", "alerts", "webhooks", "policies",
         "tokens", "users", "audit", "benchmarks")  # fmt: skip

#: Everything that a schema says, without the order of columns, which those that were added later come at the end of.
DEFINITIONS = {
    "sqlite": "SELECT tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL",
    "postgresql": """
        SELECT table_name, concat_ws(' ', column_name, udt_name, character_maximum_length, is_nullable, column_default,
                                     is_identity, identity_generation)
          FROM information_schema.columns WHERE table_schema = 'public'
        UNION ALL SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public'
        UNION ALL SELECT conrelid::regclass::text, conname || ' ' || pg_get_constraintdef(oid)
          FROM pg_constraint WHERE connamespace = 'public'::regnamespace
        UNION ALL SELECT tgrelid::regclass::text, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
        UNION ALL SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace
    """,
}

Rows = dict[str, tuple[list[str], list[tuple[Any, ...]]]]


@pytest.fixture
def of_this_version(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connection to a new database; that of the old one is the default one as long as the test lasts."""
    new = connections["default"]
    old: Any = new.copy()
    name = f"{new.settings_dict['NAME']}_before_1"
    old.settings_dict["NAME"] = tmp_path / "db.sqlite3" if new.vendor == "sqlite" else name
    settings.DATA_DIR = tmp_path
    monkeypatch.setattr(preparing, "collect_if_changed", lambda _stamp: False)  # files for the browser: nothing of it
    if new.vendor == "postgresql":
        with new._nodb_cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {new.ops.quote_name(name)}")
    connections["default"] = old
    try:
        load(DUMPS[new.vendor].read_text())
        yield new
    finally:
        old.close()
        connections["default"] = new
        if new.vendor == "postgresql":
            with new._nodb_cursor() as cursor:
                cursor.execute(f"DROP DATABASE {new.ops.quote_name(name)}")


def load(dump: str) -> None:
    with connection.cursor():
        raw: Any = connection.connection
        raw.executescript(dump) if connection.vendor == "sqlite" else raw.execute(dump)
    connection.close()


def schema(of: Any) -> list[tuple[str, str]]:
    """By table: every column, constraint, index and trigger."""
    with of.cursor() as cursor:
        cursor.execute(DEFINITIONS[of.vendor])
        found = cursor.fetchall()
    if of.vendor == "sqlite":
        found = [(table, part) for table, sql in found for part in parts(sql)]
    return sorted((table, " ".join(definition.split())) for table, definition in found)


def parts(sql: str) -> list[str]:
    """The columns and constraints of a CREATE TABLE; any other definition whole."""
    made = re.fullmatch(r'CREATE TABLE (?:IF NOT EXISTS )?"?\w+"? \((.*)\)', sql, re.DOTALL)
    return re.split(r', (?="\w+" |CONSTRAINT )', made[1]) if made else [sql]


def rows(like: Rows | None = None) -> Rows:
    """Every row of every table: those columns that ``like`` has, or all."""
    found: Rows = {}
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            described = connection.introspection.get_table_description(cursor, table)
            columns = like[table][0] if like and table in like else [column.name for column in described]
            cursor.execute(f"SELECT {', '.join(map(connection.ops.quote_name, columns))} FROM {table}")
            found[table] = columns, sorted(cursor.fetchall(), key=repr)
    return found


def test_every_table_goes_on_with_all_its_rows(of_this_version: Any) -> None:
    before = rows()
    assert all(content for _, content in before.values())
    assert preparing.prepare(pytest.fail, local=False) == ""
    after = rows(like=before)
    for table, (_, content) in before.items():
        if table in GROWING:
            assert set(content) <= set(after[table][1]), table
        else:
            assert content == after[table][1], table


def test_its_schema_is_that_of_a_new_one(of_this_version: Any) -> None:
    assert schema(connection) != schema(of_this_version)  # there are migrations after 1.0
    preparing.prepare(pytest.fail, local=False)
    assert schema(connection) == schema(of_this_version)


def test_it_is_read_and_written(of_this_version: Any) -> None:
    of_then = rows()
    preparing.prepare(pytest.fail, local=False)
    for model in apps.get_models():
        assert list(model._base_manager.all()) or model._meta.db_table not in of_then, model
    assert {user.time_zone for user in User.objects.all()} == {""}  # what a migration after 1.0 added
    assert Image.objects.get(name="base größe.qcow2").root_id
    last = Job.objects.latest("id").pk
    assert JobFactory.create(target=Host.objects.first()).pk > last
    AuditEntry.objects.create(who="admin", what="token created", target="after")
    browser = Client()
    browser.force_login(User.objects.get(role="admin"), "django.contrib.auth.backends.ModelBackend")
    for page in LISTS:
        assert browser.get(reverse(page)).status_code == 200, page
    for job in Job.objects.all():
        assert browser.get(reverse("job", args=[job.pk])).status_code == 200


@pytest.mark.parametrize("app", ["accounts", "images", "jobs"])
def test_one_that_stands_one_migration_earlier_is_refused_and_stays_as_it_is(of_this_version: Any, app: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT max(name) FROM django_migrations WHERE app = %s", [app])
        (last,) = cursor.fetchone()
        cursor.execute("DELETE FROM django_migrations WHERE app = %s AND name = %s", [app, last])
    before, as_made = rows(), schema(connection)
    said = rf"older than version 1.0 can read \({app} .*{last}\).*Nothing was changed"
    with pytest.raises(SetupError, match=said):
        preparing.prepare(pytest.fail, local=False)
    assert (rows(), schema(connection)) == (before, as_made)
