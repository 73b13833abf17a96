"""A broken chain is repaired: the moved file is found and proven, another one is refused unless an admin takes it."""

import os
import shutil
from pathlib import Path

import pytest
from pytest_django import DjangoAssertNumQueries

from images.kinds.relink import candidates
from images.models import Image
from storage_admin.accounts.models import ForbiddenError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.lost_base import USED, as_qcow2, damaged, disk, overlay, used
from tests.images.test_rebase import create
from tests.working import ADMIN, OPERATOR, client_as, codes, image_at, info, run, said, scan, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and its overlay, as a scan has seen them; another image of that size is beside them."""
    base = create(tmp_path / "base.qcow2")
    path = create(tmp_path / "vm.qcow2", base)
    create(tmp_path / "other.qcow2")
    scan(this_machine(tmp_path))
    return base, path


def test_a_base_that_was_renamed_is_found_and_proven(pair: tuple[Path, Path]) -> None:
    base, path = pair
    assert codes("relink", image_at(path)) >= {"stale_plan"}
    moved = base.rename(base.with_name("renamed.qcow2"))
    scan(Host.objects.get())
    assert image_at(path).state == Image.State.CHAIN_BROKEN
    found = [(one.image.name, one.proven) for one in candidates(image_at(path))]
    assert found == [("renamed.qcow2", True), ("other.qcow2", False)]
    assert (codes("relink", image_at(path)), codes("relink", image_at(path), base=str(moved))) == ({"invalid"}, set())
    job = work("relink", image_at(path).pk, OPERATOR, base=str(moved))
    assert job.state == Job.State.SUCCEEDED, (job.error_code, job.error_detail, said(job))
    assert [one["argv"][1] for one in job.commands].count("compare") == 1
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert (image_at(path).state, image_at(path).backing_id) == (Image.State.OK, image_at(moved).pk)
    assert run(services.undo(OPERATOR, job)).state == Job.State.SUCCEEDED
    assert info(path)["backing-filename"] == "base.qcow2"


def test_many_candidates_ask_no_more_of_the_database_than_few(
    pair: tuple[Path, Path], django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    base, path = pair
    for number in range(6):
        shutil.copy2(base, base.with_name(f"copy{number}.qcow2"))
    base.rename(base.with_name("renamed.qcow2"))
    scan(Host.objects.get())
    image = image_at(path)
    # What was seen last under the lost name, what jobs have found, and the candidates.
    with django_assert_num_queries(3):
        assert len(candidates(image)) == 8


def test_a_copy_with_its_times_is_proven_and_one_that_was_written_to_is_not(pair: tuple[Path, Path]) -> None:
    base, path = pair
    copy, written = base.with_name("copy.qcow2"), base.with_name("written.qcow2")
    shutil.copy2(base, copy)
    os.utime(copy, ns=(base.stat().st_mtime_ns, base.stat().st_mtime_ns))
    base.rename(written)
    os.utime(written)
    scan(Host.objects.get())
    proven = {one.image.name: one.proven for one in candidates(image_at(path))}
    assert proven == {"copy.qcow2": True, "written.qcow2": False, "other.qcow2": False}
    assert codes("relink", image_at(path), base=str(written)) == {"unproven"}
    os.chown(copy, 12345, 12345)  # somebody else's, who can give it any size and time
    scan(Host.objects.get())
    assert codes("relink", image_at(path), base=str(copy)) == {"unproven"}


def test_an_unproven_one_is_checked_only_for_an_admin_and_where_looking_inside_is_allowed(
    pair: tuple[Path, Path],
) -> None:
    base, path = pair
    base.unlink()
    scan(Host.objects.get())
    image, other = image_at(path), str(path.with_name("other.qcow2"))
    assert codes("relink", image_at(path), base=other) == {"unproven"}
    with pytest.raises(ForbiddenError):
        codes("relink", image_at(path), base=other, accept_unproven=True)
    wanted = {"base": other, "accept_unproven": True}
    assert codes("relink", image, ADMIN, **wanted) == {"inside_off"}
    StoragePool.objects.update(look_inside=True)
    before = path.read_bytes()
    job = work("relink", image.pk, ADMIN, **wanted)
    assert (job.state, job.error_code) == (Job.State.FAILED, "unproven"), said(job)
    assert path.read_bytes() == before


def test_what_is_older_or_of_another_size_than_what_was_lost_is_not_even_checked(pair: tuple[Path, Path]) -> None:
    base, path = pair
    StoragePool.objects.update(look_inside=True)
    older, longer = base.with_name("older.qcow2"), base.with_name("longer.qcow2")
    shutil.copy2(base, older)
    os.utime(older, ns=(base.stat().st_mtime_ns - 10**10,) * 2)
    base.rename(longer)
    with longer.open("ab") as file:
        file.write(bytes(65536))
    scan(Host.objects.get())
    found = {one.image.name: bool(one.other) for one in candidates(image_at(path))}
    assert found == {"older.qcow2": True, "longer.qcow2": True, "other.qcow2": False}
    for wrong in (older, longer):
        assert codes("relink", image_at(path), ADMIN, base=str(wrong), accept_unproven=True) == {"unproven"}


@pytest.fixture
def states(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The overlay of a lost base, that base under another name and touched, and one whose filesystem is damaged."""
    pool, beside = tmp_path / "pool", tmp_path / "beside"
    pool.mkdir()
    beside.mkdir()
    was = disk(beside / "was", 1)
    base = as_qcow2(was, pool / "base.qcow2")
    path = overlay(was, used(was, beside / "left", USED, 2, files=3), base, pool / "vm.qcow2")
    this_machine(pool)
    StoragePool.objects.update(look_inside=True)
    moved = base.rename(pool / "moved.qcow2")
    moved.touch()
    wrong = as_qcow2(damaged(was, beside / "damaged"), pool / "wrong.qcow2")
    scan(Host.objects.get())
    return path, moved, wrong


def test_what_the_check_found_stands_with_each_file_and_the_sound_one_is_taken(states: tuple[Path, Path, Path]) -> None:
    path, moved, wrong = states
    image, browser, before = image_at(path), client_as(role="admin"), path.read_bytes()
    job = work("relink", image.pk, ADMIN, base=str(wrong), accept_unproven=True)
    assert (job.state, job.error_code) == (Job.State.FAILED, "filesystem_damaged"), said(job)
    assert path.read_bytes() == before
    rows = {one["path"]: one for one in browser.get(f"/api/v1/images/{image.pk}/candidates/").json()}
    assert [one["state"] for one in rows[str(wrong)]["filesystems"]] == ["damaged"]
    assert rows[str(wrong)]["against"]["code"] == "filesystem_damaged"
    assert (rows[str(moved)]["filesystems"], rows[str(moved)]["against"]) == ([], None)
    assert rows[str(moved)]["danger"]
    assert codes("relink", image, ADMIN, base=str(wrong), accept_unproven=True) == {"filesystem_damaged"}
    address = f"/images/{image.pk}/relink/"
    sent = {"base": str(moved), "accept_unproven": "true"}
    page = browser.get(address, sent)
    form = sent | {"planned": page.context["planned"], "shown": page.context["shown"]}
    refused = browser.post(address, form)
    assert refused.context["error"].fields.keys() == {"confirm_name"}
    assert browser.post(address, form | {"confirm_name": image.name}).status_code == 302
    job = run(Job.objects.get(kind="relink", state=Job.State.QUEUED))
    assert job.state == Job.State.SUCCEEDED, (job.error_code, job.error_detail, said(job))
    assert [one["state"] for one in (job.result or {})["filesystems"]] == ["sound"]
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert (image_at(path).state, image_at(path).backing_id) == (Image.State.OK, image_at(moved).pk)


def test_the_page_of_a_broken_chain_leads_to_its_candidates(pair: tuple[Path, Path]) -> None:
    base, path = pair
    base.rename(base.with_name("re named.qcow2"))
    scan(Host.objects.get())
    browser, image = client_as(role="operator"), image_at(path)
    address = f"/images/{image.pk}/relink/"
    assert address in browser.get(f"/images/{image.pk}/").content.decode()
    page = browser.get(address)
    assert [one.image.name for one in page.context["candidates"] if one.proven] == ["re named.qcow2"]
    chosen = browser.get(address, {"base": str(base.with_name("re named.qcow2"))})
    assert chosen.context["plan"].refusals == ()
