"""The four processes of Storage Admin as the supervisor starts them."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from storage_admin.supervisor.checks import answers
from storage_admin.supervisor.child import ChildSpec
from storage_admin.supervisor.private_redis import PrivateRedis

#: A worker mostly waits for agents' streams: one thread carries one job.
WORKER_THREADS = 32
WEB_WORKERS = 2
WEB_THREADS = 8


@dataclass(frozen=True)
class Installation:
    """Where this start works: the code, the data, the address, and the lock that children share."""

    code_dir: Path
    data_dir: Path
    bind: str
    redis_url: str
    lock: int


def redis_spec(redis: PrivateRedis, lock: int) -> ChildSpec:
    """The private Redis."""
    return ChildSpec(
        name="redis",
        argv=redis.argv(),
        cwd=redis.folder,
        ready=redis.answers,
        ready_seconds=30,
        keep_fds=(lock,),
    )


def dashboard_specs(installation: Installation) -> list[ChildSpec]:
    """Web server, worker and scheduler, in the order of their start."""
    environment = {
        "DJANGO_SETTINGS_MODULE": "storage_admin.settings",
        "PYTHONUNBUFFERED": "1",
        # Images belong to root: the worker is root on purpose.
        "PYTHONWARNINGS": "ignore:You're running the worker with superuser privileges",
        "REDIS_URL": installation.redis_url,
        "STORAGE_ADMIN_BIND": installation.bind,
        "STORAGE_ADMIN_DATA_DIR": str(installation.data_dir),
    }
    celery = (sys.executable, "-m", "celery", "--quiet", "--app", "storage_admin.celery")

    web = (sys.executable, "-m", "gunicorn", "--bind", installation.bind, "--no-control-socket")
    sizes = ("--workers", str(WEB_WORKERS), "--worker-class", "gthread", "--threads", str(WEB_THREADS))
    threads = ("--pool", "threads", "--concurrency", str(WORKER_THREADS), "--without-gossip", "--without-mingle")
    scheduler = ("--scheduler", "django_celery_beat.schedulers:DatabaseScheduler")
    plain = ChildSpec(
        name="",
        argv=(),
        cwd=installation.code_dir,
        environment=environment,
        keep_fds=(installation.lock,),
    )
    return [
        replace(
            plain,
            name="web",
            argv=(*web, *sizes, "--graceful-timeout", "5", "--log-level", "warning", "storage_admin.wsgi"),
            ready=lambda: answers(installation.bind),
        ),
        # A worker asked to stop waits for its jobs, however long they take. One that has lost its supervisor is killed:
        # its agents see the end of their input, put everything back and end.
        replace(
            plain,
            name="worker",
            argv=(*celery, "worker", *threads, "--loglevel", "warning"),
            death_signal="KILL",
        ),
        replace(plain, name="beat", argv=(*celery, "beat", *scheduler, "--pidfile=", "--loglevel", "warning")),
    ]
