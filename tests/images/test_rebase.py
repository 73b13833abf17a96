"""A job gives an image another backing file, and another one takes bitmaps away; both come back by an undo."""

import subprocess
from pathlib import Path

import pytest

from images.models import Image
from storage_admin.errors import InvalidError
from storage_admin.jobs import kinds, services
from storage_admin.jobs.models import Job
from tests.agent.test_bitmaps import bitmaps, leave_open
from tests.factories import ImageUseFactory
from tests.working import OPERATOR, client_as, codes, image_at, info, run, scanned_machine, succeeded, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


def create(path: Path, *base: Path) -> Path:
    below = [word for one in base for word in ("-b", one.name, "-F", "qcow2")]
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *below, path, "64M"], check=True)
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", f"write -q -P {len(path.name)} {len(path.name)}M 3M", path], check=True
    )
    return path


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Image]:
    old, new = create(tmp_path / "old.qcow2"), create(tmp_path / "other.qcow2")
    path = create(tmp_path / "vm.qcow2", old)
    scanned_machine(tmp_path)
    return {"old": image_at(old), "new": image_at(new), "vm": image_at(path)}


@pytest.mark.parametrize("by", ["id", "path"])
def test_an_image_gets_another_backing_file_and_the_old_one_again(images: dict[str, Image], by: str) -> None:
    base: int | str = images["new"].pk if by == "id" else images["new"].path
    job = succeeded(work("rebase", images["vm"].pk, OPERATOR, base=base))
    assert info(images["vm"].path)["backing-filename"] == "other.qcow2"
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert image_at(Path(images["vm"].path)).backing_id == images["new"].pk
    assert run(services.undo(OPERATOR, job)).state == Job.State.SUCCEEDED
    assert info(images["vm"].path)["backing-filename"] == "old.qcow2"


def test_what_cannot_be_the_backing_file_is_refused(images: dict[str, Image]) -> None:
    assert codes("rebase", images["vm"]) == {"invalid"}
    assert codes("rebase", images["vm"], base=images["new"].pk) == set()
    assert codes("rebase", images["vm"], base=images["old"].pk) == {"invalid"}
    assert "chain_cycle" in codes("rebase", images["vm"], base=images["vm"].pk)
    assert "chain_cycle" in codes("rebase", images["old"], base=images["vm"].pk)
    for named in (10**6, "/nowhere/vm.qcow2"):
        with pytest.raises(InvalidError):
            codes("rebase", images["vm"], base=named)
    ImageUseFactory.create(image=images["new"], disk__guest__state="running")
    assert "guest_running" in codes("rebase", images["vm"], base=images["new"].pk)


def test_the_new_backing_file_is_locked_for_other_jobs_meanwhile(images: dict[str, Image]) -> None:
    kind = kinds.get("rebase")
    locks = kind.locks(kind.resolve(images["vm"].pk), kind.clean({"base": images["new"].pk}))
    held = {lock.key: lock.exclusive for lock in locks}
    assert (held[f"image:{images['vm'].pk}"], held[f"image:{images['new'].pk}"]) == (True, False)
    assert len(held) == len(locks)


def test_its_page_takes_a_path_and_names_what_is_wrong(images: dict[str, Image]) -> None:
    browser, address = client_as(role="operator"), f"/images/{images['vm'].pk}/rebase/"
    assert address in browser.get(f"/images/{images['vm'].pk}/").content.decode()
    assert browser.get(address).context["plan"].refusals[0].code == "invalid"
    planned = browser.get(address, {"base": images["new"].path})
    assert planned.context["plan"].refusals == ()
    wrong = browser.get(address, {"base": "/nowhere"})
    assert (wrong.status_code, wrong.context["error"].fields.keys()) == (200, {"base"})


def test_stale_bitmaps_are_removed_and_those_of_backups_only_when_asked_for(tmp_path: Path) -> None:
    path = create(tmp_path / "vm.qcow2")
    subprocess.run(["qemu-img", "bitmap", "--add", path, "old"], check=True)
    leave_open(path)
    subprocess.run(["qemu-img", "bitmap", "--add", path, "virtnbdbackup.0"], check=True)
    scanned_machine(tmp_path)
    image = image_at(path)
    assert [(one["name"], one["owner"], one["in_use"]) for one in image.bitmaps] == [
        ("old", "", True), ("virtnbdbackup.0", "virtnbdbackup", False),
    ]  # fmt: skip
    browser = client_as(role="operator")
    assert f"/images/{image.pk}/bitmaps/" in browser.get(f"/images/{image.pk}/").content.decode()
    succeeded(work("bitmaps", image.pk, OPERATOR))
    assert set(bitmaps(path)) == {"virtnbdbackup.0"}
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert codes("bitmaps", image_at(path)) == {"stale_plan"}
    assert work("bitmaps", image.pk, OPERATOR, which="all").state == Job.State.SUCCEEDED
    assert set(bitmaps(path)) == set()
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert f"/images/{image.pk}/bitmaps/" not in browser.get(f"/images/{image.pk}/").content.decode()
