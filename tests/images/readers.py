"""Somebody who only reads an image, as a backup does."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.working import image_at, scan


@contextmanager
def read_by_a_process(path: Path) -> Iterator[int]:
    """A process that is no child of this one, as a backup is, and has the image open; its id."""
    script = 'setsid sleep 600 < "$1" > /dev/null 2>&1 & echo $!'
    started = subprocess.run(["sh", "-c", script, "sh", path], capture_output=True, text=True, check=True)
    pid = int(started.stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def scanned_while_read(path: Path) -> Iterator[None]:
    """What a scan leaves that ran while something had the image open, which it has not any more."""
    with read_by_a_process(path):
        scan(image_at(path).host)
        assert image_at(path).in_use is True
    yield
