"""Snapshots with files of their own that libvirt deletes under a running guest, and what may go away meanwhile."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO
from unittest import mock

import pytest

from images.live import follow
from images.live.follow import GUEST_ENDED
from images.models import Image
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import snapshots
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.kinds import in_doubt
from storage_admin.jobs.models import Job
from tests.chance import night
from tests.harness import libvirtd as daemons
from tests.harness.guests import Disk, Domains, LibvirtGuest
from tests.harness.processes import wait_until
from tests.live.chains import chain_of, definition_of, done, kill_qemu, pid_of
from tests.live.conftest import scanned
from tests.live.test_faults import KilledError, dies_in
from tests.live.test_switches import asked
from tests.live.writer import acknowledged, begin, check, wait_for_writes, writing
from tests.working import ON_LIBVIRT, OPERATOR, create, refused_as, run, said, scan, succeeded

pytestmark = [pytest.mark.guest, pytest.mark.django_db(transaction=True), *ON_LIBVIRT]
TIMES = 5 if night() else 1
Begun = Callable[[str], tuple[LibvirtGuest, Job]]
QUERY = {"execute": "query-block-jobs"}
#: MiB that each overlay holds, and bytes a second by which they are merged: libvirt itself takes no limit. QEMU merges
#: the first 32 MiB of what a guest writes to at once, whatever the limit.
HELD, SPEED = 88, 20 << 20
#: A second line to QEMU, of an abstract name: an argument with a path in it would be taken for a file in use.
LINE = (
    "<qemu:commandline>"
    "<qemu:arg value='-chardev'/><qemu:arg value='socket,id=line,path={},abstract=on,server=on,wait=off'/>"
    "<qemu:arg value='-mon'/><qemu:arg value='chardev=line,mode=control'/>"
    "</qemu:commandline>"
)
#: What the guest's disk stands on after each of them was deleted.
AFTER = {"one": ["disk.two", "disk.qcow2"], "two": ["disk.one", "disk.qcow2"]}

#: Of two snapshots the inner one, and the one whose overlay the guest writes to.
both = pytest.mark.parametrize("name", AFTER)
one_by_day = pytest.mark.parametrize("name", [pytest.param("one", marks=pytest.mark.night), "two"])
times = pytest.mark.parametrize("time_of", range(TIMES))


@contextlib.contextmanager
def _line_to(guest: LibvirtGuest) -> Iterator[TextIO]:
    """The line over which a guest's QEMU says what its jobs do, and obeys, whatever libvirt waits for."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(60)
        line.connect(f"\0{guest.name}")
        with line.makefile("rw") as file:
            _tell(file, "qmp_capabilities")
            yield file


def _tell(line: TextIO, command: str, **arguments: object) -> None:
    line.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
    line.flush()


def _slowly(qemu: int, begun: threading.Event) -> None:
    """Lets a QEMU work a twentieth of its time until something has begun, so that nobody comes too late for that."""
    while not begun.wait(0.04):
        os.kill(qemu, signal.SIGCONT)
        time.sleep(0.002)
        os.kill(qemu, signal.SIGSTOP)
    os.kill(qemu, signal.SIGCONT)


@contextlib.contextmanager
def while_it_merges(guest: LibvirtGuest, happens: Callable[[], object], speed: int = SPEED) -> Iterator[None]:
    """Within it, something happens once QEMU has begun to merge an overlay of the guest, which it does slowly then."""
    caught = threading.Event()

    def watch() -> None:
        with _line_to(guest) as line:
            said = map(json.loads, line)
            changes = (one["data"]["id"] for one in said if one.get("event") == "JOB_STATUS_CHANGE")
            _tell(line, "block-job-set-speed", device=next(changes), speed=speed)
            answer = next(one for one in said if "event" not in one)
        assert "return" in answer, f"nothing is merged any more: {answer}"
        caught.set()
        slowed.result()
        time.sleep(0.5)
        try:
            happens()
        except BaseException:
            daemons.restart()  # a job waits for libvirt as long as it takes
            raise

    with ThreadPoolExecutor() as threads:
        slowed = threads.submit(_slowly, pid_of(guest), caught)
        watched = threads.submit(watch)
        try:
            yield
        finally:
            caught.set()
            watched.result()


@pytest.fixture
def begun(domains: Domains, shared_folder: Path) -> Begun:
    """``begun(name)``: a guest with the snapshots one and two, and a job that deletes one of them."""

    def made(name: str) -> tuple[LibvirtGuest, Job]:
        own = f"sa-test-{secrets.token_hex(4)}"
        guest = domains.run([Disk(create(shared_folder / "disk.qcow2", "160M"))], own, override=LINE.format(own))
        host, row = scanned(shared_folder, guest)
        for one in AFTER:
            done(services.submit(OPERATOR, "snapshot", row.pk, {"name": one, "quiesce": False}))
            write = f"dd if=/dev/urandom of=/dev/vda bs=1M seek=68 count={HELD} conv=notrunc,fsync"
            guest.console.run(f"{write} 2>/dev/null")
        scan(host)
        return guest, services.submit(OPERATOR, "delete_snapshot", row.pk, {"name": name})

    return made


def listed(job: Job) -> set[str]:
    return {one.name for one in snapshots.of(job.host, Guest.objects.get(pk=job.target_id).uid).found}


def whole(guest: LibvirtGuest, folder: Path, after: list[str]) -> None:
    """Chain, definition and every acknowledged write; a check of the guest's last state."""
    assert (chain_of(guest), definition_of(guest)) == (after, after[0])
    last = acknowledged(guest)
    guest.stop()
    check(folder / after[0], last)


@times
@both
def test_libvirtd_is_killed_meanwhile_and_asked_again(
    domains: Domains, begun: Begun, shared_folder: Path, name: str, time_of: int
) -> None:
    guest, job = begun(name)

    def kill() -> None:
        daemons.kill()
        time.sleep(3)
        daemons.restart()

    with writing(guest):
        with while_it_merges(guest, kill):
            run(job)
        domains.reconnect(guest)
        succeeded(job)
        wait_for_writes(guest, 2)
    assert listed(job) == set(AFTER) - {name}
    whole(guest, shared_folder, AFTER[name])
    assert not (shared_folder / f"disk.{name}").exists()


@times
@both
def test_a_guest_that_is_killed_meanwhile_keeps_what_was_acknowledged_and_its_snapshot(
    domains: Domains, begun: Begun, shared_folder: Path, name: str, time_of: int
) -> None:
    guest, job = begun(name)
    last: list[int] = []

    def kill() -> None:
        last.append(acknowledged(guest))
        guest.domain.destroy()

    begin(guest)
    with while_it_merges(guest, kill, SPEED // 5):
        run(job)
    assert (job.state, job.error_code in {"tool_failed", GUEST_ENDED}) == ("failed", True), said(job)
    if job.error_code == GUEST_ENDED:  # seldom libvirt 9.0 waits for that block job forever
        daemons.restart()
        domains.reconnect(guest)
    assert listed(job) == set(AFTER)
    assert definition_of(guest) == "disk.two"
    check(shared_folder / "disk.two", last[0])
    scan(job.host)
    done(services.submit(OPERATOR, "delete_snapshot", job.target_id, {"name": name}))
    check(shared_folder / AFTER[name][0], last[0])


def test_a_libvirt_that_waits_for_a_guest_that_has_ended_is_given_up(
    begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest, job = begun("two")

    def waits(host: Host, uid: str, name: str, created: int | None, tick: Callable[[], None]) -> None:
        guest.domain.destroy()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            tick()
            time.sleep(0.1)

    monkeypatch.setattr(follow, "LOOKS", 0.5)
    monkeypatch.setattr(snapshots, "delete", waits)
    run(job)
    assert (job.state, job.error_code) == ("failed", GUEST_ENDED), (job.error_detail, said(job))
    assert in_doubt(job)
    assert listed(job) == set(AFTER)


def test_what_a_guest_has_written_after_a_switch_that_libvirt_never_knew_of_is_kept(
    domains: Domains, begun: Begun, shared_folder: Path
) -> None:
    guest, job = begun("two")
    qemu, last = pid_of(guest), list[int]()

    def unseen() -> None:
        daemons.kill()
        wait_until(lambda: asked(guest, lambda _: QUERY)[0]["ready"], 60, "all is merged")
        asked(
            guest,
            lambda _: QUERY,
            lambda jobs: {"execute": "job-complete", "arguments": {"id": jobs[0]["device"]}},
        )
        wait_for_writes(guest, 80)
        last.append(acknowledged(guest))
        kill_qemu(qemu)
        daemons.restart()

    begin(guest)
    with while_it_merges(guest, unseen, SPEED // 5):
        run(job)
    domains.reconnect(guest)
    assert (job.state, job.error_code) == ("failed", GUEST_ENDED), (job.error_detail, said(job))
    assert listed(job) == set(AFTER)
    assert definition_of(guest) == "disk.two"
    scan(job.host)
    again = services.plan(OPERATOR, "delete_snapshot", job.target_id, {"name": "two"})
    assert [one.code for one in again.by_hand] == [GUEST_ENDED]  # which policies leave alone
    assert refused_as(services.retry, OPERATOR, job) == GUEST_ENDED  # nobody would see the warning
    check(shared_folder / "disk.one", last[0])


def test_a_guest_that_runs_on_without_libvirt_is_left_alone(
    domains: Domains, begun: Begun, shared_folder: Path
) -> None:
    """A libvirt 9.0 that is killed in the wrong moment leaves what it cannot read again: to it, the guest is off."""
    guest, job = begun("two")
    qemu, status = pid_of(guest), Path(f"/run/libvirt/qemu/{guest.name}.xml")

    def lost() -> None:
        daemons.kill()
        before = status.read_text()
        status.write_text(before.replace("job='active-commit'", "job=''"))
        assert status.read_text() != before
        daemons.restart()

    with writing(guest):
        with while_it_merges(guest, lost, SPEED // 5):
            run(job)
        domains.reconnect(guest)
        assert not guest.domain.isActive()
        assert (job.state, job.error_code) == ("failed", GUEST_ENDED), (job.error_detail, said(job))
        wait_for_writes(guest, 2)
    last = acknowledged(guest)
    kill_qemu(qemu)
    assert listed(job) == set(AFTER)
    check(shared_folder / "disk.two", last)


@one_by_day
def test_a_worker_that_dies_meanwhile_is_followed_by_the_next_one(
    begun: Begun, shared_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    guest, job = begun(name)
    deletes = snapshots.delete

    def dies(host: Host, uid: str, one: str, created: int | None, tick: object) -> None:
        """The request goes on in libvirt, and whoever waits for it is gone."""
        threading.Thread(target=deletes, args=(host, uid, one, created, lambda: None), daemon=True).start()
        time.sleep(1)
        raise KilledError

    with writing(guest):
        dies_in(job, mock.patch.object(snapshots, "delete", dies))
        assert job.state == "queued"
        succeeded(run(job))
        wait_for_writes(guest, 2)
    assert listed(job) == set(AFTER) - {name}
    whole(guest, shared_folder, AFTER[name])


def test_what_somebody_made_on_its_base_meanwhile_is_not_written_under_by_the_next_worker(
    begun: Begun, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libvirt has given the deletion up, or was never asked for it."""
    guest, job = begun("two")

    dies_in(job, mock.patch.object(snapshots, "delete", side_effect=KilledError))
    create(shared_folder / "clone.qcow2", "160M", base=str(shared_folder / "disk.one"))
    run(job)
    assert (job.state, job.error_code) == ("failed", "has_overlays"), (job.error_detail, said(job))
    assert chain_of(guest) == ["disk.two", "disk.one", "disk.qcow2"]


@one_by_day
def test_a_cancel_ends_the_waiting_and_libvirt_finishes_it(begun: Begun, shared_folder: Path, name: str) -> None:
    guest, job = begun(name)
    with writing(guest):
        with while_it_merges(guest, lambda: services.cancel(OPERATOR, job)):
            run(job)
        assert job.state == "cancelled", (job.error_detail, said(job))
        wait_until(lambda: name not in listed(job), 60, "libvirt has deleted it")
        wait_for_writes(guest, 2)
    assert listed(job) == set(AFTER) - {name}
    whole(guest, shared_folder, AFTER[name])


def test_a_snapshot_whose_overlay_was_merged_before_libvirt_ended_is_told_how_to_go(
    begun: Begun, shared_folder: Path
) -> None:
    guest, job = begun("one")
    services.cancel(OPERATOR, job)
    subprocess.run(
        ["virsh", "blockcommit", guest.name, "vda", "--top", shared_folder / "disk.one", "--wait"],
        check=True, capture_output=True,
    )  # fmt: skip
    scan(job.host)
    plan = services.plan(OPERATOR, "delete_snapshot", job.target_id, {"name": "one"})
    assert [one.code for one in plan.refusals] == ["stale_plan"]
    assert f"virsh snapshot-delete {guest.name} one --metadata" in plan.refusals[0].detail


def test_a_libvirtd_that_dies_while_it_creates_one_leaves_the_guest_and_the_job_names_what_is_there(
    domains: Domains, shared_folder: Path
) -> None:
    """QEMU is held once the overlay is there, so that libvirtd waits for it, and is killed."""
    guest = domains.run([Disk(create(shared_folder / "disk.qcow2", "96M"))])
    __, row = scanned(shared_folder, guest)
    qemu = pid_of(guest)
    overlay = shared_folder / "disk.one"
    job = services.submit(OPERATOR, "snapshot", row.pk, {"name": "one", "quiesce": False})

    def dies() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and not overlay.exists():
            time.sleep(0.001)
        os.kill(qemu, signal.SIGSTOP)
        time.sleep(3)
        daemons.kill()
        os.kill(qemu, signal.SIGCONT)
        daemons.restart()

    dying = threading.Thread(target=dies)
    with writing(guest):
        dying.start()
        run(job)
        dying.join()
        domains.reconnect(guest)
        assert (job.state, job.error_code) == ("failed", GUEST_ENDED), job.error_detail
        assert str(overlay) in job.error_detail
        wait_for_writes(guest, 2)
    assert listed(job) == set()
    whole(guest, shared_folder, ["disk.qcow2"])
    scan(job.host)
    assert [image.name for image in Image.objects.filter(host=job.host, orphan=True)] == []
    again = services.plan(OPERATOR, "snapshot", row.pk, {"name": "another", "quiesce": False})
    assert [one.code for one in again.by_hand] == [GUEST_ENDED]
