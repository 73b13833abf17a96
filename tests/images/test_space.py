"""Space of admitted jobs is reserved: what the queued and running ones may need is not promised twice."""

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.kinds.reclaim import Reclaim
from images.models import Image
from images.rewrite.space import Admitted, Need, needed_by_running, worst_moment
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal
from tests.factories import GIB, HostFactory, ImageFactory, StoragePoolFactory
from tests.jobs.test_claims import at_once
from tests.working import OPERATOR, refused_as

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet", "no_hypervisor"), pytest.mark.sql]

sizes = st.integers(min_value=0, max_value=9)
some_needs = st.builds(
    lambda host, scratch, lasting: Need(host, scratch, min(scratch, lasting)), st.sampled_from([1, 2]), sizes, sizes
)


@given(st.lists(some_needs, max_size=5), st.integers(1, 3), st.integers(1, 3))
def test_the_worst_moment_is_the_worst_of_all_that_can_happen(needs: list[Need], one: int, two: int) -> None:
    slots, worst = {1: one, 2: two}, 0
    for states in itertools.product(("queued", "running", "ended"), repeat=len(needs)):
        there = list(zip(needs, states, strict=True))
        running = Counter(need.host_id for need, state in there if state == "running")
        if all(count <= slots[host] for host, count in running.items()):
            taken = {"queued": 0, "running": 1, "ended": 2}
            worst = max(worst, sum((0, need.scratch, need.lasting)[taken[state]] for need, state in there))
    assert worst_moment(needs, slots) == worst


@pytest.fixture
def pool() -> StoragePool:
    """35 GiB of it may be used: 40 are free, and 5 have to stay free. Each image takes 4, and so may its copy."""
    return StoragePoolFactory.create(fs_key="fs one")


def images_in(pool: StoragePool, count: int) -> list[Image]:
    return [ImageFactory.create(pool=pool) for _ in range(count)]


def submitted(images: list[Image], **options: Any) -> list[Job]:
    return [services.submit(OPERATOR, "reclaim", image.pk, {"method": "compress", **options}) for image in images]


def against(image: Image, **options: Any) -> list[Refusal]:
    return list(services.plan(OPERATOR, "reclaim", image.pk, {"method": "compress", **options}).refusals)


def test_copies_beside_undo_copies_add_up_until_no_more_fits(pool: StoragePool) -> None:
    *first, last = images_in(pool, 9)
    submitted(first)
    (refusal,) = against(last)
    assert refusal.code == "not_enough_space"
    assert f"queued and running jobs need up to {32 * GIB:,} more" in refusal.detail
    assert refused_as(submitted, [last]) == "not_enough_space"


def test_without_undo_copies_only_those_at_work_at_the_same_time_count(pool: StoragePool) -> None:
    assert len(submitted(images_in(pool, 20), undo_hours=0)) == 20
    assert against(ImageFactory.create(pool=pool), undo_hours=0) == []
    large = {"pool": pool, "allocated_size": 36 * GIB}
    assert against(ImageFactory.create(**large), undo_hours=0)[0].code == "not_enough_space"
    StoragePool.objects.update(available_bytes=46 * GIB)
    assert against(ImageFactory.create(**large), undo_hours=0) == []
    pool.host.max_jobs = 3
    pool.host.save()
    assert against(ImageFactory.create(**large), undo_hours=0)[0].code == "not_enough_space"  # 36 + 4 + 4


def test_a_flattened_image_goes_on_to_hold_what_it_took_over(pool: StoragePool) -> None:
    base = ImageFactory.create(pool=pool, allocated_size=10 * GIB)
    overlays = [ImageFactory.create(backing=base, allocated_size=GIB) for _ in range(4)]
    for overlay in overlays[:3]:
        job = services.submit(OPERATOR, "flatten", overlay.pk, {"undo_hours": 0})
        assert (job.plan["scratch_bytes"], job.plan["lasting_bytes"]) == (11 * GIB, 10 * GIB)
    (refusal,) = services.plan(OPERATOR, "flatten", overlays[3].pk, {"undo_hours": 0}).refusals
    assert refusal.code == "not_enough_space"  # 40 GiB stay, and one more passes


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled", "interrupted"])
def test_a_job_that_has_ended_reserves_nothing(pool: StoragePool, state: str) -> None:
    *first, last = images_in(pool, 9)
    jobs = submitted(first)
    Job.objects.filter(pk=jobs[0].pk).update(state="running")
    assert against(last) != []
    Job.objects.filter(pk=jobs[0].pk).update(state=state)
    assert against(last) == []


def test_the_filesystem_counts_and_not_the_pool(pool: StoragePool) -> None:
    submitted(images_in(pool, 8))
    beside = StoragePoolFactory.create(host=pool.host, fs_key="fs one")
    elsewhere = StoragePoolFactory.create(host=pool.host, fs_key="fs two")
    never_scanned = StoragePoolFactory.create(host=pool.host, fs_key="")
    assert [refusal.code for refusal in against(ImageFactory.create(pool=beside))] == ["not_enough_space"]
    assert against(ImageFactory.create(pool=elsewhere)) == []
    submitted(images_in(never_scanned, 8))
    assert against(ImageFactory.create(pool=never_scanned)) != []


def test_one_filesystem_on_two_hosts_is_one_with_the_slots_of_both(pool: StoragePool) -> None:
    other = StoragePoolFactory.create(host=HostFactory.create(), fs_key="fs one")
    submitted(images_in(pool, 2) + images_in(other, 2), undo_hours=0)
    assert Admitted().worst(pool) == Admitted().worst(other) == 8 * GIB


def test_a_conversion_takes_its_space_where_it_goes_to(pool: StoragePool) -> None:
    target = StoragePoolFactory.create(host=pool.host, fs_key="fs two")
    image = ImageFactory.create(pool=pool)
    job = services.submit(OPERATOR, "convert", image.pk, {"format": "raw", "target_pool": target.pk})
    assert job.plan["scratch_pool"] == target.pk
    assert job.plan["lasting_bytes"] == job.plan["scratch_bytes"] > 0
    assert (Admitted().worst(pool), Admitted().worst(target)) == (0, job.plan["scratch_bytes"])


def test_what_needs_no_space_is_not_refused_and_auto_finds_it(pool: StoragePool) -> None:
    *first, last = images_in(pool, 9)
    submitted(first)
    plan = services.plan(OPERATOR, "reclaim", last.pk, {})
    assert (plan.method, plan.refusals, plan.scratch_bytes) == ("in_place", (), 0)
    assert "jobs have not reserved" in plan.reason
    StoragePool.objects.update(available_bytes=0)
    assert against(last, method="in_place") == []


def test_the_agent_is_told_what_others_at_work_may_still_write(pool: StoragePool) -> None:
    beside = StoragePoolFactory.create(host=pool.host, fs_key="fs one")
    elsewhere = StoragePoolFactory.create(host=pool.host, fs_key="fs two")
    job, queued, writing, next_to_it, written, _ = submitted(
        [*images_in(pool, 3), *images_in(beside, 2), *images_in(elsewhere, 1)]
    )
    Job.objects.exclude(pk=queued.pk).update(state="running", stage="copying")
    Job.objects.filter(pk=written.pk).update(stage="verifying")
    assert Reclaim().request(job)["others_bytes"] == {
        "here": {writing.uid: 4 * GIB, next_to_it.uid: 4 * GIB}, "elsewhere": {},
    }  # fmt: skip
    far = StoragePoolFactory.create(host=HostFactory.create(), fs_key="fs one")
    Job.objects.filter(pk=next_to_it.pk).update(host=far.host)
    assert needed_by_running(job) == {"here": {writing.uid: 4 * GIB}, "elsewhere": {next_to_it.uid: 4 * GIB}}
    Job.objects.filter(pk__in=[writing.pk, next_to_it.pk]).update(stage="swapping")
    assert needed_by_running(job) == {"here": {}, "elsewhere": {}}


@pytest.mark.django_db(transaction=True)
def test_of_many_at_once_only_those_are_admitted_that_fit(pool: StoragePool) -> None:
    images = images_in(pool, 12)
    answers = at_once(12, lambda number: submitted([images[number]]))
    refused = [answer for answer in answers if isinstance(answer, RefusedError)]
    assert [answer for answer in answers if isinstance(answer, Exception) and answer not in refused] == []
    assert {error.code for error in refused} == {"not_enough_space"}
    assert Job.objects.filter(state="queued").count() == 8
