"""VMs of Proxmox VE changed as jobs: limits, moves, sizes and trims, by a server held to the official schema."""

from typing import Any

import pytest
from django.test import Client

from storage_admin.accounts.models import ForbiddenError
from storage_admin.agent.protocol import RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import GuestDiskFactory, UserFactory
from tests.guests.vms import OLD, WEB, conf, good, guest, host, reached, server, submit, web
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import AUDITOR
from tests.web.confirming import confirm
from tests.working import ADMIN, OPERATOR, against, reread, run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

__all__ = ["host", "server", "web"]


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
    assert against("set_io_priority", web, limits={"read_iops_sec": 50}) == ["stale_plan"]
    assert against("set_io_priority", web, limits={"read_iops_sec": 50}, disk="scsi0") == []


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
    assert reread(row).io_limits == result["now"]["io_limits"]
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
    assert "take effect at the next start" in result["words"]
    assert "iops_rd" not in conf(server)["scsi1"]


def test_limits_that_cannot_be_are_refused_before_anything(server: ProxmoxServer, host: Host, web: Guest) -> None:
    limits = {"read_iops_sec": 5}
    assert against("set_io_priority", web, weight=500) == ["invalid"]
    assert against("set_io_priority", web, priority=3) == ["invalid"]
    assert against("set_io_priority", web, disk="scsi7", limits=limits) == ["invalid"]
    assert against("set_io_priority", web, limits={"read_bytes_sec": 5}) == ["invalid"]
    assert against("set_io_priority", guest(host, "102"), limits=limits) == ["guest_locked"]
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
    assert against("set_io_priority", web, limits=limits) == ["right_missing"]
    assert against("set_io_priority", web, limits=limits, disk="scsi5") == ["right_missing"]
    assert against("move_disk", web, disk="scsi5", storage="s2") == ["right_missing"]
    assert against("resize", web, disk="scsi5", size_bytes=9 << 30) == ["right_missing"]
    good(run(submit("set_io_priority", web, limits=limits, disk="scsi0")))
