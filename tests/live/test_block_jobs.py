"""Chains shortened under guests that write all the time: every acknowledged write is there, and all agree then."""

import subprocess
from pathlib import Path

import libvirt
import pytest
from django.utils import timezone

from images.alert_rules.looking import look
from images.models import Image
from images.policies import runs
from images.policies import services as policies
from storage_admin.events.models import Alert
from storage_admin.hosts.libvirt import running
from storage_admin.jobs import kinds, services
from storage_admin.jobs.models import Job
from tests.factories import PolicyFactory
from tests.harness.guests import Disk, Starts
from tests.live.chains import PATTERNS, at_stage, chain_of, definition_of, done, patterns, submit, whole
from tests.live.conftest import OnChain, scanned
from tests.live.writer import PLACES, acknowledged, wait_for_writes, writing
from tests.working import (
    ADMIN,
    ON_LIBVIRT,
    OPERATOR,
    against,
    client_as,
    create,
    image_at,
    run,
    said,
    scan,
    succeeded,
    work,
)

pytestmark = [pytest.mark.guest, pytest.mark.django_db, *ON_LIBVIRT]


@pytest.mark.parametrize(("down_to", "left"), [(None, ["top.qcow2"]), ("base.qcow2", ["top.qcow2", "base.qcow2"])])
def test_a_chain_is_flattened_under_a_guest_that_writes(
    on_chain: OnChain, chain: list[Path], down_to: str | None, left: list[str]
) -> None:
    guest, row, folder = on_chain
    with writing(guest):
        wait_for_writes(guest, PLACES)  # from here on the guest's writes allocate nothing more
        job = done(submit("live_flatten", row, down_to=down_to and str(folder / down_to)))
        wait_for_writes(guest, 2)
        assert chain_of(guest) == left
    assert definition_of(guest) == "top.qcow2"
    assert (job.result or {})["now"]["chain"] == [str(folder / name) for name in left]
    assert job.after_bytes == chain[0].stat().st_blocks * 512
    assert (job.freed_bytes or 0) < 0
    whole(guest, chain[0], acknowledged(guest))


def test_a_policy_flattens_the_longest_chain_of_a_guest_that_writes(tcg_guest: Starts, chain: list[Path]) -> None:
    guest = tcg_guest(Disk(create(chain[0].parent / "other.qcow2", "8M")), Disk(chain[0]))
    __, row = scanned(chain[0].parent, guest)
    policy = PolicyFactory.create(kind="live_flatten", options=kinds.get("live_flatten").clean({}))
    found = client_as(role="operator").get(f"/api/v1/policies/{policy.pk}/preview/").json()
    assert [one["guest"] for one in found["chosen"]] == [row.pk]
    policies.run_now(OPERATOR, policy)
    runs.work(timezone.now())
    job = succeeded(run(Job.objects.get(kind="live_flatten")))
    assert (job.result or {})["disk"] == "vdb"
    now = running.look(row.host, row.uid)
    assert [[Path(path).name for path in disk.chain] for disk in now.disks] == [["other.qcow2"], ["top.qcow2"]]


@pytest.mark.parametrize(
    ("layer", "into", "left"),
    [
        (None, None, ["middle.qcow2", "base.qcow2"]),
        (None, "base.qcow2", ["base.qcow2"]),
        ("middle.qcow2", None, ["top.qcow2", "base.qcow2"]),
    ],
)
def test_overlays_are_merged_under_a_guest_that_writes(
    on_chain: OnChain, chain: list[Path], layer: str | None, into: str | None, left: list[str]
) -> None:
    guest, row, folder = on_chain
    with writing(guest):
        options = {"layer": layer and str(folder / layer), "into": into and str(folder / into)}
        done(submit("live_merge", row, **options))
        wait_for_writes(guest, 2)
        assert chain_of(guest) == left
    assert definition_of(guest) == left[0]
    assert client_as(role="viewer").get(f"/jobs/{Job.objects.get(kind='live_merge').pk}/").status_code == 200
    whole(guest, folder / left[0], acknowledged(guest))
    scan(row.host)
    assert {path.name: image_at(path).state for path in chain if path.name not in left} == dict.fromkeys(
        {path.name for path in chain} - {*left}, "merged"
    )
    assert {image_at(folder / name).state for name in left} == {"ok"}


def test_an_overlay_that_was_merged_is_worked_on_no_more_as_long_as_it_is_that_file(
    on_chain: OnChain, chain: list[Path]
) -> None:
    (guest, row, _), top = on_chain, chain[0]
    host, job = row.host, done(submit("live_merge", row))
    assert job.after_bytes == chain[1].stat().st_blocks * 512
    scan(host)
    image = image_at(top)
    for kind, options in (("reclaim", {}), ("flatten", {}), ("convert", {"format": "raw"})):
        assert "merged" in against(kind, image, **options), kind
    guest.domain.destroy()
    # By hand, past the warning: the guest gets the overlay again.
    guest.domain.connect().defineXML(guest.domain.XMLDesc().replace("middle.qcow2", "top.qcow2"))
    guest.domain.create()
    scan(host)
    look(timezone.now())
    assert Alert.objects.get(closed=None, target_kind="image").target_id == image.pk
    assert "merged" in against("live_flatten", row)
    guest.domain.destroy()
    guest.domain.connect().defineXML(guest.domain.XMLDesc().replace("top.qcow2", "middle.qcow2"))
    scan(host)
    # Away and back it is the same file; written over it, and so with the same inode, another one is not.
    away = top.rename(top.parent.parent / top.name)
    scan(host)
    away.rename(top)
    scan(host)
    assert image_at(top).state == "merged"
    kept = top.read_bytes()
    top.write_bytes(kept)
    scan(host)
    assert image_at(top).state == "ok"


def test_an_overlay_that_was_merged_is_set_aside_and_a_new_file_of_its_name_is_none(
    on_chain: OnChain, chain: list[Path]
) -> None:
    (_, row, _), top = on_chain, chain[0]
    done(submit("live_merge", row))
    scan(row.host)
    assert work("set_aside", image_at(top).pk, ADMIN).state == "succeeded"
    create(top, "8M")
    scan(row.host)
    assert set(Image.objects.filter(name=top.name).values_list("state", flat=True)) == {"set_aside", "ok"}


@pytest.mark.parametrize("layer", [None, "middle.qcow2"])
def test_the_files_of_merged_overlays_are_deleted_where_that_was_asked_for(
    on_chain: OnChain, chain: list[Path], layer: str | None
) -> None:
    guest, row, folder = on_chain
    merged = chain[1] if layer else chain[0]
    before = sum(path.stat().st_blocks * 512 for path in chain)
    options = {"layer": layer and str(folder / layer), "delete_merged": True}
    job = done(submit("live_merge", row, **options))
    assert (job.result or {})["deleted"] == [str(merged)]
    assert not merged.exists()
    left = [path for path in chain if path != merged]
    assert chain_of(guest) == [path.name for path in left]
    assert patterns(guest) == PATTERNS
    freed = before - sum(path.stat().st_blocks * 512 for path in left)
    # What QEMU, or the guest, writes into the image that has grown after it was looked at.
    assert abs((job.freed_bytes or 0) - freed) <= 64 << 10
    scan(row.host)
    assert not Image.objects.filter(name=merged.name, state="ok").exists()


def test_an_overlay_that_somebody_has_open_stays(on_chain: OnChain, chain: list[Path]) -> None:
    _, row, _ = on_chain
    with subprocess.Popen(["tail", "-f", chain[0]], stdout=subprocess.DEVNULL) as reader:
        job = done(submit("live_merge", row, delete_merged=True))
        reader.kill()
    assert (job.result or {})["deleted"] == []
    assert chain[0].exists()
    assert any("is left, delete it" in line for line in said(job))


def test_an_overlay_that_somebody_made_an_image_on_meanwhile_stays(on_chain: OnChain, chain: list[Path]) -> None:
    _, row, folder = on_chain
    job = submit("live_merge", row, delete_merged=True)
    with at_stage("pivoting", lambda: create(folder / "new.qcow2", base="top.qcow2")):
        job = done(job)
    assert (job.result or {})["deleted"] == []
    assert chain[0].exists()


def test_a_base_that_others_use_is_never_merged_into(tcg_guest: Starts, chain: list[Path]) -> None:
    create(chain[0].parent / "sibling.qcow2", base="base.qcow2")
    guest = tcg_guest(Disk(chain[0]))
    __, row = scanned(chain[0].parent, guest)
    assert against("live_merge", row, disk="vda", layer=str(chain[1]), into=None) == ["shared_base"]
    assert against("live_merge", row, disk="vda", layer=None, into=None) == []


@pytest.mark.parametrize("below", ["middle.qcow2", "top.qcow2"])
def test_what_was_made_on_an_image_since_the_scan_is_not_merged_under(on_chain: OnChain, below: str) -> None:
    guest, row, folder = on_chain
    create(folder / "sibling.qcow2", base=below)
    job = run(submit("live_merge", row))
    assert (job.state, job.error_code) == ("failed", "has_overlays"), (job.error_detail, said(job))
    assert chain_of(guest) == ["top.qcow2", "middle.qcow2", "base.qcow2"]


def test_what_a_guest_has_written_since_the_scan_counts_as_what_a_merge_may_need(
    on_chain: OnChain, chain: list[Path]
) -> None:
    guest, row, _ = on_chain
    guest.write(40, 30, 0x44)
    plan = services.plan(OPERATOR, "live_merge", row.pk, {"disk": "vda"})
    top, middle = (path.stat().st_blocks * 512 for path in chain[:2])
    assert (plan.before_bytes, plan.predicted_high) == (middle, top + middle)


def test_snapshots_that_libvirt_keeps_stand_against_it(tcg_guest: Starts, chain: list[Path]) -> None:
    guest = tcg_guest(Disk(chain[0]))
    guest.domain.snapshotCreateXML(
        "<domainsnapshot><name>now</name></domainsnapshot>", libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY
    )
    __, row = scanned(chain[0].parent, guest)
    for kind in ("live_flatten", "live_merge"):
        assert "in_snapshot_chain" in against(kind, row, disk="vda")


def test_a_cancel_leaves_the_chain_as_it_was(on_chain: OnChain, chain: list[Path]) -> None:
    guest, row, _ = on_chain
    with writing(guest):
        job = submit("live_flatten", row, bandwidth_bytes_sec=1 << 20)
        with at_stage("mirroring", lambda: services.cancel(OPERATOR, job)):
            run(job)
        assert job.state == "cancelled", (job.error_code, job.error_detail, said(job))
        assert chain_of(guest) == ["top.qcow2", "middle.qcow2", "base.qcow2"]
        assert not guest.domain.blockJobInfo("vda", 0)
    whole(guest, chain[0], acknowledged(guest))


def test_images_of_the_chain_are_locked_for_other_jobs(on_chain: OnChain, chain: list[Path]) -> None:
    guest, row, _ = on_chain
    job = submit("live_flatten", row)
    held = set(job.locks.values_list("key", flat=True))
    assert {f"image:{image_at(path).pk}" for path in chain} <= held
    guest.stop()
    job = run(job)
    assert (job.state, job.error_code) == ("failed", "guest_off")
