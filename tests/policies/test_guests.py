"""Today's choice of a policy that is for guests."""

from datetime import timedelta

import pytest

from images.policies import guests
from images.policies.rules import others_not_meant
from images.policies.shape import Rules
from tests.factories import GuestFactory, HostFactory, ImageFactory, ImageUseFactory, JobFactory, PolicyFactory
from tests.policies.test_rules import NOW, chosen, look

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def test_a_trim_is_for_guests_that_run() -> None:
    disk = ImageFactory.create()
    runs = ImageUseFactory.create(image=disk, disk__guest__name="web-1", disk__guest__state="running").disk.guest
    GuestFactory.create(host=runs.host, name="web-off", state="shut off")
    GuestFactory.create(host=runs.host, name="db-1", state="running")
    GuestFactory.create(name="web-elsewhere", state="running")
    GuestFactory.create(host=runs.host, name="web-ct", state="running", kind="container")
    node = HostFactory.create(kind="proxmox")
    GuestFactory.create(host=node, name="web-pct", state="running", kind="container")
    policy = PolicyFactory.create(kind="trim", hosts=[node.pk])
    assert chosen(policy) == ["web-pct"]
    policy = PolicyFactory.create(kind="trim", hosts=[runs.host_id], name_pattern="web-*")
    found = look(policy)
    assert [(one.label, one.pool_id) for one in found.chosen] == [("web-1", None)]
    assert [(skip.label, skip.code) for skip in found.skips] == [("web-off", "guest_off")]
    assert found.not_meant == {"other_name": 1, "other_host": 2}
    assert [one.name for one in others_not_meant(Rules.of(policy), "other_name")] == ["db-1"]
    policy.name_pattern, policy.pools = "", [disk.pool_id]
    assert (chosen(policy), look(policy).not_meant["other_pool"]) == (["web-1"], 2)
    JobFactory.create(target=runs, kind="trim", state="succeeded", finished=NOW - timedelta(hours=5))
    policy.min_age_hours = 6
    assert [(skip.label, skip.code) for skip in look(policy).skips] == [("web-1", "too_young")]


def test_live_flattening_is_for_libvirts_guests_that_run_with_a_chain() -> None:
    top = ImageFactory.create(chain_depth=3)
    runs = ImageUseFactory.create(image=top, disk__guest__name="web", disk__guest__state="running").disk.guest
    flat = ImageUseFactory.create(image__chain_depth=1, disk__guest__name="flat", disk__guest__state="running")
    ImageUseFactory.create(image__chain_depth=2, disk__guest__name="off", disk__guest__state="shut off")
    ImageUseFactory.create(
        image__chain_depth=4, disk__guest__name="vm", disk__guest__state="running", disk__guest__kind="vm"
    )
    policy = PolicyFactory.create(kind="live_flatten")
    assert [one.id for one in look(policy).chosen] == [runs.pk]
    skipped = {(skip.label, skip.code) for skip in look(policy).skips}
    assert skipped == {("flat", "chain_too_short"), ("off", "guest_off")}
    policy.min_chain_depth = 4
    assert chosen(policy) == []
    other = ImageFactory.create(pool__host=top.host, chain_depth=5)
    deeper = ImageUseFactory.create(image=other, disk__guest=runs, disk__target="vdz")
    assert guests.options_for(Rules.of(policy), runs.pk)["disk"] == "vdz"
    policy.pools, policy.min_chain_depth = [top.pool_id], 2
    assert [one.id for one in look(policy).chosen] == [runs.pk]
    assert guests.options_for(Rules.of(policy), runs.pk)["disk"] != deeper.disk.target
    policy.min_chain_depth = 4
    assert chosen(policy) == []
    # What only a snapshot names is not what the guest stands on.
    ImageUseFactory.create(image__chain_depth=9, disk__guest=flat.disk.guest, disk__only_in="before")
    assert "flat" not in chosen(PolicyFactory.create(kind="live_flatten"))
