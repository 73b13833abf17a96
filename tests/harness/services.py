"""Real services for tests: a private Redis, a private PostgreSQL, a Celery worker, and the whole dashboard as
``manage.py up`` starts it.
"""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
import redis
import requests
from psycopg.rows import dict_row

from tests import postgres
from tests.harness.processes import Daemon, free_port

ROOT = Path(__file__).resolve().parents[2]


class RedisServer(Daemon):
    """A Redis on a unix socket, with nothing on disk that outlives it."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        self.path = path or folder / "redis.sock"
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        argv = ["redis-server", "--port", "0", "--unixsocket", str(self.path), "--dir", str(folder), "--save", ""]
        super().__init__(
            [*argv, "--appendonly", "no", "--maxmemory-policy", "noeviction"], folder / "redis.log", grace=5
        )
        self.wait_for(self.answers, 20, "Redis answers")

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def answers(self) -> bool:
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False


class PostgresServer(Daemon):
    """A PostgreSQL on a unix socket in a folder with a short path; it can go away at once, and come back.

    What it has called committed stays when its processes are killed, as on a machine that stays up.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._tools = folder, postgres.binaries()
        self.user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        become = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--init-groups", "--pdeathsig=QUIT"]
        self._become = [*(become if os.geteuid() == 0 else ["setpriv", "--pdeathsig=QUIT"]), "--"]
        shutil.chown(folder, self.user)
        self._run("initdb", "-D", str(folder / "data"), "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        settings = {"listen_addresses": "", "unix_socket_directories": str(folder), "fsync": "off"}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        argv = [*self._become, str(self._tools / "postgres"), "-D", str(folder / "data"), *options]
        super().__init__(argv, folder / "postgres.log", cwd=folder)
        self.wait_for(self.answers, 30, "PostgreSQL answers")
        self._run("createdb", "-h", str(folder), postgres.DATABASE)

    def _run(self, tool: str, *words: str) -> None:
        subprocess.run(
            [*self._become, self._tools / tool, "-U", self.user, *words],
            check=True,
            capture_output=True,
            cwd=self.folder,
        )

    @property
    def url(self) -> str:
        """``DATABASE_URL``, with the socket's folder the way django-environ reads it."""
        return f"postgres://{self.user}@/{self.folder}/{postgres.DATABASE}"

    def connect(self, database: str = postgres.DATABASE) -> psycopg.Connection[dict[str, Any]]:
        """A connection of the test's own."""
        return psycopg.connect(
            host=str(self.folder), user=self.user, dbname=database, autocommit=True, row_factory=dict_row
        )

    def answers(self) -> bool:
        try:
            self.connect("postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def go_away(self, *, killed: bool) -> None:
        """Goes at once: all its processes are killed, or it is stopped as by ``pg_ctl stop -m immediate``."""
        if killed:
            processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children()]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=10)
        else:
            self.process.send_signal(signal.SIGQUIT)
        self.process.wait(10)

    def come_back(self) -> None:
        """Starts it on the same data, and waits until it answers."""
        self.start_again()
        self.wait_for(self.answers, 60, "PostgreSQL answers again")

    def stop(self) -> int:
        """Ends it without waiting for its clients to go."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        return super().stop()


def database_url(database: Mapping[str, Any]) -> str:
    """``DATABASE_URL`` for a process that is to use the same database as this connection's settings."""
    if database["ENGINE"].endswith("sqlite"):
        return f"sqlite:///{database['NAME']}"
    user, password = database.get("USER") or "", database.get("PASSWORD") or ""
    host, port = str(database.get("HOST") or ""), database.get("PORT") or ""
    login = f"{user}{':' + password if password else ''}@" if user else ""
    if host.startswith("/"):  # the folder of a unix socket, the way django-environ reads it
        return f"postgresql://{login}/{host}/{database['NAME']}"
    return f"postgresql://{login}{host}{f':{port}' if port else ''}/{database['NAME']}"


class LiveWorker(Daemon):
    """A Celery worker, as ``manage.py up`` starts one, on a database and a Redis of the test."""

    def __init__(self, folder: Path, data_dir: Path, database: str, broker: str) -> None:
        argv = [sys.executable, "-m", "celery", "-A", "storage_admin.celery", "worker", "--pool", "threads"]
        argv += ["--concurrency", "8", "--without-gossip", "--without-mingle", "--loglevel", "INFO"]
        env = os.environ | {
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "STORAGE_ADMIN_DATA_DIR": str(data_dir),
            "DATABASE_URL": database,
            "REDIS_URL": broker,
            "PYTHONUNBUFFERED": "1",
        }
        super().__init__(argv, folder / "worker.log", env=env, cwd=ROOT, grace=30)
        self.wait_for(lambda: " ready." in self.said(), 60, "the worker is ready")


@dataclass(frozen=True)
class Dashboard:
    """A dashboard that runs: where it answers, the first admin's password, and the one that was printed."""

    url: str
    password: str
    printed: str
    data_dir: Path
    daemon: Daemon
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.daemon.pid

    @property
    def demo(self) -> Path:
        """Where a test has the demo's images made."""
        return self.data_dir.parent / "demo"

    def manage(self, *arguments: str) -> str:
        """What ``manage.py`` printed, run beside the dashboard on its data folder and its database."""
        return manage(self.data_dir, *arguments, **self.environment)


def manage(data_dir: Path, *arguments: str, **environment: str) -> str:
    """What ``manage.py`` printed, run on a data folder of its own.

    Raises:
        AssertionError: it failed; with what it said.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), *arguments],
        env=environment_of(data_dir) | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"manage.py {' '.join(arguments)}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    return done.stdout


@contextlib.contextmanager
def running_dashboard(data_dir: Path, **environment: str) -> Iterator[Dashboard]:
    """``manage.py up`` on a free port and a data folder of its own, until it is healthy; then stopped as by Ctrl-C."""
    bind = f"127.0.0.1:{free_port()}"
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    env = environment_of(data_dir) | {"STORAGE_ADMIN_BIND": bind} | environment
    argv = [sys.executable, str(ROOT / "manage.py"), "up"]
    log = data_dir.parent / f"up-{secrets.token_hex(3)}.log"
    with Daemon(argv, log, env=env, cwd=ROOT, grace=60) as daemon:
        url = f"http://{bind}"
        daemon.wait_for(lambda: _healthy(url), 120, "the dashboard is healthy")
        daemon.wait_for(lambda: _password(daemon.said()), 30, "the first admin's password")
        printed = _password(daemon.said())
        password = secrets.token_urlsafe(12)
        choose_password(url, "admin", printed, password)
        yield Dashboard(url, password, printed, data_dir, daemon, environment)


def choose_password(url: str, user: str, one_time: str, password: str) -> None:
    """Signs in with a one-time password and chooses another one, as a browser does."""
    with requests.Session() as browser:
        place, form = f"{url}/login/", {"username": user, "password": one_time}
        for _step in range(2):
            token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', browser.get(place, timeout=30).text)
            assert token is not None
            sent = form | {"csrfmiddlewaretoken": token[1]}
            answer = browser.post(place, sent, headers={"Referer": place}, timeout=30)
            assert answer.ok, answer.text
            place = f"{url}/password/"
            form = {"old_password": one_time, "new_password1": password, "new_password2": password}
        assert answer.url == f"{url}/", answer.text


def environment_of(data_dir: Path) -> dict[str, str]:
    """That of a real start with a data folder of its own: pytest has named the tests' settings, which that has not."""
    kept = {key: value for key, value in os.environ.items() if key not in {"DATABASE_URL", "REDIS_URL", "SECRET_KEY"}}
    kept.pop("DJANGO_SETTINGS_MODULE", None)
    return kept | {"STORAGE_ADMIN_DATA_DIR": str(data_dir), "PYTHONUNBUFFERED": "1"}


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/healthz", timeout=2).status_code == 200
    except requests.RequestException:
        return False


def _password(said: str) -> str:
    found = re.search(r"with the password (\S+)", said)
    return found.group(1) if found else ""
