"""A storage that several hosts mount is looked at once by each policy that means any of them; the reasons are true."""

from datetime import timedelta
from typing import Any

import pytest

from images.models import Image, Policy
from images.policies import runs, services
from images.policies.reasons import NOT_MEANT
from images.policies.rules import not_meant, others_not_meant
from images.policies.scope import policies_for, reach
from images.policies.shape import Rules
from storage_admin.accounts.models import Actor, ForbiddenError, Role
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from tests.factories import (
    GIB,
    GuestFactory,
    HostFactory,
    ImageFactory,
    ImageUseFactory,
    PolicyFactory,
    PolicyPickFactory,
    PolicyRunFactory,
    StoragePoolFactory,
)
from tests.policies.test_rules import look
from tests.policies.test_runs import NOW, begun, picks

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
NAMES = ["a", "b"]


def image(name: str, pool: StoragePool, **columns: Any) -> Image:
    return ImageFactory.create(name=name, pool=pool, reclaimable_bytes=GIB, **columns)


@pytest.fixture
def both() -> tuple[StoragePool, StoragePool]:
    """One export that two hosts mount; the agent of each has walked it."""
    pools = [StoragePoolFactory.create(shared_key="nfs4:nas:/vms/", network=True) for _ in range(2)]
    for pool in pools:
        for name in NAMES:
            image(name, pool)
    return pools[0], pools[1]


@pytest.fixture
def lister_alone() -> tuple[StoragePool, StoragePool]:
    """A storage of two nodes of a cluster; the first one's agent walks it, and the second has none."""
    pools = []
    for walked in (True, False):
        host = HostFactory.create(kind=Host.Kind.PROXMOX, cluster="lab")
        columns = {} if walked else {"path_bytes": b""}
        pools.append(
            StoragePoolFactory.create(
                host=host, source=StoragePool.Source.PROXMOX, name="nfs", path="/mnt/pve/nfs", network=True,
                shared_key="nfs4:nas:/vms/", **columns,
            )
        )  # fmt: skip
    for name in NAMES:
        image(name, pools[0])
    return pools[0], pools[1]


def chosen(policy: Policy) -> list[tuple[str, int | None]]:
    return sorted((one.label, one.pool_id) for one in look(policy).chosen)


def left(policy: Policy) -> dict[str, int]:
    """How many it is not for, by the code; each code lists as many."""
    counts = {code: count for code, count in look(policy).not_meant.items() if count}
    for code in NOT_MEANT:
        found = not_meant(Rules.of(policy), code)
        assert (len(found) if isinstance(found, list) else found.count()) == counts.get(code, 0), code
    return counts


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("by", ["hosts", "pools", "both"])
def test_of_two_listings_a_policy_looks_at_the_one_that_it_names(
    both: tuple[StoragePool, StoragePool], number: int, by: str
) -> None:
    mine = both[number]
    named = {"hosts": [mine.host_id], "pools": [mine.pk]}
    policy = PolicyFactory.create(**{name: ids for name, ids in named.items() if by in {name, "both"}})
    assert chosen(policy) == [(name, mine.pk) for name in NAMES]
    assert left(policy) == {"other_pool" if by == "pools" else "other_host": 2}


def test_a_policy_for_all_or_for_both_looks_at_one_listing(both: tuple[StoragePool, StoragePool]) -> None:
    first, second = both
    everything: list[dict[str, Any]] = [
        {}, {"hosts": [first.host_id, second.host_id]}, {"pools": [first.pk, second.pk]},
    ]  # fmt: skip
    for columns in everything:
        policy = PolicyFactory.create(**columns)
        assert chosen(policy) == [(name, first.pk) for name in NAMES]
        assert left(policy) == {"listed_elsewhere": 2}


def test_a_listing_of_which_nothing_is_there_any_more_does_not_hide_the_other(
    both: tuple[StoragePool, StoragePool],
) -> None:
    Image.objects.filter(pool=both[0]).update(state="missing")
    assert chosen(PolicyFactory.create()) == [(name, both[1].pk) for name in NAMES]


def test_a_policy_for_a_node_that_does_not_list_its_storage_says_so_and_works_for_it_on_no_other(
    lister_alone: tuple[StoragePool, StoragePool],
) -> None:
    lister, other = lister_alone
    for columns in ({}, {"pools": [other.pk]}):
        policy = PolicyFactory.create(hosts=[other.host_id], **columns)
        assert chosen(policy) == []
        assert left(policy) == {"lister_not_named": 2}
        policy.hosts = [lister.host_id, other.host_id]  # as the sentence advises
        assert chosen(policy) == [(name, lister.pk) for name in NAMES]
        assert left(policy) == {}


def test_a_policy_for_the_pool_of_a_node_that_does_not_list_it_finds_its_images(
    lister_alone: tuple[StoragePool, StoragePool],
) -> None:
    lister, other = lister_alone
    stranger = image("c", StoragePoolFactory.create())
    policy = PolicyFactory.create(pools=[other.pk])
    assert [(one.label, one.host_id) for one in look(policy).chosen] == [(name, lister.host_id) for name in NAMES]
    assert left(policy) == {"other_pool": 1}
    assert list(not_meant(Rules.of(policy), "other_pool")) == [stranger]


def test_a_policy_for_a_third_host_is_told_that_the_images_are_on_another(
    lister_alone: tuple[StoragePool, StoragePool],
) -> None:
    assert left(PolicyFactory.create(hosts=[HostFactory.create().pk])) == {"other_host": 2}
    assert chosen(PolicyFactory.create(hosts=[lister_alone[0].host_id])) == [
        (name, lister_alone[0].pk) for name in NAMES
    ]


def test_who_is_limited_to_one_node_makes_no_policy_that_works_on_another(
    lister_alone: tuple[StoragePool, StoragePool],
) -> None:
    lister, other = lister_alone
    limited = Actor(name="lea", role=Role.ADMIN, hosts=frozenset({other.host.slug}))
    shared = PolicyFactory.create(name="shared", pools=[other.pk])
    assert reach(shared) == {lister.host_id, other.host_id}
    measured = PolicyFactory.create(name="measured", pools=[other.pk], kind="benchmark", options={"kind": "dd"})
    here = PolicyFactory.create(name="here", hosts=[other.host_id])
    assert set(policies_for(limited)) == {measured, here}
    with pytest.raises(ForbiddenError):
        services.create(limited, {"name": "new", "pools": [other.pk], "cron": "0 22 * * *", "kind": "check"})


OLD = [{"name": "old", "created": 1600000000, "external": False}]


def guest(host: Host, pool: StoragePool, name: str) -> Guest:
    """One that runs, with an old snapshot; its image is listed in that pool, whichever host it is on."""
    found = GuestFactory.create(host=host, name=name, state="running", kind="vm", snapshots=OLD)
    ImageUseFactory.create(image=image(name, pool), disk__guest=found)
    return found


@pytest.mark.parametrize("kind", ["trim", "delete_old_snapshots"])
def test_a_policy_for_guests_reaches_all_nodes_whose_guests_have_images_in_its_pools(
    lister_alone: tuple[StoragePool, StoragePool], kind: str
) -> None:
    lister, other = lister_alone
    ours, theirs = guest(lister.host, lister, "ours"), guest(other.host, lister, "theirs")
    outside = guest(HostFactory.create(), lister, "outside")
    columns: dict[str, Any] = {"kind": kind, "options": {"older_than_days": 1} if kind != "trim" else {}}
    policy = PolicyFactory.create(pools=[lister.pk], **columns)
    assert {one.id for one in look(policy).chosen} == {ours.pk, theirs.pk}
    assert others_not_meant(Rules.of(policy), "other_host") == [outside]
    limited = Actor(name="lea", role=Role.ADMIN, hosts=frozenset({lister.host.slug}))
    assert (reach(policy), set(policies_for(limited))) == ({lister.host_id, other.host_id}, set())
    new = {"name": "new", "pools": [lister.pk], "cron": "0 22 * * *", **columns}
    with pytest.raises(ForbiddenError):
        services.create(limited, new)
    made = services.create(limited, new | {"hosts": [lister.host_id]})
    assert {one.id for one in look(made).chosen} == {ours.pk}


@pytest.mark.usefixtures("quiet")
def test_a_guest_that_has_left_the_policys_hosts_since_it_was_chosen_is_left_alone(
    lister_alone: tuple[StoragePool, StoragePool],
) -> None:
    lister, other = lister_alone
    columns = {"kind": "trim", "options": {}, "hosts": [lister.host_id], "pools": [lister.pk]}
    run = PolicyRunFactory.create(policy=PolicyFactory.create(**columns), ends=NOW + timedelta(hours=6), chosen_at=NOW)
    moved = guest(other.host, lister, "moved")
    PolicyPickFactory.create(run=run, image=None, pool=None, host=lister.host, guest=moved, label="moved")
    runs.work(NOW)
    assert picks(run) == [("moved", "skipped", "other_host")]


@pytest.mark.usefixtures("quiet")
def test_a_policy_digs_no_holes_in_place_on_a_network_neither_by_its_own_choice_nor_by_its_options() -> None:
    pool = StoragePoolFactory.create(network=True, all_hosts_registered=True, available_bytes=90 * GIB)
    wins = {"reclaimable_bytes": GIB, "predicted_after_bytes": GIB, "predicted_low": GIB, "predicted_high": GIB}
    estimate = {"methods": {"in_place": wins, "copy": wins}}
    image("disk.raw", pool, declared_format="raw", format="raw", estimate=estimate)
    run = begun(PolicyFactory.create(options={"method": "in_place"}))
    assert picks(run) == [("disk.raw", "skipped", "unsupported_pool")]
    run = begun(PolicyFactory.create())
    assert picks(run) == [("disk.raw", "submitted", "")]
    assert Job.objects.get().plan["method"] == "copy"
