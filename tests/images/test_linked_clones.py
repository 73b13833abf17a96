"""Linked clones of Proxmox VE are flattened, and their VMs name them anew: real images, a server held to the schema."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from images.kinds.flatten import Flatten
from images.kinds.recover import Recover
from images.rewrite import linked_clones, repointing
from storage_admin.agent.protocol import HostError
from storage_admin.hosts import secrets, transport
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox.pvesh import Pvesh
from storage_admin.hosts.shells import LocalShell
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.models import Job
from tests.factories import HostFactory, JobFactory
from tests.harness.proxmox import world
from tests.harness.proxmox.server import ProxmoxServer, proxmox
from tests.harness.proxmox.world import SECRET, TOKEN_ID, lab
from tests.images import node
from tests.working import OPERATOR, create, image_at, run, said, scan, this_machine

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_reserve")]

LINKED = "store:100/base-100-disk-0.qcow2/101/vm-101-disk-0.qcow2"
OWN = "store:101/vm-101-disk-0.qcow2"


class OnDisk(world.Guest):
    """A guest whose file lies in the node's folder: the agent and the API see the same."""

    file: Path

    def __init__(self, file: Path, vmid: int, text: str) -> None:
        object.__setattr__(self, "file", file)
        super().__init__("vm", vmid, text)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "text":
            self.file.write_text(value)
        else:
            super().__setattr__(name, value)

    def __getattribute__(self, name: str) -> Any:
        if name == "text":
            return object.__getattribute__(self, "file").read_text()
        return super().__getattribute__(name)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The storage's folder."""
    (tmp_path / "store/images/100").mkdir(parents=True)
    (tmp_path / "store/images/101").mkdir()
    return tmp_path / "store"


@pytest.fixture
def server(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxmoxServer]:
    """A node with a template and its clone: /etc/pve in a folder, and the API over the same files."""
    etc = tmp_path / "root/etc/pve"
    (etc / "nodes/pve1/qemu-server").mkdir(parents=True)
    (etc / "nodes/pve1/lxc").mkdir()
    (etc / "local").symlink_to("nodes/pve1")
    node.pretend(etc, store, monkeypatch)
    there = lab()
    there.guests = {
        ("vm", vmid): OnDisk(etc / f"nodes/pve1/qemu-server/{vmid}.conf", vmid, text)
        for vmid, text in (
            (100, "name: tmpl\nscsi0: store:100/base-100-disk-0.qcow2,size=8M\ntemplate: 1\n"),
            (101, f"name: clone\nscsi0: {LINKED},discard=on,size=8M\n"),
        )
    }
    for one in there.storages:
        if one["storage"] == "store":
            one["path"] = str(store)
    with proxmox(there, tmp_path) as running:
        yield running
    assert running.wrong == []


@pytest.fixture
def clone(server: ProxmoxServer, store: Path) -> Path:
    """The clone's image, with data of its base and of its own."""
    base = create(store / "images/100/base-100-disk-0.qcow2")
    path = create(store / "images/101/vm-101-disk-0.qcow2", base="../100/base-100-disk-0.qcow2")
    for one, pattern, offset in ((base, 0x61, "0"), (path, 0x62, "4M")):
        # The base as it was before it became one: nothing is written to it once the clone has data.
        subprocess.run(["qemu-io", "-f", "qcow2", "-c", f"write -P {pattern} {offset} 1M", one], check=True)
    return path


@pytest.fixture
def host(server: ProxmoxServer, clone: Path) -> Host:
    """This machine as that node, with a token, scanned."""
    host = this_machine()
    endpoint = server.endpoint()
    Host.objects.filter(pk=host.pk).update(
        address=endpoint.address, port=endpoint.port, tls_fingerprint=endpoint.fingerprint, node="pve1",
        token_id=TOKEN_ID, token_locked=secrets.lock(SECRET),
    )  # fmt: skip
    host.refresh_from_db()
    scanned(host)
    server.seen.clear()
    return host


def scanned(host: Host) -> None:
    """Scans until no scan asks for another one: the first finds Proxmox VE and its storage."""
    scan(host)
    while (job := Job.objects.filter(kind="scan", state="queued").first()) is not None:
        assert run(job).state == "succeeded"


def conf(server: ProxmoxServer) -> dict[str, str]:
    return server.world.guests["vm", 101].conf.now


def backing(path: Path) -> str:
    told = subprocess.run(["qemu-img", "info", "--output=json", path], capture_output=True, check=True).stdout
    return str(json.loads(told).get("backing-filename", ""))


def holds(path: Path) -> bool:
    """Whether a reader of the image finds all data, its base's and its own."""
    reads = [("-c", f"read -P {pattern} {offset} 1M") for pattern, offset in ((0x61, "0"), (0x62, "4M"))]
    words = [word for read in reads for word in read]
    done = subprocess.run(["qemu-io", "-r", "-f", "qcow2", *words, path], capture_output=True, text=True)
    return done.returncode == 0 and "failed" not in done.stdout


def flatten(path: Path, **options: Any) -> Job:
    return services.submit(OPERATOR, "flatten", image_at(path).pk, options)


def test_a_linked_clone_is_flattened_named_anew_and_undone(server: ProxmoxServer, host: Host, clone: Path) -> None:
    plan = services.plan(OPERATOR, "flatten", image_at(clone).pk, {})
    assert plan.refusals == ()
    assert any(OWN in warning for warning in plan.warnings)
    assert any("qm set 101 --scsi0" in command for command in plan.commands)
    job = run(flatten(clone))
    assert job.state == "succeeded", (job.error_code, job.error_detail, said(job))
    assert (backing(clone), holds(clone)) == ("", True)
    assert conf(server) == {"name": "clone", "scsi0": f"{OWN},discard=on,size=8M"}
    assert all(one.params.get("digest") for one in server.seen if one.verb == "PUT")
    assert not job.repoint_due
    assert any(f"names {OWN} now" in line for line in said(job))
    scanned(host)
    assert image_at(clone).uses.get().disk.volume == OWN
    assert any(LINKED in warning for warning in services.plan(OPERATOR, "undo", job.pk, {"force": False}).warnings)
    undone = run(services.undo(OPERATOR, job))
    assert undone.state == "succeeded", (undone.error_code, undone.error_detail)
    assert (bool(backing(clone)), holds(clone)) == (True, True)
    assert conf(server) == {"name": "clone", "scsi0": f"{LINKED},discard=on,size=8M"}


@pytest.mark.parametrize("when", ["while it works", "in the last moment"])
def test_a_configuration_that_was_changed_meanwhile_refuses_it_and_all_is_put_back(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    machine = server.world.guests["vm", 101]

    def change() -> None:
        machine.text = "onboot: 1\n" + machine.text

    if when == "while it works":
        check = linked_clones.check

        def and_then_somebody_changes_it(job: Job, image: Any) -> None:
            begun = bool(job.kept)
            check(job, image)
            if not begun:
                change()

        monkeypatch.setattr(linked_clones, "check", and_then_somebody_changes_it)
    else:
        server.world.before_put = lambda guest: change()
    inode = clone.stat().st_ino
    job = run(flatten(clone))
    assert (job.state, job.error_code) == ("failed", "stale_plan"), job.error_detail
    assert (clone.stat().st_ino, holds(clone)) == (inode, True)
    assert sorted(entry.name for entry in clone.parent.iterdir()) == [clone.name]
    assert conf(server)["scsi0"] == f"{LINKED},discard=on,size=8M"
    assert conf(server)["onboot"] == "1"
    server.world.before_put = None
    repointing.settle()
    job.refresh_from_db()
    assert not job.repoint_due
    assert conf(server)["scsi0"] == f"{LINKED},discard=on,size=8M"


@pytest.mark.parametrize(
    ("added", "code"),
    [
        ("lock: backup\n", "guest_locked"),
        (f"parent: one\n\n[one]\nscsi0: {LINKED},size=8M\nsnaptime: 1\n", "has_internal_snapshots"),
        ("\n[PENDING]\nscsi0: none,media=cdrom\n", "stale_plan"),
    ],
)
def test_what_stands_against_it_since_the_scan_stops_it_before_any_work(
    server: ProxmoxServer, host: Host, clone: Path, added: str, code: str
) -> None:
    job = flatten(clone)
    machine = server.world.guests["vm", 101]
    machine.text += added
    inode = clone.stat().st_ino
    ended = run(job)
    assert (ended.state, ended.error_code) == ("failed", code)
    assert not any("qemu-img" in line for line in said(ended))
    assert (clone.stat().st_ino, LINKED in machine.text, OWN in machine.text) == (inode, True, False)
    assert server.verbs() == []


def test_a_missing_right_is_named_before_any_work(server: ProxmoxServer, host: Host, clone: Path) -> None:
    server.world.allow("Sys.Audit", "Datastore.Audit", "VM.Audit")
    job = run(flatten(clone))
    assert (job.error_code, "VM.Config.Disk on /vms/101" in job.error_detail) == ("right_missing", True)
    assert backing(clone)


def test_an_agent_that_dies_between_leaves_a_whole_image_and_the_ids_are_put_right(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = linked_clones.lead_to_the_flat_one

    def and_then_the_worker_is_gone(job: Job) -> None:
        lead(job)
        assert conf(server)["scsi0"].startswith(OWN)
        assert holds(clone)  # either id leads to the file, which is an overlay still
        Job.objects.filter(pk=job.pk).update(heartbeat=job.created - claims.LEASE * 2)
        assert reaper.reap() == 1

    monkeypatch.setattr(linked_clones, "lead_to_the_flat_one", and_then_the_worker_is_gone)
    job = run(flatten(clone))
    assert job.state == "interrupted"
    assert holds(clone)
    run(Job.objects.get(kind="recover", state="queued"))
    job.refresh_from_db()
    assert not job.repoint_due, said(job)
    assert (bool(backing(clone)), conf(server)["scsi0"]) == (True, f"{LINKED},discard=on,size=8M")


def test_a_swap_that_nobody_could_write_down_keeps_the_new_id(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(kind: Flatten, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("the worker is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Flatten, "record", lost)
        job = run(flatten(clone))
    assert (job.state, job.needs_recovery) == ("failed", True)
    assert conf(server)["scsi0"].startswith(OWN)
    reaper.recover_hosts()
    run(Job.objects.get(kind="recover", state="queued"))
    job.refresh_from_db()
    assert (job.state, job.repoint_due) == ("succeeded", False)
    assert (backing(clone), holds(clone), conf(server)["scsi0"]) == ("", True, f"{OWN},discard=on,size=8M")


def test_a_change_that_is_cut_off_in_the_middle_is_put_back_with_every_line(
    server: ProxmoxServer, host: Host, clone: Path
) -> None:
    changes: list[str] = []

    def fail_once(guest: world.Guest) -> None:
        changes.append(conf(server)["scsi0"])
        if len(changes) == 2:
            assert conf(server)["unused0"] == LINKED  # the drive has its new id, and a second line the old one
            raise world.ApiDeathError(500, "unable to write: input/output error\n")

    server.world.before_put = fail_once
    job = run(flatten(clone))
    assert (job.state, "input/output error" in job.error_detail) == ("failed", True)
    assert len(changes) > 2
    assert not job.repoint_due
    assert (bool(backing(clone)), holds(clone)) == (True, True)
    assert conf(server) == {"name": "clone", "scsi0": f"{LINKED},discard=on,size=8M"}


def test_a_guest_that_is_locked_when_it_is_put_back_is_waited_for(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, machine = linked_clones.lead_to_the_flat_one, server.world.guests["vm", 101]

    def and_then_a_backup_begins(job: Job) -> None:
        lead(job)
        machine.text += "lock: backup\n"
        Job.objects.filter(pk=job.pk).update(cancel_requested=True)

    monkeypatch.setattr(linked_clones, "lead_to_the_flat_one", and_then_a_backup_begins)
    job = run(flatten(clone))
    assert (job.state, job.repoint_due) == ("cancelled", True), said(job)
    assert any("changed later" in line for line in said(job))
    repointing.settle()
    machine.text = machine.text.replace("lock: backup\n", "")
    repointing.settle()
    job.refresh_from_db()
    assert (job.repoint_due, conf(server)["scsi0"]) == (False, f"{LINKED},discard=on,size=8M")


def test_an_api_that_is_away_when_it_is_put_back_is_asked_again(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = linked_clones.lead_to_the_flat_one

    def and_then_it_is_cancelled(job: Job) -> None:
        lead(job)
        Job.objects.filter(pk=job.pk).update(cancel_requested=True)
        Host.objects.filter(pk=host.pk).update(port=1)

    monkeypatch.setattr(linked_clones, "lead_to_the_flat_one", and_then_it_is_cancelled)
    job = flatten(clone)
    job.host.refresh_from_db()
    ended = run(job)
    assert (ended.state, ended.repoint_due) == ("cancelled", True), said(ended)
    assert conf(server)["scsi0"].startswith(OWN)
    Host.objects.filter(pk=host.pk).update(port=server.port)
    repointing.settle()
    ended.refresh_from_db()
    assert not ended.repoint_due
    assert conf(server)["scsi0"].startswith(LINKED)


def test_one_vm_that_cannot_be_changed_keeps_no_other_from_it(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server.world.guests["vm", 101]
    assert isinstance(first, OnDisk)
    second = OnDisk(first.file.with_name("102.conf"), 102, first.text.replace("clone", "second"))
    server.world.guests["vm", 102] = second
    scanned(host)
    lead = linked_clones.lead_to_the_flat_one

    def and_then_the_first_is_locked(job: Job) -> None:
        lead(job)
        assert {one["uid"] for one in job.kept["volumes"]} == {"101", "102"}
        first.text += "lock: backup\n"
        Job.objects.filter(pk=job.pk).update(cancel_requested=True)

    monkeypatch.setattr(linked_clones, "lead_to_the_flat_one", and_then_the_first_is_locked)
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
    options = {"format": "qcow2", "replace": True}
    codes = [one.code for one in services.plan(OPERATOR, "convert", image_at(clone).pk, options).refusals]
    assert "guest_records_chain" in codes


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
    refusals = services.plan(OPERATOR, "flatten", image_at(clone).pk, {}).refusals
    assert [one.code for one in refusals] == ([code] if code else [])


# By the command that root has on the node

PVESH = """#!{python}
import json, sys
from urllib.parse import quote
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.endpoint import Endpoint, Token
verb, path, *rest = sys.argv[1:]
params = dict(zip([name[2:] for name in rest[::2]], rest[1::2]))
assert params.pop("output-format") == "json"
client = Client(Endpoint("127.0.0.1", {port}, "{fingerprint}"), Token("{token}", "{secret}"), 5)
try:
    answer = getattr(client, dict(get="get", set="put", create="post", delete="delete")[verb])(
        *path.strip("/").split("/"), params=params)
except (HostError, RefusedError) as error:
    # pvesh tells in words alone; these are the ones that Proxmox VE has for it.
    lock = error.detail.partition("(")[2].partition(")")[0]
    words = dict(stale_plan="checksum mismatch (file change by other user?)", guest_locked=f"VM is locked ({{lock}})")
    sys.stderr.write(words.get(error.code, error.detail.partition(" says: ")[2] or error.detail) + chr(10))
    sys.exit(255)
if verb == "set":  # as PVE::API2::Qemu does where no web server stands between
    told = [f"-{{key}} {{params[key]}}" for key in sorted(params) if key != "digest"]
    print(f"update VM {{path.split('/')[4]}}: {{' '.join(told)}}")
if answer is not None:
    print(json.dumps(answer))
"""


@pytest.fixture
def by_command(server: ProxmoxServer, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node without a token, and a double of pvesh there that asks the same server, as root."""
    server.world.root = True
    Host.objects.filter(pk=host.pk).update(token_id="", token_locked=b"", address="", port=None, node="")
    tool = tmp_path / "bin/pvesh"
    tool.parent.mkdir()
    endpoint = server.endpoint()
    tool.write_text(
        PVESH.format(
            python=sys.executable, port=endpoint.port, fingerprint=endpoint.fingerprint, token=TOKEN_ID, secret=SECRET
        )
    )
    tool.chmod(0o755)
    root = Path(linked_clones.__file__).parents[1]
    env = {"PATH": f"{tool.parent}:{os.defpath}", "PYTHONPATH": str(root)}
    monkeypatch.setattr(transport, "shell", lambda host: LocalShell(os.environ | env))


# Longer than a heart's beat: that would wait for this test's own transaction.
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("by_command")
def test_without_a_token_root_on_the_node_does_it_by_pvesh(server: ProxmoxServer, clone: Path) -> None:
    job = run(flatten(clone))
    assert job.state == "succeeded", (job.error_code, job.error_detail, said(job))
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
        with pytest.raises(HostError, match="no path"):
            Pvesh(LocalShell({"PATH": "/nonexistent"}), "pve").get("nodes", part)
