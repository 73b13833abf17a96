"""What guests may take of the disks, as jobs: containers by real ssh and doubles of OpenVZ's tools, real domains."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from images.scan import hypervisors
from storage_admin.accounts.models import AuditEntry
from storage_admin.errors import InvalidError
from storage_admin.guests.models import Guest
from storage_admin.hosts import openvz, registration, secrets, transport
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import GuestFactory, HostFactory, UserFactory
from tests.harness.guests import Disk, Domains, Starts
from tests.harness.openvz import OpenVZHost
from tests.harness.sshd import sshd
from tests.working import ADMIN, OPERATOR, create, reread, run, said, scanned_machine, succeeded

pytestmark = [pytest.mark.services, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


@pytest.fixture
def vz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenVZHost:
    """A host with OpenVZ in a folder."""
    host = OpenVZHost(tmp_path / "vz")
    for name in ("containers", "set_priority"):
        monkeypatch.setattr(openvz, name, functools.partial(getattr(openvz, name), folders=host.folders))
    return host


@pytest.fixture
def host(tmp_path: Path, vz: OpenVZHost) -> Iterator[Host]:
    """That host, reached by ssh."""
    with sshd(tmp_path / "sshd", environment={"PATH": f"{vz.bin}:{os.defpath}"}) as server:
        yield HostFactory.create(
            kind="ssh", transport="plain", address="127.0.0.1", port=server.port, user="root", status="ok",
            host_key=server.host_key, private_key_locked=secrets.lock(server.private_key),
        )  # fmt: skip


def container(host: Host, ctid: str, state: str = "running", priority: int | None = None) -> Guest:
    return GuestFactory.create(
        host=host, kind="container", uid=ctid, name=f"ct{ctid}", state=state, io_priority=priority
    )


def set_for(guest: Guest, **options: object) -> Job:
    return run(services.submit(OPERATOR, "set_io_priority", guest.pk, options))


def test_a_containers_priority_is_set_and_what_was_there_is_told(vz: OpenVZHost, host: Host) -> None:
    vz.add("101", 'HOSTNAME="a"\nIOPRIO="3"\n', state="running")
    guest = container(host, "101", priority=3)
    plan = services.plan(OPERATOR, "set_io_priority", guest.pk, {"priority": 7})
    assert plan.refusals == ()
    assert "becomes 7 (now 3)" in plan.reason
    assert plan.commands == ("vzctl set 101 --ioprio 7 --save",)
    job = succeeded(set_for(guest, priority=7))
    result = job.result or {}
    assert (result["before"]["io_priority"], result["now"]["io_priority"], result["effect"]) == (3, 7, "now")
    assert reread(guest).io_priority == 7
    assert b'IOPRIO="7"' in (vz.conf / "101.conf").read_bytes()
    assert any("vzctl set 101" in line for line in said(job))
    entry = AuditEntry.objects.get(what="set_io_priority ended")
    assert (entry.who, entry.target) == ("olga", guest.name)
    assert ((entry.before or {})["io_priority"], (entry.after or {})["io_priority"]) == (3, 7)


def test_unset_is_not_zero(vz: OpenVZHost, host: Host) -> None:
    vz.add("101", 'HOSTNAME="a"\n', state="running")
    guest = container(host, "101")
    assert "now not set" in services.plan(OPERATOR, "set_io_priority", guest.pk, {"priority": 0}).reason
    result = set_for(guest, priority=0).result or {}
    assert (result["before"]["io_priority"], result["now"]["io_priority"]) == (None, 0)


def test_one_that_is_not_there_is_not_made(vz: OpenVZHost, host: Host) -> None:
    job = set_for(container(host, "999"), priority=5)
    assert (job.state, job.error_code) == ("failed", "stale_plan")
    assert not (vz.conf / "999.conf").exists()


@pytest.mark.parametrize("options", [{"priority": 8}, {"priority": -1}, {"priority": "7"}, {}, {"weight": 0}])
def test_what_is_out_of_range_is_bad_input_and_nothing_runs(
    vz: OpenVZHost, host: Host, options: dict[str, object]
) -> None:
    vz.add("101")
    before = (vz.conf / "101.conf").read_bytes()
    with pytest.raises(InvalidError):
        services.submit(OPERATOR, "set_io_priority", container(host, "101").pk, options)
    assert (vz.conf / "101.conf").read_bytes() == before
    assert not Job.objects.exists()


def test_containers_take_priorities_and_machines_weights(host: Host) -> None:
    machine = GuestFactory.create(host=host, kind="domain")
    cases: list[tuple[Guest, dict[str, Any]]] = [
        (container(host, "101"), {"weight": 500}),
        (machine, {"priority": 3}),
        (machine, {"disk": "vdz", "limits": {}}),
    ]
    for guest, options in cases:
        (refusal,) = services.plan(OPERATOR, "set_io_priority", guest.pk, options).refusals
        assert refusal.code == "invalid"


@pytest.mark.guest
def test_a_domains_limits_are_set_and_read_again(tcg_guest: Starts, shared_folder: Path, no_reserve: None) -> None:
    disk = create(shared_folder / "disk.qcow2", "64M")
    guest = tcg_guest(Disk(disk))
    scanned_machine(shared_folder)
    row = Guest.objects.get(name=guest.name)
    job = succeeded(set_for(row, limits={"read_bytes_sec": 50 << 20, "write_iops_sec": 200}))
    assert reread(row).io_limits == {"vda": {"read_bytes_sec": 50 << 20, "write_iops_sec": 200}}
    assert guest.domain.blockIoTune("vda")["read_bytes_sec"] == 50 << 20
    assert (job.result or {})["effect"] == "now"
    assert set_for(row, limits={"read_bytes_sec": 0, "write_iops_sec": 0}).state == "succeeded"
    assert guest.domain.blockIoTune("vda")["read_bytes_sec"] == 0


@pytest.mark.guest
def test_a_domain_that_is_off_has_them_from_its_next_start(domains: Domains, shared_folder: Path) -> None:
    disk = create(shared_folder / "disk.qcow2", "64M")
    domain = domains.define([Disk(disk)])
    scanned_machine(shared_folder)
    row = Guest.objects.get(name=domain.name())
    job = succeeded(set_for(row, limits={"read_iops_sec": 100}))
    assert (job.result or {})["effect"] == "next_start"
    assert "<read_iops_sec>100<" in domain.XMLDesc()


def test_containers_are_listed_by_a_scan_with_their_priorities(vz: OpenVZHost, host: Host) -> None:
    vz.add("101", 'HOSTNAME="web"\nIOPRIO="3"\n', state="running")
    vz.add("102", 'HOSTNAME="db"\n')
    assert run(services.submit(OPERATOR, "scan", host.pk, {})).state == "succeeded"
    rows = Guest.objects.filter(host=host).order_by("uid").values_list("kind", "uid", "name", "state", "io_priority")
    assert list(rows) == [("container", "101", "web", "running", 3), ("container", "102", "db", "shut off", None)]
    assert (reread(host).status, host.owners_unknown) == ("ok", "")


def registered_anew(host: Host) -> Host:
    """The host, forgotten and added again by the same key."""
    key = secrets.unlock(host.private_key_locked)
    host.delete()
    where = {"address": "127.0.0.1", "port": host.port, "host_key": host.host_key}
    return registration.add_ssh_host(ADMIN, registration.Wanted(name="old", private_key=key, **where))  # type: ignore[arg-type]


def test_a_host_without_python_is_registered_for_its_containers(
    vz: OpenVZHost, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    vz.add("101", state="running")
    (vz.bin / "sh").symlink_to("/bin/sh")
    monkeypatch.setattr(transport, "_installed", set())
    monkeypatch.setattr(transport, "FOLDER", "/nonexistent")
    monkeypatch.setattr(transport, "PYTHON", "python3-that-is-not-there")
    assert registered_anew(host).transport == "plain"


def test_one_whose_python_is_gone_since_is_registered_at_the_first_try(
    vz: OpenVZHost, host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vz.add("101", state="running")
    monkeypatch.setattr(transport, "FOLDER", str(tmp_path / "lib"))
    where = transport.endpoint(host)
    transport.ensure_installed(where)
    monkeypatch.setattr(transport, "PYTHON", "python3-that-is-not-there")
    assert registered_anew(host).transport == "plain"


def test_a_host_that_was_never_scanned_is_asked_for_containers_at_once(vz: OpenVZHost, host: Host) -> None:
    vz.add("101", 'HOSTNAME="web"\n', state="running")
    host.transport, host.capabilities = "ssh", {}
    (told,) = hypervisors.ask(host)
    assert [(guest.uid, guest.name) for guest in told.guests] == [("101", "web")]
    host.capabilities = {"tools": {"vzctl": False}}
    assert hypervisors.ask(host) == []


def test_one_without_any_tells_nothing_of_them(vz: OpenVZHost, host: Host) -> None:
    vz.remove("vzctl", "vzlist")
    host.transport, host.capabilities = "ssh", {}
    assert hypervisors.ask(host) == []


def test_where_vzctl_is_gone_known_containers_are_told_of_by_their_files(vz: OpenVZHost, host: Host) -> None:
    path = vz.add("101", 'HOSTNAME="web"\nIOPRIO="6"\n', state="running")
    container(host, "101", priority=3)
    vz.remove("vzctl", "vzlist")
    host.transport, host.capabilities = "ssh", {"tools": {"vzctl": False}}
    (told,) = hypervisors.ask(host)
    assert [(guest.uid, guest.state, guest.io_priority) for guest in told.guests] == [("101", "unknown", 6)]
    path.unlink()
    (told,) = hypervisors.ask(host)
    assert (told.guests, told.answered, told.kinds) == ((), True, ("container",))


def test_without_vzctl_the_plan_tells_of_the_edit_and_when_it_counts(vz: OpenVZHost, host: Host) -> None:
    vz.add("101", 'IOPRIO="3"\n', state="running")
    vz.remove("vzctl")
    assert run(services.submit(OPERATOR, "scan", host.pk, {})).state == "succeeded"
    guest = Guest.objects.get(host=host)
    plan = services.plan(OPERATOR, "set_io_priority", guest.pk, {"priority": 7})
    assert plan.commands == ()
    assert any(
        "/etc/vz/conf/101.conf" in text and 'IOPRIO="7"' in text and "next start" in text for text in plan.warnings
    )
    job = set_for(guest, priority=7)
    assert (job.state, (job.result or {})["effect"]) == ("succeeded", "next_start")
    assert b'IOPRIO="7"' in (vz.conf / "101.conf").read_bytes()


def test_a_vzlist_that_fails_is_no_host_that_does_not_answer(vz: OpenVZHost, host: Host) -> None:
    vz.add("101")
    vz.switch("vzlist_fails", "out of memory")
    job = run(services.submit(OPERATOR, "scan", host.pk, {}))
    assert (job.state, job.error_code) == ("failed", "tool_failed")
    assert "out of memory" in job.error_detail
    assert reread(host).status == "ok"


def test_the_log_has_vzctls_own_words_and_no_script(vz: OpenVZHost, host: Host) -> None:
    vz.add("101", state="running")
    vz.switch("locked", "1")
    job = succeeded(set_for(container(host, "101"), priority=7))
    lines = said(job)
    assert any("Locked by: pid 4711" in line for line in lines)
    assert not any("stat -L" in line or "sh -c" in line for line in lines)


def test_what_was_lost_stands_in_the_log_and_the_row_says_what_is_there(vz: OpenVZHost, host: Host) -> None:
    vz.add("101", 'HOSTNAME="a"\nIOPRIO="3"\n', state="running")
    vz.switch("before_save", "rm -r conf/101.conf private/101")
    guest = container(host, "101", priority=3)
    job = set_for(guest, priority=7)
    assert (job.state, job.error_code) == ("failed", "tool_failed")
    assert any('HOSTNAME="a"' in line for line in said(job))
    assert reread(guest).io_priority == 7


def test_a_form_that_is_sent_again_says_that_nothing_new_was_queued(host: Host, client: Client) -> None:
    guests = [container(host, ctid).pk for ctid in ("101", "102")]
    client.force_login(UserFactory.create(role="operator"), "django.contrib.auth.backends.ModelBackend")
    form: dict[str, Any] = {"guest": guests, "priority": "4"}
    page = client.post("/guests/io/", form)
    form |= {"planned": page.context["planned"], "key": page.context["key"]}
    first, again = client.post("/guests/io/", form, follow=True), client.post("/guests/io/", form, follow=True)
    assert Job.objects.count() == 2
    assert [str(one) for one in first.context["messages"]] == ["2 queued."]
    assert [str(one) for one in again.context["messages"]] == [
        "2 were already queued by this form. Nothing new was queued."
    ]
