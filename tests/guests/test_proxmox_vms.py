"""VMs of Proxmox VE changed as jobs: limits, moves, sizes and trims, by a server held to the official schema."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from images.kinds.targets import locks_on
from images.models import Image, ImageUse
from storage_admin.accounts.roles import ForbiddenError
from storage_admin.agent.protocol import RefusedError, b64
from storage_admin.errors import InvalidError
from storage_admin.guests import proxmox_vms
from storage_admin.guests.models import Guest
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import registration, tasks
from storage_admin.jobs import kinds, reaper, runner, services
from storage_admin.jobs.models import Job, ResourceLock
from storage_admin.jobs.recorder import Recorder
from tests.factories import GuestDiskFactory, GuestFactory, ImageFactory, TokenFactory, UserFactory
from tests.harness.proxmox import world
from tests.harness.proxmox.server import ProxmoxServer, proxmox
from tests.harness.proxmox.world import AUDITOR, SECRET, TOKEN_ID, lab
from tests.web.confirming import confirm
from tests.working import ADMIN, OPERATOR, VIEWER, run, said

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

WEB = (
    "agent: 1\nide2: none,media=cdrom\nname: web\nscsi0: store:120/vm-120-disk-0.qcow2,discard=on,size=8G\n"
    "scsi1: local-lvm:vm-120-disk-1,size=1G\nunused0: store:120/vm-120-disk-7.qcow2\n"
)
OLD = "store:120/vm-120-disk-0.qcow2"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxmoxServer]:
    """The node of the tests' data with one VM more. At the end nothing may be wrong with any request or answer."""
    monkeypatch.setitem(tasks.follow.__kwdefaults__ or {}, "interval", 0.02)
    monkeypatch.setattr(proxmox_vms, "SHARED_SECONDS", 0.0)
    with proxmox(lab(), tmp_path) as running:
        running.world.guests["vm", 120] = world.Guest("vm", 120, WEB)
        yield running
    assert running.wrong == []


def files_of(server: ProxmoxServer) -> dict[str, Any]:
    """What the agent on that node would tell of /etc/pve."""
    texts = {number: one.text for (kind, number), one in server.world.guests.items() if kind == "vm"}
    files = {f"nodes/pve1/qemu-server/{number}.conf": text for number, text in texts.items()}
    told = [{"name": name, "content_b64": b64(text.encode())} for name, text in files.items()]
    return {"proxmox": True, "node": "pve1", "files": told, "failed": [], "running": {}}


@pytest.fixture
def host(server: ProxmoxServer, monkeypatch: pytest.MonkeyPatch) -> Host:
    """That node, added with its token and scanned; then its agent can read its files."""
    endpoint = server.endpoint()
    wanted = registration.WantedNode(
        name="pve", address=endpoint.address, port=endpoint.port, token_id=TOKEN_ID, token_secret=SECRET,
        tls_fingerprint=endpoint.fingerprint,
    )  # fmt: skip
    host = registration.add_node(ADMIN, wanted)
    job = run(services.submit(OPERATOR, "scan", host.pk, {}))
    assert job.state == "succeeded", (job.error_detail, said(job))
    monkeypatch.setattr(asking, "ask", lambda host, verb, args: files_of(server))
    reached(host, Host.Transport.API_SSH)
    server.seen.clear()
    return host


def reached(host: Host, way: str) -> None:
    Host.objects.filter(pk=host.pk).update(transport=way)
    host.refresh_from_db()


@pytest.fixture
def web(host: Host) -> Guest:
    return Guest.objects.get(host=host, uid="120")


def guest(host: Host, uid: str) -> Guest:
    return Guest.objects.get(host=host, uid=uid)


def conf(server: ProxmoxServer, vmid: int = 120) -> dict[str, str]:
    return server.world.guests["vm", vmid].conf.now


def refusals(kind: str, row: Guest, **options: Any) -> list[str]:
    return [one.code for one in services.plan(OPERATOR, kind, row.pk, options).refusals]


def submit(kind: str, row: Guest, **options: Any) -> Job:
    return services.submit(OPERATOR, kind, row.pk, options)


def good(job: Job) -> dict[str, Any]:
    assert job.state == "succeeded", (job.error_code, job.error_detail, said(job))
    return dict(job.result or {})


# Limits


def test_a_container_of_proxmox_ve_is_offered_nothing_and_costs_its_host_nothing(host: Host, client: Client) -> None:
    row = Guest.objects.get(host=host, kind="container")
    plan = services.plan(OPERATOR, "set_io_priority", row.pk, {"priority": 4})
    assert ([one.code for one in plan.refusals], plan.commands) == (["invalid"], ())
    with pytest.raises(RefusedError):
        submit("set_io_priority", row, priority=4)
    row.host.refresh_from_db()
    assert row.host.status != "unreachable"
    client.force_login(UserFactory.create(role="operator"))
    for page in (f"/guests/{row.pk}/", "/guests/?kind=container"):
        shown = client.get(page).content.decode()
        assert row.name in shown
        assert f"/guests/io/?guest={row.pk}" not in shown
        assert f'name="guest" value="{row.pk}"' not in shown
    assert "vzctl" not in client.get("/guests/io/", {"guest": str(row.pk), "priority": "4"}).content.decode()
    machine = guest(host, "120")
    assert f"?guest={machine.pk}" in client.get(f"/guests/{machine.pk}/").content.decode()


def test_limits_of_a_disk_that_waits_for_another_volume_are_refused_before_any_is_set(
    server: ProxmoxServer, host: Host, web: Guest
) -> None:
    Guest.objects.filter(pk=web.pk).update(waiting=["scsi1"])
    assert refusals("set_io_priority", web, limits={"read_iops_sec": 50}) == ["stale_plan"]
    assert refusals("set_io_priority", web, limits={"read_iops_sec": 50}, disk="scsi0") == []


def test_limits_are_set_on_every_disk_and_read_again(server: ProxmoxServer, host: Host) -> None:
    row = guest(host, "110")
    plan = services.plan(OPERATOR, "set_io_priority", row.pk, {"limits": {"write_bytes_sec": 5 << 20}})
    assert plan.refusals == ()
    assert "qm set 110 --scsi0 '…,mbps_wr=5'" in plan.commands
    result = good(run(submit("set_io_priority", row, limits={"write_bytes_sec": 5 << 20, "write_iops_sec": 0})))
    assert result["before"]["io_limits"] == {"scsi0": {"read_bytes_sec": 13107200, "write_iops_sec": 300}}
    every = {"write_bytes_sec": 5 << 20}
    assert result["now"]["io_limits"] == {
        "scsi0": {"read_bytes_sec": 13107200} | every,
        "scsi1": every,
        "virtio0": every,
    }
    assert result["effect"] == "next_start"
    row.refresh_from_db()
    assert row.io_limits == result["now"]["io_limits"]
    assert conf(server, 110)["scsi0"] == "local-lvm:vm-110-disk-0,mbps_rd=12.5,mbps_wr=5,size=8G"
    assert all(one.params.get("digest") for one in server.seen if one.verb == "PUT")


def test_limits_of_a_running_vm_are_in_effect_or_said_to_wait(server: ProxmoxServer, web: Guest) -> None:
    machine = server.world.guests["vm", 120]
    machine.running = True
    job = run(submit("set_io_priority", web, disk="scsi0", limits={"read_iops_sec": 100}))
    assert (good(job)["effect"], "iops_rd=100" in conf(server)["scsi0"]) == ("now", True)
    assert "iops_rd" not in conf(server)["scsi1"]
    machine.hotplug = False
    result = good(run(submit("set_io_priority", web, disk="scsi1", limits={"read_iops_sec": 50})))
    assert result["effect"] == "next_start"
    assert "wait for its next start" in result["words"]
    assert "iops_rd" not in conf(server)["scsi1"]


def test_limits_that_cannot_be_are_refused_before_anything(server: ProxmoxServer, host: Host, web: Guest) -> None:
    limits = {"read_iops_sec": 5}
    assert refusals("set_io_priority", web, weight=500) == ["invalid"]
    assert refusals("set_io_priority", web, priority=3) == ["invalid"]
    assert refusals("set_io_priority", web, disk="scsi7", limits=limits) == ["invalid"]
    assert refusals("set_io_priority", web, limits={"read_bytes_sec": 5}) == ["invalid"]
    assert refusals("set_io_priority", guest(host, "102"), limits=limits) == ["guest_locked"]
    server.world.allow(*AUDITOR)
    plan = services.plan(OPERATOR, "set_io_priority", web.pk, {"limits": limits})
    assert [one.code for one in plan.refusals] == ["right_missing"]
    assert "VM.Config.Disk on /vms/120" in plan.refusals[0].detail
    assert server.verbs() == []


def test_a_right_or_a_lock_that_changes_meanwhile_stops_the_job(server: ProxmoxServer, web: Guest) -> None:
    job = submit("set_io_priority", web, limits={"read_iops_sec": 5})
    server.world.guests["vm", 120].text += "lock: backup\n"
    assert run(job).error_code == "guest_locked"
    server.world.guests["vm", 120].text = WEB
    job = submit("set_io_priority", web, limits={"read_iops_sec": 5})
    server.world.allow(*AUDITOR)
    assert run(job).error_code == "right_missing"
    assert conf(server)["scsi0"] == f"{OLD},discard=on,size=8G"
    assert server.verbs() == []


#: What the API does not show, and a write by it drops.
HIDDEN = "scsi31: store:120/vm-120-disk-9.qcow2,size=1G\n"
WRITES: list[tuple[str, dict[str, Any]]] = [
    ("set_io_priority", {"limits": {"read_iops_sec": 5}}),
    ("resize", {"disk": "scsi0", "size_bytes": 9 << 30}),
    ("move_disk", {"disk": "scsi0", "storage": "s2"}),
]


def hide_a_line(server: ProxmoxServer, web: Guest) -> str:
    """Gives the VM a line that the API does not show; the digest of its file then."""
    machine = server.world.guests["vm", 120]
    machine.text = HIDDEN + WEB
    Guest.objects.filter(pk=web.pk).update(digest=machine.conf.digest, unread=[HIDDEN.strip()])
    return str(machine.conf.digest)


@pytest.mark.parametrize(("kind", "options"), WRITES)
def test_a_line_that_a_write_would_drop_is_named_by_the_plan_and_stays(
    server: ProxmoxServer, web: Guest, kind: str, options: dict[str, Any]
) -> None:
    late = submit(kind, web, **options)
    hide_a_line(server, web)
    plan = services.plan(OPERATOR, kind, web.pk, options)
    assert [one.code for one in plan.refusals] == ["hidden_lines"]
    assert "scsi31: store:120/vm-120-disk-9.qcow2" in plan.refusals[0].detail
    assert run(late).error_code == "hidden_lines"
    assert server.world.guests["vm", 120].text == HIDDEN + WEB
    # What Proxmox VE shows, it keeps.
    server.world.guests["vm", 120].text = "args: -drive file=/srv/x\n" + WEB
    good(run(submit(kind, web, **options)))
    assert "args" in conf(server)


@pytest.mark.parametrize(("kind", "options"), WRITES)
def test_by_the_api_alone_an_admin_accepts_what_cannot_be_checked_once(
    server: ProxmoxServer, host: Host, web: Guest, kind: str, options: dict[str, Any]
) -> None:
    digest = hide_a_line(server, web)
    reached(host, Host.Transport.API)
    plan = services.plan(ADMIN, kind, web.pk, options)
    assert [one.code for one in plan.refusals] == ["hidden_lines"]
    assert digest in plan.refusals[0].detail
    with pytest.raises(ForbiddenError):
        submit(kind, web, **options, accept_hidden_lines=digest)
    assert server.world.guests["vm", 120].text == HIDDEN + WEB
    other = services.plan(ADMIN, kind, web.pk, options | {"accept_hidden_lines": "0" * 40})
    assert [one.code for one in other.refusals] == ["hidden_lines"]
    job = services.submit(ADMIN, kind, web.pk, options | {"accept_hidden_lines": digest})
    assert any("cannot be checked" in warning for warning in job.plan["warnings"])
    server.world.guests["vm", 120].text += "# another one by now\n"
    assert run(job).error_code == "hidden_lines"
    server.world.guests["vm", 120].text = HIDDEN + WEB
    good(run(services.submit(ADMIN, kind, web.pk, options | {"accept_hidden_lines": digest})))
    web.refresh_from_db()
    # Limits are read again right after Proxmox VE has written them: that file has no such line.
    assert web.accepted_digest == (conf_digest(server) if kind == "set_io_priority" else digest)


def test_the_page_asks_an_admin_to_accept_it_and_starts_it_then(
    server: ProxmoxServer, host: Host, web: Guest, client: Client
) -> None:
    digest = hide_a_line(server, web)
    reached(host, Host.Transport.API)
    asked = {"guest": str(web.pk), "read_iops_sec": "5"}
    client.force_login(UserFactory.create(role="operator"))
    assert "accept_hidden_lines=" not in client.get("/guests/io/", asked).content.decode()
    client.force_login(UserFactory.create(role="admin"))
    assert f"accept_hidden_lines={digest}" in client.get("/guests/io/", asked).content.decode()
    confirm(client, "/guests/io/", asked | {"accept_hidden_lines": digest})
    assert good(run(Job.objects.get(kind="set_io_priority")))["effect"] == "next_start"
    resize = {"disk": "scsi0", "size_gib": "9"}
    web.refresh_from_db()
    Guest.objects.filter(pk=web.pk).update(accepted_digest="", digest=conf_digest(server))
    page = client.get(f"/guests/{web.pk}/resize/", resize).content.decode()
    assert f"accept_hidden_lines={conf_digest(server)}" in page
    confirm(client, f"/guests/{web.pk}/resize/", resize | {"accept_hidden_lines": conf_digest(server)})
    good(run(Job.objects.get(kind="resize")))


def conf_digest(server: ProxmoxServer) -> str:
    return str(server.world.guests["vm", 120].conf.digest)


def test_a_trim_writes_no_configuration_and_needs_nobody_to_accept_anything(
    server: ProxmoxServer, host: Host, web: Guest
) -> None:
    hide_a_line(server, web)
    machine = server.world.guests["vm", 120]
    machine.running, machine.trims = True, [{"path": "/", "trimmed": 5}]
    reached(host, Host.Transport.API)
    good(run(submit("trim", web)))
    assert machine.text == HIDDEN + WEB


def test_what_proxmox_leaves_to_root_alone_is_refused_by_the_plan(server: ProxmoxServer, web: Guest) -> None:
    server.world.guests["vm", 120].text = WEB + "scsi5: /dev/sdz,size=1G\n"
    GuestDiskFactory.create(guest=web, target="scsi5", path="/dev/sdz", volume="")
    limits = {"read_iops_sec": 5}
    assert refusals("set_io_priority", web, limits=limits) == ["right_missing"]
    assert refusals("set_io_priority", web, limits=limits, disk="scsi5") == ["right_missing"]
    assert refusals("move_disk", web, disk="scsi5", storage="s2") == ["invalid"]
    assert refusals("resize", web, disk="scsi5", size_bytes=9 << 30) == ["invalid"]
    good(run(submit("set_io_priority", web, limits=limits, disk="scsi0")))


# Moving


def test_a_disk_is_moved_and_the_old_volume_kept(server: ProxmoxServer, web: Guest) -> None:
    plan = services.plan(OPERATOR, "move_disk", web.pk, {"disk": "scsi0", "storage": "s2"})
    assert plan.refusals == ()
    assert "stays with the VM as an unused disk" in plan.reason
    assert plan.commands == ("qm disk move 120 scsi0 s2 --delete 0",)
    job = submit("move_disk", web, disk="scsi0", storage="s2")
    job = run(job)
    result = good(job)
    assert (result["before"]["volume"], result["left_as"]) == (OLD, "unused1")
    assert result["now"]["volume"] == conf(server)["scsi0"].partition(",")[0]
    assert result["now"]["volume"].startswith("s2:120/")
    assert conf(server)["unused1"] == OLD
    log = said(job)
    assert any(result["task"] in line for line in log)
    assert any("transferred 2.0 GiB of 4.0 GiB (50.00%)" in line for line in log)
    assert Job.objects.filter(kind="scan", state="queued").exists()
    assert not ResourceLock.objects.filter(job=job).exists()


def test_the_progress_of_a_move_is_what_its_task_tells(
    server: ProxmoxServer, web: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    progress = Recorder.progress

    def note(recorder: Recorder, event: dict[str, Any]) -> None:
        told.append(event["percent"])
        progress(recorder, event)

    monkeypatch.setattr(Recorder, "progress", note)
    good(run(submit("move_disk", web, disk="scsi0", storage="s2", format="raw", delete_source=True)))
    assert told == [0, 0, 25, 50, 75, 100]
    assert conf(server)["scsi0"].startswith("s2:120/vm-120-disk-0.raw,")
    assert "unused1" not in conf(server)


def test_a_move_that_is_cancelled_ends_its_task(
    server: ProxmoxServer, web: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit("move_disk", web, disk="scsi0", storage="s2")
    tick = Recorder.tick

    def and_somebody_cancels(recorder: Recorder) -> None:
        Job.objects.filter(pk=job.pk).update(cancel_requested=True)
        recorder._written = 0.0
        tick(recorder)

    monkeypatch.setattr(Recorder, "tick", and_somebody_cancels)
    ended = run(job)
    assert ended.state == "cancelled", (ended.error_detail, said(ended))
    (task,) = server.world.tasks.values()
    assert task.exit_status == "interrupted by signal"
    assert conf(server)["scsi0"] == f"{OLD},discard=on,size=8G"
    assert any("told to stop" in line for line in said(ended))


def test_a_worker_that_is_told_to_end_stops_the_task(
    server: ProxmoxServer, web: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit("move_disk", web, disk="scsi0", storage="s2")
    begin = server.world.begin

    def and_stop(*given: Any) -> str:
        runner.stopping.set()
        return begin(*given)

    monkeypatch.setattr(server.world, "begin", and_stop)
    try:
        ended = run(job)
    finally:
        runner.stopping.clear()
    assert (ended.state, ended.error_code) == ("interrupted", "interrupted")
    assert [task.exit_status for task in server.world.tasks.values()] == ["interrupted by signal"]


def test_a_job_whose_worker_is_lost_says_that_its_task_may_go_on(web: Guest) -> None:
    job = submit("move_disk", web, disk="scsi0", storage="s2")
    Job.objects.filter(pk=job.pk).update(state="running", heartbeat=None)
    assert reaper.reap() == 1
    job.refresh_from_db()
    assert (job.state, job.needs_recovery) == ("interrupted", False)
    assert "goes on there" in job.error_detail
    assert "original image" not in job.error_detail


def test_a_task_that_fails_is_a_job_that_failed_with_its_words(server: ProxmoxServer, web: Guest) -> None:
    job = submit("move_disk", web, disk="scsi0", storage="s2")
    server.world.task_fails = "storage migration failed: no space left on device"
    ended = run(job)
    assert (ended.state, "no space left on device" in ended.error_detail) == ("failed", True)
    assert Job.objects.filter(kind="scan", state="queued").exists()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"disk": "scsi0", "storage": "nowhere"}, "invalid", "none of that name"),
        ({"disk": "scsi0", "storage": "disabled"}, "invalid", "takes no disks"),
        ({"disk": "scsi0", "storage": "other-node"}, "invalid", "takes no disks"),
        ({"disk": "scsi0", "storage": "nfs-dead"}, "host_unreachable", "cannot reach the storage nfs-dead"),
        ({"disk": "scsi0", "storage": "store"}, "invalid", "is in store already"),
        ({"disk": "ide2", "storage": "s2"}, "invalid", "no volume"),
        ({"disk": "scsi5", "storage": "s2"}, "invalid", "has no drive scsi5"),
    ],
)
def test_a_move_to_where_nothing_can_be_is_refused(
    server: ProxmoxServer, web: Guest, options: dict[str, Any], code: str, words: str
) -> None:
    (refusal,) = services.plan(OPERATOR, "move_disk", web.pk, options).refusals
    assert (refusal.code, words in refusal.detail) == (code, True), refusal.detail
    assert server.verbs() == []


def test_a_storage_that_is_full_is_refused(server: ProxmoxServer, web: Guest) -> None:
    for status in server.world.statuses:
        status["avail"] = (8 << 30) - 1
    assert refusals("move_disk", web, disk="scsi0", storage="s2") == ["not_enough_space"]
    assert refusals("move_disk", web, disk="scsi1", storage="s2") == []


def test_what_proxmox_protects_is_not_moved_or_enlarged(server: ProxmoxServer, host: Host, web: Guest) -> None:
    template, locked = guest(host, "101"), guest(host, "102")
    assert refusals("move_disk", template, disk="scsi0", storage="s2") == ["immutable"]
    assert refusals("resize", template, disk="scsi0", size_bytes=20 << 30) == ["immutable"]
    for kind, options in (("move_disk", {"disk": "scsi0", "storage": "s2"}), ("trim", {})):
        assert refusals(kind, locked, **options) == ["guest_locked"]
    server.world.guests["vm", 120].text = WEB + f"parent: one\n\n[one]\nscsi0: {OLD},size=8G\nsnaptime: 1\n"
    assert refusals("move_disk", web, disk="scsi0", storage="s2") == []
    assert refusals("move_disk", web, disk="scsi0", storage="s2", delete_source=True) == ["has_internal_snapshots"]
    assert refusals("resize", web, disk="scsi0", size_bytes=20 << 30) == ["has_internal_snapshots"]
    server.world.allow(*AUDITOR, "VM.Config.Disk")
    (refusal,) = services.plan(OPERATOR, "move_disk", web.pk, {"disk": "scsi0", "storage": "s2"}).refusals
    assert (refusal.code, "Datastore.AllocateSpace on /storage/s2" in refusal.detail) == ("right_missing", True)
    assert server.verbs() == []


def image_of(row: Guest, target: str) -> Image:
    return Image.objects.get(uses__disk__guest=row, uses__disk__target=target)


def test_a_volume_that_others_need_is_moved_and_never_removed(server: ProxmoxServer, host: Host, web: Guest) -> None:
    server.world.volumes["store"] += [
        {"volid": OLD, "content": "images", "format": "qcow2", "size": 8 << 30, "used": 4096, "vmid": 120},
        {"volid": "store:120/vm-120-disk-3.qcow2", "content": "images", "format": "qcow2", "size": 8 << 30,
         "used": 4096, "vmid": 120, "parent": "vm-120-disk-0.qcow2"},
    ]  # fmt: skip
    server.world.guests["vm", 121] = world.Guest("vm", 121, f"name: second\nscsi1: {OLD},size=8G\n")
    reached(host, Host.Transport.API)
    assert run(services.submit(OPERATOR, "scan", host.pk, {})).state == "succeeded"
    reached(host, Host.Transport.API_SSH)
    web = guest(host, "120")
    assert image_of(web, "scsi0").overlays_count == 1
    assert refusals("move_disk", web, disk="scsi0", storage="s2") == []
    plan = services.plan(OPERATOR, "move_disk", web.pk, {"disk": "scsi0", "storage": "s2", "delete_source": True})
    assert [one.code for one in plan.refusals] == ["has_overlays", "guest_names_image"]
    assert "a disk of second" in plan.refusals[1].detail
    with pytest.raises(RefusedError):
        submit("move_disk", web, disk="scsi0", storage="s2", delete_source=True)
    assert server.verbs() == []


def test_a_job_on_a_disk_waits_for_one_on_its_image_wherever_that_is_listed(server: ProxmoxServer, web: Guest) -> None:
    elsewhere = ImageFactory.create(dev="7", inode="11")
    disk = web.disks.get(target="scsi0")
    ImageUse.objects.filter(disk=disk).delete()
    ImageUse.objects.create(image=elsewhere, disk=disk)
    kind = kinds.get("resize")
    held = {lock.key for lock in kind.locks(kind.resolve(web.pk), {"disk": "scsi0"})}
    assert held >= {lock.key for lock in locks_on(elsewhere, exclusive=True)}


def test_only_vms_of_a_node_with_an_api_have_these_kinds(server: ProxmoxServer, host: Host) -> None:
    container = guest(host, "300")
    assert refusals("move_disk", container, disk="rootfs", storage="s2") == ["invalid"]
    alone = GuestFactory.create(kind="vm", uid="120")
    assert refusals("trim", alone) == ["tool_missing"]
    with pytest.raises(Exception, match="operator"):
        services.submit(VIEWER, "trim", guest(host, "120").pk, {})


def test_options_that_are_missing_or_wrong_are_named(web: Guest) -> None:
    for kind, options, names in (
        ("move_disk", {}, {"disk", "storage"}),
        ("resize", {"disk": "scsi0"}, {"size_bytes"}),
        ("resize", {"disk": "scsi0", "size_bytes": 1000001}, {"size_bytes"}),
        ("move_disk", {"disk": "scsi0", "storage": "s2", "format": "vdi"}, {"format"}),
        ("trim", {"x": 1}, {"x"}),
    ):
        with pytest.raises(InvalidError) as error:
            services.submit(OPERATOR, kind, web.pk, options)
        assert set(error.value.fields) == names


def test_a_node_that_does_not_answer_refuses_the_plan_in_its_words(web: Guest, host: Host) -> None:
    Host.objects.filter(pk=host.pk).update(port=1)
    assert refusals("trim", web) == ["host_unreachable"]


def test_a_vm_that_another_node_has_by_now_is_told(server: ProxmoxServer, web: Guest) -> None:
    del server.world.guests["vm", 120]
    (refusal,) = services.plan(OPERATOR, "trim", web.pk, {}).refusals
    assert "no VM 120 on pve1" in refusal.detail


# Enlarging


def test_a_disk_is_enlarged_and_read_again(server: ProxmoxServer, web: Guest) -> None:
    job = run(submit("resize", web, disk="scsi0", size_bytes=9 << 30))
    result = good(job)
    assert (result["before"]["size_bytes"], result["now"]["size_bytes"]) == (8 << 30, 9 << 30)
    assert "size=9437184K" in conf(server)["scsi0"]
    assert any("UPID:" in line for line in said(job))


def test_nothing_is_made_smaller(server: ProxmoxServer, web: Guest) -> None:
    for size in (8 << 30, 1024):
        assert refusals("resize", web, disk="scsi0", size_bytes=size) == ["invalid"]
    assert refusals("resize", web, disk="ide2", size_bytes=8 << 30) == ["invalid"]
    assert server.verbs() == []


def test_a_configuration_that_changes_under_a_task_ends_it(
    server: ProxmoxServer, web: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit("resize", web, disk="scsi0", size_bytes=9 << 30)
    begin = server.world.begin

    def interfere(*given: Any) -> str:
        server.world.guests["vm", 120].text += "onboot: 1\n"
        return begin(*given)

    monkeypatch.setattr(server.world, "begin", interfere)
    ended = run(job)
    assert (ended.state, ended.error_code) == ("failed", "stale_plan")
    assert "size=8G" in conf(server)["scsi0"]


# Trimming


def test_a_guest_is_trimmed_and_what_each_filesystem_gave_back_is_told(server: ProxmoxServer, web: Guest) -> None:
    machine = server.world.guests["vm", 120]
    assert refusals("trim", web) == ["invalid"]  # it is off
    machine.running = True
    machine.trims = [
        {"path": "/", "trimmed": 104857600, "minimum": 0},
        {"path": "/boot", "error": "the discard operation is not supported"},
    ]
    plan = services.plan(OPERATOR, "trim", web.pk, {})
    assert plan.refusals == ()
    assert any("scsi1" in warning and "scsi0" not in warning for warning in plan.warnings)
    job = run(submit("trim", web))
    result = good(job)
    assert (result["trimmed_bytes"], len(result["filesystems"])) == (104857600, 2)
    assert any("/boot: the discard operation" in line for line in said(job))
    assert Job.objects.filter(kind="scan", state="queued").exists()


def emulator(host: Host, said: str) -> None:
    """What the agent found on that node at the last scan."""
    Host.objects.filter(pk=host.pk).update(capabilities=host.capabilities | {"qemu_system": said})


def bugs(kind: str, row: Guest, **options: Any) -> list[str]:
    """Warnings of bugs that a plan gives, after which a user may go on; a policy is refused."""
    plan = services.plan(OPERATOR, kind, row.pk, options)
    assert all(one.code == "qemu_bug" and one.detail in plan.warnings for one in plan.by_hand)
    return [one.detail for one in plan.by_hand]


def test_a_trim_warns_of_the_bug_of_its_qemu_and_policies_never_do_it(
    server: ProxmoxServer, host: Host, web: Guest
) -> None:
    machine = server.world.guests["vm", 120]
    machine.running, machine.trims = True, [{"path": "/", "trimmed": 5}]
    emulator(host, "10.2.1 (pve-qemu-kvm_10.2.1-1)")
    [warning] = bugs("trim", web)
    assert "pve-qemu-kvm 11.0.0-1" in warning
    assert "Shut the guest down" in warning
    with pytest.raises(RefusedError) as refused:
        services.submit(ADMIN, "trim", web.pk, {}, by_hand=False)
    assert refused.value.code == "qemu_bug"
    good(run(submit("trim", web)))


def test_a_mended_qemu_trims_without_a_word_unless_the_guest_runs_an_older_one(
    server: ProxmoxServer, host: Host, web: Guest
) -> None:
    machine = server.world.guests["vm", 120]
    machine.running, machine.trims = True, []
    emulator(host, "11.0.0 (pve-qemu-kvm_11.0.0-1)")
    assert bugs("trim", web) == []
    machine.qemu = "11.0.0"
    assert bugs("trim", web) == []
    machine.qemu = "10.1.2"
    assert len(bugs("trim", web)) == 1
    emulator(host, "")
    machine.qemu = ""
    assert len(bugs("trim", web)) == 1


def test_a_disk_is_moved_without_a_warning_while_the_guest_is_off(
    server: ProxmoxServer, host: Host, web: Guest
) -> None:
    emulator(host, "10.1.2 (pve-qemu-kvm_10.1.2-6)")
    assert bugs("move_disk", web, disk="scsi1", storage="store") == []
    server.world.guests["vm", 120].running = True
    assert len(bugs("move_disk", web, disk="scsi1", storage="store")) == 2
    emulator(host, "10.2.1 (pve-qemu-kvm_10.2.1-1)")
    assert bugs("move_disk", web, disk="scsi1", storage="store") == []


def test_a_guest_without_an_agent_is_refused_or_fails_with_its_words(
    server: ProxmoxServer, host: Host, web: Guest
) -> None:
    machine = server.world.guests["vm", 120]
    machine.running, machine.text = True, WEB.replace("agent: 1\n", "")
    assert refusals("trim", web) == ["tool_missing"]
    machine.text = WEB
    ended = run(submit("trim", web))
    assert (ended.state, "guest agent is not running" in ended.error_detail) == ("failed", True)
    machine.trims = [{"path": "/", "error": "no"}]
    assert run(submit("trim", web)).state == "failed"


# By REST and by the pages


def test_rest_plans_and_starts_what_the_api_does(server: ProxmoxServer, web: Guest, client: Client) -> None:
    TokenFactory.create(secret="s", role="operator")
    bearer = {"authorization": "Bearer s"}

    def post(**body: Any) -> tuple[int, dict[str, Any]]:
        answer = client.post("/api/v1/jobs/", body, content_type="application/json", headers=bearer)
        return answer.status_code, answer.json()

    kinds = client.get("/api/v1/job-kinds/", headers=bearer).json()["results"]
    assert {"move_disk", "resize", "trim"} <= {kind["name"] for kind in kinds}
    body: dict[str, Any] = {"kind": "resize", "guest": web.pk, "options": {"disk": "scsi0", "size_bytes": 9 << 30}}
    status, plan = post(**body, dry_run=True)
    assert (status, plan["refusals"], plan["affected_guests"][0]["name"]) == (200, [], "web")
    status, job = post(**body)
    assert (status, job["guest"]) == (202, web.pk)
    assert post(**body)[1]["code"] == "busy"
    assert run(Job.objects.get(pk=job["id"])).state == "succeeded"
    assert client.get(f"/api/v1/jobs/{job['id']}/", headers=bearer).json()["result"]["now"]["size_bytes"] == 9 << 30
    status, answer = post(kind="resize", guest=web.pk, options={"disk": "scsi0"})
    assert (status, set(answer["fields"])) == (400, {"size_bytes"})
    status, answer = post(kind="move_disk", guest=web.pk, options={"disk": "scsi0", "storage": "nfs-dead"})
    assert (status, answer["code"]) == (409, "host_unreachable")


def test_a_guests_page_offers_what_can_be_done_and_the_form_shows_the_plan_first(
    server: ProxmoxServer, web: Guest, client: Client
) -> None:
    client.force_login(UserFactory.create(role="operator"), "django.contrib.auth.backends.ModelBackend")
    page = client.get(f"/guests/{web.pk}/").content.decode()
    assert f"/guests/{web.pk}/move-disk/?disk=scsi0" in page
    assert f"/guests/{web.pk}/trim/" in page
    assert "disk=ide2" not in page
    assert "disk=unused0" not in page
    assert f'href="/guests/{web.pk}/"' in client.get("/guests/").content.decode()
    form = {"disk": "scsi0", "storage": "s2", "format": "raw", "delete_source": "true", "bandwidth_mib": "50"}
    plan = client.get(f"/guests/{web.pk}/move-disk/", form).content.decode()
    assert "qm disk move 120 scsi0 s2 --format raw --delete 1" in plan
    assert server.verbs() == []
    assert not Job.objects.filter(kind="move_disk").exists()
    answer = confirm(client, f"/guests/{web.pk}/move-disk/", form)
    job = Job.objects.get(kind="move_disk")
    assert answer["Location"] == f"/jobs/{job.pk}/"
    assert job.options == {
        "disk": "scsi0", "storage": "s2", "format": "raw", "delete_source": True, "bandwidth_bytes_sec": 50 << 20,
        "accept_hidden_lines": None,
    }  # fmt: skip
    assert run(job).state == "succeeded"
    assert "s2:120/vm-120-disk-0.raw" in client.get(f"/jobs/{job.pk}/").content.decode()


def test_a_guests_forms_say_what_is_wrong_and_start_nothing(server: ProxmoxServer, web: Guest, client: Client) -> None:
    client.force_login(UserFactory.create(role="operator"), "django.contrib.auth.backends.ModelBackend")
    address = f"/guests/{web.pk}/resize/"
    assert "Say first what is to be done" in client.get(address, {"disk": "scsi0"}).content.decode()
    assert "Give a number above 0" in client.get(address, {"disk": "scsi0", "size_gib": "x"}).content.decode()
    assert "Refused: invalid" in client.get(address, {"disk": "scsi0", "size_gib": "1"}).content.decode()
    assert "9,663,676,416 bytes" in client.get(address, {"disk": "scsi0", "size_gib": "9"}).content.decode()
    for text in ("x", "1", "NaN", "1e99"):
        confirm(client, address, {"disk": "scsi0", "size_gib": text})
    assert "Refused: invalid" in client.get(f"/guests/{web.pk}/trim/").content.decode()
    assert client.get("/guests/999999/").status_code == 404
    client.force_login(UserFactory.create(role="viewer"), "django.contrib.auth.backends.ModelBackend")
    assert client.post(address, {"disk": "scsi0", "size_gib": "9"}).status_code == 403
    assert not Job.objects.exclude(kind="scan").exists()
    assert server.verbs() == []


def test_the_page_for_io_sets_limits_of_a_vm(server: ProxmoxServer, web: Guest, client: Client) -> None:
    client.force_login(UserFactory.create(role="operator"), "django.contrib.auth.backends.ModelBackend")
    form = {"guest": str(web.pk), "read_bytes_sec": "5"}
    assert "mbps_rd=5" in client.get("/guests/io/", form).content.decode()
    confirm(client, "/guests/io/", form)
    assert run(Job.objects.get(kind="set_io_priority")).state == "succeeded"
    assert "mbps_rd=5" in conf(server)["scsi0"]
    assert "mbps_rd=5" in conf(server)["scsi1"]


def test_proxmox_ve_enlarges_no_vmdk(server: ProxmoxServer, web: Guest) -> None:
    server.world.guests["vm", 120].text += "sata3: store:120/vm-120-disk-5.vmdk,size=1G\n"
    assert refusals("resize", web, disk="sata3", size_bytes=2 << 30) == ["unsupported_subformat"]
    with pytest.raises(RefusedError):
        submit("resize", web, disk="sata3", size_bytes=2 << 30)
    assert server.verbs() == []
