"""A job merges an overlay into its backing file: the ledger's line to the byte, deaths and recovery, the page."""

import subprocess
from pathlib import Path

import pytest

from images.kinds import commit
from images.models import Image
from storage_admin.agent.protocol import b64
from storage_admin.hosts.models import Host
from storage_admin.jobs import kinds, reaper, services
from storage_admin.jobs.models import Job
from tests.agent.harness import leftovers
from tests.factories import ImageUseFactory
from tests.faults.test_linked_clone_kills import run_to_death
from tests.images.test_rebase import create
from tests.working import OPERATOR, allocated, client_as, codes, image_at, run, scan, succeeded, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    pool = tmp_path / "pool"
    pool.mkdir()
    base = create(pool / "base.qcow2")
    path = create(pool / "overlay.qcow2", base)
    scan(this_machine(pool))
    return base, path


def reads_alike(first: Path, second: Path) -> bool:
    return subprocess.run(["qemu-img", "compare", "-U", first, second], capture_output=True).returncode == 0


def test_the_ledger_says_by_how_much_the_backing_file_grew(pair: tuple[Path, Path]) -> None:
    base, path = pair
    before = allocated(base)
    job = succeeded(work("commit", image_at(path).pk, OPERATOR))
    assert (job.before_bytes, job.after_bytes, job.freed_bytes) == (before, allocated(base), before - allocated(base))
    assert job.plan["predicted_low"] <= allocated(base) <= job.plan["predicted_high"]
    assert reads_alike(base, path)
    assert not job.undo_available
    run(Job.objects.get(kind="scan", state=Job.State.QUEUED))
    assert image_at(path).state == Image.State.MERGED
    assert codes("commit", image_at(path)) >= {"merged"}


def test_base_and_overlay_are_locked_alone_and_what_is_below_with_others(pair: tuple[Path, Path]) -> None:
    _, path = pair
    above = create(path.with_name("above.qcow2"), path)
    scan(Host.objects.get())
    kind = kinds.get("commit")
    held = {lock.key: lock.exclusive for lock in kind.locks(kind.resolve(image_at(above).pk), kind.clean({}))}
    assert [held[f"image:{image_at(one).pk}"] for one in (above, path, pair[0])] == [True, True, False]
    assert codes("commit", image_at(path)) == {"shared_base"}
    assert codes("commit", image_at(above)) == set()


def test_an_agent_that_dies_in_the_middle_leaves_a_merge_that_recovery_finishes(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, path = pair
    before = allocated(base)
    job = run_to_death(services.submit(OPERATOR, "commit", image_at(path).pk, {}), 7, "after", monkeypatch)
    assert job.state != Job.State.SUCCEEDED
    assert leftovers(path.parent) == {f".sa-{job.uid}.journal"}
    reaper.recover_hosts()
    recovery = Job.objects.get(kind="recover", state=Job.State.QUEUED)
    succeeded(run(recovery))
    job.refresh_from_db()
    assert (job.needs_recovery, leftovers(path.parent)) == (False, set())
    assert reads_alike(base, path)
    assert job.freed_bytes == before - allocated(base)
    scan(Host.objects.get())
    assert image_at(path).state == Image.State.OK
    succeeded(work("commit", image_at(path).pk, OPERATOR))


def test_a_merge_whose_guest_was_led_to_the_base_meanwhile_is_not_done_again(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, path = pair
    job = run_to_death(services.submit(OPERATOR, "commit", image_at(path).pk, {}), 7, "after", monkeypatch)
    assert job.needs_recovery
    files = {"overlay_b64": b64(bytes(path)), "base_b64": b64(bytes(base))}
    assert commit.owed(job.host_id) == {"merges": [{"job": job.uid, **files}], "merges_over": []}
    assert "busy" in codes("create", image_at(base).pool, name="n.qcow2", base=image_at(base).pk)
    ImageUseFactory.create(image=image_at(base))
    assert commit.owed(job.host_id) == {"merges": [], "merges_over": [job.uid]}
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -q -P 9 0 60M", base], check=True)
    before = base.read_bytes()
    reaper.recover_hosts()
    assert run(Job.objects.get(kind="recover", state=Job.State.QUEUED)).state == Job.State.SUCCEEDED
    assert (base.read_bytes() == before, leftovers(path.parent)) == (True, set())


def test_a_merge_that_was_cut_off_is_owed_still_when_its_base_was_away_for_a_while(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, path = pair
    job = run_to_death(services.submit(OPERATOR, "commit", image_at(path).pk, {}), 7, "after", monkeypatch)
    away = base.rename(base.parent.parent / base.name)
    scan(job.host)
    assert image_at(path).backing_id is None
    reaper.recover_hosts()
    assert run(Job.objects.get(kind="recover", state=Job.State.QUEUED)).state == Job.State.SUCCEEDED
    job.refresh_from_db()
    assert (job.needs_recovery, leftovers(path.parent)) == (True, {f".sa-{job.uid}.journal"})
    away.rename(base)
    scan(job.host)
    assert work("recover", job.host_id).state == Job.State.SUCCEEDED
    job.refresh_from_db()
    assert (job.needs_recovery, leftovers(path.parent)) == (False, set())
    assert reads_alike(base, path)


def test_bitmaps_and_a_smaller_overlay_are_refused_before_anything_is_done(pair: tuple[Path, Path]) -> None:
    base, path = pair
    subprocess.run(["qemu-img", "bitmap", "--add", path, "backup"], check=True)
    scan(Host.objects.get())
    assert codes("commit", image_at(path)) == {"unsupported_subformat"}
    subprocess.run(["qemu-img", "bitmap", "--remove", path, "backup"], check=True)
    subprocess.run(["qemu-img", "resize", "-q", base, "128M"], check=True)
    scan(Host.objects.get())
    assert codes("commit", image_at(path)) == {"stale_plan"}
    assert codes("commit", image_at(base)) == {"stale_plan"}


def test_its_page_wants_the_name_typed(pair: tuple[Path, Path]) -> None:
    base, path = pair
    image, browser = image_at(path), client_as(role="operator")
    address = f"/images/{image.pk}/commit/"
    assert address in browser.get(f"/images/{image.pk}/").content.decode()
    assert f"/images/{image_at(base).pk}/commit/" not in browser.get(f"/images/{image_at(base).pk}/").content.decode()
    shown = browser.get(address)
    form = {"planned": shown.context["planned"], "key": shown.context["key"]}
    refused = browser.post(address, form | {"confirm_name": "base.qcow2"})
    assert refused.context["error"].fields.keys() == {"confirm_name"}
    assert 'value="base.qcow2"' in refused.content.decode()
    assert not Job.objects.filter(kind="commit").exists()
    assert browser.post(address, form | {"confirm_name": image.name}).status_code == 302
    assert Job.objects.filter(kind="commit").count() == 1
