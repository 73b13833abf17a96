"""A file is uploaded by REST, on from where it broke off; what comes of it has its digest, or is removed."""

import base64
import hashlib
import io
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from images import download, uploads
from images.kinds.upload import TURN
from images.models import Image
from images.rewrite import space, wait_for_guests
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError, StoppedError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import claims, reaper, runner, services
from storage_admin.jobs.models import Job
from tests.agent.harness import make_image, write
from tests.harness.patching import raising
from tests.images.scanned import pool
from tests.working import OPERATOR, VIEWER, allocated, client_as, codes, image_at, refused_as, reread, run, said, scan

__all__ = ["pool"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]
MIB = 1 << 20


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    path = tmp_path / "source.qcow2"
    make_image(path, "16M")
    for at in range(1, 12, 2):
        write(path, 0x20 + at, f"{at}M", "1M")
    return path.read_bytes()


def queued(pool: StoragePool, data: bytes, **more: Any) -> Job:
    job = services.submit(OPERATOR, "upload", pool.pk, {"name": "vm.qcow2", "size": len(data), **more})
    return run(job)


def digest(data: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


def patch(browser: Client, job: Job, data: bytes, offset: int, **headers: str) -> Any:
    return browser.patch(
        f"/api/v1/uploads/{job.pk}/", data, "application/offset+octet-stream",
        headers={"Upload-Offset": str(offset), **headers},
    )  # fmt: skip


def offset_of(browser: Client, job: Job) -> tuple[str, str]:
    answer = browser.head(f"/api/v1/uploads/{job.pk}/")
    return answer["Upload-Offset"], answer["Upload-Length"]


def files(pool: StoragePool) -> set[str]:
    return {path.name for path in Path(pool.path).iterdir()}


def test_pieces_become_an_image_that_the_next_scan_lists(pool: StoragePool, data: bytes) -> None:
    browser, job, half = client_as(role="operator"), queued(pool, data), len(data) // 2
    assert (job.state, job.parked_at is not None, job.done_bytes) == (Job.State.QUEUED, True, 0)
    first = patch(browser, job, data[:half], 0, **{"Content-Digest": digest(data[:half])})
    assert (first.status_code, first["Upload-Offset"], first["Tus-Resumable"]) == (204, str(half), "1.0.0")
    assert offset_of(browser, job) == (str(half), str(len(data)))
    assert (reread(job).state, job.parked_at is not None, job.done_bytes) == (Job.State.QUEUED, True, half)
    assert patch(browser, job, data[half:], half, **{"Repr-Digest": digest(data)}).status_code == 204
    assert run(job).state == Job.State.SUCCEEDED, (job.error_detail, said(job))
    made = Path(pool.path) / "vm.qcow2"
    assert (made.read_bytes() == data, files(pool)) == (True, {"vm.qcow2"})
    assert (job.result or {})["sha256"] == hashlib.sha256(data).hexdigest()
    assert (job.after_bytes, job.freed_bytes, job.kept) == (allocated(made), -allocated(made), {})
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert (image_at(made).state, image_at(made).virtual_size) == (Image.State.OK, 16 * MIB)
    assert AuditEntry.objects.filter(what__startswith="upload").count() == 2


def test_it_goes_on_where_the_connection_broke(pool: StoragePool, data: bytes) -> None:
    browser, job = client_as(role="operator"), queued(pool, data)

    class Breaking:
        def __init__(self) -> None:
            self.left = 3

        def read(self, size: int, /) -> bytes:
            self.left -= 1
            if not self.left:
                raise OSError("gone")
            return data[:size]

    with pytest.raises(OSError, match="gone"):
        uploads.take(OPERATOR, job, 0, len(data), Breaking())
    there = int(offset_of(browser, job)[0])
    assert patch(browser, job, data[there:], there).status_code == 204
    assert run(job).state == Job.State.SUCCEEDED
    assert (Path(pool.path) / "vm.qcow2").read_bytes() == data


@pytest.mark.sql
def test_what_does_not_follow_is_a_conflict_and_counts_for_nothing(pool: StoragePool, data: bytes) -> None:
    browser, job = client_as(role="operator"), queued(pool, data)
    assert patch(browser, job, data[:MIB], 0).status_code == 204
    for offset in (0, MIB - 1, MIB + 1):
        answer = patch(browser, job, data[:MIB], offset)
        assert (answer.status_code, answer.json()["code"]) == (409, "stale_plan"), offset
    answer = patch(browser, job, data[:MIB], MIB, **{"Content-Digest": digest(b"another")})
    assert (answer.status_code, answer.json()["code"]) == (409, "wrong_digest")
    assert patch(browser, job, data + b"x", MIB).status_code == 400
    assert offset_of(browser, job)[0] == str(MIB)
    assert patch(browser, job, data[MIB:], MIB).status_code == 204
    assert patch(browser, job, b"x", len(data)).status_code == 409
    assert run(job).state == Job.State.SUCCEEDED


@pytest.mark.parametrize(
    "headers",
    [
        {"Upload-Offset": "-1"}, {"Upload-Offset": "x"}, {"Upload-Offset": "9" * 19}, {"Upload-Offset": "٣"},
        {"Content-Digest": "sha-256=:abc:"}, {"Content-Digest": f"sha-256=:{'=' * 44}:"}, {"Repr-Digest": "md5=:x:"},
    ],
)  # fmt: skip
def test_headers_that_make_no_sense_are_named(pool: StoragePool, data: bytes, headers: dict[str, str]) -> None:
    browser, job = client_as(role="operator"), queued(pool, data)
    answer = patch(browser, job, data, 0, **headers)
    assert (answer.status_code, list(answer.json()["fields"])) == (400, [next(iter(headers))])
    other = browser.patch(f"/api/v1/uploads/{job.pk}/", data, "application/json")
    assert other.status_code in {400, 415}


def test_a_file_that_is_not_as_its_digest_says_is_not_made(pool: StoragePool, data: bytes) -> None:
    browser = client_as(role="operator")
    by_option = queued(pool, data, sha256="0" * 64)
    patch(browser, by_option, data, 0)
    assert (run(by_option).state, by_option.error_code) == (Job.State.FAILED, "wrong_digest")
    by_header = queued(pool, data)
    patch(browser, by_header, data, 0, **{"Repr-Digest": digest(b"another")})
    assert (run(by_header).state, by_header.error_code) == (Job.State.FAILED, "wrong_digest")
    Job.objects.update(finished=timezone.now() - timedelta(hours=1))
    uploads.tidy()
    assert files(pool) == set()


def test_only_operators_send_and_others_see_how_far_it_is(pool: StoragePool, data: bytes) -> None:
    job = queued(pool, data)
    assert patch(client_as(role="viewer"), job, data, 0).status_code == 403
    assert client_as(role="viewer").get(f"/api/v1/uploads/{job.pk}/").json() == {
        "job": job.pk, "state": "queued", "name": "vm.qcow2", "size": len(data), "received": 0
    }  # fmt: skip
    assert patch(client_as(role="operator", hosts=["other"]), job, data, 0).status_code == 404
    scans = Job.objects.filter(kind="scan").first()
    assert scans is not None
    assert patch(client_as(role="operator"), scans, data, 0).status_code == 404
    with pytest.raises(Exception, match="operator"):
        uploads.take(VIEWER, job, 0, 1, None)  # type: ignore[arg-type]


def test_a_name_that_is_taken_or_wrong_and_a_pool_that_is_too_small_are_said_first(
    pool: StoragePool, data: bytes
) -> None:
    (Path(pool.path) / "vm.qcow2").write_bytes(data)
    scan(Host.objects.get())
    assert codes("upload", pool, name="vm.qcow2", size=9) == {"target_exists"}
    assert codes("upload", pool, name="other.iso", size=1 << 60) == {"not_enough_space"}
    assert codes("upload", pool, name="other.iso", size=9) == set()
    for name in ("", "../x", "a/b", ".hidden", ".sa-j1.new", "x" * 256, "a\nb"):
        answer = client_as(role="operator").post(
            "/api/v1/jobs/", {"kind": "upload", "pool": pool.pk, "options": {"name": name, "size": 9}},
            "application/json",
        )  # fmt: skip
        assert (answer.status_code, list(answer.json()["fields"])) == (400, ["name"]), name


def test_no_more_at_once_than_the_server_has_places_for(pool: StoragePool, data: bytes) -> None:
    browser, job = client_as(role="operator"), queued(pool, data)
    for _ in range(download.AT_ONCE):
        download.take_place()
    assert patch(browser, job, data, 0).json()["code"] == "busy"
    for _ in range(download.AT_ONCE):
        download.give_place()
    for _ in range(download.AT_ONCE + 1):
        patch(browser, job, data, 5)
    assert patch(browser, job, data, 0).status_code == 204


@pytest.mark.sql
def test_a_cancelled_one_takes_no_bytes_and_leaves_none(pool: StoragePool, data: bytes) -> None:
    browser, job = client_as(role="operator"), queued(pool, data)
    patch(browser, job, data[:MIB], 0)
    assert files(pool) == {f".sa-{job.uid}.part"}
    services.cancel(OPERATOR, reread(job))
    assert patch(browser, job, data[MIB:], MIB).json()["code"] == "stale_plan"
    uploads.tidy()
    assert files(pool) == {f".sa-{job.uid}.part"}  # whoever still sends may not have noticed yet
    Job.objects.update(finished=timezone.now() - timedelta(hours=1))
    uploads.tidy()
    assert (files(pool), reread(job).kept) == (set(), {})


@pytest.mark.sql
def test_one_of_which_nothing_comes_for_a_day_is_given_up(pool: StoragePool, data: bytes) -> None:
    browser, job = client_as(role="operator"), queued(pool, data)
    patch(browser, job, data[:MIB], 0)
    reaper.reap()
    wait_for_guests.look()
    assert reread(job).state == Job.State.QUEUED
    Job.objects.filter(pk=job.pk).update(wait_until=timezone.now() - timedelta(seconds=1))
    reaper.reap()
    assert (reread(job).state, job.error_code) == (Job.State.FAILED, "upload_incomplete")
    assert services.submit(OPERATOR, "upload", pool.pk, {"name": "vm.qcow2", "size": 9}).state == Job.State.QUEUED


def test_what_has_arrived_outlives_its_worker(pool: StoragePool, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, job = client_as(role="operator"), queued(pool, data)
    patch(browser, job, data, 0)
    assert claims.claim(job.pk, "a worker that dies") is not None
    Job.objects.filter(pk=job.pk).update(heartbeat=timezone.now() - timedelta(hours=1))
    reaper.reap()
    assert reread(job).state == Job.State.QUEUED

    def told_to_end(*_: object) -> None:
        runner.stopping.set()
        raise StoppedError(protocol.CANCELLED, "cancelled")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "_work", told_to_end)
        assert run(job).state == Job.State.QUEUED
    runner.stopping.clear()
    assert run(job).state == Job.State.SUCCEEDED
    assert (Path(pool.path) / "vm.qcow2").read_bytes() == data


def test_a_cancel_that_comes_while_it_is_read_back_ends_it(pool: StoragePool, data: bytes) -> None:
    job = queued(pool, data)
    patch(client_as(role="operator"), job, data, 0)
    assert services.cancel(OPERATOR, reread(job)).state == Job.State.QUEUED
    assert run(job).state == Job.State.CANCELLED
    Job.objects.update(finished=timezone.now() - timedelta(hours=1))
    uploads.tidy()
    assert files(pool) == set()


def test_a_request_that_another_one_came_after_counts_no_more(pool: StoragePool, data: bytes) -> None:
    browser, job = client_as(role="operator"), queued(pool, data)

    class Overtaken:
        """Its client has given it up, and another request begins before it goes on."""

        def __init__(self) -> None:
            self.asked = 0

        def read(self, size: int, /) -> bytes:
            self.asked += 1
            if self.asked == 2:
                Job.objects.filter(pk=job.pk).update(kept=reread(job).kept | {TURN: reread(job).kept[TURN] + 1})
            return b"B" * size

    assert refused_as(uploads.take, OPERATOR, job, 0, 2 * MIB, Overtaken()) == "stale_plan"
    assert offset_of(browser, job)[0] == "0"
    assert patch(browser, job, data, 0).status_code == 204
    assert run(job).state == Job.State.SUCCEEDED
    assert (Path(pool.path) / "vm.qcow2").read_bytes() == data


def test_one_that_comes_late_to_the_lock_cuts_nothing_off(pool: StoragePool, data: bytes) -> None:
    """It was let in before an earlier request had ended, which then sent everything."""
    browser, job = client_as(role="operator"), queued(pool, data)
    turn = uploads._turn(job, 0, None)
    assert patch(browser, job, data[:MIB], 0).status_code == 204
    with pytest.raises(RefusedError):
        uploads._take(job, 0, uploads._reader(job, turn, MIB, io.BytesIO(b"B" * MIB)), turn, None)
    assert (Path(pool.path) / f".sa-{job.uid}.part").read_bytes() == data[:MIB]
    assert patch(browser, job, data[MIB:], MIB).status_code == 204
    assert run(job).state == Job.State.SUCCEEDED


def test_the_last_bytes_are_told_of_once(pool: StoragePool) -> None:
    whole = bytes(32 * MIB)
    job = run(services.submit(OPERATOR, "upload", pool.pk, {"name": "zeros.raw", "size": len(whole)}))
    assert patch(client_as(role="operator"), job, whole, 0).status_code == 204
    assert run(job).state == Job.State.SUCCEEDED


def test_a_whole_file_outlives_a_host_that_is_away_and_a_job_that_was_parked_too_late(
    pool: StoragePool, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queued(pool, data)
    patch(client_as(role="operator"), job, data, 0)
    assert reread(job).parked_at is None
    Job.objects.filter(pk=job.pk).update(parked_at=timezone.now())  # as by a claim that had read the row before
    reaper.reap()
    assert reread(job).parked_at is None

    with monkeypatch.context() as patched:
        patched.setattr(runner, "_work", raising(HostError("the line broke", "host_unreachable")))
        assert run(job).state == Job.State.QUEUED
    assert run(job).state == Job.State.SUCCEEDED


def test_what_has_arrived_is_not_set_aside_a_second_time(pool: StoragePool, data: bytes) -> None:
    job = queued(pool, data)
    Job.objects.filter(pk=job.pk).update(kept={"received": len(data) - 5})
    assert [need.scratch for need in space._load(pool).needs] == [5]


def test_one_that_was_given_up_does_not_look_as_if_all_had_arrived(pool: StoragePool, data: bytes) -> None:
    browser, job = client_as(role="operator"), queued(pool, data)
    patch(browser, job, data[:MIB], 0)
    services.cancel(OPERATOR, reread(job))
    assert offset_of(browser, job) == ("0", str(len(data)))
