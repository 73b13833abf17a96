"""What a request for a job becomes: a row with its locks, the first answer again, or a reason why not."""

from typing import Any

import pytest

from images.models import Image
from storage_admin.accounts.models import Actor, AuditEntry, ForbiddenError, Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.jobs import kinds, services
from storage_admin.jobs.models import IdempotentAnswer, Job, JobLog, ResourceLock
from tests.factories import GuestFactory, HostFactory, ImageFactory, JobFactory, StoragePoolFactory
from tests.jobs.test_claims import at_once
from tests.working import ADMIN, OPERATOR, VIEWER, at_most_queries, refused_as, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet", "no_hypervisor"), pytest.mark.sql]


def reclaim(image: Image, actor: Actor = OPERATOR, key: str = "", **options: Any) -> Job:
    return services.submit(actor, "reclaim", image.pk, options, idempotency_key=key)


def test_a_job_is_a_row_with_its_plan_locks_log_and_audit() -> None:
    base = ImageFactory.create()
    image = ImageFactory.create(backing=base)
    job = reclaim(image, undo_hours=2)
    assert (job.state, job.rewrites, job.created_by, job.target_label) == ("queued", True, "olga", image.name)
    assert job.options["undo_hours"] == 2
    assert job.options["compression"] == "auto"
    assert job.plan["before_bytes"] == image.allocated_size
    locks = {(lock.key.partition(":")[0], lock.exclusive) for lock in job.locks.all()}
    assert locks == {("inode", True), ("inode", False), ("image", True), ("image", False)}
    assert [line.text for line in JobLog.objects.filter(job=job)] == ["queued by olga"]
    assert AuditEntry.objects.get().what == "reclaim queued"


def test_twenty_clones_of_one_template_queue_and_its_writer_is_busy() -> None:
    base = ImageFactory.create()
    clones = [reclaim(ImageFactory.create(backing=base)) for _ in range(20)]
    with pytest.raises(RefusedError) as refused:
        reclaim(base)
    assert refused.value.code == "busy"
    assert any(f"Job {clone.pk} " in refused.value.detail for clone in clones)
    assert Job.objects.count() == 20


def test_a_writer_of_the_template_keeps_its_clones_waiting_outside() -> None:
    base = ImageFactory.create()
    first = reclaim(base)
    clone = ImageFactory.create(backing=base)
    assert refused_as(reclaim, clone) == "busy"
    services.cancel(OPERATOR, first)
    assert reclaim(clone).state == "queued"


def test_an_image_that_became_another_file_while_its_job_waits_stays_locked() -> None:
    image = ImageFactory.create()
    reclaim(image)
    Image.objects.filter(pk=image.pk).update(inode="999999")
    assert refused_as(reclaim, image) == "busy"


def test_two_names_of_one_file_share_its_lock() -> None:
    image = ImageFactory.create()
    other = ImageFactory.create(pool=image.pool, inode=image.inode, dev=image.dev)
    reclaim(image)
    assert refused_as(reclaim, other) == "busy"


def test_a_refused_job_leaves_nothing_but_a_line_in_the_audit_trail() -> None:
    image = ImageFactory.create(in_use=True, in_use_detail="guest web is running")
    assert refused_as(reclaim, image) == "image_in_use"
    assert (Job.objects.count(), ResourceLock.objects.count()) == (0, 0)
    assert (AuditEntry.objects.get().after or {})["code"] == "image_in_use"


def test_a_busy_job_leaves_no_locks_behind() -> None:
    base = ImageFactory.create()
    reclaim(base)
    before = ResourceLock.objects.count()
    assert refused_as(reclaim, ImageFactory.create(backing=base)) == "busy"
    assert (Job.objects.count(), ResourceLock.objects.count()) == (1, before)


def test_the_same_key_gets_the_first_answer_again_whatever_became_of_it() -> None:
    image = ImageFactory.create()
    first = reclaim(image, key="k")
    assert reclaim(image, key="k").pk == first.pk
    Job.objects.filter(pk=first.pk).update(state="failed")
    assert reclaim(image, key="k").pk == first.pk
    assert Job.objects.count() == 1


def test_a_key_is_remembered_also_where_the_answer_was_a_job_that_waits_already() -> None:
    host = HostFactory.create()
    waiting = services.submit(OPERATOR, "scan", host.pk, {})
    assert services.submit(OPERATOR, "scan", host.pk, {}, idempotency_key="k").pk == waiting.pk
    Job.objects.filter(pk=waiting.pk).update(state="succeeded")
    assert services.submit(OPERATOR, "scan", host.pk, {}, idempotency_key="k").pk == waiting.pk


def test_a_key_for_another_request_is_invalid() -> None:
    image = ImageFactory.create()
    reclaim(image, key="k")
    for options in ({"undo_hours": 1}, {"compression": "zlib"}):
        with pytest.raises(InvalidError, match="Idempotency-Key"):
            reclaim(image, key="k", **options)
    with pytest.raises(InvalidError):
        services.submit(OPERATOR, "scan", image.host_id, {}, idempotency_key="k")


def test_keys_of_two_actors_do_not_meet() -> None:
    host = HostFactory.create()
    first = services.submit(OPERATOR, "recover", host.pk, {}, idempotency_key="k")
    Job.objects.update(state="succeeded")
    assert services.submit(ADMIN, "recover", host.pk, {}, idempotency_key="k").pk != first.pk


@pytest.mark.parametrize("key", ["x" * 256, "a\0b", "line\nbreak"])
def test_an_unusable_key_is_invalid(key: str) -> None:
    with pytest.raises(InvalidError):
        reclaim(ImageFactory.create(), key=key)
    assert IdempotentAnswer.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_one_key_at_once_from_ten_is_one_job() -> None:
    image = ImageFactory.create()
    answers = at_once(10, lambda _: reclaim(image, key="k").pk)
    assert set(answers) == {Job.objects.get().pk}


@pytest.mark.django_db(transaction=True)
def test_two_users_at_once_get_one_job_and_one_refusal() -> None:
    image = ImageFactory.create()
    answers = at_once(8, lambda number: reclaim(image, Actor(f"user{number}", Role.OPERATOR)).pk)
    refused = [answer for answer in answers if isinstance(answer, RefusedError)]
    assert [error.code for error in refused] == ["busy"] * 7
    assert Job.objects.count() == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"method": "magic"}, "method"), ({"undo_hours": -1}, "undo_hours"), ({"undo_hours": "soon"}, "undo_hours"),
        ({"undo_hours": True}, "undo_hours"), ({"bandwidth_bytes_sec": 5}, "bandwidth_bytes_sec"),
        ({"force": 1}, "force"), ({"idle_io": "yes"}, "idle_io"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_is_named(options: dict[str, Any], field: str) -> None:
    image = ImageFactory.create()
    with pytest.raises(InvalidError, match=r".") as invalid:
        reclaim(image, **options)
    assert (set(invalid.value.fields), Job.objects.count()) == ({field}, 0)


@pytest.mark.parametrize("options", [[], "x", 5, None])
def test_options_that_are_no_object_are_invalid(options: Any) -> None:
    with pytest.raises(InvalidError):
        services.submit(OPERATOR, "reclaim", ImageFactory.create().pk, options)


def test_an_unknown_kind_or_target_says_so() -> None:
    with pytest.raises(InvalidError, match="reclaim"):
        services.submit(OPERATOR, "format_c", 1, {})
    for kind in kinds.every():
        with pytest.raises(NotFoundError):
            services.submit(ADMIN, kind.name, 4711, {"priority": 1} if kind.target == "guest" else {})


def test_roles_are_asked_in_the_service_for_every_kind() -> None:
    host, image = HostFactory.create(), ImageFactory.create()
    done = JobFactory.create(kind="reclaim", target=image, state="succeeded", undo_state="available")
    targets = {"host": host.pk, "image": image.pk, "job": done.pk, "guest": GuestFactory.create().pk}
    targets["pool"] = StoragePoolFactory.create().pk
    for kind in kinds.every():
        for role in (Role.VIEWER, Role.OPERATOR):
            if role < kind.role:
                with pytest.raises(ForbiddenError):
                    services.submit(Actor("x", role), kind.name, targets[kind.target], {})
    assert Job.objects.exclude(pk=done.pk).count() == 0
    admins = {kind.name for kind in kinds.every() if kind.role == Role.ADMIN}
    devices, asides = {"from_device", "to_device", "attach", "detach"}, {"set_aside", "restore_aside", "delete_aside"}
    assert admins == {"discard_undo", "settle_leftover", *devices, *asides}


def test_a_viewer_may_look_at_a_plan_and_do_nothing_else() -> None:
    image = ImageFactory.create()
    assert services.plan(VIEWER, "reclaim", image.pk, {}).refusals == ()
    job = reclaim(image)
    for act in (services.cancel, services.retry, services.undo, services.discard_undo):
        Job.objects.filter(pk=job.pk).update(state="queued" if act is services.cancel else "failed")
        with pytest.raises(ForbiddenError):
            act(VIEWER, reread(job))


def test_what_is_on_other_hosts_is_refused_in_the_words_for_what_nobody_has() -> None:
    image = ImageFactory.create()
    targets = {"host": image.host_id, "image": image.pk, "pool": StoragePoolFactory.create().pk}
    targets |= {"job": JobFactory.create(target=image).pk, "guest": GuestFactory.create().pk}
    limited = Actor("token", Role.ADMIN, hosts=frozenset({"elsewhere"}))
    for kind in kinds.every():
        said = []
        for target in (targets[kind.target], 4711):
            with pytest.raises(NotFoundError) as told:
                services.plan(limited, kind.name, target, {})
            said.append(str(told.value).replace(str(target), "N"))
        assert said[0] == said[1], kind.name


def test_what_is_on_other_hosts_does_not_exist_for_a_limited_token() -> None:
    image = ImageFactory.create()
    limited = Actor("token", Role.ADMIN, hosts=frozenset({"elsewhere"}))
    for kind, target in (("reclaim", image.pk), ("scan", image.host_id)):
        with pytest.raises(NotFoundError):
            services.submit(limited, kind, target, {})
        with pytest.raises(NotFoundError):
            services.plan(limited, kind, target, {})
    job = reclaim(image)
    with pytest.raises(ForbiddenError):
        services.cancel(limited, job)


def test_a_plan_writes_nothing() -> None:
    image = ImageFactory.create()
    with at_most_queries(15):
        predicted = services.plan(OPERATOR, "reclaim", image.pk, {})
    assert predicted.before_bytes == image.allocated_size
    assert predicted.predicted_after_bytes is None
    assert (Job.objects.count(), AuditEntry.objects.count()) == (0, 0)


def test_a_queued_job_is_cancelled_at_once_with_its_locks() -> None:
    job = services.cancel(OPERATOR, reclaim(ImageFactory.create()))
    assert (job.state, job.cancel_requested, job.locks.count()) == ("cancelled", True, 0)
    assert job.finished is not None


def test_a_running_job_is_asked_to_stop_and_keeps_its_locks() -> None:
    job = reclaim(ImageFactory.create())
    Job.objects.filter(pk=job.pk).update(state="running")
    job = services.cancel(OPERATOR, job)
    assert (job.state, job.cancel_requested) == ("running", True)
    assert job.locks.count() == 2


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled", "interrupted"])
def test_what_has_ended_cannot_be_cancelled(state: str) -> None:
    with pytest.raises(InvalidError, match="already ended"):
        services.cancel(OPERATOR, JobFactory.create(state=state))


def test_a_retry_is_a_new_job_planned_anew() -> None:
    image = ImageFactory.create()
    job = reclaim(image, undo_hours=3)
    services.cancel(OPERATOR, job)
    again = services.retry(OPERATOR, reread(job))
    assert again.pk != job.pk
    assert (again.options, again.state) == (job.options, "queued")
    services.cancel(OPERATOR, again)
    Image.objects.filter(pk=image.pk).update(in_use=None)
    assert refused_as(services.retry, OPERATOR, job) == "guests_unknown"


@pytest.mark.parametrize("state", ["queued", "running", "succeeded"])
def test_only_what_did_not_succeed_is_retried(state: str) -> None:
    with pytest.raises(InvalidError, match="can be retried"):
        services.retry(OPERATOR, JobFactory.create(state=state))


def test_forcing_an_undo_is_for_admins_also_as_a_plain_job_and_as_a_retry() -> None:
    image = ImageFactory.create()
    done = JobFactory.create(kind="reclaim", target=image, state="succeeded", undo_state="available")
    with pytest.raises(ForbiddenError):
        services.undo(OPERATOR, done, force=True)
    with pytest.raises(ForbiddenError):
        services.submit(OPERATOR, "undo", done.pk, {"force": True})
    forced = services.undo(ADMIN, done, force=True)
    services.cancel(ADMIN, forced)
    with pytest.raises(ForbiddenError):
        services.retry(OPERATOR, reread(forced))


def test_an_undo_and_a_reclaim_of_one_image_exclude_each_other() -> None:
    image = ImageFactory.create()
    done = JobFactory.create(kind="reclaim", target=image, state="succeeded", undo_state="available")
    services.undo(OPERATOR, done)
    assert refused_as(reclaim, image) == refused_as(services.discard_undo, ADMIN, done) == "busy"
