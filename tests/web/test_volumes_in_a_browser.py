"""Volumes in a browser: the list, a thin pool that fills up, and an unused volume set aside and restored."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone
from playwright.sync_api import Page

from images.alert_rules.looking import look_at_space
from images.models import Image
from images.scan import minutes
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from tests.factories import GuestFactory, StoragePoolFactory
from tests.harness.lvm import GROUP, VOLUME, Lvm
from tests.web.browser import axe
from tests.working import reread, run, scan, succeeded, this_machine

pytestmark = [
    pytest.mark.browser, pytest.mark.qemu, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("quiet"),
]  # fmt: skip

MIB = 1 << 20
POOL_BYTES, BLOCK = 640 * MIB, 64 << 10
THIN_POOL = {"lv_layout": "thin,pool", "lv_role": "private", "lv_size": str(POOL_BYTES), "lv_metadata_size": "4194304"}
THIN = {"pool_lv": "data", "lv_layout": "thin,sparse", "lv_size": str(256 * MIB), "data_percent": "25.00"}


def line(name: str, **columns: str) -> dict[str, str]:
    return VOLUME | {"lv_name": name, "vg_name": "vg0", "lv_uuid": f"id-{name}"} | columns


def kernel(used: int) -> str:
    """As ``dmsetup status`` tells of the thin pool with so many bytes used."""
    sectors, blocks = POOL_BYTES // 512, POOL_BYTES // BLOCK
    told = f"thin-pool 1 100/1024 {used // BLOCK}/{blocks} - rw discard_passdown queue_if_no_space - 1024"
    return f"vg0-data-tpool: 0 {sectors} {told}"


@pytest.fixture
def lvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lvm:
    """A node of Proxmox VE, this machine, with a thin pool and a group; guest 100 has a disk, guest 900 is gone."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    state = Lvm(tmp_path / "bin")
    pool = line("data", **THIN_POOL, data_percent="40.00", metadata_percent="9.77")
    volumes = [pool, line("vm-100-disk-0", **THIN), line("vm-900-disk-0"), line("backups")]
    state.install(vg=[GROUP | {"vg_name": "vg0"}], lv=volumes, thin=kernel(256 * MIB))
    host = this_machine()
    for name, kind, path in (("local-lvm", "lvmthin", "lvmthin vg0/data"), ("disks", "lvm", "lvm vg0")):
        StoragePoolFactory.create(volumes=True, host=host, name=name, kind=kind, path=path)
    GuestFactory.create(host=host, kind=Guest.Kind.VM, uid="100", name="web")
    scan(host)
    return state


@pytest.fixture(params=["light", pytest.param("dark", marks=pytest.mark.night)])
def page(admins_page: Callable[..., Page], request: pytest.FixtureRequest) -> Page:
    return admins_page(color_scheme=request.param)


def done(page: Page) -> Job:
    """The job whose page it is, which the test works at instead of a worker; the page follows it to its end."""
    page.wait_for_url("**/jobs/*/")
    job = succeeded(run(Job.objects.latest("pk")))
    page.locator("#status").get_by_text("succeeded").wait_for()
    return job


def test_volumes_stand_in_the_list_with_what_lvm_says(lvm: Lvm, page: Page) -> None:
    page.goto("/images/")
    rows = page.locator("table tbody tr")
    assert sorted(rows.locator("a").all_inner_texts()) != []
    row = rows.filter(has_text="vm-100-disk-0")
    assert "256 MiB" in row.inner_text()
    assert "64 MiB" in row.inner_text()
    assert axe(page) == []
    row.get_by_role("link", name="vm-100-disk-0").click()
    page.get_by_text("67,108,864").first.wait_for()
    assert axe(page) == []
    pool = StoragePool.objects.get(name="disks")
    page.goto(f"/pools/{pool.pk}/")
    page.get_by_text("What takes the space").wait_for()
    assert f"{pool.shares['images']:,}" in page.content()
    assert axe(page) == []


def test_a_thin_pool_that_fills_up_is_told_of_with_what_frees_most(lvm: Lvm, page: Page) -> None:
    pool, now = StoragePool.objects.select_related("host").get(name="local-lvm"), timezone.now()
    state = lvm.read()
    lvm.write(state | {"lv": [*state["lv"], line("vm-901-disk-0", **THIN)]})
    scan(pool.host)
    Host.objects.update(capabilities={"proxmox": True})
    Image.objects.filter(name="vm-901-disk-0").update(alone_bytes=48 * MIB, alone_at=now)
    used = 256 * MIB
    for minute in range(12):
        used += 24 * MIB
        lvm.write(lvm.read() | {"thin": kernel(used)})
        minutes.look(now + timedelta(minutes=minute))
    look_at_space(timezone.now())
    page.goto("/alerts/")
    told = page.locator("tbody tr").filter(has_text="local-lvm").first
    told.wait_for()
    assert axe(page) == []
    told.get_by_role("link").first.click()
    page.get_by_text("Forecast full in about").first.wait_for()
    assert "vm-901-disk-0" in page.get_by_role("table").filter(has_text="48 MiB").inner_text()
    assert axe(page) == []
    page.goto(f"/pools/{pool.pk}/")
    assert reread(pool).used_bytes == used
    assert f"{pool.available_bytes:,}" in page.content()
    assert str(used) in page.content(), "the chart ends with what was seen last"


def test_an_unused_volume_is_set_aside_restored_and_deleted(lvm: Lvm, page: Page) -> None:
    before = lvm.volumes()
    page.goto("/orphans/?everywhere=true")
    row = page.locator("#orphans tbody tr").filter(has_text="vm-900-disk-0")
    assert page.locator("#orphans tbody tr").count() == 1
    row.get_by_role("link", name="Set vm-900-disk-0 aside…").click()
    page.locator("#plan").wait_for()
    assert axe(page) == []
    page.get_by_role("button", name="Set vm-900-disk-0 aside").click()
    job = done(page)
    [aside] = lvm.volumes().keys() - before.keys()
    assert (aside, lvm.volumes()[aside]["lv_uuid"]) == (f".sa-{job.uid}.aside", "id-vm-900-disk-0")

    page.goto("/orphans/?everywhere=true")
    waiting = page.locator("#aside tbody tr").filter(has_text="vm-900-disk-0")
    assert axe(page) == []
    waiting.get_by_role("button", name="Restore vm-900-disk-0").click()
    done(page)
    assert lvm.volumes() == before
    assert Image.objects.get(name="vm-900-disk-0").orphan is True
