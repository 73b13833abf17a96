"""Linked clones of Proxmox VE are flattened, and their VMs name them anew: real images, a server held to the schema."""

from pathlib import Path

import pytest

from images.kinds.recover import Recover
from images.rewrite import linked_clones, repointing
from storage_admin.agent.protocol import HostError
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox.pvesh import Pvesh
from storage_admin.hosts.shells import LocalShell
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import HostFactory, JobFactory
from tests.harness.patching import do_after
from tests.harness.proxmox import world
from tests.harness.proxmox.server import ProxmoxServer
from tests.images.linked import (
    LINKED,
    OWN,
    OnDisk,
    backing,
    by_command,
    clone,
    conf,
    flatten,
    holds,
    host,
    server,
    store,
)
from tests.images.node import scanned
from tests.working import OPERATOR, against, image_at, reread, run, said, succeeded

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_reserve")]

__all__ = ["by_command", "clone", "host", "server", "store"]


def test_an_api_that_is_away_when_it_is_put_back_is_asked_again(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def and_then_it_is_cancelled(job: Job) -> None:
        Job.objects.filter(pk=job.pk).update(cancel_requested=True)
        Host.objects.filter(pk=host.pk).update(port=1)

    do_after(monkeypatch, linked_clones, "lead_to_the_flat_one", and_then_it_is_cancelled)
    job = flatten(clone)
    job.host.refresh_from_db()
    ended = run(job)
    assert (ended.state, ended.repoint_due) == ("cancelled", True), said(ended)
    assert conf(server)["scsi0"].startswith(OWN)
    Host.objects.filter(pk=host.pk).update(port=server.port)
    repointing.settle()
    assert not reread(ended).repoint_due
    assert conf(server)["scsi0"].startswith(LINKED)


def test_one_vm_that_cannot_be_changed_keeps_no_other_from_it(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server.world.guests["vm", 101]
    assert isinstance(first, OnDisk)
    second = OnDisk(first.file.with_name("102.conf"), 102, first.text.replace("clone", "second"))
    server.world.guests["vm", 102] = second
    scanned(host)

    def and_then_the_first_is_locked(job: Job) -> None:
        assert {one["uid"] for one in job.kept["volumes"]} == {"101", "102"}
        first.text += "lock: backup\n"
        Job.objects.filter(pk=job.pk).update(cancel_requested=True)

    do_after(monkeypatch, linked_clones, "lead_to_the_flat_one", and_then_the_first_is_locked)
    job = run(flatten(clone))
    assert (job.state, job.repoint_due) == ("cancelled", True), said(job)
    assert second.conf.now["scsi0"].startswith(LINKED)
    assert conf(server)["scsi0"].startswith(OWN)


def test_only_hosts_that_answer_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, away = HostFactory.create(), HostFactory.create(status="unreachable")
    due = [JobFactory.create(host=host, state="failed", repoint_due=True) for host in (reached, away)]
    asked: list[int] = []
    monkeypatch.setattr(repointing, "agree", lambda job: asked.append(job.pk))
    repointing.settle()
    assert asked == [due[0].pk]
    Recover().ended(JobFactory.create(kind="recover", host=HostFactory.create(), state="succeeded"))
    assert asked == [due[0].pk]  # a recovery of another host has nothing to do with it


def test_what_has_no_way_to_the_configuration_is_refused(host: Host, clone: Path) -> None:
    Host.objects.filter(pk=host.pk).update(token_id="", kind="ssh", transport="forced", slug="other", address="h")
    (refusal,) = services.plan(OPERATOR, "flatten", image_at(clone).pk, {}).refusals
    assert (refusal.code, "API token" in refusal.detail) == ("guest_records_chain", True)
    assert "guest_records_chain" in against("convert", image_at(clone), format="qcow2", replace=True)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (f"name: clone\nunused0: {LINKED}\n", "guest_records_chain"),
        (f"name: clone\nscsi0: {LINKED}\n\n[PENDING]\ndelete: scsi0\n", "stale_plan"),
        (f"name: clone\nscsi0: {LINKED}\n\n[PENDING]\nscsi0: store:101/vm-101-disk-5.qcow2\n", "stale_plan"),
        (f"name: clone\nscsi0: {LINKED}\n\n[PENDING]\nmemory: 4096\n", ""),
    ],
)
def test_what_the_configuration_would_not_take_is_refused_in_the_plan(
    server: ProxmoxServer, host: Host, clone: Path, text: str, code: str
) -> None:
    server.world.guests["vm", 101].text = text
    scanned(host)
    assert against("flatten", image_at(clone)) == ([code] if code else [])


# Longer than a heart's beat: that would wait for this test's own transaction.
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("by_command")
def test_without_a_token_root_on_the_node_does_it_by_pvesh(server: ProxmoxServer, clone: Path) -> None:
    job = succeeded(run(flatten(clone)))
    assert (backing(clone), holds(clone), conf(server)["scsi0"]) == ("", True, f"{OWN},discard=on,size=8M")
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    assert conf(server)["scsi0"] == f"{LINKED},discard=on,size=8M"


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("by_command")
def test_by_pvesh_a_change_in_between_is_not_written_over(server: ProxmoxServer, clone: Path) -> None:
    machine = server.world.guests["vm", 101]

    def change(guest: world.Guest) -> None:
        machine.text = "onboot: 1\n" + machine.text

    server.world.before_put = change
    job = run(flatten(clone))
    assert (job.state, job.error_code) == ("failed", "stale_plan"), job.error_detail
    assert (bool(backing(clone)), conf(server)["scsi0"]) == (True, f"{LINKED},discard=on,size=8M")


def test_a_node_without_pvesh_says_so(clone: Path, host: Host) -> None:
    with pytest.raises(HostError, match="no pvesh on pve"):
        Pvesh(LocalShell({"PATH": "/nonexistent"}), "pve").get("version")
    for part in ("a/b", "..", "x y", "$(id)"):
        with pytest.raises(HostError, match="not a valid path"):
            Pvesh(LocalShell({"PATH": "/nonexistent"}), "pve").get("nodes", part)
