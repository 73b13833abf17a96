"""Encrypted images by REST and pages: passphrases are kept sealed until the job starts, and nowhere else."""

import json
import sqlite3
import tarfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core import serializers
from django.test import Client
from django.utils import timezone

from images.models import Image
from images.rewrite import wait_for_guests
from storage_admin import sealing
from storage_admin.accounts.models import AuditEntry
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import reaper, sealed, services
from storage_admin.jobs.models import IdempotentAnswer, Job, JobLog, Sealed
from storage_admin.supervisor import backups
from tests.agent.test_keys import FIRST, made, opens
from tests.images.scanned import folder, pool
from tests.working import OPERATOR, VIEWER, against, client_as, image_at, refused_as, reread, run, scan, succeeded

__all__ = ["folder", "pool"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]
MIB = 1 << 20
SECOND = "the second-passphrase"
NEW = {"name": "vm.qcow2", "virtual_size": 8 * MIB, "encryption": "luks", "iter_time": 20}


@pytest.fixture
def image(pool: StoragePool, folder: Path) -> Image:
    path = made(folder, "qcow2")
    scan(pool.host)
    return image_at(path)


def everything() -> Iterator[str]:
    """All that the database holds, as text."""
    for model in (Job, JobLog, AuditEntry, IdempotentAnswer, Sealed, Image, Host, StoragePool):
        yield serializers.serialize("json", model._default_manager.all(), ensure_ascii=False)


def is_anywhere(secret: str) -> bool:
    told = (secret, json.dumps(secret)[1:-1])
    return any(one in text for text in everything() for one in told)


@pytest.mark.parametrize("form", ["qcow2", "raw"])
def test_a_new_image_is_encrypted_with_what_was_told_in_confidence(pool: StoragePool, folder: Path, form: str) -> None:
    options = NEW | {"name": f"vm.{form}", "format": form}
    answer = client_as(role="operator").post(
        "/api/v1/jobs/",
        {"kind": "create", "pool": pool.pk, "options": options, "secrets": {"new_passphrase": FIRST}},
        "application/json", headers={"Idempotency-Key": "one"},
    )  # fmt: skip
    assert answer.status_code == 202, answer.content
    assert (FIRST in answer.content.decode(), is_anywhere(FIRST), Sealed.objects.count()) == (False, False, 1)
    assert json.loads(sealing.unlock(Sealed.objects.get().content)) == {"new_passphrase": FIRST}
    job = succeeded(run(Job.objects.get(kind="create")))
    assert (is_anywhere(FIRST), Sealed.objects.count()) == (False, 0)
    path = folder / f"vm.{form}"
    taken = path.stat().st_blocks * 512
    assert job.plan["predicted_low"] <= taken <= job.plan["predicted_high"]
    real = "luks" if form == "raw" else form
    assert (opens(path, real, FIRST), opens(path, real, SECOND)) == (True, False)
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    found = image_at(path)
    assert (found.format, found.encrypted, found.from_header("key_slots")) == (real, True, [0])
    shown = client_as(role="viewer").get(f"/api/v1/images/{found.pk}/").json()
    assert shown["header"]["key_slots"] == [0]
    assert "key slots in use: 0" in client_as(role="viewer").get(f"/images/{found.pk}/").content.decode()


def test_a_job_without_its_passphrase_waits_and_asks_for_it(pool: StoragePool, folder: Path) -> None:
    job = run(services.submit(OPERATOR, "create", pool.pk, NEW))
    assert (job.state, job.parked_at is not None, sealed.awaited(job)) == (
        Job.State.QUEUED, True, ("new_passphrase",)
    )  # fmt: skip
    wait_for_guests.look()
    reaper.reap()
    assert reread(job).parked_at is not None
    browser = client_as(role="operator")
    page = browser.get(f"/jobs/{job.pk}/").content.decode()
    assert 'name="new_passphrase"' in page
    wrong = {"new_passphrase": FIRST, "new_passphrase_again": FIRST + "x"}
    answer = browser.post(f"/jobs/{job.pk}/secrets/", wrong)
    assert (answer.status_code, FIRST in answer.content.decode(), Sealed.objects.count()) == (200, False, 0)
    assert browser.post(f"/jobs/{job.pk}/secrets/", {}).status_code == 200
    told = {"new_passphrase": FIRST, "new_passphrase_again": FIRST}
    assert browser.post(f"/jobs/{job.pk}/secrets/", told).status_code == 302
    assert (reread(job).parked_at, sealed.awaited(job)) == (None, ())
    assert AuditEntry.objects.get(what="job given its passphrase").after == {"job": job.pk}
    assert run(job).state == Job.State.SUCCEEDED
    assert opens(folder / "vm.qcow2", "qcow2", FIRST)
    assert not is_anywhere(FIRST)


@pytest.mark.sql
def test_after_a_quarter_of_an_hour_it_is_forgotten_and_asked_for_again(pool: StoragePool) -> None:
    job = services.submit(OPERATOR, "create", pool.pk, NEW, secrets={"new_passphrase": FIRST})
    Sealed.objects.update(since=timezone.now() - sealed.KEEP - timedelta(seconds=1))
    assert run(job).parked_at is not None
    reaper.reap()
    assert Sealed.objects.count() == 0
    for client, code in ((client_as(role="viewer"), 403), (client_as(role="operator", hosts=["x"]), 404)):
        address = f"/api/v1/jobs/{job.pk}/secrets/"
        assert client.post(address, {"secrets": {"new_passphrase": FIRST}}, "application/json").status_code == code
    operator = client_as(role="operator")
    for wrong in ({}, {"passphrase": FIRST}, {"new_passphrase": ""}, {"new_passphrase": "a\nb"}):
        answer = operator.post(f"/api/v1/jobs/{job.pk}/secrets/", {"secrets": wrong}, "application/json")
        assert (answer.status_code, FIRST in answer.content.decode()) == (400, False), wrong
    told = {"secrets": {"new_passphrase": f" {FIRST} "}}
    assert operator.post(f"/api/v1/jobs/{job.pk}/secrets/", told, "application/json").status_code == 202
    assert json.loads(sealing.unlock(Sealed.objects.get().content)) == told["secrets"]
    again = operator.post(f"/api/v1/jobs/{job.pk}/secrets/", told, "application/json")
    assert (again.status_code, again.json()["code"]) == (409, "stale_plan")


@pytest.mark.sql
def test_a_job_that_is_never_told_gives_up_after_a_day(pool: StoragePool) -> None:
    job = run(services.submit(OPERATOR, "create", pool.pk, NEW))
    Job.objects.filter(pk=job.pk).update(wait_until=timezone.now() - timedelta(seconds=1))
    reaper.reap()
    assert reread(job).state == Job.State.FAILED
    assert refused_as(services.tell_secrets, OPERATOR, job, {"new_passphrase": FIRST}) == "stale_plan"


def test_a_cancelled_job_keeps_no_passphrase(pool: StoragePool) -> None:
    job = services.submit(OPERATOR, "create", pool.pk, NEW, secrets={"new_passphrase": FIRST})
    services.cancel(OPERATOR, job)
    assert Sealed.objects.count() == 0


def test_what_no_job_needs_is_refused(pool: StoragePool) -> None:
    plain: dict[str, Any] = {"name": "vm.qcow2", "virtual_size": 8 * MIB}
    options: dict[str, Any]
    for options, secrets in (
        (plain, {"new_passphrase": FIRST}), (NEW, {"passphrase": FIRST}), (NEW, {"new_passphrase": "x" * 600}),
    ):  # fmt: skip
        with pytest.raises(InvalidError) as refused:
            services.submit(OPERATOR, "create", pool.pk, options, secrets=secrets)
        assert FIRST not in str(refused.value.fields)
    for options in ({"format": "vmdk"}, {"format": "raw", "format_options": {"preallocation": "full"}}):
        with pytest.raises(InvalidError):
            services.plan(OPERATOR, "create", pool.pk, NEW | {"name": f"vm.{options['format']}"} | options)
    with pytest.raises(Exception, match="operator"):
        services.submit(VIEWER, "create", pool.pk, NEW, secrets={"new_passphrase": FIRST})


def keys(image: Image, secrets: dict[str, str], **options: Any) -> Job:
    scan(image.host)
    return run(services.submit(OPERATOR, "keys", image.pk, {"iter_time": 20} | options, secrets=secrets))


def test_passphrases_change_by_jobs_that_can_be_undone(image: Image, folder: Path) -> None:
    path = folder / "vm.qcow2"
    wrong = keys(image, {"passphrase": SECOND, "new_passphrase": FIRST})
    assert (wrong.state, wrong.error_code) == (Job.State.FAILED, "wrong_passphrase")
    succeeded(keys(image, {"passphrase": FIRST, "new_passphrase": SECOND}))
    assert (opens(path, "qcow2", FIRST), opens(path, "qcow2", SECOND)) == (True, True)
    scan(image.host)
    assert reread(image).from_header("key_slots") == [0, 1]
    succeeded(keys(image, {"passphrase": SECOND}, slot=0, undo_hours=0))
    assert (opens(path, "qcow2", FIRST), opens(path, "qcow2", SECOND)) == (False, True)
    scan(image.host)
    assert against("keys", image, slot=1) == ["stale_plan"]
    assert not is_anywhere(FIRST)
    assert not is_anywhere(SECOND)


def test_an_image_that_is_not_encrypted_has_no_passphrases(pool: StoragePool, folder: Path) -> None:
    run(services.submit(OPERATOR, "create", pool.pk, {"name": "plain.qcow2", "virtual_size": 8 * MIB}))
    scan(Host.objects.get())
    plain = image_at(folder / "plain.qcow2")
    assert against("keys", plain) == ["unsupported_subformat"]
    assert b"Change passphrases" not in client_as(role="operator").get(f"/images/{plain.pk}/").content


def test_the_page_leads_from_the_image_to_a_job_that_asks(image: Image) -> None:
    browser: Client = client_as(role="operator")
    assert b"Change passphrases" in browser.get(f"/images/{image.pk}/").content
    answer = browser.get(f"/images/{image.pk}/keys/")
    assert b"empty key slot 0" in answer.content
    sent = {name: answer.context[name] for name in ("planned", "shown")} | {"key": "k", "undo_hours": "24"}
    done = browser.post(f"/images/{image.pk}/keys/", sent)
    assert done.status_code == 302, done.content.decode()
    job = Job.objects.get(kind="keys")
    page = browser.get(f"/jobs/{job.pk}/").content.decode()
    assert ('name="passphrase"' in page, 'name="new_passphrase_again"' in page) == (True, True)


def test_a_backup_holds_no_passphrase(tmp_path: Path) -> None:
    database = tmp_path / "db.sqlite3"
    with sqlite3.connect(database) as made:
        made.execute("CREATE TABLE jobs_sealed (content BLOB)")
        made.execute("INSERT INTO jobs_sealed VALUES (?)", (b"sealed words",))
    backups.write(tmp_path / "backup", tmp_path, database, [])
    with tarfile.open(tmp_path / "backup") as archive:
        held = archive.extractfile("db.sqlite3")
        assert held is not None
        assert b"sealed words" not in held.read()
