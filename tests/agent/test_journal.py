"""The journal beside an image."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from storage_admin.agent.swap import journal
from storage_admin.agent.swap.journal import Journal, JournalError, Stamp, Story
from tests.agent.harness import held_open
from tests.working import refused_as


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    with held_open(tmp_path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        yield fd


def test_records_come_back_in_order(folder: int) -> None:
    one = Journal.create(folder, "j1", generation=3, name_b64="eA==")
    stamp = Stamp(1, 2, 3, 4, 5, 6)
    one.append(journal.READY, new=stamp)
    one.close()
    again = Journal.open(folder, "j1")
    records = again.records()
    assert [record["step"] for record in records] == [journal.STARTED, journal.READY]
    assert records[0] == {"step": "started", "job": "j1", "generation": 3, "name_b64": "eA=="}
    assert Stamp.parse(records[1]["new"]) == stamp
    again.close()


def test_only_root_may_read_it(folder: int, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        Journal.create(folder, "j1").close()
    finally:
        os.umask(old)
    assert (tmp_path / ".sa-j1.journal").stat().st_mode & 0o777 == 0o600


def test_none_is_begun_where_what_root_makes_is_somebody_elses(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert (refused_as(Journal.create, folder, "j1"), list(tmp_path.iterdir())) == ("immutable", [])


def test_a_job_has_one_journal(folder: int, tmp_path: Path) -> None:
    Journal.create(folder, "j1", generation=1).close()
    content = (tmp_path / ".sa-j1.journal").read_bytes()
    with pytest.raises(FileExistsError):
        Journal.create(folder, "j1", generation=2)
    assert (tmp_path / ".sa-j1.journal").read_bytes() == content


def test_nobody_opens_a_journal_that_somebody_works_on(folder: int) -> None:
    one = Journal.create(folder, "j1")
    assert refused_as(Journal.open, folder, "j1") == "busy"
    one.close()
    Journal.open(folder, "j1").close()


def test_a_record_that_was_cut_off_is_left_out_and_the_next_one_is_whole(folder: int, tmp_path: Path) -> None:
    one = Journal.create(folder, "j1")
    with (tmp_path / ".sa-j1.journal").open("ab") as raw:
        raw.write(b'{"step":"ready","new":{"de')
    assert [record["step"] for record in one.records()] == [journal.STARTED]
    one.append(journal.DONE)
    assert [record["step"] for record in one.records()] == [journal.STARTED, journal.DONE]
    one.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"step":"ready"}\n',
        b'{"step":"started","job":"j2"}\n',
        b"[]\n",
        b"\xff\xfe\n",
        b"x" * (2 << 20),
    ],
)
def test_a_journal_that_says_nothing_is_told_from_one_that_does(folder: int, tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".sa-j1.journal").write_bytes(content)
    (tmp_path / ".sa-j1.journal").chmod(0o600)
    one = Journal.open(folder, "j1")
    with pytest.raises(JournalError):
        one.records()
    one.close()


@pytest.mark.parametrize(
    ("first", "later", "why"),
    [
        ({}, [{"step": "part"}], "a further part has no name"),
        ({"old_name_b64": b64(b"a.qcow2")}, [], "it names something that is not an image"),
        ({"name_b64": None}, [], "it does not say which image it belongs to"),
    ],
)
def test_an_admin_is_told_what_a_journal_leaves_out(
    tmp_path: Path, first: dict[str, Any], later: list[dict[str, Any]], why: str
) -> None:
    records = [{"name_b64": b64(b"a.qcow2"), "undo_hours": 24, "original": asdict(Stamp.of(tmp_path.stat()))} | first]
    with pytest.raises(JournalError, match=f"^{why}$"):
        Story.of(records + later)


def test_a_journal_that_others_may_write_to_is_not_believed(folder: int, tmp_path: Path) -> None:
    Journal.create(folder, "j1").close()
    (tmp_path / ".sa-j1.journal").chmod(0o666)
    with pytest.raises(JournalError):
        Journal.open(folder, "j1")


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        (b".sa-abc123.journal", ("abc123", "journal")),
        (b".sa-abc123.new", ("abc123", "new")),
        (b".sa-abc123.orig", ("abc123", "orig")),
        (b".sa-.new", None),
        (b".sa-a/b.new", None),
        (b".sa-a.new\n", None),
        (b".sa-a.new.bak", None),
        (b"vm.qcow2", None),
        (b".sa-" + b"a" * 41 + b".new", None),
        (".sa-é.new".encode(), None),
    ],
)
def test_names(name: bytes, parsed: tuple[str, str] | None) -> None:
    assert journal.parse_name(name) == parsed
