"""Jobs that wait hear of a guest's end from libvirt at once; what listens for that ends with the waiting."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from images import tasks
from images.rewrite import libvirt_events, wait_for_guests
from storage_admin.agent.protocol import HostError
from storage_admin.guests.models import GuestSpan
from storage_admin.hosts import secrets
from storage_admin.hosts.libvirt import watch
from storage_admin.hosts.libvirt.process import command
from storage_admin.hosts.models import Host
from storage_admin.jobs import runner, services
from storage_admin.jobs.models import Elapsed, Job
from tests.factories import HostFactory, JobFactory
from tests.harness.guests import Disk, Domains
from tests.harness.processes import wait_until
from tests.harness.sshd import sessions_of, sshd
from tests.patient import patient
from tests.working import ON_LIBVIRT, OPERATOR, create, image_at, scanned_machine, work

pytestmark = [
    pytest.mark.guest,
    pytest.mark.django_db(transaction=True),
    *ON_LIBVIRT,
    pytest.mark.usefixtures("patient", "no_reserve"),
]

__all__ = ["patient"]


@pytest.fixture
def domain(domains: Domains, shared_folder: Path) -> Any:
    """A domain that does not run, with one disk."""
    return domains.define([Disk(create(shared_folder / "disk.qcow2", "64M"))])


@pytest.fixture
def host(domain: Any, shared_folder: Path) -> Host:
    """This machine, scanned while that domain runs."""
    domain.create()
    return scanned_machine(shared_folder)


@pytest.fixture(autouse=True)
def _watchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This test's own; they have ended when it has."""
    made = libvirt_events.Watchers()
    for module in (libvirt_events, tasks):
        monkeypatch.setattr(module, "watchers", made)
    monkeypatch.setattr(libvirt_events, "STILL_WANTED", 0.5)
    yield
    Job.objects.update(parked_at=None)
    wait_until(lambda: not watched(), 20, "nobody is watched any more")
    assert listeners() == []


def watched() -> list[int]:
    """Ids of the hosts that a thread of this process watches."""
    return [int(thread.name[6:]) for thread in threading.enumerate() if thread.name.startswith("watch-")]


def listeners() -> list[psutil.Process]:
    """The processes below this one that listen to a libvirt, or forward its socket."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "storage_admin.hosts.libvirt.events" in words or (words[:1] == ["ssh"] and "-L" in words):
                found.append(process)
    return found


def parked(folder: Path) -> Job:
    job = work("reclaim", image_at(folder / "disk.qcow2").pk, OPERATOR, when_running="wait")
    assert job.parked_at is not None, (job.state, job.error_detail)
    return job


def test_a_guest_that_ends_is_noticed_before_anybody_polls(host: Host, domain: Any, shared_folder: Path) -> None:
    job = parked(shared_folder)
    tasks.look_at_guests()
    assert watched() == [host.pk]
    wait_until(connected, 20, "somebody listens, and the connection stands")
    asked = Job.objects.filter(kind="scan", state="queued")
    assert not asked.exists()
    domain.destroy()
    wait_until(asked.exists, 10, "a scan is asked for")
    told = Job.objects.filter(pk=job.pk, waiting_for__contains="is off")
    wait_until(told.exists, 10, "the job says what it waits for now")  # right after the scan is asked for


def connected() -> bool:
    """Whether libvirt has told the states to somebody who listens; a look by that leaves the reason as it is."""
    return any(process.io_counters().write_chars > 100 for process in listeners())


def test_nobody_listens_when_no_job_waits(host: Host, shared_folder: Path) -> None:
    tasks.look_at_guests()
    assert (watched(), listeners()) == ([], [])
    job = parked(shared_folder)
    tasks.look_at_guests()
    tasks.look_at_guests()
    wait_until(listeners, 10, "somebody listens")
    assert watched() == [host.pk]
    services.cancel(OPERATOR, job)
    wait_until(lambda: not watched() and not listeners(), 10, "the listener has ended")


def test_when_a_guest_ran_is_written_down_while_an_undo_copy_waits(domain: Any, shared_folder: Path) -> None:
    Elapsed.tick()  # from here on time counts; before, it stands at 0
    scanned_machine(shared_folder)
    job = JobFactory.create(
        target=image_at(shared_folder / "disk.qcow2"), state="succeeded", undo_state="available", undo_bytes=1
    )
    tasks.look_at_guests()
    wait_until(connected, 20, "somebody listens, and the connection stands")
    spans = GuestSpan.objects.filter(uid=domain.UUIDString())
    domain.create()
    wait_until(spans.filter(ran=True).exists, 10, "its start is written down")
    began = Elapsed.now()
    domain.destroy()
    wait_until(spans.filter(ran=False, since__gte=began).exists, 10, "its end is written down")
    ran = spans.get(ran=True)
    assert 0 <= ran.since <= began <= ran.until <= Elapsed.now()
    Job.objects.filter(pk=job.pk).update(undo_state="expired")
    wait_until(lambda: not watched() and not listeners(), 10, "the listener has ended")


def test_a_worker_that_is_told_to_end_takes_its_listeners_along(
    host: Host, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parked(shared_folder)
    tasks.look_at_guests()
    wait_until(listeners, 10, "somebody listens")
    stopping = threading.Event()
    monkeypatch.setattr(runner, "stopping", stopping)
    stopping.set()
    wait_until(lambda: not watched() and not listeners(), 10, "the listener has ended")


def test_a_libvirt_that_cannot_be_watched_is_polled_and_tried_again_later(
    host: Host, domain: Any, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fails(host: Host) -> Iterator[None]:
        tries.append(host.pk)
        raise HostError("no")

    monkeypatch.setattr(watch, "changes", fails)
    parked(shared_folder)
    for _ in range(3):
        tasks.look_at_guests()
        wait_until(lambda: not watched(), 10, "the try is over")
    assert tries == [host.pk]
    monkeypatch.setattr(libvirt_events, "TRY_AGAIN", 0.0)
    domain.destroy()
    tasks.look_at_guests()
    assert Job.objects.filter(kind="scan", state="queued").count() == 1
    wait_until(lambda: len(tries) == 2, 5, "it is tried again")


def test_the_states_of_domains_come_as_they_change(domain: Any) -> None:
    uid = domain.UUIDString()
    with contextlib.closing(watch.changes(HostFactory.build())) as changes:
        assert next_told(changes)[uid] == "shut off"
        acts = {"create": "running", "suspend": "paused", "resume": "running", "destroy": "shut off"}
        for act, state in acts.items():
            getattr(domain, act)()
            told_within(5, changes, uid, state)
    assert listeners() == []


def next_told(changes: Iterator[dict[str, str] | None]) -> dict[str, str]:
    return next(states for states in changes if states is not None)


def told_within(seconds: float, changes: Iterator[dict[str, str] | None], uid: str, state: str) -> None:
    began = time.monotonic()
    while next_told(changes).get(uid) != state:
        assert time.monotonic() - began < seconds


def test_by_ssh_the_socket_is_forwarded_as_long_as_somebody_listens(domain: Any, tmp_path: Path) -> None:
    uid = domain.UUIDString()
    with sshd(tmp_path / "sshd") as server:
        host = HostFactory.build(
            slug="far", kind="ssh", transport="ssh", address="127.0.0.1", port=server.port, user="root",
            host_key=server.host_key, private_key_locked=secrets.lock(server.private_key),
        )  # fmt: skip
        with contextlib.closing(watch.changes(host)) as changes:
            assert next_told(changes)[uid] == "shut off"
            assert len(listeners()) == 2
            domain.create()
            told_within(2, changes, uid, "running")
        assert listeners() == []
        with contextlib.closing(watch.changes(host)) as changes:
            next_told(changes)
            for session in sessions_of(server):
                psutil.Process(session).kill()
            with pytest.raises(HostError, match="closed the connection"):
                list(changes)
    assert listeners() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_listener_ends_with_whoever_started_it(libvirtd: str, number: signal.Signals) -> None:
    program = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen({command(libvirtd, 'events')!r}, stdin=subprocess.PIPE)\n"
        "print(p.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        listener = int(parent.stdout.readline())
        assert b'"states"' in parent.stdout.readline()
        parent.send_signal(number)
        parent.wait()
    wait_until(lambda: not alive(listener), 5, "the listener has ended")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_question_that_hangs_ends_with_the_worker_that_asked(tmp_path: Path) -> None:
    """As a libvirtd that accepts and never answers; the worker is killed while it waits."""
    path = tmp_path / "socket"
    program = (
        "import subprocess, sys\n"
        f"words = {command(f'qemu+unix:///system?socket={path}', 'query')!r}\n"
        "p = subprocess.Popen(words); print(p.pid, flush=True); p.wait()"
    )
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(os.fspath(path))
        silent.listen()
        silent.settimeout(60)
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            question = int(worker.stdout.readline())
            silent.accept()
            assert alive(question)
            worker.kill()
        wait_until(lambda: not alive(question), 5, "the question has ended")


def test_hosts_whose_jobs_wait_for_other_guests_alone_are_not_watched() -> None:
    host = HostFactory.create()
    waited = [{"kind": "vm", "uid": "101", "name": "web"}]
    job = Job.objects.create(kind="reclaim", host=host, target_kind="image", target_id=1, waited_guests=waited)
    Job.objects.filter(pk=job.pk).update(parked_at=job.created)
    assert wait_for_guests.hosts_that_wait() == []
    Job.objects.filter(pk=job.pk).update(waited_guests=[*waited, {"kind": "domain", "uid": "u", "name": "db"}])
    assert wait_for_guests.hosts_that_wait() == [host.pk]
    assert wait_for_guests.hosts_that_wait(but_not=[host.pk]) == []
