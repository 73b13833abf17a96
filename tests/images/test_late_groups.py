"""Volume groups that come later than their host, as after a power cut: what jobs have left in them waits until then."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images.models import Image
from images.orphans import rows
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job
from tests.factories import JobFactory
from tests.harness.lvm import GROUP, VOLUME, Lvm
from tests.working import register, reread, scan, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_libvirt")]

OTHER = "other"
MOVED = {"target_pool": None, "target_name": "moved", "repoint_guest": False}


@pytest.fixture
def lvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lvm:
    """Two groups with a volume each, which a scan has seen."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    state = Lvm(tmp_path / "bin")
    groups = [GROUP | {"vg_name": name, "vg_uuid": f"uuid-{name}"} for name in ("vg0", OTHER)]
    volumes = [
        VOLUME | {"vg_name": one["vg_name"], "vg_uuid": one["vg_uuid"], "lv_name": name, "lv_uuid": f"id-{name}"}
        for one, name in zip(groups, ("disk", "there"), strict=True)
    ]
    state.install(vg=groups, lv=volumes, thin="")
    scan(this_machine())
    return state


def disk() -> Image:
    return Image.every.select_related("host", "pool").get(path="/dev/vg0/disk")


def cut_off(kind: str, **more: Any) -> Job:
    """A job at the volume that has ended in the power cut."""
    ended = timezone.now() - timedelta(minutes=1)
    usual = {"state": "interrupted", "needs_recovery": True, "finished": ended, "rewrites": True}
    return JobFactory.create(kind=kind, target=disk(), **usual | more)


def renamed(lvm: Lvm, job: Job, name: str) -> None:
    """The volume has the name that a job gave it, and its tag."""
    told = lvm.read()
    (one,) = [line for line in told["lv"] if line["lv_uuid"] == "id-disk"]
    one |= {"lv_name": f".sa-{job.uid}.{name}", "lv_tags": f"sa-{job.uid}.{'m' if name == 'new' else 'i'}y.disk"}
    lvm.write(told)


def without(lvm: Lvm, *names: str) -> dict[str, Any]:
    """Takes groups away, as before their disks are there; gives what there was."""
    told = lvm.read()
    lvm.write(told | {kind: [one for one in told[kind] if one["vg_name"] not in names] for kind in ("vg", "lv")})
    return told


def recovered(job: Job) -> Job:
    assert work("recover", job.host_id).state == "succeeded"
    return reread(job)


@pytest.mark.parametrize("kind", ["move", "reclaim", "set_aside"])
def test_a_volume_that_a_job_has_renamed_gets_its_name_back_once_its_group_is_there(lvm: Lvm, kind: str) -> None:
    job = cut_off(kind, options=MOVED if kind == "move" else {})
    renamed(lvm, job, "work")
    there = without(lvm, "vg0")
    assert recovered(job).needs_recovery
    lvm.write(there)
    assert not recovered(job).needs_recovery
    assert (lvm.volumes()["disk"]["lv_tags"], lvm.volumes()["disk"]["lv_uuid"]) == ("", "id-disk")


def test_what_a_move_has_made_is_waited_for_with_the_group_that_it_went_to(lvm: Lvm) -> None:
    pool = StoragePool.objects.get(name=OTHER).pk
    job = cut_off("move", options=MOVED | {"target_pool": pool}, plan={"scratch_pool": pool})
    there = without(lvm, OTHER)
    assert recovered(job).needs_recovery
    lvm.write(there)
    assert not recovered(job).needs_recovery


def is_recovered_after_a_scan(job: Job) -> bool:
    scan(job.host)
    asked = Job.objects.filter(kind="recover", state="queued")
    return bool(asked.delete()[0])


@pytest.mark.parametrize("name", ["work", "new", ""])
def test_a_scan_that_finds_a_volume_which_a_job_has_left_has_the_host_recovered(lvm: Lvm, name: str) -> None:
    job = cut_off("move", options=MOVED)
    assert not is_recovered_after_a_scan(job)
    renamed(lvm, job, name or "work")
    if not name:  # it was cut off before the volume was renamed
        told = lvm.read()
        lvm.write(told | {"lv": [one | ({"lv_name": "disk"} if one["lv_tags"] else {}) for one in told["lv"]]})
    there = without(lvm, "vg0")
    assert not is_recovered_after_a_scan(job)
    lvm.write(there)
    assert is_recovered_after_a_scan(job)
    recovered(job)
    assert not is_recovered_after_a_scan(job)


def test_a_volume_that_is_set_aside_does_not_hide_a_file_that_a_job_has_left(lvm: Lvm, shared_folder: Path) -> None:
    register(disk().host, shared_folder)
    aside = JobFactory.create(kind="set_aside", target=disk(), state="succeeded", rewrites=True)
    rows.set_aside(disk(), aside)
    renamed(lvm, aside, "aside")
    assert not is_recovered_after_a_scan(aside)
    (shared_folder / ".sa-1f.journal").touch()
    assert is_recovered_after_a_scan(aside)


def test_what_was_set_aside_in_a_group_that_was_made_anew_is_gone_and_nobody_asks_again(lvm: Lvm) -> None:
    aside = JobFactory.create(kind="set_aside", target=disk(), state="succeeded", rewrites=True)
    rows.set_aside(disk(), aside)
    Image.every.filter(pk=disk().pk).update(aside_since=timezone.now() - timedelta(minutes=1))
    renamed(lvm, aside, "aside")
    told = without(lvm, "vg0")
    fresh = [one | ({"vg_uuid": "uuid-fresh"} if one["vg_name"] == "vg0" else {}) for one in told["vg"]]
    lvm.write(lvm.read() | {"vg": fresh})
    assert is_recovered_after_a_scan(aside)
    recovered(aside)
    assert disk().missing_since is not None
    assert not is_recovered_after_a_scan(aside)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_volume_that_waits_to_be_deleted_is_not_taken_for_deleted_while_its_group_is_away(
    lvm: Lvm, is_there: bool
) -> None:
    aside = JobFactory.create(kind="set_aside", target=disk(), state="succeeded", rewrites=True)
    rows.set_aside(disk(), aside)
    renamed(lvm, aside, "aside")
    deletion = cut_off("delete_aside")
    there = without(lvm, "vg0")
    assert (recovered(deletion).state, deletion.needs_recovery, disk().state) == ("interrupted", True, "set_aside")
    if not is_there:
        there |= {"lv": [one for one in there["lv"] if one["vg_name"] != "vg0"]}
    lvm.write(there)
    expected = ("interrupted", "set_aside", None) if is_there else ("succeeded", "deleted", 24 << 20)
    job = recovered(deletion)
    assert (job.state, disk().state, (job.result or {}).get("freed_bytes")) == expected
    assert not job.needs_recovery


def test_a_volume_that_is_set_aside_is_not_called_missing_while_its_group_is_away(lvm: Lvm) -> None:
    aside = JobFactory.create(kind="set_aside", target=disk(), state="succeeded", rewrites=True)
    rows.set_aside(disk(), aside)
    renamed(lvm, aside, "aside")
    there = without(lvm, "vg0")
    recovered(aside)
    assert disk().state == "set_aside"
    lvm.write(there | {"lv": []})
    recovered(aside)
    assert disk().state == "missing"
