"""Hosts that are this machine, reached by real ssh, with folders of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.hosts import registration, ssh, transport
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.services import add_pool
from tests.harness.filesystems import new_folder
from tests.harness.sshd import Sshd, sshd
from tests.working import ADMIN, scan

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHi0Rc1lVQc8Yy5mCqGvTBxN8Z2mKc1M1Yd4vW2pVqfX"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A server that takes root in."""
    with sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture
def authorized(server: Sshd) -> Iterator[Sshd]:
    """That server; what a test lets in besides is let in no more after it."""
    before = (server.folder / "authorized_keys").read_text()
    yield server
    (server.folder / "authorized_keys").write_text(before)


@pytest.fixture
def agent_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the agent is installed on hosts."""
    folder = tmp_path / "lib"
    monkeypatch.setattr(transport, "FOLDER", str(folder))
    monkeypatch.setattr(transport, "_installed", set())
    return folder


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked over a network; every server shows one key."""
    monkeypatch.setattr(ssh, "scan_keys", lambda address, port: [HOST_KEY])


def add(server: Sshd, name: str = "hv1", **changes: object) -> Host:
    """Registers the server as a host."""
    fields: dict[str, object] = {
        "name": name, "address": "127.0.0.1", "port": server.port, "private_key": server.private_key,
        "host_key": server.host_key,
    }  # fmt: skip
    return registration.add_ssh_host(ADMIN, registration.Wanted(**(fields | changes)))  # type: ignore[arg-type]


def with_folder(host: Host, folder: Path) -> StoragePool:
    """The host with this folder as its only pool."""
    host.pools.all().delete()
    return add_pool(host, bytes(folder), StoragePool.Source.ADMIN)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A folder that is empty."""
    return new_folder(tmp_path / "pool")


def scanned(server: Sshd, folder: Path, **changes: object) -> Host:
    """The server as a host with this folder alone, scanned."""
    return scan_folder(add(server, **changes), folder)  # type: ignore[arg-type]


def scan_folder(host: Host, folder: Path) -> Host:
    with_folder(host, folder)
    scan(host)
    return host


@pytest.fixture
def without_libvirt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no libvirt were there, whatever else runs on this machine."""
    monkeypatch.setattr(reader, "read", lambda host: None)
