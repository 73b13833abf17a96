"""What the look makes of storages that some, or all, cannot see now: it says nothing that it does not know."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from images.alert_rules.looking import look
from images.selectors.overview import overview
from storage_admin.accounts.models import SYSTEM
from storage_admin.events.models import Alert, Event
from storage_admin.events.selectors import alerts_for
from storage_admin.hosts.models import Host, StoragePool
from tests.factories import GIB, PoolSampleFactory, StoragePoolFactory, WebhookFactory

pytestmark = pytest.mark.django_db
SHARED: dict[str, Any] = {"fs_key": "nfs:a", "shared_key": "nfs:a/", "filesystem": "nfs4", "network": True}
AWAY = {"state": "missing", "capacity_bytes": None, "available_bytes": None, "reserved_bytes": None}


@pytest.fixture(autouse=True)
def _hook() -> None:
    WebhookFactory.create()


def looked(at: datetime | None = None) -> dict[str, str]:
    """What is open for whoever sees all, after a look: the title by the key."""
    look(at or timezone.now())
    return dict(alerts_for(SYSTEM).filter(closed=None).order_by("id").values_list("key", "title"))


def told() -> list[str]:
    return list(Event.objects.order_by("id").values_list("name", flat=True))


def away(*pools: StoragePool) -> None:
    StoragePool.objects.filter(pk__in=[pool.pk for pool in pools]).update(**AWAY)


def there(*pools: StoragePool, **values: Any) -> None:
    values = {"state": "ok", "capacity_bytes": 100 * GIB, "last_scanned": timezone.now()} | values
    StoragePool.objects.filter(pk__in=[pool.pk for pool in pools]).update(**values)


def grown(pool: StoragePool, days: int = 10) -> None:
    """Samples of so many days."""
    for age in range(days):
        at = timezone.now() - timedelta(days=age, hours=1)
        PoolSampleFactory.create(pool=pool, at=at, available_bytes=(20 + 2 * age) * GIB)


def test_what_is_open_of_a_pool_that_is_not_mounted_stays_as_it_is_until_it_is_seen_again() -> None:
    pool = StoragePoolFactory.create(
        available_bytes=10 * GIB, virtual_bytes=300 * GIB, warn_overcommit=2.0, undo_bytes=50 * GIB
    )
    before = looked()
    kinds = {"pool_over_threshold", "pool_overcommit", "undo_held"}
    assert {key.partition(":")[0] for key in before} == kinds
    away(pool)
    assert looked() == before
    assert told() == ["alert.opened"] * 3
    there(pool, available_bytes=9 * GIB)
    assert looked() == before
    assert told() == ["alert.opened"] * 3
    assert Alert.objects.get(kind="pool_over_threshold").detail.startswith("91.0 % used")
    there(pool, available_bytes=90 * GIB, virtual_bytes=GIB, undo_bytes=0)
    assert looked() == {}


def test_nothing_is_opened_of_a_pool_that_is_not_mounted_and_what_nobody_asks_for_any_more_is_closed() -> None:
    pool = StoragePoolFactory.create(available_bytes=90 * GIB, undo_bytes=50 * GIB)
    assert list(looked()) == [f"undo_held:{pool.pk}"]
    away(pool)
    StoragePool.objects.update(virtual_bytes=900 * GIB, warn_overcommit=2.0, warn_undo_percent=None)
    assert looked() == {}


@pytest.mark.parametrize("first_one", [True, False])
def test_a_share_that_one_of_its_hosts_loses_and_finds_again_is_told_of_once(first_one: bool) -> None:
    pools = [
        StoragePoolFactory.create(available_bytes=10 * GIB, virtual_bytes=300 * GIB, warn_overcommit=2.0, **SHARED)
        for _ in range(2)
    ]
    before = looked()
    assert set(before) == {f"pool_over_threshold:{pools[0].pk}", f"pool_overcommit:{pools[0].pk}"}
    flapping = pools[0] if first_one else pools[1]
    for _ in range(3):
        away(flapping)
        assert looked() == before
        there(flapping, available_bytes=10 * GIB)
        assert looked() == before
    away(*pools)
    assert looked() == before
    assert told() == ["alert.opened"] * 2
    # Whoever has it mounted sees that it is over, for all.
    there(pools[0] if not first_one else pools[1], available_bytes=90 * GIB, virtual_bytes=GIB)
    StoragePool.objects.update(virtual_bytes=GIB)
    assert looked() == {}


def test_a_share_is_judged_by_whoever_has_seen_it_last() -> None:
    old, new = (StoragePoolFactory.create(available_bytes=40 * GIB, **SHARED) for _ in range(2))
    there(old, available_bytes=40 * GIB, last_scanned=timezone.now() - timedelta(hours=3))
    there(new, available_bytes=4 * GIB)
    assert list(looked()) == [f"pool_over_threshold:{old.pk}"], "the first one names it"
    assert Alert.objects.get(told_under="").detail.startswith("96.0 % used")
    seen = overview(SYSTEM).totals
    assert (seen.capacity_bytes, seen.available_bytes, seen.used_bytes) == (100 * GIB, 4 * GIB, 96 * GIB)


def test_a_host_that_does_not_answer_is_believed_only_where_no_other_does() -> None:
    silent, answering = (StoragePoolFactory.create(available_bytes=4 * GIB, **SHARED) for _ in range(2))
    Host.objects.filter(pk=silent.host_id).update(status="unreachable")
    there(answering, available_bytes=60 * GIB, last_scanned=timezone.now() - timedelta(hours=3))
    assert list(looked()) == [f"host_unreachable:{silent.host_id}"]
    assert overview(SYSTEM).totals.available_bytes == 60 * GIB
    Host.objects.update(status="unreachable")
    assert f"pool_over_threshold:{silent.pk}" in looked()
    assert overview(SYSTEM).totals.available_bytes == 4 * GIB


def later(days: int) -> datetime:
    return timezone.now() + timedelta(days=days)


@pytest.fixture
def full_soon() -> StoragePool:
    """A pool that is told of as full soon."""
    pool = StoragePoolFactory.create(available_bytes=20 * GIB)
    grown(pool)
    assert list(looked()) == [f"pool_days_until_full:{pool.pk}"]
    return pool


@pytest.mark.parametrize("is_mounted", [True, False])
def test_full_soon_is_not_called_over_because_nobody_has_looked_for_days(
    full_soon: StoragePool, is_mounted: bool
) -> None:
    if not is_mounted:
        away(full_soon)
    assert list(looked(later(5))) == [f"pool_days_until_full:{full_soon.pk}"]
    assert told() == ["alert.opened"]
    # Fresh samples that do not carry it any more end it.
    there(full_soon, available_bytes=20 * GIB)
    full_soon.samples.update(available_bytes=20 * GIB, at=F("at") + timedelta(days=5))
    assert looked(later(5)) == {}


def test_full_soon_goes_on_by_the_samples_of_another_host(full_soon: StoragePool) -> None:
    StoragePool.objects.filter(pk=full_soon.pk).update(**SHARED)
    other = StoragePoolFactory.create(available_bytes=20 * GIB, **SHARED)
    grown(other, days=12)
    for pool in (full_soon, other, full_soon):
        StoragePool.objects.update(last_scanned=timezone.now() - timedelta(hours=1))
        there(pool)
        assert list(looked()) == [f"pool_days_until_full:{full_soon.pk}"]
    assert "in the last 12 days" in Alert.objects.get(told_under="").detail
    away(full_soon)
    full_soon.samples.update(at=F("at") - timedelta(days=4))
    assert list(looked()) == [f"pool_days_until_full:{full_soon.pk}"]
    there(other, available_bytes=90 * GIB)
    assert looked() == {}, "45 days are no more soon"


def test_page_and_alert_agree_right_below_the_threshold_and_what_is_hardly_below_does_not_read_as_over() -> None:
    pool = StoragePoolFactory.create(available_bytes=int(15.04 * GIB), warn_percent=85)
    assert looked() == {}
    [row] = overview(SYSTEM).pools
    assert (row.over_threshold, row.used_percent) == (False, 84.9)
    there(pool, available_bytes=15 * GIB)
    assert list(looked().values()) == [f"{pool} is over its threshold of 85 %"]
    [row] = overview(SYSTEM).pools
    assert (row.over_threshold, row.used_percent) == (True, 85.0)
    there(pool, available_bytes=int(16.5 * GIB))
    assert list(looked().values()) == [f"{pool} is just below its threshold of 85 %"]
    assert Alert.objects.get().detail.startswith("83.5 % used")


def test_overcommit_that_is_hardly_less_than_its_threshold_is_called_so() -> None:
    pool = StoragePoolFactory.create(virtual_bytes=200 * GIB, warn_overcommit=2.0)
    assert list(looked().values()) == [f"{pool} has more than 2 times its capacity provisioned"]
    StoragePool.objects.update(virtual_bytes=195 * GIB)
    assert list(looked().values()) == [f"{pool} has only just less than 2 times its capacity provisioned"]
