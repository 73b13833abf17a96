"""A server of Proxmox VE for each test, and the schema's word on every request that it got."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.hosts.proxmox.client import Client
from tests.harness.proxmox.server import ProxmoxServer, proxmox
from tests.harness.proxmox.world import lab


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ProxmoxServer]:
    """The node of the tests' data. At the end nothing may be wrong with any request or answer."""
    with proxmox(lab(), tmp_path) as running:
        yield running
    assert running.wrong == []


@pytest.fixture
def client(server: ProxmoxServer) -> Iterator[Client]:
    """With a token that has all the rights that the dashboard uses."""
    with server.client() as made:
        yield made
