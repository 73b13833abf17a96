"""Images that are set aside, and what others do to their files between two looks: nothing is lost for good by that."""

from pathlib import Path

import pytest

from images.models import Image
from storage_admin.hosts.models import Host
from tests.images.test_set_aside import fresh, orphan, recover
from tests.working import ADMIN, scan, succeeded, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


def test_what_was_taken_for_gone_and_is_there_again_can_be_restored(pool: Path, host: Host) -> None:
    """As on a filesystem below the pool's folder that was not mounted for a while."""
    image = orphan(pool, host)
    content = (pool / "left.qcow2").read_bytes()
    job = work("set_aside", image.pk, ADMIN)
    waiting = {name: (pool / name) for name in (f".sa-{job.uid}.aside", f".sa-{job.uid}.journal")}
    for name, path in waiting.items():
        path.rename(pool.parent / name)
    recover(host)
    assert fresh(image).state == "missing"
    for name, path in waiting.items():
        (pool.parent / name).rename(path)
    recover(host)
    image = fresh(image)
    assert (image.state, image.aside_job) == ("set_aside", job)
    succeeded(work("restore_aside", image.pk, ADMIN))
    assert (pool / "left.qcow2").read_bytes() == content
    scan(host)
    assert [(one.pk, one.state) for one in Image.every.all()] == [(image.pk, "ok")]
