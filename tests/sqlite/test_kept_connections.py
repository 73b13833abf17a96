"""A connection that is kept from one request to the next."""

import ast
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from storage_admin.sqlite.base import DatabaseWrapper
from storage_admin.supervisor import commands
from tests.harness.services import ROOT

#: Of the wrapper below; the database of the tests is not touched.
pytestmark = pytest.mark.django_db


@pytest.fixture
def kept(tmp_path: Path) -> Any:
    settings = connections["default"].settings_dict | {
        "NAME": str(tmp_path / "kept.sqlite3"),
        "ENGINE": "storage_admin.sqlite",
        "OPTIONS": {},
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
    }
    wrapper = DatabaseWrapper(settings, "kept")
    wrapper.inc_thread_sharing()
    with wrapper.cursor() as cursor:
        cursor.execute("CREATE TABLE told (word)")
        cursor.execute("INSERT INTO told VALUES ('before')")
    yield wrapper
    wrapper.close()


def _word(wrapper: Any) -> str:
    wrapper.close_if_unusable_or_obsolete()  # as Django does where a request begins and ends
    with wrapper.cursor() as cursor:
        cursor.execute("SELECT word FROM told")
        return str(cursor.fetchone()[0])


def test_the_next_request_has_the_same_connection(kept: Any) -> None:
    first = kept.connection
    assert _word(kept) == "before"
    assert kept.connection is first


def test_the_next_request_sees_what_others_wrote(kept: Any) -> None:
    assert _word(kept) == "before"
    with sqlite3.connect(kept.settings_dict["NAME"]) as other:
        other.execute("UPDATE told SET word = 'after'")
    assert _word(kept) == "after"


def test_a_database_that_was_put_in_its_place_is_opened(kept: Any, tmp_path: Path) -> None:
    assert _word(kept) == "before"
    with sqlite3.connect(tmp_path / "restored") as restored:
        restored.execute("CREATE TABLE told (word)")
        restored.execute("INSERT INTO told VALUES ('restored')")
    restored.close()
    (tmp_path / "restored").replace(kept.settings_dict["NAME"])
    assert _word(kept) == "restored"


def test_a_connection_on_which_something_failed_is_not_kept(kept: Any) -> None:
    first = kept.connection
    with pytest.raises(Exception, match="no such table"), kept.cursor() as cursor:
        cursor.execute("SELECT * FROM untold")
    assert _word(kept) == "before"
    assert kept.connection is not first


@pytest.mark.parametrize(("is_web", "seconds"), [(True, 60), (False, 0)])
def test_only_the_web_server_keeps_connections(tmp_path: Path, is_web: bool, seconds: int) -> None:
    argv = commands.web("127.0.0.1:0")
    named = dict(argv[place + 1].split("=") for place, word in enumerate(argv) if word == "--env") if is_web else {}
    told = subprocess.run(
        [sys.executable, "-c", "from storage_admin import settings; print(settings.DATABASES['default'])"],
        cwd=ROOT, env=os.environ | named | {"STORAGE_ADMIN_DATA_DIR": str(tmp_path), "DATABASE_URL": "sqlite:///x"},
        check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    assert ast.literal_eval(told)["CONN_MAX_AGE"] == seconds
