"""A job exports an image, by REST's way and by the page; what it wrote comes back by an import."""

from pathlib import Path

import pytest

from images.models import Image
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.test_export import fill, unpacked
from tests.agent.test_unpack import MIB, image
from tests.images.scanned import folder, pool
from tests.working import OPERATOR, client_as, codes, image_at, scan, succeeded, work

__all__ = ["folder", "pool"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


@pytest.fixture
def disk(pool: StoragePool, folder: Path) -> Image:
    path = image(folder)
    fill(path, 3 * MIB)
    scan(pool.host)
    return image_at(path)


def test_an_image_leaves_in_parts_and_comes_back(pool: StoragePool, folder: Path, disk: Image) -> None:
    before = Path(disk.path).read_bytes()
    job = succeeded(work("export", disk.pk, OPERATOR, packing="gzip", part_bytes=2 * MIB))
    result = job.result or {}
    parts = sorted(folder.glob("disk.qcow2.gz.*"))
    assert [one.name for one in parts] == ["disk.qcow2.gz.001", "disk.qcow2.gz.002"]
    assert (result["parts"], result["path"]) == (2, str(parts[0]))
    assert unpacked(parts[0]) == before
    page = client_as(role="viewer").get(f"/jobs/{job.pk}/").content.decode()
    assert result["content_sha256"] in page
    assert "2 MiB (2,097,152 bytes)" in page
    taken = sum(one.stat().st_blocks * 512 for one in parts)
    assert (job.before_bytes, job.after_bytes, job.freed_bytes, result["after_bytes"]) == (0, taken, -taken, taken)
    back = succeeded(
        work("unpack", pool.pk, OPERATOR, source=result["path"], name="back.qcow2", sha256=result["sha256"])
    )
    assert (folder / "back.qcow2").read_bytes() == before
    assert (back.result or {})["content_sha256"] == result["content_sha256"]


def test_an_archive_takes_no_more_than_its_plan_says(folder: Path, disk: Image) -> None:
    plan = services.plan(OPERATOR, "export", disk.pk, {"packing": "ova", "cpus": 2})
    job = succeeded(work("export", disk.pk, OPERATOR, packing="ova", cpus=2))
    taken = (folder / "disk.ova").stat().st_blocks * 512
    assert plan.scratch_bytes is not None
    assert taken <= plan.scratch_bytes
    assert (job.plan["predicted_high"] or taken) >= taken >= (job.plan["predicted_low"] or 0)


def test_what_is_wrong_is_said_before_anything_is_written(folder: Path, disk: Image) -> None:
    wrong: list[dict[str, object]] = [
        {"packing": "rar"}, {"packing": "ova", "part_bytes": 2 * MIB}, {"part_bytes": 1000}, {"cpus": 2},
        {"target_name": "disk.gz"}, {"target_name": "../disk.zst"}, {"packing": "ova", "memory_bytes": MIB + 1},
        {"target_pool": 99_999},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(InvalidError):
            services.plan(OPERATOR, "export", disk.pk, options)
    (folder / "disk.qcow2.zst").write_bytes(b"somebody's")
    job = work("export", disk.pk, OPERATOR)
    assert (job.state, job.error_code) == (Job.State.FAILED, "target_exists")
    assert (folder / "disk.qcow2.zst").read_bytes() == b"somebody's"


def test_an_overlay_is_only_exported_with_its_base(folder: Path, disk: Image) -> None:
    assert work("create", disk.pool_id, OPERATOR, name="top.qcow2", base=disk.pk).state == Job.State.SUCCEEDED
    scan(disk.host)
    top = image_at(folder / "top.qcow2")
    assert codes("export", top) == {"unsupported_subformat"}
    assert services.plan(OPERATOR, "export", top.pk, {"packing": "ova"}).refusals == ()


def test_its_page_plans_and_starts_it(disk: Image) -> None:
    browser, address = client_as(role="operator"), f"/images/{disk.pk}/export/"
    assert address in browser.get(f"/images/{disk.pk}/").content.decode()
    given = {"packing": "gzip", "part_mib": "2"}
    shown = browser.get(address, given)
    assert shown.context["plan"].options["part_bytes"] == 2 * MIB
    wrong = browser.get(address, {"packing": "ova", "part_mib": "2"})
    assert wrong.context["error"].fields.keys() == {"part_mib"}
    sent = browser.post(address, given | {"planned": shown.context["planned"], "key": "k"})
    assert sent.status_code == 302, sent.content.decode()[:2000]
    assert Job.objects.get(kind="export").options["part_bytes"] == 2 * MIB
