"""A dashboard of the benchmark's own: settings, tables, and how things are timed."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import django
from django.core.management import call_command

import storage_admin.celery  # noqa: F401 (the app that jobs are sent by)
from storage_admin.supervisor.static_files import collect_if_changed


def broker_socket(folder: Path) -> Path:
    """Where the benchmark's own Redis listens."""
    return folder / "redis.sock"


def prepare(folder: Path) -> None:
    """Sets up Django on a data folder of its own; call it before any model is imported."""
    for name in ("DATABASE_URL", "SECRET_KEY"):
        os.environ.pop(name, None)
    data = folder / "data"
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "storage_admin.settings",
        "STORAGE_ADMIN_DATA_DIR": str(data),
        "REDIS_URL": f"unix://{broker_socket(folder)}",
        "LOG_LEVEL": "ERROR",
        "ALLOWED_HOSTS": "testserver,127.0.0.1",
    }
    data.mkdir(mode=0o700)
    django.setup()
    call_command("migrate", interactive=False, verbosity=0)
    collect_if_changed(data / "static.stamp")


def median(measure: Callable[[], float], times: int) -> float:
    """The median of several measurements."""
    return statistics.median(measure() for _ in range(times))


#: Starts a command, waits for it, and writes the most memory it had resident, in KiB, into a file.
_PEAK = """
import os, sys
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(pid, 0)
open(sys.argv[1], "w").write(str(usage.ru_maxrss))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_wrapper(report: Path) -> list[str]:
    """What to put before a command so that its peak of resident memory stands in ``report`` afterwards, in KiB."""
    return [sys.executable, "-c", _PEAK, str(report)]


def timed(*command: str) -> float:
    """Seconds that a command takes.

    Raises:
        CalledProcessError: it failed.
    """
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin
