"""The command lines of the web server, a worker and the scheduler, whoever starts them."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

#: A worker mostly waits for agents' streams: one thread carries one job.
WORKER_THREADS = 32
WEB_WORKERS = 2
WEB_THREADS = 8
#: gunicorn's with threads, which tells overload (``storage_admin/overload.py``).
WORKER_CLASS = "storage_admin.overload.Worker"
#: Images belong to root: a worker beside them is root on purpose.
ENVIRONMENT = {
    "DJANGO_SETTINGS_MODULE": "storage_admin.settings",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore:You're running the worker with superuser privileges",
}
_CELERY = (sys.executable, "-m", "celery", "--quiet", "--app", "storage_admin.celery")


def web(bind: str, workers: int = WEB_WORKERS, log_level: str = "warning") -> tuple[str, ...]:
    """gunicorn on ``bind``, with so many processes."""
    server = (sys.executable, "-m", "gunicorn", "--bind", bind, "--no-control-socket")
    known = ("--env", "STORAGE_ADMIN_WEB_SERVER=1")
    sizes = ("--workers", str(workers), "--worker-class", WORKER_CLASS, "--threads", str(WEB_THREADS))
    # Fewer than the files that a process may usually have open: 1,024.
    most = ("--worker-connections", "500")
    # Longer than clients and proxies keep an idle connection: else it may be closed just when it is used again.
    times = ("--graceful-timeout", "5", "--keep-alive", "75")
    return (*server, *known, *sizes, *most, *times, "--log-level", log_level, "storage_admin.wsgi")


def worker(threads: int = WORKER_THREADS, log_level: str = "warning") -> tuple[str, ...]:
    """A worker that carries so many jobs at once; which queues it listens to is decided where it starts."""
    pool = ("--pool", "threads", "--concurrency", str(threads), "--without-gossip", "--without-mingle")
    return (*_CELERY, "worker", *pool, "--loglevel", log_level)


def scheduler(log_level: str = "warning") -> tuple[str, ...]:
    """What rings for scans and for all that is due at a time."""
    return (*_CELERY, "beat", "--pidfile=", "--loglevel", log_level)


def typed(command: str, data_dir: Path, usual: Path) -> str:
    """A command as somebody types it in another terminal, so that it works on the same data, if that is elsewhere."""
    return command if data_dir == usual else f"STORAGE_ADMIN_DATA_DIR={shlex.quote(str(data_dir))} {command}"


def become(argv: Sequence[str], code_dir: Path, **environment: str) -> NoReturn:
    """Replaces this process by a command, so that whoever started it has that one to watch and to end."""
    os.chdir(code_dir)
    os.execve(argv[0], list(argv), os.environ | ENVIRONMENT | environment)  # noqa: S606 (no shell: an argument list)
