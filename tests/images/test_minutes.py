"""Looks at how full pools are between scans, by the real agent on real filesystems."""

import os
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from django.utils import timezone

from images.alert_rules.looking import look_at_space
from images.scan import minutes
from storage_admin.agent.host import special_mounts
from storage_admin.events.models import Alert
from storage_admin.hosts.models import Host, PoolMinute, StoragePool
from tests.harness.filesystems import MIB, loop_filesystem
from tests.harness.processes import Daemon
from tests.images.far import answering_again
from tests.working import create, reread, scanned_machine

pytestmark = [pytest.mark.services, pytest.mark.qemu, pytest.mark.django_db]
pytestmark.append(pytest.mark.usefixtures("quiet", "no_hypervisor"))


def test_a_filesystem_that_is_filled_between_scans_is_seen_and_told_of_as_statvfs_says(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path, 64) as folder:
        image = create(folder / "a.qcow2")
        scanned_machine(folder)
        pool, read = StoragePool.objects.get(), image.stat().st_atime_ns
        (folder / "new").write_bytes(bytes(50 * MIB))
        os.sync()
        before = timezone.now()
        minutes.look(before)
        look_at_space(timezone.now())
        space, pool = os.statvfs(folder), reread(pool)
        assert pool.capacity_bytes == space.f_blocks * space.f_frsize
        assert pool.available_bytes == space.f_bavail * space.f_frsize
        assert pool.reserved_bytes == (space.f_bfree - space.f_bavail) * space.f_frsize
        assert pool.space_at is not None
        assert pool.space_at > before > (pool.last_scanned or before)
        assert Alert.objects.get(closed=None).key == f"pool_over_threshold:{pool.pk}"
        assert image.stat().st_atime_ns == read
        minutes.look(timezone.now())
        assert PoolMinute.objects.count() == 1, "it is not due yet"
        (folder / "new").unlink()
        os.sync()
        minutes.look(timezone.now() + minutes.OFTEN)
        look_at_space(timezone.now())
        assert not Alert.objects.filter(closed=None).exists()
        seen = reread(pool).space_at
        subprocess.run(["umount", folder], check=True)
        minutes.look(timezone.now() + timedelta(hours=1))
        assert reread(pool).space_at == seen, "what lies below the mount point is not the pool"
        assert PoolMinute.objects.count() == 2
        subprocess.run(["mount", "-o", "loop", tmp_path / "disk.img", folder], check=True)


def test_a_server_that_does_not_answer_is_told_of_and_the_other_pools_are_looked_at(
    far_host: Host, far_server: Daemon, near: Path
) -> None:
    here, far = (far_host.pools.get(path=str(path)) for path in (near.parent, near.parent.parent / "far"))
    with answering_again(far_server):
        psutil.Process(far_server.pid).suspend()
        began, now = time.monotonic(), timezone.now()
        minutes.look(now)
        assert time.monotonic() - began < special_mounts.PATIENCE + 10
        assert (reread(far).state, far.available_bytes) == ("silent", reread(far).available_bytes)
        assert Alert.objects.get(closed=None).key == f"pool_silent:{far.pk}"
        assert reread(here).space_at > now  # type: ignore[operator]
        began = time.monotonic()
        minutes.look(now + timedelta(hours=1))
        assert time.monotonic() - began < special_mounts.PATIENCE, "it is the next scan's"
        assert PoolMinute.objects.filter(pool=far).count() == 0
        assert PoolMinute.objects.filter(pool=here).count() == 2
