"""Collects the files for the browser, when they differ from what was collected last."""

import hashlib
from pathlib import Path

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.management import call_command

from storage_admin.supervisor.errors import SetupError


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
