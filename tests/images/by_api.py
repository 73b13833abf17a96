"""What the tests of proxmox by api share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import registration
from storage_admin.jobs import services
from tests.harness.proxmox.cluster import cluster
from tests.harness.proxmox.server import ProxmoxServer, server
from tests.harness.proxmox.world import SECRET, TOKEN_ID
from tests.working import ADMIN, OPERATOR, run, succeeded

__all__ = ["server"]

STORE = "/mnt/pve/store/images"


def add(server: ProxmoxServer, name: str = "pve", secret: str = SECRET) -> Host:
    endpoint = server.endpoint()
    return registration.add_node(
        ADMIN,
        registration.WantedNode(
            name=name, address=endpoint.address, port=endpoint.port, token_id=TOKEN_ID, token_secret=secret,
            tls_fingerprint=endpoint.fingerprint,
        ),
    )  # fmt: skip


def scan(host: Host) -> dict[str, Any]:
    job = succeeded(run(services.submit(OPERATOR, "scan", host.pk, {})))
    host.refresh_from_db()
    return dict(job.result or {})


def add_and_scan(server: ProxmoxServer) -> Host:
    host = add(server)
    scan(host)
    return host


def at(place: str) -> Image:
    return Image.objects.select_related("host", "pool", "backing").get(path=place)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two nodes of a cluster, registered; nobody has scanned them yet."""
    with cluster(tmp_path) as (first, second):
        yield add(first, "node1"), add(second, "node2")
