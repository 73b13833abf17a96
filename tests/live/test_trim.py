"""Trims of running libvirt guests by Debian's own agent: what became free, and by name why nothing did."""

import subprocess
from pathlib import Path

import pytest
from django.utils import timezone

from images.policies import runs
from images.policies import services as policies
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan
from tests.factories import PolicyFactory
from tests.harness.guests import Disk, Domains, LibvirtGuest, Starts
from tests.live.conftest import MIB, allocated, deletes, filesystem_image, scanned
from tests.working import ON_LIBVIRT, OPERATOR, client_as, create, run, succeeded

pytestmark = [pytest.mark.guest, pytest.mark.django_db, *ON_LIBVIRT]

#: What makes the first disk take discards of a MiB and more alone; libvirt has no element for it before 10.2.
GRANULARITY = (
    "<qemu:override><qemu:device alias='virtio-disk0'><qemu:frontend>"
    "<qemu:property name='discard_granularity' type='unsigned' value='1048576'/>"
    "</qemu:frontend></qemu:device></qemu:override>"
)


def plan_of(guest_id: int) -> Plan:
    return services.plan(OPERATOR, "trim", guest_id, {})


def codes(plan: Plan) -> set[tuple[str, str]]:
    return {(cause.code, cause.disk) for cause in plan.causes}


def test_what_a_guest_has_deleted_becomes_free_and_the_ledger_says_how_much(
    agent_guest: Starts, shared_folder: Path
) -> None:
    image = filesystem_image(shared_folder / "disk.qcow2")
    guest = agent_guest(Disk(image, driver="detect_zeroes='unmap'"))
    deletes(guest, 60)
    __, row = scanned(shared_folder, guest)
    plan = plan_of(row.pk)
    assert (plan.refusals, plan.causes) == ((), ())
    before = allocated(image)
    job = succeeded(run(services.submit(OPERATOR, "trim", row.pk, {})))
    result = job.result or {}
    assert before - allocated(image) >= 57 * MIB
    assert result["disks"] == [
        {"disk": "vda", "before_bytes": before, "after_bytes": allocated(image),
         "freed_bytes": before - allocated(image)}
    ]  # fmt: skip
    assert [one["path"] for one in result["filesystems"]] == ["/mnt"]
    assert result["trimmed_bytes"] >= 57 * MIB
    assert (job.freed_bytes, job.before_bytes, job.after_bytes) == (before - allocated(image), before, allocated(image))
    assert job.space_pool is not None
    assert Job.objects.filter(kind="scan", host=row.host_id).count() == 2, "a scan follows"
    assert guest.console.run("ls /mnt") == "lost+found"


def test_every_disk_is_told_of_alone(agent_guest: Starts, shared_folder: Path) -> None:
    first = filesystem_image(shared_folder / "first.qcow2")
    second = filesystem_image(shared_folder / "second.raw", "raw")
    guest = agent_guest(Disk(first), Disk(second, "raw", discard="ignore"))
    guest.console.run("mkdir /tmp; mkdir /data; mount -t ext4 /dev/vdb /data")
    deletes(guest, 20)
    guest.console.run("dd if=/dev/urandom of=/data/noise bs=1M count=20 2>/dev/null; sync; rm /data/noise; sync")
    __, row = scanned(shared_folder, guest)
    plan = plan_of(row.pk)
    assert plan.refusals == ()
    assert codes(plan) == {("zeroes_kept", "vda"), ("zeroes_kept", "vdb"), ("discard_ignored", "vdb")}
    job = run(services.submit(OPERATOR, "trim", row.pk, {}))
    freed = {one["disk"]: one["freed_bytes"] for one in (job.result or {})["disks"]}
    assert freed["vda"] >= 19 * MIB
    assert freed["vdb"] == 0


def test_a_guest_that_is_off_is_not_trimmed(domains: Domains, shared_folder: Path) -> None:
    domain = domains.define([Disk(create(shared_folder / "disk.qcow2"))], agent=True)
    __, row = scanned(shared_folder, LibvirtGuest(None, domain))  # type: ignore[arg-type]
    assert [one.code for one in plan_of(row.pk).refusals] == ["guest_off"]


def test_a_guest_without_a_line_to_an_agent_says_so(tcg_guest: Starts, shared_folder: Path) -> None:
    guest = tcg_guest(Disk(filesystem_image(shared_folder / "disk.qcow2")))
    __, row = scanned(shared_folder, guest)
    plan = plan_of(row.pk)
    assert ("no_agent", "") in codes(plan)
    assert [one.code for one in plan.refusals] == ["tool_missing"]


def test_an_agent_that_does_not_answer_is_told_apart_from_none(agent_guest: Starts, shared_folder: Path) -> None:
    guest = agent_guest(Disk(filesystem_image(shared_folder / "disk.qcow2")))
    __, row = scanned(shared_folder, guest)
    guest.console.run("killall qemu-ga")
    plan = plan_of(row.pk)
    assert ("agent_silent", "") in codes(plan)
    assert [one.code for one in plan.refusals] == ["tool_missing"]


def test_an_agent_that_may_not_trim_is_named(agent_guest: Starts, shared_folder: Path) -> None:
    guest = agent_guest(Disk(filesystem_image(shared_folder / "disk.qcow2")), words="blocked=guest-fstrim")
    __, row = scanned(shared_folder, guest)
    plan = plan_of(row.pk)
    assert ("agent_cannot_trim", "") in codes(plan)
    assert [one.code for one in plan.refusals] == ["tool_missing"]


def test_disks_that_free_nothing_are_refused_with_their_causes(agent_guest: Starts, shared_folder: Path) -> None:
    guest = agent_guest(Disk(filesystem_image(shared_folder / "disk.qcow2"), discard="ignore"))
    __, row = scanned(shared_folder, guest)
    plan = plan_of(row.pk)
    assert codes(plan) == {("discard_ignored", "vda"), ("zeroes_kept", "vda")}
    assert [one.code for one in plan.refusals] == ["nothing_to_free"]


def test_old_machine_types_pass_no_discard_by_virtio(agent_guest: Starts, shared_folder: Path) -> None:
    guest = agent_guest(Disk(filesystem_image(shared_folder / "disk.qcow2")), machine="pc-q35-3.1")
    __, row = scanned(shared_folder, guest)
    assert ("bus_without_discard", "vda") in codes(plan_of(row.pk))
    with pytest.raises(AssertionError):
        guest.console.run("fstrim /mnt")


def test_what_snapshots_bases_clusters_and_granularity_hold_is_named(agent_guest: Starts, shared_folder: Path) -> None:
    filesystem_image(shared_folder / "base.qcow2", "qcow2", "256M", "-o", "cluster_size=2M")
    subprocess.run(["qemu-img", "snapshot", "-c", "before", shared_folder / "base.qcow2"], check=True)
    top = create(shared_folder / "top.qcow2", base="base.qcow2")
    other = filesystem_image(shared_folder / "other.qcow2", "qcow2", "256M", "-o", "cluster_size=2M")
    subprocess.run(["qemu-img", "snapshot", "-c", "before", other], check=True)
    guest = agent_guest(Disk(top), Disk(other), override=GRANULARITY)
    __, row = scanned(shared_folder, guest)
    found = codes(plan_of(row.pk))
    assert {("held_by_base", "vda"), ("coarse_granularity", "vda")} <= found
    assert {("held_by_snapshot", "vdb"), ("large_clusters", "vdb")} <= found
    assert ("held_by_snapshot", "vda") not in found


def test_a_policy_trims_the_guests_that_run(agent_guest: Starts, shared_folder: Path) -> None:
    guest = agent_guest(Disk(filesystem_image(shared_folder / "disk.raw", "raw"), "raw"))
    deletes(guest, 40)
    __, row = scanned(shared_folder, guest)
    policy = PolicyFactory.create(kind="trim", options={})
    found = client_as(role="operator").get(f"/api/v1/policies/{policy.pk}/preview/").json()
    assert [(one["guest"], one["image"], one["label"]) for one in found["chosen"]] == [(row.pk, None, row.name)]
    night = policies.run_now(OPERATOR, policy)
    runs.work(timezone.now())
    job = succeeded(run(Job.objects.get(kind="trim")))
    assert (job.freed_bytes or 0) >= 39 * MIB
    runs.work(timezone.now())
    [pick] = night.picks.all()
    assert (pick.state, pick.guest, pick.label) == ("succeeded", row, row.name)
    assert row.name in client_as(role="viewer").get(f"/policies/{policy.pk}/runs/{night.pk}/").content.decode()
    for page in (f"/policies/{policy.pk}/", f"/policies/{policy.pk}/preview/"):
        assert client_as(role="operator").get(page).status_code == 200
