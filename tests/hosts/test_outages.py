"""A host that is gone or silent costs its time limit once, is told with when it was last seen, and harms no other."""

import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from images.models import Image
from storage_admin.guests.models import Guest
from storage_admin.hosts import secrets, session, ssh, transport
from storage_admin.hosts.libvirt import reader, relay, uri
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.proxmox import client as proxmox_client
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import GuestFactory, UserFactory
from tests.harness.proxmox.server import ProxmoxServer, proxmox
from tests.harness.proxmox.world import lab
from tests.harness.sshd import Sshd, sshd
from tests.hosts.remote import agent_folder, scanned, server
from tests.hosts.test_proxmox_hosts import add as add_node
from tests.working import OPERATOR, create, refused_as, reread, run, said, scan, succeeded, work

__all__ = ["agent_folder", "server"]

pytestmark = [
    pytest.mark.services,
    pytest.mark.qemu,
    pytest.mark.django_db,
    pytest.mark.usefixtures("quiet", "no_reserve", "no_hypervisor", "agent_folder"),
]

#: As it is where nobody has replaced it.
READ = reader.read


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of somebody who accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ProxmoxServer]:
    with proxmox(lab(), tmp_path) as running:
        yield running


def took(job: Job) -> float:
    assert job.started is not None
    assert job.finished is not None
    return (job.finished - job.started).total_seconds()


@pytest.fixture
def hanging(tmp_path: Path, server: Sshd) -> Iterator[Sshd]:
    """A server that lets us in, and nothing that is asked for there ever says a word."""
    with sshd(tmp_path / "hanging", "ForceCommand sleep 60") as running:
        yield running


def known_already(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """The usual case: this worker has worked on the host before."""
    transport._installed.add(("127.0.0.1", port, transport.agent_bundle().hash))
    monkeypatch.setitem(ssh.PINNED, "ConnectTimeout", "2")
    monkeypatch.setattr(session, "HELLO_TIMEOUT", 2.0)
    monkeypatch.setattr(uri, "LOOK_TIMEOUT", 2.0)
    monkeypatch.setattr(relay, "GREETING_TIMEOUT", 2.0)


@pytest.fixture
def two(server: Sshd, tmp_path: Path) -> tuple[Host, Host]:
    """Two hosts with an image each, scanned."""
    hosts = []
    for name in ("far", "near"):
        (tmp_path / name).mkdir()
        create(tmp_path / name / f"{name}.qcow2")
        hosts.append(reread(scanned(server, tmp_path / name, name=name)))
    Job.objects.filter(state="queued").delete()
    return hosts[0], hosts[1]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("transport_of", ["ssh", "forced"])
@pytest.mark.parametrize("libvirt_is_asked", [False, True], ids=["agent", "libvirt and agent"])
@pytest.mark.parametrize("how", ["gone", "silent", "hanging"])
def test_a_host_that_does_not_answer_costs_its_time_limit_once_and_is_told(
    two: tuple[Host, Host], silent: int, hanging: Sshd, monkeypatch: pytest.MonkeyPatch, how: str,
    libvirt_is_asked: bool, transport_of: str,
) -> None:  # fmt: skip
    far, _ = two
    port = {"gone": 1, "silent": silent, "hanging": hanging.port}[how]
    known_already(monkeypatch, port)
    if libvirt_is_asked:
        monkeypatch.setattr(reader, "read", READ)
    Host.objects.filter(pk=far.pk).update(port=port, transport=transport_of)
    if how == "hanging":
        key = secrets.lock(hanging.private_key)
        Host.objects.filter(pk=far.pk).update(host_key=hanging.host_key, private_key_locked=key)
    job = work("scan", far.pk)
    assert (job.state, job.error_code) == ("failed", "host_unreachable"), (job.error_detail, said(job))
    assert took(job) < (1 if how == "gone" else 2 + 3)
    now = Host.objects.get(pk=far.pk)
    assert (now.status, now.last_seen) == ("unreachable", far.last_seen)
    assert now.status_detail == job.error_detail


def rows() -> dict[str, list[Any]]:
    """All that is known of images, pools and guests."""
    return {
        model.__name__: list(model._default_manager.order_by("pk").values()) for model in (Image, StoragePool, Guest)
    }


def test_one_hosts_outage_changes_nothing_on_the_others_and_is_told_with_when_it_was_last_seen(
    two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    far, near = two
    day_ago = timezone.now().replace(microsecond=0) - timedelta(days=1)
    Host.objects.filter(pk=far.pk).update(port=1, last_seen=day_ago)
    guest = GuestFactory.create(host=far, name="web")
    known_already(monkeypatch, 1)
    before = rows(), Host.objects.filter(pk=near.pk).values().get()
    assert work("scan", far.pk).state == "failed"
    assert (rows(), Host.objects.filter(pk=near.pk).values().get()) == before

    scan(Host.objects.get(pk=near.pk))  # the neighbour goes on
    image = Image.objects.get(host=near)
    succeeded(run(services.submit(OPERATOR, "check", image.pk, {})))
    assert refused_as(services.submit, OPERATOR, "reclaim", Image.objects.get(host=far).pk, {}) == "host_unreachable"

    client.force_login(UserFactory.create(role="admin"))
    told = {row["slug"]: row for row in client.get("/api/v1/hosts/").json()["results"]}
    assert (told["far"]["status"], told["near"]["status"]) == ("unreachable", "ok")
    assert parse_datetime(told["far"]["last_seen"]) == day_ago
    assert "refused" in told["far"]["status_detail"]
    assert guest.pk in {row["id"] for row in client.get("/api/v1/guests/").json()["results"]}
    page = client.get("/hosts/").content.decode()
    assert "unreachable" in page
    assert f"{day_ago:%Y-%m-%d}" in page


def test_a_host_that_came_back_is_told_as_well(two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    far, _ = two
    known_already(monkeypatch, 1)
    Host.objects.filter(pk=far.pk).update(port=1)
    assert work("scan", far.pk).state == "failed"
    Host.objects.filter(pk=far.pk).update(port=far.port)
    scan(Host.objects.get(pk=far.pk))
    now = Host.objects.get(pk=far.pk)
    assert (now.status, now.status_detail) == ("ok", "")
    assert now.last_seen is not None
    assert far.last_seen is not None
    assert now.last_seen > far.last_seen


def kept(host: Host) -> list[set[str]]:
    """Its guests and its storages."""
    of_host = (Guest.objects.filter(host=host), "uid"), (StoragePool.objects.filter(host=host), "name")
    return [set(rows.values_list(name, flat=True)) for rows, name in of_host]


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_node_by_its_api_alone_that_does_not_answer_costs_its_time_limit_once_and_keeps_its_guests(
    node: ProxmoxServer, silent: int, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    host = add_node(node)
    scan(host)
    seen = reread(host).last_seen
    assert seen is not None
    before = kept(host)
    assert all(before)
    Host.objects.filter(pk=host.pk).update(port=1 if how == "gone" else silent)
    monkeypatch.setattr(proxmox_client, "CONNECT_SECONDS", 2.0)
    job = work("scan", host.pk)
    assert (job.state, job.error_code) == ("failed", "host_unreachable"), job.error_detail
    assert took(job) < (1 if how == "gone" else 2 + 2)
    now = Host.objects.get(pk=host.pk)
    assert (now.status, now.last_seen) == ("unreachable", seen)
    assert kept(host) == before
