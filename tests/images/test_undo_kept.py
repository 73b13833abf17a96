"""An undo copy goes by itself where it is known not to be the last good copy, and when time has surely passed."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from images import tasks
from images.alert_rules.looking import look
from images.rewrite import holding
from images.scan import hypervisors
from images.scan.hypervisors import Told
from storage_admin.agent.protocol import Moment
from storage_admin.events.models import Alert
from storage_admin.guests import services as guests
from storage_admin.guests.models import Guest, GuestSpan
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.models import Elapsed, Job
from tests import passing
from tests.agent.harness import qemu_img, write
from tests.factories import GuestFactory, HostFactory, ImageUseFactory, JobFactory
from tests.working import ADMIN, OPERATOR, client_as, create, image_at, refused_as, reread, run, scan, succeeded, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]
HOUR = 3600.0


@pytest.fixture
def job(path: Path) -> Job:
    """A finished reclaim whose undo copy waits for a day."""
    job = succeeded(work("reclaim", image_at(path).pk, OPERATOR))
    run(Job.objects.get(kind="scan", state="queued"))
    return job


@pytest.fixture
def guest(path: Path) -> Guest:
    """A guest whose disk the image is."""
    guest = GuestFactory.create(host=image_at(path).host, state="running")
    ImageUseFactory.create(image=image_at(path), disk__guest=guest)
    return guest


def removals() -> list[tuple[str, str]]:
    """How the removals of undo copies ended, those that are queued first done."""
    for one in Job.objects.filter(kind="discard_undo", state="queued"):
        run(one)
    return list(Job.objects.filter(kind="discard_undo").order_by("id").values_list("state", "error_code"))


def window_closes(job: Job) -> list[tuple[str, str]]:
    passing.undo_window(job)
    tasks.expire_undo()
    return removals()


def set_clock(monkeypatch: pytest.MonkeyPatch, ahead: timedelta) -> None:
    """The dashboard's clock on the wall is ahead; what counts seconds goes on as it did."""
    really = timezone.now
    monkeypatch.setattr(timezone, "now", lambda: really() + ahead)


def alerts() -> dict[str, str]:
    look(timezone.now())
    return dict(Alert.objects.filter(closed=None).values_list("key", "title"))


def exchange(path: Path) -> None:
    create(path.with_name("another.qcow2"), "8M")
    path.with_name("another.qcow2").replace(path)


def create_over(path: Path) -> None:
    qemu_img("create", "-q", "-f", "qcow2", path, "8M")


@pytest.mark.parametrize("harm", [exchange, create_over])
def test_the_copy_of_an_image_that_is_not_the_jobs_any_more_stays_is_told_of_and_goes_by_force_alone(
    path: Path, job: Job, harm: Callable[[Path], None]
) -> None:
    harm(path)
    assert window_closes(job) == [("failed", "undo_kept")]
    tasks.expire_undo()
    passing.undo_window(job)
    Job.objects.filter(kind="discard_undo").update(finished=timezone.now() - timedelta(days=2))
    tasks.expire_undo()
    assert removals() == [("failed", "undo_kept")]  # it is not tried again and again
    pool = image_at(path).pool
    assert (job.uid in str(list(path.parent.iterdir())), pool.undo_bytes) == (True, job.undo_bytes or pool.undo_bytes)
    key = f"undo_kept:{job.pk}"
    assert key in alerts()
    assert "may be the last good copy" in client_as(role="admin").get(f"/pools/{pool.pk}/").content.decode()
    assert run(services.discard_undo(ADMIN, job)).error_code == "undo_kept"
    assert run(services.discard_undo(ADMIN, job, force=True)).state == "succeeded"
    assert key not in alerts()
    assert not (path.parent / f".sa-{job.uid}.orig").exists()


@pytest.mark.parametrize(("state", "code"), [("failed", "host_unreachable"), ("interrupted", "interrupted")])
def test_a_kept_copy_is_still_told_of_when_its_removal_by_force_came_to_nothing(
    path: Path, job: Job, state: str, code: str
) -> None:
    exchange(path)
    window_closes(job)
    JobFactory.create(
        kind="discard_undo", target=job, state=state, error_code=code, error_detail="It came to nothing."
    )  # fmt: skip
    ((waiting, why),) = holding.kept(10)
    assert (waiting, "may be the last good copy" in why) == (job, True)
    assert f"undo_kept:{job.pk}" in alerts()
    assert (
        "may be the last good copy" in client_as(role="admin").get(f"/pools/{image_at(path).pool_id}/").content.decode()
    )
    assert run(services.discard_undo(ADMIN, job, force=True)).state == "succeeded"


def test_the_copy_of_an_image_that_its_guest_has_written_to_goes(path: Path, job: Job, guest: Guest) -> None:
    write(path, 0x33, "1M", "256k")
    passing.guest_ran(guest.kind, guest.uid, guest.host_id, HOUR, 0)
    assert window_closes(job) == [("succeeded", "")]


@pytest.mark.parametrize("ran", [None, (3 * HOUR, 2 * HOUR)])
def test_the_copy_of_an_image_that_was_written_to_while_no_guest_is_known_to_have_run_stays(
    path: Path, job: Job, guest: Guest, ran: tuple[float, float] | None
) -> None:
    write(path, 0x33, "1M", "256k")
    if ran is not None:
        passing.guest_ran(guest.kind, guest.uid, guest.host_id, *ran)
    assert window_closes(job) == [("failed", "undo_kept")]


def test_what_scans_saw_before_a_guest_ran_counts(path: Path, job: Job, guest: Guest) -> None:
    long_ago = 1_600_000_000 * 10**9
    Guest.objects.update(state="shut off")
    os.utime(path, ns=(long_ago, long_ago))
    scan(job.host)
    Guest.objects.update(state="running")
    assert [seen[1] for seen in reread(job).undo_seen][-1] == long_ago
    write(path, 0x33, "1M", "64k")
    passing.guest_ran(guest.kind, guest.uid, guest.host_id, HOUR, 0)
    assert window_closes(job) == [("failed", "undo_kept")]


def test_a_copy_whose_image_a_later_job_rewrote_goes_when_its_own_window_closes(path: Path, job: Job) -> None:
    later = work("reclaim", image_at(path).pk, OPERATOR, method="copy")
    if later.result and not later.result["swapped"]:
        later = work("convert", image_at(path).pk, OPERATOR, format="raw", replace=True)
    succeeded(later)
    assert window_closes(job) == [("succeeded", "")]


def test_a_clock_that_jumps_ends_no_window_and_is_told_of(
    path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    Elapsed.tick()
    with monkeypatch.context() as jump:
        set_clock(jump, timedelta(hours=25))
        tasks.expire_undo()
        assert removals() == []
        assert list(alerts()) == ["clock_jumped"]
    assert alerts() == {}
    tasks.expire_undo()
    assert removals() == []
    assert window_closes(job) == [("succeeded", "")]
    assert (path.parent / f".sa-{job.uid}.orig").exists() is False


def test_nothing_is_removed_while_the_clock_is_wrong_even_what_is_due(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    Elapsed.tick()
    passing.undo_window(job)
    with monkeypatch.context() as jump:
        set_clock(jump, timedelta(hours=25))
        tasks.expire_undo()
        assert removals() == []
    tasks.expire_undo()
    assert removals() == [("succeeded", "")]


def test_a_dashboard_that_starts_again_at_another_time_ends_no_window(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine was booted, and its clock was lost meanwhile; what it counts since then is all that has passed."""
    Elapsed.tick()
    set_clock(monkeypatch, timedelta(days=3))
    wall = timezone.now().timestamp()
    boots = {"boottime": 40.0}
    monkeypatch.setattr(Moment, "now", lambda: Moment("another-boot", boots["boottime"], wall))
    tasks.expire_undo()
    boots["boottime"] += 600
    tasks.expire_undo()
    assert removals() == []
    assert Elapsed.objects.count() == 2
    job.refresh_from_db()
    assert job.undo_due is not None
    boots["boottime"] += job.undo_due - Elapsed.now()
    wall += boots["boottime"] - 40
    assert Elapsed.now() == pytest.approx(job.undo_due, abs=1)


def test_of_two_machines_the_time_that_one_has_counted_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for boot, boottime in [("a", 1000.0), ("b", 900_000.0), ("a", 1060.0), ("b", 900_060.0), ("b", 900_120.0)]:
        monkeypatch.setattr(Moment, "now", lambda boot=boot, boottime=boottime: Moment(boot, boottime, 0.0))
        Elapsed.tick()
    assert Elapsed.now() == 120


def test_a_clock_that_stays_as_it_was_set_counts_as_right_after_a_day(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    Elapsed.tick()
    passing.undo_window(job)
    set_clock(monkeypatch, timedelta(hours=2))
    tasks.expire_undo()
    assert (removals(), abs(Elapsed.clock_jump() - 2 * HOUR) < 5) == ([], True)
    Elapsed.objects.update(jumped_at=-Elapsed.SETTLED)
    tasks.expire_undo()
    assert (removals(), Elapsed.clock_jump()) == ([("succeeded", "")], 0.0)


def test_the_grace_period_of_an_image_that_is_set_aside_does_not_end_by_a_jump(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = image_at(path)
    assert work("set_aside", image.pk, ADMIN).state == "succeeded"
    Elapsed.tick()
    set_clock(monkeypatch, timedelta(days=400))
    assert refused_as(services.submit, ADMIN, "delete_aside", image.pk, {"confirm_name": path.name}) == "clock_unsure"


def test_when_a_guest_ran_is_what_looks_saw_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = GuestFactory.create(host=HostFactory.create())
    key, at = (str(guest.kind), guest.uid), 0.0

    def saw(state: str, moment: float) -> None:
        monkeypatch.setattr(Elapsed, "now", lambda: moment)
        guests.saw_run(guest.host, [guest.kind], {key: state})

    for state, at in [
        ("shut off", 0), ("shut off", 600), ("running", 660), ("running", 1500), ("paused", 2000), ("shut off", 2060),
        ("running", 9000), ("running", 20_000), ("unknown", 20_030), ("running", 20_060), ("shut off", 30_000),
        ("unknown", 30_010),
    ]:  # fmt: skip
        saw(state, at)
    # Seconds lie between the first looks; before and after the others nobody looked for long.
    assert sorted(guests.spans_of([guest])) == [(600, 2060), (9000, 9000), (20_000, 20_060)]
    assert GuestSpan.objects.filter(ran=False).count() == 1
    monkeypatch.setattr(Elapsed, "now", lambda: 30_000 + guests.SPANS_KEPT)
    guests.saw_run(guest.host, [guest.kind], {})
    assert guests.spans_of([guest]) == []


def test_hosts_without_libvirt_are_asked_each_minute_where_undo_copies_wait(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told((str(Guest.Kind.VM),), (GuestFacts(kind="vm", uid="100", name="web", state="running"),))
    away = Told((str(Guest.Kind.CONTAINER),), unknown="It does not answer.", answered=False)
    asked: list[int] = []

    def ask(host: Host) -> list[Told]:
        asked.append(host.pk)
        return [told, away]

    monkeypatch.setattr(hypervisors, "ask", ask)
    HostFactory.create()
    tasks.look_at_users_of_undo_copies()
    span = GuestSpan.objects.get()
    assert (asked, span.host_id, span.kind, span.uid, span.ran) == ([job.host_id], job.host_id, "vm", "100", True)
    Job.objects.update(undo_state="expired")
    tasks.look_at_users_of_undo_copies()
    assert len(asked) == 1
