"""A site for the tests of overload: ``/hold`` keeps its thread until a file is there."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from storage_admin import overload

FOLDER = Path(os.environ["HELD_FOLDER"])
# Of programs, whoever waited at all waited too long; of people, nobody did.
overload.BULK_PATIENCE, overload.PATIENCE = 0.0, 3600.0


def _site(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/hold":
        (FOLDER / "holds").touch()
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
    start("200 OK", [("Content-Length", "2")])
    return [b"ok"]


application = overload.Refusing(_site)
