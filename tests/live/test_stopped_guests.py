"""A guest of a real libvirt that is paused since its filesystem is full is named, with its disk and pool."""

import os
import time
from pathlib import Path

import pytest

from images.scan import stopped_guests
from storage_admin.agent.protocol import HostError
from storage_admin.events.models import Alert
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.models import StoragePool
from tests.harness.filesystems import MIB, loop_filesystem, new_file
from tests.harness.guests import Disk, Domains
from tests.harness.libvirtd import sees
from tests.harness.patching import raising
from tests.live.conftest import scanned
from tests.working import create

pytestmark = [pytest.mark.guest, pytest.mark.django_db, pytest.mark.usefixtures("quiet", "libvirtd")]


def test_a_guest_that_is_paused_since_its_pool_is_full_is_named_until_it_goes_on(
    shared_folder: Path, domains: Domains, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loop_filesystem(shared_folder, 64) as folder, sees(folder):
        folder.chmod(0o755)
        image = create(folder / "disk.qcow2", "256M")
        image.chmod(0o666)
        guest = domains.run([Disk(image, driver="error_policy='stop'")])
        host, row = scanned(folder, guest)
        stopped_guests.look()
        assert not Alert.objects.exists()
        filler = new_file(folder / "filler", bytes(40 * MIB))
        os.sync()
        guest.console.run("dd if=/dev/urandom of=/dev/vda bs=1M count=40 oflag=direct 2> /dev/null &")
        deadline = time.monotonic() + 60
        while not Alert.objects.filter(closed=None).exists():
            assert time.monotonic() < deadline
            time.sleep(1)
            stopped_guests.look()
        alert = Alert.objects.get()
        assert (alert.key, alert.target_id) == (f"guest_io_error:{host.pk}:{row.uid}", row.pk)
        pool = StoragePool.objects.get()
        assert all(word in alert.detail for word in ("vda", "no space left", image.name, pool.name))
        with monkeypatch.context() as patched:
            patched.setattr(control, "stopped", raising(HostError("It does not answer.")))
            stopped_guests.look()
            assert Alert.objects.filter(closed=None).exists()
        filler.unlink()
        os.sync()
        guest.domain.resume()
        stopped_guests.look()
        assert not Alert.objects.filter(closed=None).exists()
        guest.stop()
