"""What jobs and recoveries say of volumes of which nobody tells what they take while they are inactive."""

from typing import Any

import pytest
from django.utils import timezone

from images.kinds.aside import DeleteAside, RestoreAside
from images.kinds.recover import Recover
from images.models import Image
from images.orphans import rows
from storage_admin.agent.protocol import b64
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job
from tests.factories import HostFactory, ImageFactory, JobFactory
from tests.images.test_volume_jobs import MIB, volume
from tests.working import reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


@pytest.fixture
def aside() -> Image:
    """A thin volume of 32 MiB that is set aside."""
    image = volume("lvmthin", orphan=True)
    StoragePool.objects.filter(pk=image.pool_id).update(volume_facts={}, state="ok")
    image = Image.objects.get(pk=image.pk)
    job = JobFactory.create(kind="set_aside", target=image, state="succeeded", rewrites=True)
    rows.set_aside(image, job)
    return image


def recover(image: Image, *found: dict[str, Any], **told: Any) -> None:
    job = JobFactory.create(kind="recover", target=image.host)
    Recover().record(job, {"recovered": list(found), "images": [], "unread": [], "silent": [], "away": [], **told})


def row(job: Job, outcome: str, **more: Any) -> dict[str, Any]:
    """As the agent tells it of a volume."""
    unknown = ("undo_of", "inode", "before_bytes", "discarded_bytes", "after_bytes")
    return {**dict.fromkeys(unknown), "job": job.uid, "outcome": outcome, "detail": "", "undo_bytes": 0} | more


def cut_off(image: Image, kind: str, **more: Any) -> Job:
    return JobFactory.create(
        kind=kind, target=image, state="interrupted", needs_recovery=True, finished=timezone.now(), rewrites=True,
        **more,
    )  # fmt: skip


def test_one_that_is_restored_or_deleted_has_taken_what_it_took_before(aside: Image) -> None:
    told = RestoreAside().record(
        JobFactory.create(kind="restore_aside", target=aside), {"after_bytes": 0, "seconds": 1.0}
    )
    assert (told["before_bytes"], told["after_bytes"], reread(aside).allocated_size) == (32 * MIB,) * 3
    rows.set_aside(reread(aside), JobFactory.create(kind="set_aside", target=aside))
    job = JobFactory.create(kind="delete_aside", target=aside)
    told = DeleteAside().record(job, {"before_bytes": 0, "freed_bytes": 5 * MIB, "seconds": 1.0})
    assert (told["before_bytes"], told["freed_bytes"]) == (32 * MIB, 5 * MIB)
    assert (reread(job).before_bytes, reread(job).freed_bytes) == (32 * MIB, 5 * MIB)


@pytest.mark.parametrize(
    ("alone", "takes", "told", "freed"),
    [(5 * MIB, 32 * MIB, 9 * MIB, 5 * MIB), (5 * MIB, 32 * MIB, 4 * MIB, 4 * MIB), (None, 32 * MIB, 40 * MIB, 32 * MIB),
     (None, None, 40 * MIB, 40 * MIB), (5 * MIB, 32 * MIB, 0, 0), (5 * MIB, 32 * MIB, None, None)],
)  # fmt: skip
def test_what_others_of_a_thin_pool_let_go_of_meanwhile_is_not_what_a_deletion_has_freed(
    aside: Image, alone: int | None, takes: int | None, told: int | None, freed: int | None
) -> None:
    Image.every.filter(pk=aside.pk).update(alone_bytes=alone, allocated_size=takes)
    job = JobFactory.create(kind="delete_aside", target=aside)
    assert DeleteAside().record(job, {"before_bytes": 0, "freed_bytes": told, "seconds": 1.0})["freed_bytes"] == freed
    assert reread(job).freed_bytes == freed


def test_one_whose_size_nobody_has_ever_told_is_not_said_to_take_nothing(aside: Image) -> None:
    Image.every.filter(pk=aside.pk).update(allocated_size=None)
    RestoreAside().record(JobFactory.create(kind="restore_aside", target=aside), {"after_bytes": 0, "seconds": 1.0})
    assert reread(aside).allocated_size is None


def test_one_that_a_recovery_finds_set_aside_holds_what_it_took(aside: Image) -> None:
    rows.restored(aside)
    lost = cut_off(aside, "set_aside")
    recover(aside, row(lost, "kept"))
    assert (reread(lost).state, (reread(lost).result or {})["held_bytes"]) == ("succeeded", 32 * MIB)


@pytest.mark.parametrize(("alone", "freed"), [(5 * MIB, 5 * MIB), (None, None)])
def test_a_deletion_that_a_recovery_finds_done_has_freed_no_more_than_the_volume_had_alone(
    aside: Image, alone: int | None, freed: int | None
) -> None:
    Image.every.filter(pk=aside.pk).update(alone_bytes=alone)
    deletion = cut_off(aside, "delete_aside")
    assert aside.aside_job is not None
    recover(aside, row(aside.aside_job, "lost"))
    assert (reread(aside).state, reread(deletion).state) == ("deleted", "succeeded")
    assert reread(deletion).freed_bytes == (reread(deletion).result or {})["freed_bytes"] == freed


@pytest.mark.parametrize(
    ("stays", "is_due", "owes", "warnings"), [(True, False, False, 1), (True, True, True, 0), (False, False, True, 0)]
)
def test_guests_that_were_led_back_to_an_original_which_stays_are_left_with_it(
    stays: bool, is_due: bool, owes: bool, warnings: int
) -> None:
    """They may have written to it before the copy was found: an admin decides, not a recovery."""
    image = volume("lvmthin")
    options = {"target_pool": image.pool_id, "target_name": "new", "repoint_guest": True}
    kept = {"guests": [{"name": "web"}], "stays": stays, "new_path_b64": b64(b"/dev/vg/new")}
    lost = cut_off(image, "move", options=options, kept=kept, repoint_due=is_due)
    recover(image, row(lost, "finished", made_bytes=0, undo_waits=False, path_b64=""))
    assert (reread(lost).state, lost.repoint_due) == ("succeeded", owes)
    assert lost.log_lines.filter(level="warning").count() == warnings


def test_what_is_on_a_backend_that_is_silent_is_still_owed_a_recovery(aside: Image) -> None:
    file = ImageFactory.create(host=aside.host)
    jobs = {
        "volume": cut_off(aside, "delete_aside"),
        "moved there": cut_off(file, "move", plan={"scratch_pool": aside.pool_id}),
        "file": cut_off(file, "reclaim"),
    }
    recover(aside, silent=["lvm"])
    assert {name for name, job in jobs.items() if reread(job).needs_recovery} == {"volume", "moved there"}
    recover(aside, silent=["zfs", "rbd"])
    assert not any(reread(job).needs_recovery for job in jobs.values())


def test_a_recovery_leaves_alone_what_a_running_job_of_another_host_has_made_on_a_disk_that_both_see() -> None:
    here, there = (volume("lvm", HostFactory.create(slug=slug)) for slug in ("here", "there"))
    running = [JobFactory.create(kind="move", target=one, state="running", rewrites=True).uid for one in (here, there)]
    JobFactory.create(kind="move", target=there, state="failed", rewrites=True)
    asked = Recover().request(JobFactory.create(kind="recover", target=here.host))
    assert sorted(asked["jobs_active"]) == sorted(running)


def test_what_a_move_has_made_takes_what_its_agent_said_where_nobody_tells_it_any_more() -> None:
    """As after a restart of the host: the new volume is thin, and inactive until the recovery."""
    image = volume("lvmthin")
    options = {"target_pool": image.pool_id, "target_name": "new", "repoint_guest": False}
    lost = cut_off(image, "move", options=options, kept={"ready": {"made_bytes": 7 * MIB}})
    recover(image, row(lost, "finished", made_bytes=0, undo_waits=False, path_b64=""))
    assert (reread(lost).state, (reread(lost).result or {})["after_bytes"]) == ("succeeded", 7 * MIB)
    assert reread(lost).freed_bytes == -7 * MIB
