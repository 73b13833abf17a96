"""The fixtures that tests ask for by name. Each ends what it started, by process number."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection

import storage_admin.celery  # noqa: F401 (the app that the jobs of tests are sent by)
from tests.harness import tables
from tests.harness.filesystems import loop_filesystem
from tests.harness.guests import Disk, Domains, Guest, Starts, qemu_guest
from tests.harness.libvirtd import libvirtd as started_libvirtd
from tests.harness.services import Dashboard, LiveWorker, RedisServer, database_url, running_dashboard
from tests.harness.sshd import Sshd, sshd


@pytest.fixture(scope="session")
def django_db_keepdb(django_db_modify_db_settings: None) -> bool:
    """Has Django find all tables in the tests' database, where that is SQLite: the migrations take seconds."""
    if connection.vendor != "sqlite":
        return False
    tables.bring(Path(str(connection.settings_dict["TEST"]["NAME"])))
    return True


@pytest.fixture(scope="session")
def libvirtd() -> Iterator[str]:
    """The URI of a real libvirtd, ``qemu:///system``; started unless one answers already."""
    with started_libvirtd() as uri:
        yield uri


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder with a short path that other users of the machine, such as libvirt's, may enter."""
    folder = folder_for_all()
    yield folder
    shutil.rmtree(folder)


def folder_for_all(inside: Path = Path("/var/tmp")) -> Path:
    """A new folder that other users of the machine may enter."""
    folder = Path(tempfile.mkdtemp(prefix="sa-test-", dir=inside))
    folder.chmod(0o755)
    return folder


@pytest.fixture
def ssh_server(tmp_path: Path) -> Iterator[Sshd]:
    """An SSH server of the test's own."""
    with sshd(tmp_path / "sshd") as running:
        yield running


@pytest.fixture
def domains(libvirtd: str, shared_folder: Path) -> Iterator[Domains]:
    """Defines and runs domains in the real libvirt; their images belong into ``shared_folder``."""
    with Domains(libvirtd, shared_folder) as made:
        yield made


@pytest.fixture
def tcg_guest(domains: Domains) -> Starts:
    """``tcg_guest(Disk(path), …)``: a running domain with these disks."""
    return lambda *disks: domains.run(disks)


@pytest.fixture
def plain_guest(shared_folder: Path) -> Iterator[Callable[..., Guest]]:
    """``plain_guest(Disk(path), …)``: a guest that qemu runs without libvirt; it ends with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *disks: stack.enter_context(qemu_guest(shared_folder, disks))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs are found before those of this machine."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A folder on an ext4 of 64 MiB of its own."""
    with loop_filesystem(tmp_path, 64) as folder:
        yield folder


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A private Redis at the address that the tests' settings name, so that tests ring through it."""
    path = Path(settings.REDIS_URL.removeprefix("unix://").partition("?")[0])
    folder = Path(tempfile.mkdtemp(prefix="sa-redis-"))
    with RedisServer(folder, path) as server:
        yield server
    shutil.rmtree(folder)


@pytest.fixture
def live_worker(transactional_db: None, redis_server: RedisServer, tmp_path: Path) -> Iterator[LiveWorker]:
    """A real Celery worker on the test's database; jobs that the test submits are run by it."""
    database = database_url(connection.settings_dict)
    with LiveWorker(tmp_path, Path(settings.DATA_DIR), database, redis_server.url) as worker:
        yield worker


@pytest.fixture(scope="session")
def running_dashboard_session() -> Iterator[Dashboard]:
    """One dashboard for a whole run of tests that look at it together."""
    folder = Path(tempfile.mkdtemp(prefix="sa-up-", dir="/var/tmp"))
    folder.chmod(0o755)
    (folder / "data").mkdir(mode=0o700)
    tables.bring(folder / "data" / "db.sqlite3")
    try:
        with running_dashboard(folder / "data") as dashboard:
            yield dashboard
    finally:
        shutil.rmtree(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says in one line what a machine lacks for the services of these tests, instead of a hundred errors."""
    wanted = {name for item in items for name in getattr(item, "fixturenames", ())}
    if wanted & {"libvirtd", "small_filesystem"} and os.geteuid() != 0:
        raise pytest.UsageError("Tests with libvirtd and small filesystems need root.")


__all__ = ["Disk", "Domains", "Guest"]
