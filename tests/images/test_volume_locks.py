"""The guest of a thin volume of Proxmox VE is locked from the go on, until its volume has its name again."""

from pathlib import Path

import pytest

from images.models import Image
from images.rewrite import guest_locks
from storage_admin.agent.protocol import HELD_LOCK
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job
from tests.factories import ImageFactory, ImageUseFactory, JobFactory, StoragePoolFactory
from tests.harness.proxmox.server import ProxmoxServer
from tests.images.linked import clone, host, server, store
from tests.images.test_guest_locks import locks_set, text
from tests.working import refused_as, reread

__all__ = ["clone", "host", "server", "store"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "clone")]


@pytest.fixture
def job(host: Host, server: ProxmoxServer, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A reclaim of a volume of VM 101 that runs."""
    server.world.root = True
    monkeypatch.setattr(guest_locks, "_api", lambda host: server.client())
    pool = StoragePoolFactory.create(host=host, kind="lvmthin", path="lvmthin vg/pool", source="proxmox")
    image = ImageFactory.create(pool=pool, path="/dev/vg/vm-101-disk-1", path_bytes=b"/dev/vg/vm-101-disk-1")
    ImageUseFactory.create(image=image, disk__guest=Guest.objects.get(host=host, uid="101"))
    return JobFactory.create(kind="reclaim", target=Image.objects.get(pk=image.pk), state="running")


@pytest.mark.parametrize("ends", ["succeeded", "failed", "interrupted"])
def test_a_guest_is_locked_while_its_volume_has_another_name_and_not_any_longer(
    server: ProxmoxServer, job: Job, ends: str
) -> None:
    before, kind = text(server), kinds.get("reclaim")
    kind.before_swap(job)
    assert f"lock: {HELD_LOCK}\n" in text(server)
    Job.objects.filter(pk=job.pk).update(state=ends, needs_recovery=ends == "interrupted")
    kind.ended(reread(job))
    if ends == "interrupted":  # until a recovery has given the volume its name
        assert f"lock: {HELD_LOCK}\n" in text(server)
        Job.objects.filter(pk=job.pk).update(needs_recovery=False)
        guest_locks.settle(job.host_id)
    assert (text(server), locks_set(server)) == (before, [("101", HELD_LOCK), ("101", "lock")])
    assert not reread(job).unlock_due


@pytest.mark.parametrize("lock", ["backup", HELD_LOCK])
def test_where_somebody_else_has_the_guest_no_volume_loses_its_name(
    server: ProxmoxServer, job: Job, store: Path, lock: str
) -> None:
    guest = server.world.guests["vm", 101]
    guest.text += f"lock: {lock}\n"
    before = text(server)
    assert refused_as(kinds.get("reclaim").before_swap, job) == "guest_locked"
    assert text(server) == before
