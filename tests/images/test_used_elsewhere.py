"""Another registered host shares the storage: its agent is asked who has the image open there."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from images import elsewhere
from images.models import Image
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import asking, transport
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job
from tests.factories import HostFactory
from tests.images.test_silent_storage import opened
from tests.working import image_at, register

pytestmark = [pytest.mark.qemu, pytest.mark.django_db]
pytestmark.append(pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve"))


@pytest.fixture
def other(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host that has the same export mounted, under another path; its agent runs on this machine."""

    @contextlib.contextmanager
    def command(host: Host, word: str) -> Iterator[list[str]]:
        yield transport.local_command()

    monkeypatch.setattr(asking, "agent_command", command)
    there = path.parent.parent / "mounted"
    there.mkdir()
    subprocess.run(["mount", "--bind", path.parent, there], check=True)
    host = HostFactory.create(slug="other")
    register(host, there)
    StoragePool.objects.update(network=True, shared_key="nfs:server:/export")
    yield host
    subprocess.run(["umount", "-l", there], check=True)


def _refused(image: Image) -> str:
    with pytest.raises(RefusedError) as refused:
        elsewhere.refuse_used(image)
    assert "other" not in refused.value.detail.replace("nother", "")
    return refused.value.code


def test_an_image_that_is_open_on_another_host_is_left_alone_and_looked_at_before_the_work_and_the_swap(
    path: Path, other: Host
) -> None:
    image = image_at(path)
    elsewhere.refuse_used(image)
    with opened(path):
        assert _refused(image) == "image_in_use"
        for kind in ("reclaim", "flatten", "convert"):
            with pytest.raises(RefusedError, match="open on another host"):
                kinds.get(kind).prepare(Job(kind=kind, host=image.host, target_id=image.pk))
    elsewhere.refuse_used(image)


def test_a_host_that_cannot_be_asked_refuses_the_work(path: Path, other: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(host: Host, verb: str, args: dict[str, str]) -> dict[str, str]:
        raise HostError("It does not answer.", "host_unreachable")

    image = image_at(path)
    with monkeypatch.context() as patch:
        patch.setattr(asking, "ask", away)
        assert _refused(image) == "guests_unknown"
    Host.objects.filter(pk=other.pk).update(kind=Host.Kind.PROXMOX, transport=Host.Transport.API)
    assert _refused(image) == "guests_unknown"


def test_another_file_there_is_refused_and_hosts_of_other_storages_are_not_asked(path: Path, other: Host) -> None:
    image = image_at(path)
    image.inode = "1"
    assert _refused(image) == "stale_plan"
    other.pools.update(shared_key="nfs:server:/another")
    elsewhere.refuse_used(image)
