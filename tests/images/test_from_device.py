"""A job makes an image of a device, for admins."""

import subprocess
from pathlib import Path

import pytest

from images.models import Image
from storage_admin.accounts.models import ForbiddenError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.test_from_device import behind, device
from tests.images.scanned import pool
from tests.working import ADMIN, OPERATOR, client_as, image_at, run, succeeded

__all__ = ["behind", "device", "pool"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


def test_an_admin_imports_a_device_by_the_page(pool: StoragePool, behind: Path, device: Path) -> None:
    browser, address = client_as(role="admin"), f"/pools/{pool.pk}/from-device/"
    assert b"Import device" in browser.get(f"/pools/{pool.pk}/").content
    assert b"Import device" not in client_as(role="operator").get(f"/pools/{pool.pk}/").content
    sent = {"device": str(device), "name": "lv.qcow2", "format": "qcow2"}
    shown = browser.post(address, sent | {"show": "1"})
    assert str(device).encode() in shown.content
    assert browser.post(address, sent | {"planned": shown.context["planned"], "key": "k"}).status_code == 302
    job = succeeded(run(Job.objects.get(kind="from_device")))
    made = Path(pool.path) / "lv.qcow2"
    assert (job.result or {})["device_bytes"] == behind.stat().st_size
    subprocess.run(["qemu-img", "compare", "-f", "raw", "-F", "qcow2", behind, made], check=True, capture_output=True)
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert image_at(made).state == Image.State.OK


def test_only_admins_may_and_only_of_a_device(pool: StoragePool, device: Path) -> None:
    with pytest.raises(ForbiddenError):
        services.submit(OPERATOR, "from_device", pool.pk, {"device": str(device), "name": "lv.qcow2"})
    for wrong in ("/etc/passwd", "/dev/../etc/passwd", "/dev/a b", "dev/sda", "/dev/", ""):
        answer = client_as(role="admin").post(
            "/api/v1/jobs/", {"kind": "from_device", "pool": pool.pk, "options": {"device": wrong, "name": "lv.qcow2"}},
            "application/json",
        )  # fmt: skip
        assert (answer.status_code, list(answer.json()["fields"])) == (400, ["device"]), wrong
    job = run(services.submit(ADMIN, "from_device", pool.pk, {"device": "/dev/nothing-here", "name": "lv.qcow2"}))
    assert (job.state, job.error_code) == (Job.State.FAILED, "stale_plan")
    assert list(Path(pool.path).iterdir()) == []
