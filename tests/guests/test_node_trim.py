"""Trims by a Proxmox VE node's own commands: of containers, and of VMs where there is no token.

The words are those of Proxmox VE 9.2 (pct, qm), as measured on 2026-11-26.
"""

import os
from pathlib import Path

import pytest

from storage_admin.guests.models import Guest
from storage_admin.hosts import transport
from storage_admin.hosts.models import Host
from storage_admin.hosts.shells import LocalShell
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import GuestDiskFactory, GuestFactory, HostFactory
from tests.harness.filesystems import new_program
from tests.working import OPERATOR, against, client_as, run, succeeded

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

CONTAINER = """echo "/var/lib/lxc/200/rootfs/: 7.8 GiB (8350253056 bytes) trimmed"
echo "/var/lib/lxc/200/rootfs/data: 973.4 MiB (1020678144 bytes) trimmed"
"""
VM = """echo '{ "paths" : [ { "minimum" : 0, "path" : "/", "trimmed" : 4096 },
 { "error" : "read-only", "path" : "/boot" } ] }'"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A node that is reached by ssh alone, whose ``pct`` and ``qm`` are scripts of ours."""
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    monkeypatch.setattr(transport, "shell", lambda host: LocalShell(env))
    return HostFactory.create(kind=Host.Kind.PROXMOX, node="pve1", transport=Host.Transport.SSH)


def says(folder: Path, program: str, script: str) -> None:
    new_program(folder / program, f'#!/bin/sh\necho "$@" > {folder}/asked\n{script}\n')


def trimmed(guest: Guest) -> Job:
    return run(services.submit(OPERATOR, "trim", guest.pk, {}))


def test_a_containers_volumes_are_trimmed_by_its_node(node: Host, tmp_path: Path) -> None:
    says(tmp_path, "pct", CONTAINER)
    guest = GuestFactory.create(host=node, kind=Guest.Kind.CONTAINER, uid="200")
    assert services.plan(OPERATOR, "trim", guest.pk, {}).commands == ("pct fstrim 200",)
    job = succeeded(trimmed(guest))
    assert (tmp_path / "asked").read_text() == "fstrim 200\n"
    assert [(one["path"], one["trimmed_bytes"]) for one in (job.result or {})["filesystems"]] == [
        ("/", 8350253056), ("/data", 1020678144),
    ]  # fmt: skip
    assert f"/guests/{guest.pk}/trim/" in client_as(role="viewer").get(f"/guests/{guest.pk}/").content.decode()


def test_a_vm_is_trimmed_by_its_node_where_there_is_no_token(node: Host, tmp_path: Path) -> None:
    says(tmp_path, "qm", VM)
    guest = GuestFactory.create(host=node, kind=Guest.Kind.VM, uid="300", state="running")
    GuestDiskFactory.create(guest=guest, target="scsi0", discard="on")
    for unused in ("unused0", "efidisk0"):
        GuestDiskFactory.create(guest=guest, target=unused)
    assert {one.disk for one in services.plan(OPERATOR, "trim", guest.pk, {}).causes} <= {"", "scsi0"}
    job = succeeded(trimmed(guest))
    assert (tmp_path / "asked").read_text() == "guest cmd 300 fstrim\n"
    assert [one["error"] for one in (job.result or {})["filesystems"]] == ["", "read-only"]
    Guest.objects.filter(pk=guest.pk).update(state="stopped")
    assert against("trim", guest) == ["guest_off"]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("echo 'CT is locked (backup)' >&2; exit 255", "guest_locked"),
        # pct itself ends as if all were well.
        ("echo 'mount: /var/lib/lxc/200/rootfs: wrong fs type' >&2; exit 0", "tool_failed"),
        ("echo \"Configuration file 'nodes/pve1/lxc/200.conf' does not exist\" >&2; exit 2", "tool_failed"),
    ],
)
def test_what_fails_is_told_in_the_nodes_words(node: Host, tmp_path: Path, script: str, code: str) -> None:
    says(tmp_path, "pct", script)
    guest = GuestFactory.create(host=node, kind=Guest.Kind.CONTAINER, uid="200")
    job = trimmed(guest)
    assert (job.state, job.error_code) == ("failed", code)
    if code == "tool_failed":
        assert script.split("'")[1][:20].strip('"\\') in job.error_detail.replace('"', "")


def test_a_lock_that_is_known_and_a_node_without_a_shell_stand_against_it(
    node: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = GuestFactory.create(host=node, kind=Guest.Kind.CONTAINER, uid="200", lock="backup")
    assert against("trim", guest) == ["guest_locked"]
    monkeypatch.undo()
    Host.objects.filter(pk=node.pk).update(transport=Host.Transport.FORCED)
    Guest.objects.filter(pk=guest.pk).update(lock="")
    assert against("trim", guest) == ["host_unreachable"]


def test_a_container_of_openvz_is_not_trimmed() -> None:
    guest = GuestFactory.create(host=HostFactory.create(), kind=Guest.Kind.CONTAINER, uid="101")
    assert against("trim", guest) == ["invalid"]
    assert "/trim/" not in client_as(role="viewer").get(f"/guests/{guest.pk}/").content.decode()
