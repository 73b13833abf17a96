"""Jobs run in the test's own process, by the real agent as a process of its own, in folders of the test."""

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.test.utils import CaptureQueriesContext

from images.models import Image
from images.rewrite import refusals
from images.rewrite.libvirt_events import watchers
from images.scan.run import ScanRun
from storage_admin.accounts.models import SYSTEM, Actor, Role
from storage_admin.agent.protocol import HostError, RefusedError, StoppedError
from storage_admin.errors import InvalidError
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.services import add_pool
from storage_admin.jobs import routing, runner, services
from storage_admin.jobs.models import Job
from storage_admin.jobs.routing import heart
from tests.factories import HostFactory, UserFactory

M = TypeVar("M", bound=Model)
E = TypeVar("E", HostError, InvalidError, RefusedError, StoppedError)

ADMIN = Actor("ada", Role.ADMIN)
OPERATOR = Actor("olga", Role.OPERATOR)
VIEWER = Actor("vera", Role.VIEWER)
#: Marks of jobs here on guests of a real libvirt.
ON_LIBVIRT = [pytest.mark.services, pytest.mark.usefixtures("quiet", "libvirtd")]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat beside the test's transaction, and nobody to ring for: the test runs its jobs itself."""
    monkeypatch.setattr(heart, "start", lambda: None)
    monkeypatch.setattr(watchers, "attend", lambda host_ids: None)
    monkeypatch.setattr(routing, "ring_now", lambda job_id: None)


@pytest.fixture
def no_libvirt(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine as one without libvirt, whatever else runs on it at this time."""
    take = ScanRun.take

    def without_libvirt(run: ScanRun, event: dict[str, Any]) -> None:
        take(run, event | {"libvirt": "absent"} if event["event"] == "host" else event)

    monkeypatch.setattr(ScanRun, "take", without_libvirt)
    monkeypatch.setattr(reader, "read", lambda host: None)


@pytest.fixture
def no_hypervisor(no_libvirt: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and without volumes that are no files."""
    take = ScanRun.take

    def without_volumes(run: ScanRun, event: dict[str, Any]) -> None:
        if event["event"] != "volumes":
            take(run, event)

    monkeypatch.setattr(ScanRun, "take", without_volumes)


@pytest.fixture
def no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filesystem of tests may be as full as it likes."""
    monkeypatch.setattr(refusals, "RESERVE_BYTES", 0)
    monkeypatch.setattr(refusals, "RESERVE_PERCENT", 0)


def this_machine(*folders: Path) -> Host:
    """The row of this machine with these folders as its pools, registered by an admin; not scanned yet."""
    host = HostFactory.create(slug="local", last_seen=None, capabilities={}, owners_unknown="Not scanned yet.")
    for folder in folders:
        register(host, folder)
    return host


def register(host: Host, folder: Path, source: str = StoragePool.Source.ADMIN) -> StoragePool:
    return add_pool(host, bytes(folder), source)


def work(kind: str, target_id: int, actor: Actor = SYSTEM, **options: Any) -> Job:
    """Submits a job, runs it here and now, and gives its row as it ended."""
    return run(services.submit(actor, kind, target_id, options))


def run(job: Job) -> Job:
    runner.run(job.pk)
    job.refresh_from_db()
    return job


def scan(host: Host) -> dict[str, Any]:
    """Scans a host and answers the job's result; jobs that the scan asks for stay queued."""
    return dict(succeeded(work("scan", host.pk)).result or {})


def scanned_machine(*folders: Path) -> Host:
    """The row of this machine with these folders as its pools, scanned."""
    host = this_machine(*folders)
    scan(host)
    return host


def succeeded(job: Job) -> Job:
    """The job, which ended as it should; what it says of itself where it did not."""
    assert job.state == Job.State.SUCCEEDED, (job.error_code, job.error_detail, said(job))
    return job


def said(job: Job) -> list[str]:
    return list(job.log_lines.values_list("text", flat=True))


def image_at(path: Path | bytes) -> Image:
    raw = path if isinstance(path, bytes) else bytes(path)
    return Image.every.select_related("host", "pool").get(path_bytes=raw)


def code_of(error: type[Exception], act: Callable[..., object], *given: Any, **more: Any) -> str:
    """The code with which that call fails."""
    with pytest.raises(error) as failed:
        act(*given, **more)
    assert isinstance(failed.value, HostError | RefusedError | StoppedError)
    return failed.value.code


@contextmanager
def fails_as(error: type[E], code: str, words: str | None = None) -> Iterator[pytest.ExceptionInfo[E]]:
    """Passes where what is within fails so: with this code, and with words that this expression finds."""
    with pytest.raises(error, match=words) as failed:
        yield failed
    assert failed.value.code == code


def refused_as(act: Callable[..., object], *given: Any, **more: Any) -> str:
    return code_of(RefusedError, act, *given, **more)


def against(kind: str, target: Model, actor: Actor = OPERATOR, /, **options: Any) -> list[str]:
    """The codes of what stands against such a job, in the order of its plan."""
    return [one.code for one in services.plan(actor, kind, target.pk, options).refusals]


def codes(kind: str, target: Model, actor: Actor = OPERATOR, /, **options: Any) -> set[str]:
    """What a plan of such a job is refused for."""
    return set(against(kind, target, actor, **options))


def invalid_fields(act: Callable[..., object], *given: Any, **more: Any) -> dict[str, str]:
    """The fields that are named as wrong where that call is refused, and what is said of each."""
    with pytest.raises(InvalidError) as wrong:
        act(*given, **more)
    return wrong.value.fields


def reread(row: M) -> M:
    """The same row, as the database has it by now."""
    row.refresh_from_db()
    return row


@contextmanager
def at_most_queries(count: int) -> Iterator[None]:
    """Fails where more of them are sent to the database within."""
    with CaptureQueriesContext(connection) as captured:
        yield
    assert len(captured) <= count, [query["sql"][:200] for query in captured]


def client_as(**values: Any) -> Client:
    """A browser in which a new user has signed in; ``client_as(role="admin", hosts=["a"])`` says which."""
    client = Client()
    client.force_login(UserFactory.create(**values), "django.contrib.auth.backends.ModelBackend")
    return client


def digests(folder: Path) -> dict[str, str]:
    """What every file in a folder holds, by name: nothing was changed where it is the same as before."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def create(path: Path, size: str = "8M", *options: str, base: str | Path | None = None, form: str = "qcow2") -> Path:
    backing = ["-b", str(base), "-F", "qcow2"] if base is not None else []
    done = subprocess.run(
        ["qemu-img", "create", "-q", "-f", form, *options, *backing, str(path), *([size] if base is None else [])],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


def info(path: Path | str) -> dict[str, Any]:
    """What qemu-img tells of an image, also while somebody has it open."""
    told = subprocess.run(["qemu-img", "info", "-U", "--output=json", str(path)], capture_output=True, check=True)
    return dict(json.loads(told.stdout))
