"""A server of Proxmox VE for each test, and the schema's word on every request that it got."""

from collections.abc import Iterator

import pytest

from storage_admin.hosts.proxmox.client import Client
from tests.harness.proxmox.server import ProxmoxServer, server

__all__ = ["server"]


@pytest.fixture
def client(server: ProxmoxServer) -> Iterator[Client]:
    """With a token that has all the rights that the dashboard uses."""
    with server.client() as made:
        yield made
