"""A site for the tests of overload: ``…/hold`` keeps its thread until a file is there; ``/order`` tells who had one."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from storage_admin import overload

FOLDER = Path(os.environ["HELD_FOLDER"])
for _setting in os.environ["HELD_SETTINGS"].split():
    _name, _, _value = _setting.partition("=")
    setattr(overload, _name, type(getattr(overload, _name))(_value))
# gunicorn reads it before it makes the threads, and so with these numbers.
Worker = overload.Worker
_order: list[str] = []


def _site(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    path, told = environ["PATH_INFO"], b"ok"
    if path == "/order":
        told = "\n".join(_order).encode()
    elif path != overload.HEALTH:
        _order.append(path)
    if path.endswith("/hold"):
        with (FOLDER / "holds").open("a") as holds:
            holds.write("x")
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
    if path == "/reads":
        (FOLDER / "reads").touch()
        told = b"%d" % len(environ["wsgi.input"].read())
    start("200 OK", [("Content-Length", str(len(told)))])
    return [told]


application = overload.Refusing(_site)
