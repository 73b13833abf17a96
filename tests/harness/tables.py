"""The tables of the tests' SQLite databases: the migrations make them once, and they are copied until these change."""

import fcntl
import hashlib
import importlib.metadata
import re
import shutil
import sqlite3
import tempfile
from pathlib import Path

from django.apps import apps

from tests.harness.services import manage

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "var" / "tables"
_IMPORTS = re.compile(rb"^(?:from|import) ((?:storage_admin|images|benchmarks)[\w.]*)(?: import (\w+))?", re.MULTILINE)


def bring(database: Path, kept: Path = KEPT) -> None:
    """Makes a file a database with all tables and without a row of ours.

    Args:
        kept: the folder of what was made before.
    """
    made = kept / f"{stamp()}.sqlite3"
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            for old in kept.glob("*.sqlite3"):
                old.unlink()
            _make(made)
        shutil.copyfile(made, database)


def stamp() -> str:
    """Of all that the tables are made from: the migrations of each app, and the modules of ours that these import."""
    found = hashlib.sha256(f"{importlib.metadata.version('django')} {sqlite3.sqlite_version}".encode())
    for config in apps.get_app_configs():
        for path in sorted(Path(config.path, "migrations").glob("*.py")):
            content = path.read_bytes()
            found.update(f"{config.label}/{path.name}\n".encode() + content)
            for module, name in _IMPORTS.findall(content):
                for imported in (module, module + b"." + name):
                    file = ROOT / f"{imported.decode().replace('.', '/')}.py"
                    found.update(file.read_bytes() if file.is_file() else b"")
    return found.hexdigest()[:16]


def _make(made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        manage(Path(folder), "migrate", "-v", "0")
        Path(folder, "db.sqlite3").rename(made)
