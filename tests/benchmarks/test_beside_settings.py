"""What was measured of a pool's cache and AIO modes stands where a disk's settings are chosen."""

from datetime import timedelta

import pytest
from django.utils import timezone

from storage_admin.hosts.models import StoragePool
from tests.benchmarks.factories import BenchmarkFactory, SampleFactory
from tests.factories import GuestFactory, ImageFactory, ImageUseFactory, StoragePoolFactory
from tests.working import client_as

pytestmark = pytest.mark.django_db


def measured(pool: StoragePool, value: float, **more: object) -> None:
    run = BenchmarkFactory.create(pool=pool, kind="modes", **{"finished": timezone.now()} | more)
    for cache, io, factor in (("none", "native", 2), ("writeback", "threads", 1)):
        for metric in ("rand_read_iops", "rand_write_iops"):
            for repetition in (1, 2, 3):
                SampleFactory.create(
                    benchmark=run, setting={"cache": cache, "io": io}, metric=metric, unit="1/s",
                    value=value * factor + repetition, repetition=repetition,
                )  # fmt: skip


def test_figures_of_another_hosts_pool_are_not_shown() -> None:
    disk = ImageUseFactory.create(image=ImageFactory.create(), disk__guest=GuestFactory.create()).disk
    measured(disk.use.image.pool, 9000)
    assert disk.guest.host != disk.use.image.host
    page = client_as(role="viewer", hosts=[disk.guest.host.slug]).get(f"/guests/{disk.guest_id}/set-disk/")
    assert page.status_code == 200
    assert "9,002" not in page.content.decode()


def test_the_newest_run_of_the_disks_own_pool_is_shown_and_what_it_advises() -> None:
    disk = ImageUseFactory.create(image=ImageFactory.create(), disk__target="vda").disk
    pool = disk.use.image.pool
    address = f"/guests/{disk.guest_id}/set-disk/?disk=vda"
    viewer = client_as(role="viewer")
    page = viewer.get(address).content.decode()
    assert f"/benchmarks/start/?pool={pool.pk}&amp;kind=modes" in page
    measured(pool, 1000, finished=timezone.now() - timedelta(days=1))
    measured(pool, 9000)
    measured(pool, 70_000, finished=None)  # it was cut off
    measured(StoragePoolFactory.create(), 50_000)
    page = viewer.get(address).content.decode()
    for words in ("none native", "18,002 a second", "9,002 a second", "none native does random reads 2"):
        assert words in page, words
