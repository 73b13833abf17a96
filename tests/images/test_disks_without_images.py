"""Why a disk of a guest has no image: not known is told as not known."""

import os
from typing import Any

import pytest
from django.utils import timezone

from images.selectors import guests_for, why_no_image
from images.serializers import GuestSerializer
from storage_admin.accounts.models import SYSTEM
from storage_admin.hosts.models import StoragePool
from tests.factories import GuestDiskFactory, HostFactory, StoragePoolFactory

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
NOW = timezone.now()
SCSI = {"path": "/mnt/pve/tank/images/100/vm-100-disk-0.raw", "volume": "tank:100/vm-100-disk-0.raw"}


def told(disk: dict[str, Any], **pool: Any) -> str | None:
    """What is said of a disk, where its host has a pool ``tank`` of Proxmox VE."""
    host = HostFactory.create()
    fields = {"name": "tank", "source": StoragePool.Source.PROXMOX, "path": "/mnt/pve/tank", "state": "ok"} | pool
    StoragePoolFactory.create(host=host, path_bytes=os.fsencode(fields["path"]), **fields)
    row = GuestDiskFactory.create(guest__host=host, **disk)
    (guest,) = guests_for(SYSTEM).filter(host=host)
    (shown,) = guest.disks.all()
    ((rest,),) = [one["disks"] for one in GuestSerializer([guest], many=True).data]
    assert (rest["image"], rest["why_no_image"]) == (None, why_no_image(shown) or None)
    assert why_no_image(row) == why_no_image(shown)
    return why_no_image(shown) or None


@pytest.mark.parametrize(
    ("disk", "pool", "said"),
    [
        (SCSI, {"last_scanned": NOW}, "not among the images of tank"),
        (SCSI, {"last_scanned": None, "state": "new"}, "unknown: tank has not been listed yet"),
        # A token without Datastore.Allocate, as PVEAuditor's, lists no volumes.
        (SCSI, {"last_scanned": None, "state": "unreadable"}, "unknown: tank has not been listed yet"),
        (SCSI, {"last_scanned": NOW, "state": "unreadable"}, "unknown: tank could not be listed"),
        (SCSI, {"last_scanned": NOW, "state_detail": "At another node."}, "unknown: tank could not be listed"),
        # Nobody tells where a volume of an inactive storage is.
        (SCSI | {"path": ""}, {"last_scanned": None}, "unknown: tank has not been listed yet"),
        (SCSI, {"last_scanned": None, "name": "other"}, "unknown: other has not been listed yet"),
        (SCSI, {"last_scanned": None, "name": "other", "path": "/mnt/pve/tan"}, "not in any registered pool"),
        ({"path": "/dev/sdb"}, {"last_scanned": NOW}, "not in any registered pool"),
        ({"path": ""}, {"last_scanned": NOW}, None),
    ],
)
def test_a_disk_is_in_no_pool_only_where_that_is_known(
    disk: dict[str, Any], pool: dict[str, Any], said: str | None
) -> None:
    assert told(disk, **pool) == said
