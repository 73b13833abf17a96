"""Collects the files for the browser, when they differ from what was collected last."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.staticfiles.finders import AppDirectoriesFinder, BaseFinder, FileSystemFinder, get_finders
from django.core.management import call_command

from storage_admin.browser_files import is_loaded
from storage_admin.supervisor.errors import SetupError


class _Loaded(BaseFinder):
    """Lists what pages load, and nothing else of what libraries bring."""

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterable[Any]:
        for name, storage in super().list(ignore_patterns):
            if is_loaded("/".join(filter(None, [getattr(storage, "prefix", ""), name]))):
                yield name, storage


class OfFolders(_Loaded, FileSystemFinder):
    """As Django's."""


class OfApps(_Loaded, AppDirectoriesFinder):
    """As Django's."""


def collect_if_changed(stamp: Path) -> bool:
    """Runs collectstatic unless ``stamp`` says that these very files have been collected.

    Returns:
        True when it collected.

    Raises:
        SetupError: the libraries that npm brings are not there.
    """
    for entry in settings.STATICFILES_DIRS:
        folder = Path(str(entry[1] if isinstance(entry, tuple) else entry))
        if not folder.is_dir():
            raise SetupError(f"{folder} is missing: the set-up is not complete. Run: make run")
    now = _fingerprint()
    if stamp.is_file() and stamp.read_text() == now:
        return False
    stamp.unlink(missing_ok=True)
    call_command("collectstatic", interactive=False, clear=True, verbosity=0)
    stamp.write_text(now)
    return True


def _fingerprint() -> str:
    """Names, sizes and times of every source file, and where they go."""
    digest = hashlib.blake2b(str(settings.STATIC_ROOT).encode(), digest_size=16)
    for finder in get_finders():
        for name, storage in finder.list([]):
            status = Path(storage.path(name)).stat()
            digest.update(f"{getattr(storage, 'prefix', '')}/{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
