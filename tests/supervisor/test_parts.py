"""Web server, worker and scheduler started one by one, as systemd or a container does, on PostgreSQL and a Redis."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from tests import postgres
from tests.harness.processes import Daemon, free_port
from tests.harness.services import RedisServer

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ("DJANGO_SETTINGS_MODULE", "SECRET_KEY", "STORAGE_ADMIN_WORKER_HOST")


@dataclass(frozen=True)
class Site:
    """A database and a Redis that several parts share, each part with a data folder of its own."""

    folder: Path
    database: str
    broker: str

    def environment(self, part: str, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        own = {"DATABASE_URL": self.database, "REDIS_URL": self.broker, "PYTHONUNBUFFERED": "1", "SECRET_KEY": "shared"}
        return kept | own | {"STORAGE_ADMIN_DATA_DIR": str(self.folder / part)} | more

    def part(self, part: str, *words: str, **more: str) -> Daemon:
        """``manage.py`` with these words, from a folder that is not the project's."""
        argv = [sys.executable, str(ROOT / "manage.py"), *words]
        return Daemon(argv, self.folder / f"{part}.log", env=self.environment(part, **more), cwd=Path("/"), grace=30)

    def manage(self, part: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *words],
            env=self.environment(part, **more), capture_output=True, text=True, timeout=60, cwd="/",
        )  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with (
        postgres.cluster() as database,
        tempfile.TemporaryDirectory(prefix="sa-redis-") as folder,
        RedisServer(Path(folder)) as broker,
    ):
        yield Site(tmp_path, database, broker.url)


def healthy(address: str) -> bool:
    with contextlib.suppress(requests.RequestException):
        return requests.get(f"http://{address}/healthz", timeout=5).status_code == 200
    return False


def test_parts_that_start_at_once_make_the_tables_once_and_work_together(site: Site) -> None:
    binds = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(site.part("worker", "worker", "--threads", "4", STORAGE_ADMIN_LOCAL="0"))
        worker.wait_for(lambda: "Waiting for at most" in worker.said(), 30, "it waits for the tables")
        scheduler = stack.enter_context(site.part("scheduler", "scheduler"))
        webs = [
            stack.enter_context(site.part(f"web{number}", "web", STORAGE_ADMIN_BIND=bind))
            for number, bind in enumerate(binds)
        ]
        for web, bind in zip(webs, binds, strict=True):
            web.wait_for(lambda: healthy(bind), 120, "it is healthy, and so is all that it needs")  # noqa: B023
        said = "".join(web.said() for web in webs)
        assert len(re.findall("Log in as admin with the password", said)) == 1, said
        assert "Traceback" not in said
        listening = {"STORAGE_ADMIN_BIND": binds[0]}
        assert site.manage("web0", "healthy", "web", **listening).returncode == 0
        told = site.manage("web0", "healthy", "web", **listening, ALLOWED_HOSTS="storage.example.org")
        assert told.stderr.strip() == "CommandError: the web server answers 400", "it has another name"
        assert site.manage("worker", "healthy", "worker").returncode == 0
        scheduler.wait_for(
            lambda: site.manage("scheduler", "healthy", "scheduler").returncode == 0, 90, "it has written that it rang"
        )
        assert (worker.stop(), scheduler.stop()) == (0, 0)
        gone = site.manage("worker", "healthy", "worker")
        assert (gone.returncode, gone.stderr.strip()) == (1, "CommandError: no worker has reported recently")
        # The web server is well; that a worker is missing it tells those who ask for all.
        assert site.manage("web0", "healthy", "web", **listening).returncode == 0
        assert requests.get(f"http://{binds[0]}/healthz", timeout=5).json()["missing"] == ["worker"]
        assert [web.stop() for web in webs] == [0, 0]


def test_a_worker_for_a_host_says_what_keeps_it_from_being_that(site: Site) -> None:
    assert site.manage("worker", "migrate", "-v", "0").returncode == 0
    make = (
        "from storage_admin.hosts.models import Host; "
        "Host.objects.create(slug='a', name='A', kind='ssh', transport='ssh', "
        "capabilities={'machine_id': '0' * 32, 'hostname': 'old-a'})"
    )
    assert site.manage("worker", "shell", "-v", "0", "-c", make).returncode == 0
    unknown = site.manage("worker", "worker", "--host", "nothing")
    assert unknown.returncode == 1
    assert unknown.stderr.strip() == (
        "CommandError: There is no host nothing. Known hosts: a. Add the host in the dashboard first."
    )
    other = site.manage("worker", "worker", "--host", "a")
    assert other.returncode == 1
    assert re.search(r"^CommandError: a is another machine than this one: it was old-a, 0{32}, and this one is \S+\.",
                     other.stderr), other.stderr  # fmt: skip
    with site.part("worker", "worker", "--host", "a", "--new-machine", "--threads", "2") as worker:
        worker.wait_for(lambda: "ready." in worker.said(), 60, "it takes the host's place")
    assert worker.said().count("Traceback") == 0


def test_a_worker_for_a_host_needs_the_rights_of_root() -> None:
    with tempfile.TemporaryDirectory(prefix="sa-nobody-") as folder:
        os.chown(folder, 65534, 65534)
        argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"] if os.geteuid() == 0 else []
        argv += [sys.executable, str(ROOT / "manage.py"), "worker", "--host", "local"]
        env = {"STORAGE_ADMIN_DATA_DIR": folder, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
        refused = subprocess.run(argv, env=env, capture_output=True, text=True, cwd="/", timeout=60)
    assert refused.returncode == 1
    assert refused.stderr.startswith("CommandError: Images on this machine belong to root"), refused.stderr
