"""VMs of Proxmox VE changed as jobs: limits, moves, sizes and trims, by a server held to the official schema."""

from typing import Any

import pytest
from django.test import Client

from storage_admin.agent.protocol import RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import UserFactory
from tests.guests.vms import WEB, conf, good, host, server, submit, web
from tests.harness.proxmox.server import ProxmoxServer
from tests.web.confirming import confirm
from tests.working import ADMIN, OPERATOR, against, refused_as, run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

__all__ = ["host", "server", "web"]


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
    assert refused_as(services.submit, ADMIN, "trim", web.pk, {}, by_hand=False) == "qemu_bug"
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
    assert against("trim", web) == ["tool_missing"]
    machine.text = WEB
    ended = run(submit("trim", web))
    assert (ended.state, "guest agent is not running" in ended.error_detail) == ("failed", True)
    machine.trims = [{"path": "/", "error": "no"}]
    assert run(submit("trim", web)).state == "failed"


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
    assert "Choose the options, then show the plan" in client.get(address, {"disk": "scsi0"}).content.decode()
    assert "Enter a number above 0" in client.get(address, {"disk": "scsi0", "size_gib": "x"}).content.decode()
    assert 'data-code="invalid"' in client.get(address, {"disk": "scsi0", "size_gib": "1"}).content.decode()
    assert "9,663,676,416 bytes" in client.get(address, {"disk": "scsi0", "size_gib": "9"}).content.decode()
    for text in ("x", "1", "NaN", "1e99"):
        confirm(client, address, {"disk": "scsi0", "size_gib": text})
    assert 'data-code="guest_off"' in client.get(f"/guests/{web.pk}/trim/").content.decode()
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
    assert against("resize", web, disk="sata3", size_bytes=2 << 30) == ["unsupported_subformat"]
    with pytest.raises(RefusedError):
        submit("resize", web, disk="sata3", size_bytes=2 << 30)
    assert server.verbs() == []
