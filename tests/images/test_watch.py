"""What the dashboard looks for each minute, and when it calls it over."""

from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from images.alert_rules.looking import EACH, look
from images.models import Image
from images.selectors.overview import overview
from storage_admin.accounts.models import SYSTEM, Actor, Role
from storage_admin.events.models import Alert, Event
from storage_admin.events.selectors import alerts_for
from storage_admin.events.services import acknowledge
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import automation
from storage_admin.jobs.models import Automation
from tests.factories import (
    GIB,
    AlertFactory,
    HostFactory,
    ImageFactory,
    ImageUseFactory,
    PoolSampleFactory,
    StoragePoolFactory,
    WebhookFactory,
)
from tests.working import at_most_queries

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def now() -> datetime:
    return timezone.now()


def open_ones() -> dict[str, str]:
    return dict(Alert.objects.filter(closed=None).order_by("id").values_list("key", "severity"))


def looked() -> dict[str, str]:
    """What is open after a look."""
    look(now())
    return open_ones()


def use(pool: StoragePool, percent: float) -> None:
    StoragePool.objects.filter(pk=pool.pk).update(available_bytes=int(100 * GIB * (100 - percent) / 100))
    look(now())


def test_a_pool_over_its_threshold_is_told_of_until_it_is_well_below() -> None:
    pool = StoragePoolFactory.create(warn_percent=85)
    key = f"pool_over_threshold:{pool.pk}"
    course = []
    for percent in (84.9, 85.0, 84.9, 85.1, 83.1, 82.9, 84.9, 85.0, 96.0):
        use(pool, percent)
        course.append(open_ones().get(key, ""))
    assert course == ["", "warning", "warning", "warning", "warning", "", "", "warning", "danger"]
    assert Alert.objects.count() == 2
    first = Alert.objects.first()
    assert first is not None
    assert first.title == f"{pool} is over its threshold of 85 %"
    assert "96.0 % used: 96 GiB of 100 GiB, 4 GiB free." in first.detail
    assert (first.host, first.target_kind, first.target_id) == (pool.host.slug, "pool", pool.pk)


def test_a_change_of_the_threshold_opens_and_closes_it() -> None:
    pool = StoragePoolFactory.create(available_bytes=40 * GIB)
    for warn, found in ((50, True), (70, False)):
        StoragePool.objects.update(warn_percent=warn)
        assert (f"pool_over_threshold:{pool.pk}" in looked()) is found


def test_a_filesystem_with_many_pools_is_told_of_once_by_its_lowest_threshold() -> None:
    first = StoragePoolFactory.create(fs_key="one", available_bytes=30 * GIB, warn_percent=85)
    second = StoragePoolFactory.create(fs_key="one", available_bytes=30 * GIB, warn_percent=60, host=first.host)
    assert list(looked()) == [f"pool_over_threshold:{first.pk}"]
    assert Alert.objects.get().title == f"{first} is over the threshold of its filesystem of 60 %"
    assert f"On the same filesystem: {second}." in Alert.objects.get().detail


def test_a_storage_of_several_hosts_is_told_of_to_whoever_is_limited_to_any_of_them_without_naming_the_others() -> None:
    pools = [StoragePoolFactory.create(fs_key="nfs:a", shared_key="nfs:a/", available_bytes=10 * GIB) for _ in range(3)]
    WebhookFactory.create()
    look(now())
    hosts = [pool.host for pool in pools]
    assert [alert.host for alert in alerts_for(SYSTEM)] == [hosts[0].slug]
    assert Event.objects.count() == 1  # receivers are told once
    for host, pool in zip(hosts, pools, strict=True):
        [alert] = alerts_for(Actor("x", Role.OPERATOR, frozenset({host.slug})))
        assert (alert.target_id, alert.title) == (pool.pk, f"{pool} is over its threshold of 85 %")
        assert not [other for other in hosts if other != host and other.name in alert.title + alert.detail]
        acknowledge(Actor("x", Role.OPERATOR, frozenset({host.slug})), alert)
    both = Actor("x", Role.VIEWER, frozenset({hosts[0].slug, hosts[1].slug}))
    assert [alert.host for alert in alerts_for(both)] == [hosts[0].slug]
    # The pool that it is told under goes: the next one's takes its place, as a new one does.
    pools[0].delete()
    look(now())
    assert [alert.host for alert in alerts_for(SYSTEM).filter(closed=None)] == [hosts[1].slug]
    names = list(Event.objects.order_by("id").values_list("name", "host"))
    assert sorted(names[1:]) == [("alert.closed", hosts[0].slug), ("alert.opened", hosts[1].slug)]
    StoragePool.objects.update(available_bytes=90 * GIB)
    assert looked() == {}
    assert list(Event.objects.order_by("id").values_list("name", "host"))[3:] == [("alert.closed", hosts[1].slug)]


def test_a_pool_that_sits_on_the_edge_of_danger_gets_worse_once() -> None:
    pool = StoragePoolFactory.create()
    WebhookFactory.create()
    for percent in (90.0, 95.1, 94.9, 95.1, 94.0, 92.9, 95.0):
        use(pool, percent)
    names = list(Event.objects.order_by("id").values_list("name", flat=True))
    assert names == ["alert.opened", "alert.worse", "alert.worse"]
    assert Event.objects.filter(name="alert.worse").first().data["severity"] == "danger"  # type: ignore[union-attr]


def test_an_alert_tells_the_percent_that_the_pages_tell() -> None:
    sizes = {"capacity_bytes": 1000 * GIB, "available_bytes": 712 * GIB, "undo_bytes": 288 * GIB}
    StoragePoolFactory.create(warn_percent=20, warn_undo_percent=20, **sizes)
    look(now())
    [row] = overview(SYSTEM).pools
    details = dict(Alert.objects.values_list("kind", "detail"))
    assert row.used_percent == 28.8
    assert details["pool_over_threshold"].startswith("28.8 % used: ")
    assert ", 28.8 % of the capacity" in details["undo_held"]


def test_what_is_kept_for_root_is_neither_used_nor_left() -> None:
    pool = StoragePoolFactory.create(available_bytes=40 * GIB, reserved_bytes=50 * GIB, warn_percent=20)
    assert looked() == {f"pool_over_threshold:{pool.pk}": "warning"}
    told_of = Alert.objects.get().detail
    assert told_of.startswith("20.0 % used: 10 GiB of 100 GiB, 40 GiB free, 50 GiB reserved for root.")
    StoragePool.objects.filter(pk=pool.pk).update(available_bytes=0, reserved_bytes=90 * GIB)
    assert looked() == {f"pool_over_threshold:{pool.pk}": "danger"}


def test_pools_of_unknown_size_are_not_judged() -> None:
    StoragePoolFactory.create(capacity_bytes=None, available_bytes=None, virtual_bytes=10**15, warn_overcommit=1)
    assert looked() == {}


def grow(pool: StoragePool, per_day: int, days: int = 10) -> None:
    for age in range(days):
        at = now() - timedelta(days=age, hours=1)
        available = (pool.available_bytes or 0) + per_day * age
        PoolSampleFactory.create(pool=pool, at=at, available_bytes=available)


def test_a_pool_that_is_full_soon_is_told_of_with_its_range() -> None:
    soon = StoragePoolFactory.create(available_bytes=20 * GIB)
    later = StoragePoolFactory.create(available_bytes=40 * GIB)
    never = StoragePoolFactory.create(available_bytes=20 * GIB, warn_days=None)
    for pool in (soon, later, never):
        grow(pool, 2 * GIB)
    assert looked() == {f"pool_days_until_full:{soon.pk}": "warning"}
    detail = Alert.objects.get().detail
    assert detail.startswith("Forecast full in about 10 days: used space grew by 2 GiB a day in the last 10 days")
    StoragePool.objects.filter(pk=soon.pk).update(available_bytes=34 * GIB)
    assert list(looked()) == [f"pool_days_until_full:{soon.pk}"], "17 days are more than 14, and not well more"
    StoragePool.objects.filter(pk=soon.pk).update(available_bytes=36 * GIB)
    assert looked() == {}


def told() -> dict[str, str]:
    """What is open after a look for whoever sees all, as receivers were told: the title by the key."""
    look(now())
    return dict(alerts_for(SYSTEM).filter(closed=None).values_list("key", "title"))


def test_of_several_thresholds_the_one_that_tells_the_earliest_counts() -> None:
    early = StoragePoolFactory.create(fs_key="one", available_bytes=40 * GIB, warn_days=5)
    StoragePoolFactory.create(fs_key="one", available_bytes=40 * GIB, warn_days=30)
    StoragePoolFactory.create(fs_key="one", available_bytes=40 * GIB, warn_days=None)
    grow(early, 2 * GIB)
    assert list(told()) == [f"pool_days_until_full:{early.pk}"]
    assert Alert.objects.filter(told_under="").get().detail.startswith("Forecast full in about 20 days")
    assert "The alert is raised at 30 days." in Alert.objects.filter(told_under="").get().detail


def test_overcommit_is_told_of_only_where_a_threshold_is_set_and_once_for_a_shared_storage() -> None:
    StoragePoolFactory.create(virtual_bytes=900 * GIB)
    pools = [
        StoragePoolFactory.create(virtual_bytes=200 * GIB, warn_overcommit=2.0, shared_key="nfs:a", fs_key="nfs:a")
        for _ in range(2)
    ]
    assert told() == {f"pool_overcommit:{pools[0].pk}": f"{pools[0]} has more than 2 times its capacity provisioned"}
    StoragePool.objects.update(virtual_bytes=191 * GIB)
    assert len(told()) == 1
    StoragePool.objects.filter(pk__in=[pool.pk for pool in pools]).update(virtual_bytes=None)
    assert len(told()) == 1, "an image of unknown size ends no alert"
    StoragePool.objects.update(virtual_bytes=189 * GIB)
    assert looked() == {}


def test_overcommit_is_not_judged_without_one_of_the_storages_on_a_filesystem() -> None:
    one = StoragePoolFactory.create(fs_key="one", virtual_bytes=150 * GIB, warn_overcommit=2.0)
    other = StoragePoolFactory.create(fs_key="one", virtual_bytes=150 * GIB, host=one.host)
    assert list(looked()) == [f"pool_overcommit:{one.pk}"]
    StoragePool.objects.filter(pk=other.pk).update(virtual_bytes=None)
    assert list(looked()) == [f"pool_overcommit:{one.pk}"]


def test_an_image_of_unknown_size_hides_no_overcommit() -> None:
    pool = StoragePoolFactory.create(virtual_bytes=None, warn_overcommit=2.0)
    ImageFactory.create(pool=pool, virtual_size=None, state="unreadable")
    ImageFactory.create(pool=pool, virtual_size=199 * GIB)
    assert looked() == {}
    ImageFactory.create(pool=pool, virtual_size=GIB)
    assert list(looked()) == [f"pool_overcommit:{pool.pk}"]


def test_undo_copies_that_hold_much_are_told_of() -> None:
    pool = StoragePoolFactory.create(undo_bytes=25 * GIB)
    StoragePoolFactory.create(undo_bytes=24 * GIB)
    StoragePoolFactory.create(undo_bytes=90 * GIB, warn_undo_percent=None)
    assert told() == {f"undo_held:{pool.pk}": f"Undo copies hold a large part of {pool}"}


def test_what_folders_of_one_filesystem_promise_and_hold_is_added_up() -> None:
    first = StoragePoolFactory.create(fs_key="one", virtual_bytes=80 * GIB, undo_bytes=20 * GIB, warn_overcommit=9.0)
    second = StoragePoolFactory.create(
        fs_key="one", virtual_bytes=80 * GIB, undo_bytes=20 * GIB, warn_overcommit=1.5, host=first.host
    )
    assert told() == {
        f"pool_overcommit:{first.pk}": f"The filesystem of {first} has more than 1.5 times its capacity provisioned",
        f"undo_held:{first.pk}": f"Undo copies hold a large part of the filesystem of {first}",
    }
    promised, held = (Alert.objects.get(kind=kind).detail for kind in ("pool_overcommit", "undo_held"))
    assert promised.startswith("Overcommit ratio 1.60: the images have 160 GiB virtual size on 100 GiB.")
    assert held.startswith("Undo copies hold 40 GiB, 40.0 % of the capacity, until")
    assert all(f"On the same filesystem: {second}." in detail for detail in (promised, held))
    assert (first.overcommit_ratio, second.overcommit_ratio) == (0.8, 0.8), "a pool's own page says what is its own"


@pytest.mark.parametrize(
    ("one", "other", "found"), [(41, 30, True), (41, None, False), (None, 40, True), (45, 41, False)]
)
def test_the_lowest_threshold_of_undo_copies_counts(one: int | None, other: int | None, found: bool) -> None:
    for threshold in (one, other):
        StoragePoolFactory.create(fs_key="one", undo_bytes=20 * GIB, warn_undo_percent=threshold)
    assert bool(told()) is found


def test_a_storage_of_several_hosts_is_added_up_once_and_told_to_whoever_is_limited_to_any_of_them() -> None:
    shared = {"fs_key": "nfs:a", "warn_undo_percent": 50}
    pools = [
        StoragePoolFactory.create(shared_key="nfs:a/images", virtual_bytes=120 * GIB, undo_bytes=undo * GIB, **shared)
        for undo in (20, 0)
    ]
    beside = StoragePoolFactory.create(
        host=pools[1].host, shared_key="nfs:a/more", virtual_bytes=40 * GIB, undo_bytes=20 * GIB, **shared
    )
    WebhookFactory.create()
    assert looked() == {}, "40 GiB are held, whichever host counts them"
    StoragePool.objects.filter(pk=beside.pk).update(warn_overcommit=1.5, warn_undo_percent=40)
    assert set(told()) == {f"pool_overcommit:{pools[0].pk}", f"undo_held:{pools[0].pk}"}
    assert Event.objects.count() == 2  # receivers are told once
    for pool in pools:
        promised, held = alerts_for(Actor("x", Role.OPERATOR, frozenset({pool.host.slug}))).order_by("kind")
        assert (promised.target_id, held.target_id) == (pool.pk, pool.pk)
        assert promised.detail.startswith("Overcommit ratio 1.60: the images have 160 GiB")
        assert held.detail.startswith("Undo copies hold 40 GiB, 40.0 %")
        others = {one.host.name for one in pools} - {pool.host.name}
        assert not [name for name in others if name in promised.title + promised.detail + held.title + held.detail]


def test_a_folder_that_another_host_has_only_the_outer_one_of_is_not_added_twice() -> None:
    outer = StoragePoolFactory.create(fs_key="nfs:a", shared_key="nfs:a/", virtual_bytes=90 * GIB, warn_overcommit=1.0)
    inner = StoragePoolFactory.create(fs_key="nfs:a", shared_key="nfs:a/vm", virtual_bytes=60 * GIB)
    assert told() == {}, "the outer one's images are all there are"
    # Where one host has both, each has its own images.
    StoragePool.objects.filter(pk=inner.pk).update(host=outer.host)
    assert list(told()) == [f"pool_overcommit:{outer.pk}"]


def test_what_a_host_knows_that_does_not_answer_counts_only_where_nobody_else_knows() -> None:
    pools = [StoragePoolFactory.create(fs_key="a", shared_key="a", undo_bytes=undo * GIB) for undo in (90, 1)]
    Host.objects.filter(pk=pools[0].host_id).update(status="unreachable")
    assert [kind for kind, _, _ in (key.partition(":") for key in told())] == ["host_unreachable"]
    Host.objects.update(status="unreachable")
    assert f"undo_held:{pools[0].pk}" in told()


def test_an_alert_that_was_opened_by_another_pool_of_the_filesystem_goes_on_under_the_first_one() -> None:
    first, second = (StoragePoolFactory.create(fs_key="one", undo_bytes=12 * GIB) for _ in range(2))
    AlertFactory.create(key=f"undo_held:{second.pk}", host=second.host.slug)
    WebhookFactory.create()
    # As it was open it stays so a little below its threshold; receivers hear of one end and one beginning.
    assert list(told()) == [f"undo_held:{first.pk}"]
    assert sorted(Event.objects.values_list("name", "host")) == [
        ("alert.closed", second.host.slug), ("alert.opened", first.host.slug),
    ]  # fmt: skip
    StoragePool.objects.filter(pk=first.pk).delete()
    StoragePool.objects.update(undo_bytes=24 * GIB)
    assert list(told()) == [f"undo_held:{second.pk}"]
    StoragePool.objects.update(undo_bytes=23 * GIB)
    assert looked() == {}


def test_a_host_that_does_not_answer_is_told_of_until_it_does() -> None:
    host = HostFactory.create(status="unreachable", status_detail="No route to it.")
    HostFactory.create(status="degraded")
    assert looked() == {f"host_unreachable:{host.pk}": "danger"}
    assert Alert.objects.get().detail.startswith("No route to it. Last seen ")
    Host.objects.update(status="ok")
    assert looked() == {}


def test_broken_chains_and_contradicted_formats_are_told_of_image_by_image() -> None:
    broken = ImageFactory.create(state="chain_broken", state_detail="/srv/base.qcow2 is missing.")
    circle = ImageFactory.create(state="chain_cycle")
    other = ImageFactory.create(state="format_mismatch")
    ImageFactory.create(state="missing")
    keys = {f"broken_chain:{broken.pk}", f"broken_chain:{circle.pk}", f"format_mismatch:{other.pk}"}
    assert looked().keys() == keys
    assert "/srv/base.qcow2 is missing." in Alert.objects.get(target_id=broken.pk).detail
    Image.objects.update(state="ok")
    assert looked() == {}


def test_a_merged_overlay_is_told_of_once_a_guest_names_it() -> None:
    merged = ImageFactory.create(state="merged", state_detail="Job 7 merged it.")
    assert looked() == {}
    for _ in range(2):
        ImageUseFactory.create(image=merged)
    assert looked() == {f"broken_chain:{merged.pk}": "danger"}
    assert Alert.objects.get().detail == "Job 7 merged it."


def test_thousands_of_broken_chains_are_few_alerts() -> None:
    pool, second = StoragePoolFactory.create(), StoragePoolFactory.create()
    for _ in range(EACH + 7):
        ImageFactory.create(pool=pool, state="chain_broken")
    ImageFactory.create(pool=second, state="chain_broken")
    assert len(looked()) == EACH + 2
    assert Alert.objects.get(target_kind="pool").detail.startswith("7 more than the 20 ")


def test_what_others_raise_stays_until_they_close_it_or_its_pool_is_gone() -> None:
    pool = StoragePoolFactory.create()
    kept = AlertFactory.create(key=f"benchmark_regression:{pool.pk}:dd:x", target_kind="pool", target_id=pool.pk)
    AlertFactory.create(key="benchmark_regression:999:dd:x", target_kind="pool", target_id=999)
    policy = AlertFactory.create(key="policy_failed:1", target_kind="policy", target_id=1)
    assert set(looked()) == {kept.key, policy.key}


def test_pausing_automation_does_not_pause_the_look() -> None:
    Automation.objects.create(pk=1, paused=True)
    assert automation.is_paused()
    use(StoragePoolFactory.create(), 90)
    assert len(open_ones()) == 1


def test_a_look_costs_as_many_queries_for_many_pools_as_for_one() -> None:
    for _ in range(20):
        grow(StoragePoolFactory.create(), GIB)
        ImageFactory.create(state="chain_broken")
    look(now())
    with at_most_queries(39):
        look(now())


def test_another_folder_in_a_pools_place_is_told_of_until_it_is_confirmed() -> None:
    pool = StoragePoolFactory.create(state="changed", state_detail="/srv/a is another folder.")
    assert looked() == {f"pool_changed:{pool.pk}": "danger"}
    StoragePool.objects.update(state="ok")
    assert looked() == {}


def test_a_pool_that_root_took_off_the_list_is_told_of_once_and_one_that_never_was_on_it_is_not() -> None:
    StoragePoolFactory.create(state="not_listed", last_scanned=None)
    pool = StoragePoolFactory.create(state="not_listed", state_detail="Add it to the list", last_scanned=now())
    for _ in range(2):
        assert looked() == {f"pool_changed:{pool.pk}": "warning"}
    assert Alert.objects.get().detail.startswith("Add it to the list. ")
    StoragePool.objects.update(state="ok")
    assert looked() == {}
