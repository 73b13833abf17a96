"""``kill -9`` of the agent while guests of Proxmox VE are locked for it: nothing stays locked, and no byte is lost."""

from pathlib import Path

import pytest

from storage_admin.hosts.models import StoragePool
from tests.faults.test_linked_clone_kills import recovered, run_to_death
from tests.faults.trials import steps
from tests.harness.proxmox.server import ProxmoxServer
from tests.images.linked import clone, holds, host, server, store
from tests.images.node import scanned
from tests.images.test_guest_locks import on_a_network, reclaim, text
from tests.working import said

__all__ = ["clone", "host", "on_a_network", "server", "store"]

pytestmark = [
    pytest.mark.faults, pytest.mark.qemu, pytest.mark.django_db,
    pytest.mark.usefixtures("quiet", "no_reserve", "on_a_network"),
]  # fmt: skip


def test_an_agent_that_dies_leaves_no_guest_locked_once_its_host_is_recovered(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, locked = text(server), set()
    for at in steps():
        job = run_to_death(reclaim(clone), at, "after", monkeypatch)
        if job.state == "succeeded":
            break
        locked.add("lock:" in text(server))
        assert holds(clone), at
        recovery = recovered(job, at)
        assert (text(server), job.unlock_due, holds(clone)) == (before, False, True), (at, said(job))
        scanned(recovery.host)
        StoragePool.objects.update(network=True)  # as a scan of a storage that is one would say
    assert locked == {True, False}  # it died with the lock held, too
    assert text(server) == before
