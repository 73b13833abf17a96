"""One file with all that a dashboard is: database, keys, and a list of the undo copies that its jobs keep on hosts."""

import hashlib
import io
import json
import os
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import storage_admin
from storage_admin.supervisor.errors import SetupError

MANIFEST = "manifest.json"
DATABASE = "db.sqlite3"
#: Files of the data folder, and the variable that may hold their content instead.
KEYS = {"secret_key": "SECRET_KEY", "secrets.key": "STORAGE_ADMIN_SECRETS_KEY"}


def write(target: Path, data_dir: Path, database: Path | None, undo_copies: Iterable[dict[str, Any]]) -> list[str]:
    """Write a backup, readable by its owner alone, while the dashboard may run.

    Args:
        target: the new file; its folder exists.
        data_dir: where the keys are that no variable holds.
        database: the SQLite file; ``None`` for PostgreSQL, which is left to ``pg_dump``.
        undo_copies: of each: host, path, bytes.

    Returns:
        The names of what is in it.

    Raises:
        SetupError: the file is there already.
        OSError: it cannot be written; nothing of it is left.
    """
    if target.exists():
        raise SetupError(f"{target} exists already: choose another name, so that no backup is lost.")
    parts = {name: content for name in KEYS if (content := _key(name, data_dir))}
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        if database is not None:
            copy = Path(folder) / DATABASE
            with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(copy)) as made:
                source.backup(made)
                # The keys are in the same file: what waits in confidence for a job is not to be opened by it.
                made.execute("DELETE FROM jobs_sealed")
                made.commit()
                made.execute("VACUUM")
            parts[DATABASE] = copy.read_bytes()
        manifest = {
            "version": storage_admin.__version__,
            "made": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "database": "sqlite" if database is not None else "postgresql",
            "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()},
            "undo_copies": list(undo_copies),
        }
        new = Path(folder) / "new"
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                for name, content in {MANIFEST: json.dumps(manifest, indent=1).encode(), **parts}.items():
                    member = tarfile.TarInfo(name)
                    member.size, member.mode = len(content), 0o600
                    archive.addfile(member, io.BytesIO(content))
            file.flush()
            os.fsync(file.fileno())
        os.link(new, target)  # which never takes the name from another file
    return sorted(parts)


def _key(name: str, data_dir: Path) -> bytes:
    if given := os.environ.get(KEYS[name], ""):
        return given.encode()
    file = data_dir / name
    return file.read_bytes() if file.is_file() else b""


def read(source: Path, data_dir: Path) -> dict[str, Any]:
    """Put a backup's database and keys into a data folder that has no database.

    Returns:
        The backup's manifest.

    Raises:
        SetupError: the file is no whole backup, is of a newer version, or there is a database. Nothing was changed.
    """
    if (data_dir / DATABASE).exists():
        raise SetupError(f"{data_dir} has a database already: set STORAGE_ADMIN_DATA_DIR to an empty folder.")
    try:
        with tarfile.open(source, "r:gz") as archive:
            parts = {name: _member(archive, name) for name in (MANIFEST, DATABASE, *KEYS) if name in archive.getnames()}
        manifest: dict[str, Any] = json.loads(parts.pop(MANIFEST))
        whole = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()} == manifest["sha256"]
        newer = _number(manifest["version"]) > _number(storage_admin.__version__)
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError) as error:
        raise SetupError(f"{source} is no backup of Storage Admin ({error}).") from error
    if not whole:
        raise SetupError(f"{source} is damaged: its content is not what was written. Nothing was restored.")
    if newer:
        raise SetupError(f"{source} is of version {manifest['version']}: install that version or a later one first.")
    for name, content in sorted(parts.items()):  # the database first: without it, a key alone would look like one
        with os.fdopen(os.open(data_dir / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return manifest


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()
