"""A disk that is to be moved onto a volume of ZFS, or from one: its plan, and what the agent is asked.

What ZFS itself does is tried on a real host (tests/machines/test_move_zfs.py).
"""

from pathlib import Path

import pytest

from images.kinds.move import Move
from images.models import Image
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from tests.agent.test_zfs import DATASETS, POOLS, line
from tests.factories import HostFactory, StoragePoolFactory
from tests.images.test_zfs import Says, zfs_says
from tests.working import OPERATOR, codes, create, image_at, refused_as, scan, this_machine

__all__ = ["zfs_says"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_libvirt", "no_reserve")]

DISK = "plain disk"
GUID = POOLS[0].split("\t")[1]


@pytest.fixture
def image(tmp_path: Path, zfs_says: Says) -> Image:
    """A file on a host with a ZFS pool, whose volumes libvirt has in one dataset of it."""
    pool = tmp_path / "pool"
    pool.mkdir(mode=0o755)
    host = this_machine(pool)
    StoragePoolFactory.create(
        host=host, name="data", kind="zfs", path="/dev/zvol/tank/data", path_bytes=b"", path_key="data",
        source="libvirt",
    )  # fmt: skip
    disk = create(pool / "disk.qcow2", "9M")
    scan(host)
    return image_at(disk)


def tank() -> StoragePool:
    return StoragePool.objects.get(kind="zfs", source="zfs")


def code(image: Image, pool: StoragePool, **options: object) -> str:
    return refused_as(services.submit, OPERATOR, "move", image.pk, {"target_pool": pool.pk, **options})


def test_a_file_becomes_a_volume_in_the_dataset_of_the_pool(image: Image) -> None:
    assert {pool.kind for pool in Move.target_pools(image)} == {"zfs"}
    pool = StoragePool.objects.get(name="data")
    plan = services.plan(OPERATOR, "move", image.pk, {"target_pool": pool.pk})
    assert ([one.code for one in plan.refusals], plan.method) == ([], "to_volume")
    assert "zfs create -s -V 9437184 -o volmode=dev tank/data/.sa-JOB.new" in plan.commands
    assert "zfs rename tank/data/.sa-JOB.new tank/data/disk" in plan.commands
    assert any("refreservation=auto tank/data/disk" in one for one in plan.warnings)
    job = services.submit(OPERATOR, "move", image.pk, {"target_pool": pool.pk})
    volume = {"backend": "zfs", "group": "tank/data", "group_id": GUID, "name": "disk", "pool": ""}
    assert Move().request(job)["volume"] == volume
    assert Move().made_at(job) == (pool, b"/dev/zvol/tank/data/disk")


def test_what_a_new_volume_takes_on_raidz_is_foretold_with_its_parity(image: Image) -> None:
    """Blocks of 8 KiB on raidz2 over six disks take twice their bytes (docs/hosts.md)."""
    pool = tank()
    even = services.plan(OPERATOR, "move", image.pk, {"target_pool": pool.pk})
    layout = {"disks": 6, "parity": 2, "sector": 4096}
    StoragePool.objects.filter(pk=pool.pk).update(volume_facts=(pool.volume_facts or {}) | {"raidz": layout})
    told = services.plan(OPERATOR, "move", image.pk, {"target_pool": pool.pk})
    assert (told.predicted_high or 0) >= 2 * (image.virtual_size or 0) * 99 // 100
    assert 1.99 < (told.scratch_bytes or 0) / (even.scratch_bytes or 1) < 2.01


def test_a_volume_goes_into_another_dataset_or_a_file(image: Image) -> None:
    pool, path = StoragePool.objects.get(name="data"), f"/dev/zvol/tank/{DISK.replace(' ', '+')}"
    volume = Image.objects.get(path=path)
    wanted = {"target_pool": pool.pk, "target_name": "other"}
    assert codes("move", volume, **wanted) == set()
    job = services.submit(OPERATOR, "move", volume.pk, wanted)
    asked = Move().request(job)
    assert (Move().verb_for(job), asked["backend"], asked["group"], asked["name"]) == (
        "volume_to_volume", "zfs", "tank", DISK
    )  # fmt: skip
    assert asked["id"] == line(f"tank/{DISK}").split("\t")[14]
    assert "dataset" not in asked
    plan = services.plan(OPERATOR, "move", volume.pk, {"target_pool": image.pool_id, "target_name": "new.qcow2"})
    assert ([one.code for one in plan.refusals], plan.method) == ([], "to_file")
    assert [one[:10] for one in plan.commands if one.startswith("zfs rename")] == ["zfs rename", "zfs rename"]


def test_what_stands_against_it_is_said_before(image: Image, zfs_says: Says) -> None:
    pool = StoragePool.objects.get(name="data")
    for name in ("a b", "-a", "x" * 251, "ä"):
        assert code(image, tank(), target_name=name) == "invalid"
    assert code(image, pool, target_name="vm-100-disk-0") == "target_exists"
    container = Image.objects.get(name="subvol-103-disk-0")
    assert code(container, tank(), target_name="new") == "unsupported_pool"
    assert not Move.is_of_use(container, beside_volumes=True)
    StoragePoolFactory.create(host=HostFactory.create(slug="other"), kind="zfs", shared_key=f"zfs {GUID} tank/more")
    assert code(image, pool) == "shared_pool"


def test_a_volume_that_a_job_reads_keeps_its_name_and_one_that_it_makes_is_none(image: Image, zfs_says: Says) -> None:
    known = Image.objects.get(name="vm-104-disk-0")
    guid = line("tank/small/vm-104-disk-0").split("\t")[14]
    work = {"name": "tank/small/.sa-j1.work", "storage-admin:aside": f"j1.{guid}.default.vm-104-disk-0"}
    made = {"name": "tank/small/.sa-j1.new", "guid": "7", "storage-admin:aside": "j1.7.new.disk"}
    others = [one for one in DATASETS if not one.startswith("tank/small/vm-104")]
    of = "tank/small/vm-104-disk-0"
    before = {one.name for one in Image.objects.all()}
    zfs_says(POOLS, [*others, line(of, **work), line(of, **made)])
    assert scan(image.host)["vanished"] == 0
    assert {one.name for one in Image.objects.all()} == before
    assert Image.objects.get(name="vm-104-disk-0").pk == known.pk
    zfs_says(POOLS, [*others, line(of, **(work | {"storage-admin:aside": "j1.1.default.vm-104-disk-0"}))])
    assert scan(image.host)["vanished"] == 1  # that journal is another dataset's


def test_a_volume_with_snapshots_is_refused_in_the_plan_as_its_agent_refuses_it(image: Image) -> None:
    other = {"target_pool": tank().pk, "target_name": "other"}
    assert codes("move", Image.objects.get(name="vm-100-disk-0"), **other) == {"has_overlays"}
    assert codes("move", Image.objects.get(name="vm-102-disk-0"), **other) == set()


def test_what_a_volume_needs_elsewhere_is_in_the_plan_what_its_agent_asks_for(image: Image) -> None:
    """It does not know before it reads a volume how much of it is zeros."""
    volume = Image.objects.get(name="vm-104-disk-0")
    options = {"target_pool": StoragePool.objects.get(name="data").pk, "target_name": "other"}
    assert (volume.allocated_size or 0) < (volume.virtual_size or 0)
    assert services.plan(OPERATOR, "move", volume.pk, options).scratch_bytes == volume.virtual_size
