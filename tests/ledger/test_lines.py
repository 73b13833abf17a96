"""What a job's row says of space, and what becomes of that when its host, pool or image goes."""

from typing import Any

import pytest

from images.ledger.selectors import freed_of, lines_for
from images.ledger.sums import summary
from images.rewrite import record
from images.selectors import overview
from storage_admin.accounts.models import SYSTEM, Actor, Role
from storage_admin.hosts import registration
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from storage_admin.jobs.selectors import jobs_for
from tests.factories import GIB, MIB, HostFactory, IdempotentAnswerFactory, ImageFactory, JobFactory, StoragePoolFactory
from tests.ledger.rows import freed, held, job_on
from tests.working import ADMIN, reread

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def test_a_line_says_what_where_and_when() -> None:
    image = ImageFactory.create(pool__name="fast")
    job = job_on(image, plan={"before_bytes": 10, "predicted_after_bytes": 4})
    record.write_line(job, image.pool, 12, 5)
    assert (reread(job).before_bytes, job.after_bytes, job.predicted_bytes, job.freed_bytes) == (12, 5, 6, 7)
    assert (job.space_pool, job.pool_name, job.host_name) == (image.pool, "fast", image.host.name)
    assert job.freed_at is not None
    assert job.freed_month == f"{job.freed_at:%Y-%m}"


def test_nothing_is_freed_while_an_undo_copy_waits_and_what_is_undone_never_is() -> None:
    job = held(10, 4)
    assert (job.freed_bytes, job.freed_at, job.freed_month) == (0, None, "")
    record.close_line(job, 6)
    assert (reread(job).freed_bytes, bool(job.freed_at)) == (6, True)
    record.close_line(job, 0, undone=True)
    assert (reread(job).freed_bytes, job.freed_at, job.freed_month) == (0, None, "")


def test_a_file_beside_an_image_takes_what_it_occupies() -> None:
    job = job_on(kind="convert")
    record.write_line_beside(job, None, 7 * MIB)
    assert (reread(job).before_bytes, job.after_bytes, job.freed_bytes, job.pool_name) == (0, 7 * MIB, -7 * MIB, "")


def test_work_in_place_that_changed_nothing_has_no_line() -> None:
    job = job_on(state="running", generation=1)
    record.begin_line_in_place(job, 9)
    assert (reread(job).before_bytes, job.freed_bytes) == (9, None)
    record.write_line_in_place(job, None, 9, 9)
    assert (reread(job).before_bytes, job.freed_bytes) == (None, None)
    record.write_line_in_place(job, None, 9, 2)
    assert reread(job).freed_bytes == 7


def test_a_job_that_is_not_ours_any_more_notes_nothing() -> None:
    job = job_on(state="interrupted", generation=2)
    record.begin_line_in_place(job, 9)
    assert reread(job).before_bytes is None


def test_the_lines_of_a_host_that_is_removed_stay_in_every_sum_and_its_other_jobs_go() -> None:
    host = HostFactory.create(kind="ssh", slug="old", name="Old one")
    image = ImageFactory.create(pool__host=host, pool__name="old pool")
    line = freed(5 * GIB, GIB, image, created_by="ada")
    freed(3 * GIB, GIB)
    JobFactory.create(target=host, state="succeeded")
    number = host.pk
    registration.remove_host(ADMIN, host)
    assert not Host.objects.filter(pk=number).exists()
    assert list(Job.objects.filter(host=number)) == [line]
    assert [job.pk for job in jobs_for(SYSTEM)] == [job.pk for job in Job.objects.exclude(pk=line.pk)]
    assert jobs_for(SYSTEM).count() == 1
    assert freed_of(lines_for(SYSTEM)).freed_bytes == 6 * GIB
    assert overview(SYSTEM).won_so_far.freed_bytes == 6 * GIB
    found = summary(lines_for(SYSTEM))
    of_host, of_pool = found.hosts[0], found.pools[0]
    assert (of_host.id, of_host.name, of_host.sums.freed_bytes) == (None, "Old one", 4 * GIB)
    assert (of_pool.id, of_pool.name, of_pool.host_id, of_pool.host) == (None, "old pool", None, "Old one")
    told: Any = lines_for(SYSTEM).get(pk=line.pk)
    assert (told.host_now, told.pool_now, told.image_number) == (None, None, None)
    assert told.target_label == image.name


def test_a_key_that_was_answered_with_a_job_of_a_host_that_is_gone_is_free_again() -> None:
    host = HostFactory.create(kind="ssh")
    line = freed(5, 1, ImageFactory.create(pool__host=host))
    IdempotentAnswerFactory.create(job=line, actor=ADMIN.name, key="k")
    other = ImageFactory.create()
    registration.remove_host(ADMIN, host)
    job = services.submit(ADMIN, "analyze", other.pk, {}, idempotency_key="k")
    assert services.submit(ADMIN, "analyze", other.pk, {}, idempotency_key="k") == job


def test_two_hosts_that_were_removed_under_one_name_are_two() -> None:
    for _ in range(2):
        host = HostFactory.create(kind="ssh", name="node")
        freed(2 * GIB, GIB, ImageFactory.create(pool__host=host))
        registration.remove_host(ADMIN, host)
    assert [(one.id, one.name) for one in summary(lines_for(SYSTEM)).hosts] == [(None, "node"), (None, "node")]


def test_the_lines_of_a_host_that_was_removed_exist_for_nobody_who_is_limited_to_hosts() -> None:
    host = HostFactory.create(kind="ssh", slug="old")
    freed(5 * GIB, GIB, ImageFactory.create(pool__host=host))
    registration.remove_host(ADMIN, host)
    HostFactory.create(slug="old")
    limited = Actor("t", Role.ADMIN, hosts=frozenset({"old"}))
    assert not lines_for(limited).exists()


def test_the_lines_of_a_pool_or_an_image_that_is_gone_stay() -> None:
    pool = StoragePoolFactory.create(name="gone")
    line = freed(5 * GIB, GIB, ImageFactory.create(pool=pool))
    pool.delete()
    told: Any = lines_for(SYSTEM).get()
    assert (told.pk, told.host_now, told.pool_now, told.pool_name) == (line.pk, line.host.name, None, "gone")
    (found,) = summary(lines_for(SYSTEM)).pools
    assert (found.id, found.name, found.host_id) == (None, "gone", line.host_id)


def test_a_forced_undo_counts_what_was_written_since_to_the_image_that_it_undid() -> None:
    image = ImageFactory.create()
    undone = job_on(image, undo_state="undone")
    record.write_held_line(undone, image.pool, 9, 4)
    undo = job_on(undone, kind="undo")
    record.write_line(undo, image.pool, 6, 9, freed=2)
    told: Any = lines_for(SYSTEM).get(pk=undo.pk)
    assert (told.image_number, told.freed_bytes) == (image.pk, 2)
