"""A host that is reached by libvirt alone, over TLS or ssh: what it has is shown, and libvirt does what it can."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libvirt
import pytest
from rest_framework.test import APIClient

from images.models import Image
from images.scan import from_libvirt
from storage_admin.accounts.models import AuditEntry, Role
from storage_admin.accounts.services import create_token
from storage_admin.agent.protocol import RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts import secrets, transport
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import runner, services
from storage_admin.jobs.models import Job
from tests.factories import HostFactory
from tests.harness.guests import Disk, Domains, write_pattern
from tests.harness.patching import do_before, raising
from tests.harness.sshd import sshd
from tests.harness.tls_libvirtd import TlsLibvirtd, authority, tls_libvirtd
from tests.live.chains import at_stage, chain_of, done, submit
from tests.working import ADMIN, OPERATOR, client_as, create, digests, fails_as, reread, run, said, scan, work

pytestmark = [pytest.mark.services, pytest.mark.guest, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


@pytest.fixture(scope="module")
def server() -> Iterator[TlsLibvirtd]:
    folder = Path(tempfile.mkdtemp(prefix="sa-tls-", dir="/var/tmp"))
    folder.chmod(0o755)
    with tls_libvirtd(folder) as running:
        yield running
    shutil.rmtree(folder)


@pytest.fixture
def host(server: TlsLibvirtd, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The daemon as a host; whoever would start an agent there fails the test."""
    settings.DATA_DIR = tmp_path / "data"
    server.install_client(tmp_path / "data/pki/far")

    for module in (transport, runner):
        monkeypatch.setattr(module, "agent_command", raising(AssertionError("an agent was to be started")))
    return HostFactory.create(
        slug="far", name="far", kind="libvirt", transport="tls", address="127.0.0.1", port=server.port,
        capabilities={}, last_seen=None,
    )  # fmt: skip


@pytest.fixture
def connection(server: TlsLibvirtd) -> Iterator["libvirt.virConnect"]:
    """A connection of the test's own."""
    made = libvirt.open(server.uri(server.folder / "probe"))
    yield made
    for pool in made.listAllStoragePools():
        if pool.isActive():
            pool.destroy()
        pool.undefine()
    made.close()


def pool_on(connection: "libvirt.virConnect", folder: Path, name: str = "vms") -> "libvirt.virStoragePool":
    xml = f"<pool type='dir'><name>{name}</name><target><path>{folder}</path></target></pool>"
    pool = connection.storagePoolDefineXML(xml)
    pool.create()
    return pool


@pytest.fixture
def folder(shared_folder: Path) -> Path:
    """A folder with a chain, a raw disk, a broken image and things that are no images."""
    base = create(shared_folder / "base.qcow2", "64M")
    write_pattern(base, "qcow2", (0, 3, 7))
    create(shared_folder / "top.qcow2", base="base.qcow2")
    create(shared_folder / "disk.img", "3M", form="raw")
    (shared_folder / "bare").write_bytes(bytes(2 << 20))
    (shared_folder / "note.txt").write_text("no image")
    (shared_folder / "sub").mkdir()
    return shared_folder


@pytest.fixture
def listed(host: Host, connection: "libvirt.virConnect", folder: Path) -> Host:
    """The host with a pool on that folder, scanned."""
    pool_on(connection, folder)
    scan(host)
    return host


def rows() -> dict[str, Image]:
    return {image.name: image for image in Image.objects.filter(host__slug="far").select_related("pool", "backing")}


def test_its_pools_images_and_guests_are_listed_with_what_libvirt_tells(
    host: Host, server: TlsLibvirtd, connection: "libvirt.virConnect", folder: Path
) -> None:
    before = digests(folder)
    pool_on(connection, folder)
    with Domains(server.uri(server.folder / "probe"), folder) as domains:
        domain = domains.define([Disk(folder / "top.qcow2")], "web")
        result = scan(host)
        assert (result["images"], result["read"], result["vanished"]) == (4, 4, 0)
        images = rows()
        assert set(images) == {"base.qcow2", "top.qcow2", "disk.img", "bare"}
        for name, image in images.items():
            status = (folder / name).stat()
            assert (image.file_size, image.allocated_size) == (status.st_size, status.st_blocks * 512), name
            assert (image.mtime_ns, image.state) == (status.st_mtime_ns, "ok")
        base, top = images["base.qcow2"], images["top.qcow2"]
        assert (base.format, base.virtual_size, base.cluster_size, images["disk.img"].format) == (
            "qcow2", 64 << 20, 65536, "raw",
        )  # fmt: skip
        assert (top.backing, top.chain_depth, base.overlays_count, top.backing_format) == (base, 2, 1, "qcow2")
        guest = Guest.objects.get(host=host)
        assert (guest.uid, guest.name, guest.state) == (domain.UUIDString(), "web", "shut off")
        assert [use.disk.guest.name for use in top.uses.all()] == ["web"]
        assert top.declared_by == "guest web"
    pool = StoragePool.objects.get(host=host)
    assert (pool.name, pool.source, pool.kind, pool.state, pool.images_count) == ("vms", "libvirt", "dir", "ok", 4)
    assert (pool.others_count, pool.capacity_bytes) == (1, os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize)
    assert "virsh pool-refresh vms" in pool.state_detail
    assert (reread(host).status, host.owners_unknown, host.capabilities["agent"]) == ("ok", "", False)
    assert host.capabilities["libvirt_version"].count(".") == 2
    assert host.last_seen is not None
    assert before.items() <= digests(folder).items()


def test_what_is_known_is_not_written_again_and_what_changed_or_went_is_told(listed: Host, folder: Path) -> None:
    assert scan(listed)["read"] == 0
    write_pattern(folder / "base.qcow2", "qcow2", (10, 8, 9))
    (folder / "disk.img").unlink()
    result = scan(listed)
    assert (result["read"], result["vanished"]) == (1, 1)
    assert rows()["base.qcow2"].allocated_size == (folder / "base.qcow2").stat().st_blocks * 512
    assert rows()["disk.img"].state == "missing"


def test_what_no_guest_names_is_neither_called_free_nor_an_orphan(listed: Host) -> None:
    for image in rows().values():
        assert (image.in_use, image.orphan) == (None, False if image.name == "base.qcow2" else None)
    assert "No agent runs on far" in rows()["bare"].orphan_evidence[0]


@pytest.mark.parametrize("kind", ["reclaim", "flatten", "convert", "check", "analyze"])
def test_every_job_on_an_image_there_is_refused_with_what_to_do(listed: Host, kind: str) -> None:
    options = {"format": "raw"} if kind == "convert" else {}
    with fails_as(RefusedError, "tool_missing", "without an agent"):
        services.submit(OPERATOR, kind, rows()["top.qcow2"].pk, options)


def test_libvirt_itself_does_the_jobs_on_a_running_guest_there(
    host: Host, server: TlsLibvirtd, connection: "libvirt.virConnect", shared_folder: Path
) -> None:
    disk = create(shared_folder / "disk.qcow2", "64M")
    pool = pool_on(connection, shared_folder)
    with Domains(server.uri(server.folder / "probe"), shared_folder) as domains:
        guest = domains.run([Disk(disk)])
        guest.write(1, 24, 0x5A)
        before = guest.digest(0, 64)
        scan(host)
        row = Guest.objects.get(host=host)
        given_up = submit("live_copy", row, bandwidth_bytes_sec=1 << 20)
        with at_stage("mirroring", lambda: services.cancel(OPERATOR, given_up)):
            run(given_up)
        assert (given_up.state, chain_of(guest)) == ("cancelled", ["disk.qcow2"])
        left = shared_folder / "disk-copy.qcow2"
        assert left.exists()
        told = f"the unfinished copy {left} is left, delete it: "
        assert [line for line in said(given_up) if line.startswith(told)], said(given_up)
        done(submit("live_copy", row, target_name="there.qcow2"))
        assert chain_of(guest) == ["there.qcow2"]
        pool.refresh()
        scan(host)
        done(services.submit(OPERATOR, "snapshot", row.pk, {"name": "one", "quiesce": False}))
        assert chain_of(guest) == ["there.one", "there.qcow2"]
        pool.refresh()
        scan(host)
        with fails_as(RefusedError, "guests_unknown", "No agent runs on far"):
            services.submit(OPERATOR, "delete_snapshot", row.pk, {"name": "one"})
        assert guest.digest(0, 64) == before


@pytest.mark.parametrize("kind", ["recover", "sample"])
def test_work_on_the_whole_host_is_refused_as_well(host: Host, kind: str) -> None:
    with pytest.raises(RefusedError, match="tool_missing"):
        services.submit(OPERATOR, kind, host.pk, {})
    assert not Job.objects.exists()


def test_a_scan_asks_for_no_other_job(listed: Host) -> None:
    assert set(Job.objects.values_list("kind", "state")) == {("scan", "succeeded")}


def test_a_base_that_libvirt_does_not_list_is_not_called_missing(
    host: Host, connection: "libvirt.virConnect", folder: Path
) -> None:
    (folder / "sub").chmod(0o755)
    create(folder / "sub/hidden.qcow2", "8M")
    create(folder / "over.qcow2", base="sub/hidden.qcow2")
    pool_on(connection, folder)
    scan(host)
    assert rows()["over.qcow2"].state == "outside_pool"
    assert "nothing more is known" in rows()["over.qcow2"].state_detail
    pool_on(connection, folder / "sub", "more")
    scan(host)
    over = rows()["over.qcow2"]
    assert (over.state, over.backing) == ("ok", rows()["hidden.qcow2"])


def test_a_base_that_is_no_plain_file_is_unsafe(host: Host, connection: "libvirt.virConnect", folder: Path) -> None:
    for name, base in (("a.qcow2", "nbd://127.0.0.1/x"), ("b.qcow2", 'json:{"driver":"raw"}')):
        subprocess.run(
            ["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", base, "-F", "raw", folder / name, "8M"], check=True
        )
    pool_on(connection, folder)
    scan(host)
    for name in ("a.qcow2", "b.qcow2"):
        assert (rows()[name].state, rows()[name].backing) == ("outside_pool", None)


def test_a_pool_that_is_not_active_is_missing_and_keeps_its_images(
    host: Host, connection: "libvirt.virConnect", folder: Path
) -> None:
    pool = pool_on(connection, folder)
    scan(host)
    pool.destroy()
    assert scan(host)["vanished"] == 0
    row = StoragePool.objects.get(host=host)
    assert (row.state, row.images_count, row.capacity_bytes) == ("missing", 4, None)
    assert "virsh pool-start vms" in row.state_detail
    assert {image.state for image in rows().values()} == {"ok"}


def test_volumes_that_libvirt_does_not_list_in_time_stay_as_they_were(
    listed: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "VOLUMES_TIMEOUT", 0.001)
    assert scan(listed)["vanished"] == 0
    row = StoragePool.objects.get(host=listed)
    assert (row.state, "did not list the pool's volumes within" in row.state_detail) == ("unreadable", True)
    assert {image.state for image in rows().values()} == {"ok"}


def test_a_host_that_does_not_answer_is_unreachable_and_keeps_what_is_known(listed: Host) -> None:
    seen = reread(listed).last_seen
    Host.objects.filter(pk=listed.pk).update(port=1)
    job = work("scan", listed.pk)
    assert (job.state, job.error_code) == ("failed", "host_unreachable")
    assert (reread(listed).status, listed.last_seen) == ("unreachable", seen)
    assert "refused" in listed.status_detail
    assert len(rows()) == 4


def test_a_host_that_accepts_and_says_nothing_costs_its_time_limit_once(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "TIMEOUT", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        Host.objects.filter(pk=host.pk).update(port=silent.getsockname()[1])
        job = work("scan", host.pk)
    assert (job.state, job.error_detail) == ("failed", "libvirt did not answer within 2 s.")
    assert job.finished is not None
    assert job.started is not None
    assert (job.finished - job.started).total_seconds() < 4


def test_a_server_whose_certificate_another_authority_signed_is_refused(
    host: Host, settings: Any, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    authority(tmp_path / "other")
    shutil.copy(tmp_path / "other/cacert.pem", Path(settings.DATA_DIR) / "pki/far/cacert.pem")
    job = work("scan", host.pk)
    assert (job.state, job.error_code) == ("failed", "host_unreachable")
    assert "ertificate" in job.error_detail


def test_certificates_that_are_missing_or_open_to_others_are_named(host: Host, settings: Any) -> None:
    folder = Path(settings.DATA_DIR) / "pki/far"
    (folder / "clientkey.pem").chmod(0o644)
    assert f"chmod 600 {folder}/clientkey.pem" in work("scan", host.pk).error_detail
    (folder / "clientcert.pem").unlink()
    assert "does not contain clientcert.pem" in work("scan", host.pk).error_detail


def test_a_certificate_for_all_hosts_is_taken_where_one_has_none_of_its_own(
    host: Host, settings: Any, connection: "libvirt.virConnect", folder: Path
) -> None:
    pool_on(connection, folder)
    pki = Path(settings.DATA_DIR) / "pki"
    for file in (pki / "far").iterdir():
        file.rename(pki / file.name)
    (pki / "far").rmdir()
    assert scan(host)["images"] == 4
    host.slug = ""  # as while it is being registered
    assert reader.read(host) is not None


def pems(server: TlsLibvirtd, *names: str) -> dict[str, str]:
    """A client's certificates as somebody pastes them."""
    files = names or ("cacert.pem", "clientcert.pem", "clientkey.pem")
    return dict(
        zip(("ca_cert", "client_cert", "client_key"), ((server.folder / f).read_text() for f in files), strict=True)
    )


def test_pasted_certificates_are_tried_before_the_host_is_saved_and_only_its_row_has_them(
    server: TlsLibvirtd, tmp_path: Path, settings: Any
) -> None:
    settings.DATA_DIR = tmp_path / "data"
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {create_token(ADMIN, 'a', Role.ADMIN)[1]}")
    body = {"name": "far", "kind": "libvirt", "address": "127.0.0.1", "port": server.port}
    key = pems(server)["client_key"]
    mixed = client.post(
        "/api/v1/hosts/", body | pems(server, "cacert.pem", "clientcert.pem", "serverkey.pem"), format="json"
    )
    assert (mixed.status_code, set(mixed.json()["fields"])) == (400, {"client_key"})
    rubbish = client.post(
        "/api/v1/hosts/", body | {"ca_cert": "x", "client_cert": key, "client_key": "y"}, format="json"
    )
    assert set(rubbish.json()["fields"]) == {"ca_cert", "client_cert", "client_key"}
    assert key not in rubbish.content.decode()
    dead = client.post("/api/v1/hosts/", body | pems(server) | {"port": 1}, format="json")
    assert (dead.status_code, dead.json()["code"]) == (409, "host_unreachable")
    assert not Host.objects.exists()
    added = client.post("/api/v1/hosts/", body | pems(server), format="json")
    assert added.status_code == 201, added.json()
    assert "PRIVATE KEY" not in added.content.decode()
    host = Host.objects.get()
    assert b"PRIVATE KEY" not in bytes(host.private_key_locked)
    assert "PRIVATE KEY" not in str(list(AuditEntry.objects.values()))
    assert not (tmp_path / "data/pki").exists()
    scan(host)
    assert host.transport == "tls"
    moved = client.patch(f"/api/v1/hosts/{host.pk}/", {"address": "localhost"}, format="json")
    assert (moved.status_code, moved.json()["code"]) == (409, "host_unreachable")  # its certificate names the address
    assert client.patch(f"/api/v1/hosts/{host.pk}/", {"port": server.port}, format="json").status_code == 200
    assert reader.read(reread(host)) is not None


def test_the_same_by_the_page_without_a_script(server: TlsLibvirtd, tmp_path: Path, settings: Any) -> None:
    settings.DATA_DIR = tmp_path / "data"
    browser = client_as(role="admin")
    form = {"kind": "libvirt-tls", "name": "far", "address": "127.0.0.1", "port": "1"} | pems(server)
    refused = browser.post("/hosts/add/", form)
    assert refused.status_code == 409
    assert "PRIVATE KEY" not in refused.content.decode()
    assert not Host.objects.exists()
    assert browser.post("/hosts/add/", form | {"port": str(server.port)}).status_code == 302
    assert Job.objects.filter(kind="scan", target_id=Host.objects.get().pk).exists()


def test_the_same_by_ssh_with_the_socket_forwarded(
    libvirtd: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = libvirt.open(libvirtd)
    pool = pool_on(local, folder, f"sa-test-{os.getpid()}")
    try:
        with sshd(tmp_path / "sshd") as server:
            host = HostFactory.create(
                slug="far", name="far", kind="libvirt", transport="ssh", address="127.0.0.1", port=server.port,
                user="root", host_key=server.host_key, private_key_locked=secrets.lock(server.private_key),
                capabilities={},
            )  # fmt: skip
            monkeypatch.setattr("storage_admin.jobs.runner.agent_command", None)
            scan(host)
        assert {"base.qcow2", "top.qcow2", "disk.img", "bare"} <= set(rows())
        assert StoragePool.objects.get(host=host, name=pool.name()).images_count == 4
    finally:
        pool.destroy()
        pool.undefine()
        local.close()


def test_a_scan_that_is_cancelled_leaves_the_one_before(
    listed: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "disk.img").unlink()
    running = Job.objects.filter(state="running")
    do_before(monkeypatch, from_libvirt, "without_an_agent", lambda *_: running.update(cancel_requested=True))
    monkeypatch.setattr("storage_admin.jobs.plan_and_progress.INTERVAL", 0.0)
    job = work("scan", listed.pk)
    assert job.state == "cancelled", said(job)
    assert rows()["disk.img"].state == "ok"
