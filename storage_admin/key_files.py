"""Keys in files of the data folder: each made once, by whoever needs it first, and readable by its owner alone."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def key_in(path: Path, make: Callable[[], str]) -> str:
    """The key in this file. Of processes that start at once one makes it; it outlasts a power cut from then on.

    Raises:
        OSError: the folder cannot be used.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(make())
                file.flush()
                os.fsync(file.fileno())
            os.link(new, path)
        except FileExistsError:
            pass
        finally:
            new.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return path.read_text().strip()
