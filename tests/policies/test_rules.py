"""Today's choice: what a policy is for, in the order of gain, and exactly one reason for everything else."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from images.models import Image, Policy
from images.policies.rules import Choice, choose, not_meant
from images.policies.shape import Rules
from storage_admin.agent.measure.prediction import impossible
from storage_admin.jobs.models import Job, ResourceLock
from tests.api.test_query_budgets import MANY, make_images
from tests.factories import GIB, MIB, ImageFactory, ImageSampleFactory, JobFactory, PolicyFactory, StoragePoolFactory
from tests.working import at_most_queries

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
NOW = timezone.now()


def image(name: str = "disk.qcow2", **columns: Any) -> Image:
    return ImageFactory.create(name=name, **{"reclaimable_bytes": GIB} | columns)


def chosen(policy: Policy) -> list[str]:
    return [one.label for one in look(policy).chosen]


def look(policy: Policy) -> Choice:
    return choose(Rules.of(policy), NOW)


def reclaimed(one: Image, *, days_ago: float, before: int = 4 * GIB, after: int = GIB, **columns: Any) -> Job:
    finished = NOW - timedelta(days=days_ago)
    result = {"before_bytes": before, "after_bytes": after}
    values = {"kind": "reclaim", "state": "succeeded", "finished": finished, "result": result} | columns
    return JobFactory.create(target=one, **values)


def code_of(policy: Policy, one: Image) -> str:
    """Its one reason; empty where it is chosen."""
    found = look(policy)
    codes = [skip.code for skip in found.skips if skip.id == one.pk]
    codes += ["" for candidate in found.chosen if candidate.id == one.pk]
    assert len(codes) == 1, found
    assert all(skip.reason.endswith(".") for skip in found.skips)
    return codes[0]


def test_what_wins_most_comes_first() -> None:
    for name, wins in (("b", 2), ("a", 1), ("c", 3)):
        image(name, reclaimable_bytes=wins * GIB)
    assert chosen(PolicyFactory.create()) == ["c", "b", "a"]


def test_with_a_method_of_its_own_a_policy_orders_by_what_that_one_wins() -> None:
    for name, best, copy in (("a", 3, 1), ("b", 2, 2)):
        methods = {"copy": {"reclaimable_bytes": copy * GIB}, "compress": {"reclaimable_bytes": best * GIB}}
        image(name, reclaimable_bytes=best * GIB, estimate={"methods": methods})
    image("none", estimate={"methods": {"compress": {"reclaimable_bytes": GIB}}})
    policy = PolicyFactory.create(options={"method": "copy"})
    assert chosen(policy) == ["b", "a"]
    assert [(skip.label, skip.code) for skip in look(policy).skips] == [("none", "not_analyzed")]


def test_each_image_that_a_policy_is_not_for_is_counted_by_the_first_rule_that_says_so() -> None:
    pool = StoragePoolFactory.create()
    other_pool = StoragePoolFactory.create(host=pool.host)
    image("web.qcow2", pool=pool)
    elsewhere = {
        "other_host": image("web2.qcow2"), "other_pool": image("web3.qcow2", pool=other_pool),
        "other_name": image("db.qcow2", pool=pool), "other_format": image("web.raw", pool=pool, declared_format="raw"),
        "gone": image("web4.qcow2", pool=pool, state="missing"),
    }  # fmt: skip
    named = {"hosts": [pool.host_id], "pools": [pool.pk], "name_pattern": "web* db.raw !*-old*", "formats": ["qcow2"]}
    policy = PolicyFactory.create(**named)
    found = look(policy)
    assert dict(found.not_meant) == dict.fromkeys(elsewhere, 1)
    assert [one.label for one in found.chosen] == ["web.qcow2"]
    assert found.skips == []
    for code, one in elsewhere.items():
        listed = not_meant(Rules.of(policy), code)
        assert [getattr(row, "pk", row) for row in listed] == [one.pk]


def test_names_match_as_shell_patterns_and_an_exclamation_mark_leaves_out() -> None:
    for name in ("vm-1.qcow2", "vm-1-old.qcow2", "vm-22.qcow2", "VM-3.qcow2", "notes"):
        image(name)
    assert sorted(chosen(PolicyFactory.create(name_pattern="vm-?.qcow2 n*"))) == ["notes", "vm-1.qcow2"]
    assert sorted(chosen(PolicyFactory.create(name_pattern="!*old* !notes"))) == [
        "VM-3.qcow2", "vm-1.qcow2", "vm-22.qcow2",
    ]  # fmt: skip


def test_a_host_that_is_gone_never_widens_the_choice() -> None:
    image()
    assert chosen(PolicyFactory.create(hosts=[987654])) == []
    assert chosen(PolicyFactory.create(pools=[987654])) == []


def test_a_storage_that_two_hosts_list_is_looked_at_once() -> None:
    first = StoragePoolFactory.create(shared_key="nfs:/export")
    second = StoragePoolFactory.create(shared_key="nfs:/export")
    image("a", pool=first)
    image("a", pool=second)
    found = look(PolicyFactory.create())
    assert [one.pool_id for one in found.chosen] == [first.pk]
    assert found.not_meant["listed_elsewhere"] == 1


_ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "not_analyzed": ({"reclaimable_bytes": None}, {}),
    "too_little": ({"reclaimable_bytes": 99 * MIB}, {"min_reclaimable_bytes": 100 * MIB}),
    "chain_too_deep": ({"chain_depth": 65}, {}),
    "immutable": ({"header": {"immutable": True}}, {}),
    "chain_too_short": ({"chain_depth": 2}, {"min_chain_depth": 3}),
    "guest_running": ({"in_use": True, "in_use_detail": "guest web is running"}, {}),
    "guests_unknown": ({"in_use": None, "in_use_detail": "libvirt did not answer."}, {}),
}


@pytest.mark.parametrize("code", _ALONE)
def test_each_rule_leaves_out_what_it_is_about(code: str) -> None:
    columns, rules = _ALONE[code]
    assert code_of(PolicyFactory.create(**rules), image(**columns)) == code


def test_a_templates_disk_is_left_out_of_what_writes_and_looked_through_all_the_same() -> None:
    base = image("base-101-disk-0.qcow2", pool=StoragePoolFactory.create(source="proxmox"))
    other = image("base-101-disk-0.qcow2", pool=StoragePoolFactory.create())
    writes = [("reclaim", {}), ("check", {"repair": "leaks"})]
    for kind, options in (*writes, ("check", {}), ("analyze", {})):
        policy = PolicyFactory.create(kind=kind, options=options)
        code = "immutable" if (kind, options) in writes else ""
        assert (code_of(policy, base), code_of(policy, other)) == (code, ""), (kind, options)


def test_too_little_is_also_too_small_a_part_and_nothing_at_all() -> None:
    assert code_of(PolicyFactory.create(min_reclaimable_percent=26), image()) == "too_little"
    assert code_of(PolicyFactory.create(min_reclaimable_percent=25), image("b")) == ""
    assert code_of(PolicyFactory.create(), image("c", reclaimable_bytes=0)) == "too_little"
    assert code_of(PolicyFactory.create(), image("d", reclaimable_bytes=-5)) == "too_little"


def test_why_a_win_is_not_known_is_told_truthfully() -> None:
    cannot = impossible("The filesystem cannot punch holes.")
    estimate = {"methods": {"in_place": cannot, "copy": {"reclaimable_bytes": GIB}}}
    image("fixed", analyzed_at=NOW, estimate=estimate)
    policy = PolicyFactory.create(options={"method": "in_place"})
    assert reasons_of(policy) == ["The savings are not known: The filesystem cannot punch holes."]
    none = dict.fromkeys(("in_place", "copy", "compress"), impossible("Its data cannot be read."))
    Image.objects.update(reclaimable_bytes=None, estimate={"methods": none})
    assert reasons_of(PolicyFactory.create()) == ["The savings are not known: Its data cannot be read."]
    Image.objects.update(estimate=None)
    assert reasons_of(policy) == ["The savings are not known: it has not been analyzed since it changed."]
    Image.objects.update(analyzed_at=None)
    assert reasons_of(policy) == ["The savings are not known: it has not been analyzed yet."]
    Image.objects.update(format="vhdx", declared_format="vhdx")
    [reason] = reasons_of(policy)
    assert reason.startswith("The savings are not known: vhdx images cannot be analyzed; qcow2, raw, ")


def reasons_of(policy: Policy) -> list[str]:
    found = look(policy)
    assert {skip.code for skip in found.skips} == {"not_analyzed"}
    assert found.chosen == []
    return [skip.reason for skip in found.skips]


def test_an_analysis_is_for_what_nobody_knows_the_win_of() -> None:
    image("known", reclaimable_bytes=50 * MIB)
    image("unknown", reclaimable_bytes=None)
    policy = PolicyFactory.create(kind="analyze", options={}, min_reclaimable_bytes=100 * MIB)
    assert chosen(policy) == ["unknown"]
    for kind in ("reclaim", "check"):
        assert chosen(PolicyFactory.create(kind=kind, options={}, min_reclaimable_bytes=100 * MIB)) == []


@pytest.mark.parametrize(
    ("rules", "wins", "says"),
    [
        ({"percent": 10}, 4 * GIB * 96 // 1000, "about 393 MiB (9.5 %); the policy requires 10 %."),
        (
            {"bytes": 400 * MIB},
            400 * MIB - 1,
            "419,430,399 bytes (9.7 %); the policy requires at least 419,430,400 bytes.",
        ),
        ({"bytes": 400 * MIB}, 399 * MIB, "about 399 MiB (9.7 %); the policy requires at least 400 MiB."),
    ],
)
def test_too_little_never_reads_as_what_the_policy_asks_for(rules: dict[str, int], wins: int, says: str) -> None:
    image(reclaimable_bytes=wins, allocated_size=4 * GIB)
    asked = {f"min_reclaimable_{unit}": least for unit, least in rules.items()}
    [skip] = look(PolicyFactory.create(**asked)).skips
    assert skip.reason == f"The job would free {says}"


def test_what_was_done_lately_is_left_out_until_it_is_old_enough() -> None:
    one = image(allocated_size=GIB)
    reclaimed(one, days_ago=2)
    assert code_of(PolicyFactory.create(min_age_hours=49), one) == "too_young"
    assert code_of(PolicyFactory.create(min_age_hours=48), one) == ""


def test_a_job_of_another_kind_or_one_that_failed_makes_nothing_young() -> None:
    one = image()
    JobFactory.create(target=one, kind="analyze", state="succeeded", finished=NOW)
    reclaimed(one, days_ago=0, state="failed")
    assert code_of(PolicyFactory.create(min_age_hours=1000), one) == ""


def test_what_somebody_has_undone_is_left_alone() -> None:
    one = image()
    reclaimed(one, days_ago=100, undo_state="undone")
    assert code_of(PolicyFactory.create(), one) == "undone"
    reclaimed(one, days_ago=50, before=2 * GIB, after=GIB)
    assert code_of(PolicyFactory.create(include_decayed=True), one) == ""


@pytest.mark.parametrize(
    ("size", "sample_after_days", "code"),
    [
        (GIB + 2 * GIB, 10, ""),  # two of three won bytes are lost again
        (GIB + 3 * GIB, 10, "decayed"),
        (GIB + 5 * GIB // 2, 29, "decayed"),
        (GIB + 3 * GIB, 40, ""),  # it took its time
    ],
)
def test_an_image_that_grew_back_soon_is_left_out_for_good(size: int, sample_after_days: int, code: str) -> None:
    one = image(allocated_size=size)
    reclaimed(one, days_ago=200)
    at = NOW - timedelta(days=200 - sample_after_days)
    ImageSampleFactory.create(image=one, at=at - timedelta(days=9), allocated_size=GIB)
    ImageSampleFactory.create(image=one, at=at, allocated_size=size)
    assert code_of(PolicyFactory.create(), one) == code
    assert code_of(PolicyFactory.create(include_decayed=True), one) == ""


def test_what_was_as_large_before_the_job_has_not_grown_back_by_that() -> None:
    one = image(allocated_size=4 * GIB)
    ImageSampleFactory.create(image=one, at=NOW - timedelta(days=201), allocated_size=4 * GIB)
    reclaimed(one, days_ago=200)
    ImageSampleFactory.create(image=one, at=NOW - timedelta(days=100), allocated_size=4 * GIB)
    assert code_of(PolicyFactory.create(), one) == ""


def test_an_image_that_has_grown_back_by_now_is_told_before_a_sample_is() -> None:
    one = image(allocated_size=4 * GIB)
    reclaimed(one, days_ago=3)
    assert code_of(PolicyFactory.create(), one) == "decayed"
    skip = look(PolicyFactory.create()).skips[0]
    assert "freed 3 GiB" in skip.reason
    assert "grown by 3 GiB again" in skip.reason


def test_an_image_that_a_job_of_the_kind_has_is_left_out_and_one_that_another_job_needs_waits() -> None:
    base = image("base")
    overlay = image("overlay", backing=base)
    job = JobFactory.create(target=overlay, kind="reclaim", state="running")
    for one in (overlay, base):
        ResourceLock.objects.create(job=job, key=f"image:{one.pk}", exclusive=one == overlay)
    found = look(PolicyFactory.create())
    assert [(skip.label, skip.code) for skip in found.skips] == [("overlay", "busy")]
    assert f"Job {job.pk} (reclaim) is already queued or running on it" in found.skips[0].reason
    assert [(one.label, one.waits) for one in found.chosen] == [("base", True)]
    found = look(PolicyFactory.create(kind="check", options={}))
    assert [(one.label, one.waits) for one in found.chosen] == [("base", True), ("overlay", True)]
    # An analysis reads beside others.
    assert sorted(chosen(PolicyFactory.create(kind="analyze", options={}))) == ["base", "overlay"]


def test_flatten_takes_chains_the_deepest_first_and_asks_for_no_gain() -> None:
    base = image("base", reclaimable_bytes=None)
    middle = image("middle", backing=base, reclaimable_bytes=None)
    image("leaf", backing=middle, reclaimable_bytes=None)
    policy = PolicyFactory.create(kind="flatten", options={})
    assert chosen(policy) == ["leaf", "middle"]
    assert [skip.code for skip in look(policy).skips] == ["chain_too_short"]


def test_checks_and_analyses_begin_with_what_was_not_done_for_longest() -> None:
    names = ("never", "lately", "long ago")
    images = {name: image(name, analyzed_at=None if name == "never" else NOW) for name in names}
    for name, days in (("lately", 1), ("long ago", 90)):
        reclaimed(images[name], days_ago=days, kind="check")
        reclaimed(images[name], days_ago=days, kind="analyze")
    for kind in ("check", "analyze"):
        assert chosen(PolicyFactory.create(kind=kind, options={})) == ["never", "long ago", "lately"]
    images["lately"].in_use = True
    images["lately"].save()
    assert chosen(PolicyFactory.create(kind="analyze", options={})) == ["never", "long ago", "lately"]
    assert chosen(PolicyFactory.create(kind="check", options={})) == ["never", "long ago"]


def test_a_benchmark_is_for_pools() -> None:
    first, second = StoragePoolFactory.create(name="fast"), StoragePoolFactory.create(name="slow")
    JobFactory.create(target=first, kind="benchmark", state="succeeded", finished=NOW - timedelta(hours=5))
    policy = PolicyFactory.create(kind="benchmark", options={"kind": "dd"})
    assert chosen(policy) == ["slow", "fast"]
    policy.min_age_hours = 6
    assert [(skip.label, skip.code) for skip in look(policy).skips] == [("fast", "too_young")]
    policy.hosts = [second.host_id]
    assert look(policy).not_meant == {"other_host": 1}


def test_a_policy_that_waits_takes_what_is_used_last_and_what_nobody_knows_the_users_of_never() -> None:
    image("used", in_use=True, in_use_detail="guest web is running", reclaimable_bytes=4 * GIB)
    image("unknown", in_use=None)
    image("small", reclaimable_bytes=GIB)
    policy = PolicyFactory.create(options={"when_running": "wait"})
    found = look(policy)
    assert [one.label for one in found.chosen] == ["small", "used"]
    assert [(skip.label, skip.code) for skip in found.skips] == [("unknown", "guests_unknown")]


def test_the_choice_among_thousands_of_images_costs_few_queries() -> None:
    count = make_images(MANY[connection.vendor])
    for one in Image.objects.order_by("-reclaimable_bytes")[:20]:
        reclaimed(one, days_ago=1)
    policy = PolicyFactory.create(min_reclaimable_bytes=1000, min_reclaimable_percent=1)
    with at_most_queries(10):
        found = look(policy)
    assert len(found.chosen) + len(found.skips) == count
    with at_most_queries(10):
        look(PolicyFactory.create(name_pattern="vm-1-*"))


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"state": "chain_broken", "state_detail": "Its base is missing."}, "chain_broken"),
        ({"state": "merged"}, "merged"),
        ({"state": "chain_cycle", "reclaimable_bytes": None}, "chain_cycle"),
        ({"state": "unreadable", "reclaimable_bytes": None}, "unreadable"),
        ({"declared_format": "", "format": "qcow2", "reclaimable_bytes": None}, "format_undeclared"),
        ({"encrypted": True, "reclaimable_bytes": None}, "encrypted"),
    ],
)
def test_what_no_run_will_change_is_told_as_that_and_not_as_a_missing_analysis(
    columns: dict[str, Any], code: str
) -> None:
    assert code_of(PolicyFactory.create(), image(**columns)) == code


@pytest.mark.parametrize("state", ["missing", "set_aside", "deleted"])
def test_what_is_not_there_is_counted_and_looked_at_no_further(state: str) -> None:
    there = image(state=state)
    found = look(PolicyFactory.create())
    assert (found.chosen, found.skips, dict(found.not_meant)) == ([], [], {"gone": 1})
    assert list(not_meant(Rules.of(PolicyFactory.create(name="another")), "gone")) == [there]
