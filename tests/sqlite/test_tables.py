"""The tables that tests begin with are made anew when what they are made from has changed, and else copied."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness import tables


@pytest.fixture
def migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only migration of the only app, which imports a module of ours."""
    app, ours = tmp_path / "app", tmp_path / "images"
    (app / "migrations").mkdir(parents=True)
    ours.mkdir()
    (ours / "indexes.py").write_text("1")
    config = SimpleNamespace(label="app", path=str(app))
    monkeypatch.setattr(tables, "apps", SimpleNamespace(get_app_configs=lambda: [config]))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    path = app / "migrations" / "0001.py"
    path.write_text("from images import indexes\n")
    return path


def test_they_are_made_once_and_again_when_a_migration_or_what_it_imports_changes(
    migration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[str]()

    def make(path: Path) -> None:
        made.append(path.name)
        path.write_text(str(len(made)))

    monkeypatch.setattr(tables, "_make", make)
    database, kept = tmp_path / "database", tmp_path / "kept"
    for change in (None, None, migration, None, tmp_path / "images" / "indexes.py", None):
        if change is not None:
            change.write_text(change.read_text() + "# changed\n")
        tables.bring(database, kept)
    assert database.read_text() == "3"
    assert len(set(made)) == len(made) == 3
    assert [path.name for path in kept.glob("*.sqlite3")] == [made[-1]]
