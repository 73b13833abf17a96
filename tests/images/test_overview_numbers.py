"""The first page's numbers, on rows made for it."""

from datetime import timedelta

import pytest
from django.utils import timezone

from images.rewrite import record, space
from images.selectors import Won, overview
from storage_admin.accounts.models import SYSTEM
from storage_admin.hosts.models import StoragePool
from tests.factories import GIB, HostFactory, ImageFactory, ImageUseFactory, JobFactory, StoragePoolFactory
from tests.ledger.rows import freed, held
from tests.working import client_as

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def test_an_empty_dashboard_knows_nothing_and_says_so() -> None:
    seen = overview(SYSTEM)
    totals = seen.totals
    assert {totals.capacity_bytes, totals.allocated_bytes, totals.reclaimable_bytes, totals.overcommit_ratio} == {None}
    assert (totals.images_count, seen.pools, seen.win_back_now, seen.needs_a_look) == (0, (), (), ())


def test_a_filesystem_with_two_pools_counts_once() -> None:
    host = HostFactory.create()
    for _ in range(2):
        StoragePoolFactory.create(host=host, fs_key="one", capacity_bytes=100 * GIB, available_bytes=40 * GIB)
    totals = overview(SYSTEM).totals
    assert (totals.capacity_bytes, totals.used_bytes, totals.available_bytes) == (100 * GIB, 60 * GIB, 40 * GIB)
    assert (totals.pools_count, totals.pools_counted) == (2, 2)


def test_a_dataset_with_a_quota_counts_within_the_one_with_a_quota_that_it_lies_in() -> None:
    host = HostFactory.create()
    for key, capacity in (("zfs 1/tank/a", 100), ("zfs 1/tank/a/b", 50), ("zfs 1/tank/ab", 20), ("zfs 2", 10)):
        StoragePoolFactory.create(
            host=host, kind="zfs", fs_key=key, capacity_bytes=capacity * GIB, available_bytes=capacity * GIB
        )
    assert overview(SYSTEM).totals.capacity_bytes == 130 * GIB


def test_free_space_that_datasets_share_counts_once_and_what_is_kept_for_one_beside_it() -> None:
    host, whole = HostFactory.create(), 30 * GIB  # that the ZFS pool around them has free
    for name, available in (("quota", 20), ("other quota", 25), ("reservation", 34)):
        StoragePoolFactory.create(
            host=host, kind="zfs", fs_key=f"zfs 1/tank/{name}", capacity_bytes=(available + 5) * GIB,
            available_bytes=available * GIB, volume_facts={"pool_available": whole},
        )  # fmt: skip
    totals = overview(SYSTEM).totals
    assert (totals.available_bytes, totals.used_bytes, totals.capacity_bytes) == (34 * GIB, 15 * GIB, 49 * GIB)


def test_a_pool_whose_filesystem_keeps_much_for_root_is_as_full_as_df_says() -> None:
    StoragePoolFactory.create(capacity_bytes=100 * GIB, available_bytes=30 * GIB, reserved_bytes=60 * GIB)
    seen = overview(SYSTEM)
    assert (seen.totals.used_bytes, seen.totals.available_bytes, seen.totals.usable_bytes) == (
        10 * GIB, 30 * GIB, 40 * GIB,
    )  # fmt: skip
    assert (seen.pools[0].used_bytes, seen.pools[0].used_percent) == (10 * GIB, 25.0)


def test_a_pool_of_unknown_size_is_not_counted_as_empty() -> None:
    StoragePoolFactory.create(capacity_bytes=100 * GIB)
    StoragePoolFactory.create(capacity_bytes=None, available_bytes=None)
    totals = overview(SYSTEM).totals
    assert (totals.capacity_bytes, totals.pools_count, totals.pools_counted) == (100 * GIB, 2, 1)


def test_an_inode_with_three_names_counts_once() -> None:
    pool = StoragePoolFactory.create()
    for _ in range(3):
        ImageFactory.create(
            pool=pool, inode="7", nlink=3, allocated_size=4 * GIB, reclaimable_bytes=GIB, reclaimable_low=5
        )
    ImageFactory.create(pool=pool, allocated_size=GIB)
    totals = overview(SYSTEM).totals
    assert (totals.allocated_bytes, totals.virtual_bytes) == (5 * GIB, 20 * GIB)
    assert (totals.reclaimable_bytes, totals.reclaimable_low, totals.reclaimable_high) == (GIB, 5, None)


@pytest.mark.parametrize("analyzed", [0, 1])
def test_a_pool_counts_what_was_analyzed_by_one_of_two_names_of_an_inode(analyzed: int) -> None:
    pool = StoragePoolFactory.create()
    for number in range(2):
        known = 3 * GIB if number == analyzed else None
        ImageFactory.create(pool=pool, inode="7", nlink=2, allocated_size=4 * GIB, reclaimable_bytes=known)
    space.write_totals([pool])
    row = overview(SYSTEM).pools[0]
    assert (row.images_count, row.allocated_bytes, row.reclaimable_bytes) == (1, 4 * GIB, 3 * GIB)


def test_one_export_on_two_hosts_counts_once() -> None:
    for _ in range(2):
        pool = StoragePoolFactory.create(shared_key="nfs:server:/export", fs_key="nfs:server:/export")
        ImageFactory.create(pool=pool, allocated_size=4 * GIB)
    totals = overview(SYSTEM).totals
    assert (totals.allocated_bytes, totals.capacity_bytes, totals.images_count) == (4 * GIB, 100 * GIB, 1)


def test_an_image_on_one_export_of_two_hosts_is_one_candidate_and_one_orphan() -> None:
    for libvirt in ("absent", "present", "present"):
        pool = StoragePoolFactory.create(shared_key="nfs:server:/export", host__capabilities={"libvirt": libvirt})
        ImageFactory.create(pool=pool, inode="7", orphan=True, reclaimable_bytes=GIB, reclaimable_method="copy")
    seen = overview(SYSTEM)
    assert [(concern.code, concern.count, len(concern.items)) for concern in seen.needs_a_look] == [("orphan", 1, 1)]
    assert len(seen.win_back_now) == 1


def test_vanished_images_occupy_nothing() -> None:
    ImageFactory.create(state="missing", allocated_size=4 * GIB)
    assert overview(SYSTEM).totals.allocated_bytes == 0


def test_reclaimable_says_over_how_many_images() -> None:
    pool = StoragePoolFactory.create()
    ImageFactory.create(pool=pool, reclaimable_bytes=3, reclaimable_low=2, reclaimable_high=4)
    ImageFactory.create(pool=pool)
    totals = overview(SYSTEM).totals
    assert (totals.reclaimable_bytes, totals.reclaimable_low, totals.reclaimable_high) == (3, 2, 4)
    assert (totals.analyzed_count, totals.images_count) == (1, 2)


def grow(pool, per_day: int, hours: int) -> None:  # type: ignore[no-untyped-def]
    now = timezone.now()
    for age in range(0, hours + 1, 6):
        available = pool.available_bytes + per_day * age // 24
        at = now - timedelta(hours=age)
        pool.samples.create(at=at, capacity_bytes=pool.capacity_bytes, available_bytes=available)


def test_days_until_full_follow_the_growth() -> None:
    pool = StoragePoolFactory.create(available_bytes=40 * GIB)
    grow(pool, 2 * GIB, hours=240)
    row = overview(SYSTEM).pools[0]
    told = [row.days_until_full_low, row.days_until_full, row.days_until_full_high]
    assert told == pytest.approx([20, 20, 20], abs=0.3)


@pytest.mark.parametrize(("per_day", "hours"), [(2 * GIB, 18), (2 * GIB, 0), (2 * GIB, 160), (0, 240), (-GIB, 240)])
def test_days_until_full_are_unknown_without_eight_days_of_growth(per_day: int, hours: int) -> None:
    grow(StoragePoolFactory.create(available_bytes=40 * GIB), per_day, hours)
    assert overview(SYSTEM).pools[0].days_until_full is None


def test_the_largest_wins_come_first_with_their_guests() -> None:
    small = ImageFactory.create(reclaimable_bytes=GIB, reclaimable_method="compress")
    large = ImageUseFactory.create(
        image__reclaimable_bytes=3 * GIB, image__reclaimable_method="compress", image__in_use=None,
        disk__guest__name="web",
    ).image  # fmt: skip
    ImageFactory.create(reclaimable_bytes=0, reclaimable_method="compress")
    ImageFactory.create(reclaimable_bytes=None)
    ImageFactory.create(reclaimable_bytes=9 * GIB, reclaimable_method="sparsify")  # nothing does that yet
    ImageFactory.create(reclaimable_bytes=9 * GIB, reclaimable_method="compress", state="chain_broken")
    found = overview(SYSTEM).win_back_now
    assert [candidate.id for candidate in found] == [large.pk, small.pk]
    assert found[0].in_use is None
    assert [guest.name for guest in found[0].guests] == ["web"]


def test_what_is_wrong_is_named_and_counted() -> None:
    pool = StoragePoolFactory.create(available_bytes=10 * GIB, warn_percent=85)
    HostFactory.create(status="unreachable", status_detail="No answer.")
    for _ in range(7):
        ImageFactory.create(pool=pool, state="chain_broken", state_detail="/srv/gone.qcow2 is missing.")
    ImageFactory.create(pool=pool, orphan=True)  # no hypervisor could have a guest there: no news
    other = StoragePoolFactory.create(host__capabilities={"libvirt": "present"})
    ImageFactory.create(pool=other, orphan=True, orphan_evidence=["no guest uses it"])
    JobFactory.create(state="failed", finished=timezone.now(), error_detail="Disk full.")
    JobFactory.create(state="failed", finished=timezone.now() - timedelta(days=8))
    found = {concern.code: concern for concern in overview(SYSTEM).needs_a_look}
    assert {code: concern.count for code, concern in found.items()} == {
        "host_unreachable": 1, "pool_over_threshold": 1, "chain_broken": 7, "job_failed": 1, "orphan": 1,
    }  # fmt: skip
    assert len(found["chain_broken"].items) == 5
    assert found["job_failed"].items[0].detail == "Disk full."


@pytest.mark.parametrize("of", [{"state": "unreadable"}, {"orphan": True}])
def test_of_what_is_wrong_the_largest_are_named_and_those_of_unknown_size_last(of: dict[str, object]) -> None:
    pool = StoragePoolFactory.create(host__capabilities={"libvirt": "present"})
    for name, size in (("unknown", None), ("small", GIB), ("large", 9 * GIB)):
        ImageFactory.create(pool=pool, name=name, allocated_size=size, file_size=None, **of)
    [found] = overview(SYSTEM).needs_a_look
    assert [item.name for item in found.items] == ["large", "small", "unknown"]


def test_a_failed_job_that_was_repeated_with_success_is_no_concern() -> None:
    image = ImageFactory.create()
    JobFactory.create(kind="reclaim", target=image, state="failed", finished=timezone.now())
    JobFactory.create(kind="reclaim", target=image, state="succeeded", finished=timezone.now())
    assert overview(SYSTEM).needs_a_look == ()


def test_won_is_what_was_freed_less_what_was_taken_and_held_stands_apart() -> None:
    freed(9 * GIB, 4 * GIB)
    freed(0, 2 * GIB, kind="convert")
    held(3 * GIB, GIB)
    record.close_line(held(7 * GIB, GIB, undo_state="undone", undo_bytes=0), 0, undone=True)
    JobFactory.create(kind="reclaim", state="failed", result={"freed_bytes": 9 * GIB})
    assert overview(SYSTEM).won_so_far == Won(
        3 * GIB, 3 * GIB, 2, won_bytes=5 * GIB, taken_bytes=2 * GIB, copies_bytes=2 * GIB
    )


@pytest.mark.parametrize("kind", ["convert", "export", "create", "upload", "unpack", "from_device", "move"])
def test_a_new_file_that_was_asked_for_is_no_loss(kind: str) -> None:
    image = ImageFactory.create()
    done = JobFactory.create(target=image, kind=kind, state="succeeded", finished=timezone.now())
    record.write_line_beside(done, image.pool, GIB)
    won = overview(SYSTEM).won_so_far
    assert (won.freed_bytes, won.taken_bytes, won.copies_bytes, won.saved_bytes) == (-GIB, GIB, GIB, 0)


def test_overcommit_is_of_what_can_be_used_and_of_pools_whose_size_is_known() -> None:
    sized = StoragePoolFactory.create(
        capacity_bytes=100 * GIB, available_bytes=50 * GIB, reserved_bytes=20 * GIB, virtual_bytes=160 * GIB,
        last_scanned=timezone.now(),
    )  # fmt: skip
    ImageFactory.create(pool=sized, virtual_size=160 * GIB)
    unsized = StoragePoolFactory.create(
        host=sized.host, capacity_bytes=None, available_bytes=None, virtual_bytes=900 * GIB
    )
    ImageFactory.create(pool=unsized, virtual_size=900 * GIB)
    assert sized.overcommit_ratio == 2.0
    assert overview(SYSTEM).totals.overcommit_ratio == 2.0


@pytest.mark.parametrize("lost", [0, 1])
def test_overcommit_of_a_shared_storage_stays_where_one_of_its_hosts_loses_the_mount(lost: int) -> None:
    for number in range(2):
        size = None if number == lost else 1000 * GIB
        pool = StoragePoolFactory.create(
            shared_key="nfs:server:/export", fs_key="nfs:server:/export", virtual_bytes=800 * GIB,
            capacity_bytes=size, available_bytes=size, last_scanned=timezone.now(),
        )  # fmt: skip
        ImageFactory.create(pool=pool, virtual_size=800 * GIB)
    assert overview(SYSTEM).totals.overcommit_ratio == 0.8


def test_overcommit_takes_nothing_away_for_a_storage_that_may_be_one_which_is_counted() -> None:
    sized = StoragePoolFactory.create(capacity_bytes=1000 * GIB, last_scanned=timezone.now())
    ImageFactory.create(pool=sized, virtual_size=800 * GIB)
    again = StoragePoolFactory.create(
        capacity_bytes=None, available_bytes=None, virtual_bytes=800 * GIB, may_be=[{"pool": sized.pk}]
    )
    ImageFactory.create(pool=again, virtual_size=800 * GIB)
    assert overview(SYSTEM).totals.overcommit_ratio == 0.8


def test_what_is_provisioned_is_unknown_where_an_image_cannot_be_read() -> None:
    pool = StoragePoolFactory.create(capacity_bytes=1000 * GIB, last_scanned=timezone.now())
    ImageFactory.create(pool=pool, state="unreadable", virtual_size=None)
    space.write_totals([pool])
    seen = overview(SYSTEM)
    assert (seen.pools[0].virtual_bytes, seen.pools[0].overcommit_ratio) == (None, None)
    assert (seen.totals.virtual_bytes, seen.totals.overcommit_ratio) == (None, None)
    ImageFactory.create(pool=pool, virtual_size=800 * GIB)
    space.write_totals([pool])
    seen = overview(SYSTEM)
    assert seen.pools[0].virtual_bytes is None
    assert (seen.totals.virtual_bytes, seen.totals.sized_count, seen.totals.overcommit_ratio) == (800 * GIB, 1, None)
    assert "known of 1 of 2 images" in client_as(role="viewer").get("/").content.decode()


def test_a_pool_that_nobody_has_listed_has_an_unknown_number_of_images() -> None:
    pool = StoragePoolFactory.create(last_scanned=None, images_count=0, allocated_bytes=0, virtual_bytes=0)
    space.write_totals([pool])
    row = overview(SYSTEM).pools[0]
    assert (row.images_count, row.allocated_bytes, row.virtual_bytes, row.overcommit_ratio) == (None,) * 4
    StoragePool.objects.update(last_scanned=timezone.now())
    space.write_totals(StoragePool.objects.all())
    row = overview(SYSTEM).pools[0]
    assert (row.images_count, row.allocated_bytes, row.virtual_bytes) == (0, 0, 0)


def test_says_which_pool_was_scanned_the_longest_ago() -> None:
    now = timezone.now()
    for name, days in (("new", 0), ("old", 3), ("never", None)):
        scanned = None if days is None else now - timedelta(days=days)
        StoragePoolFactory.create(name=name, last_scanned=scanned)
    oldest, when = overview(SYSTEM).oldest_scan, now - timedelta(days=3)
    assert oldest is not None
    assert (oldest.name, oldest.last_scanned) == ("old", when)
    assert f'<time datetime="{when.isoformat()}"' in client_as(role="viewer").get("/").content.decode()
