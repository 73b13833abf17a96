"""libvirt on a host whose key can only run the agent: asked by the agent's relay, and never told to do anything."""

import contextlib
import os
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libvirt
import psutil
import pytest

from storage_admin.agent.folders import image_folders
from storage_admin.agent.protocol import HostError, RefusedError, decode
from storage_admin.guests.models import Guest
from storage_admin.hosts import forced, ssh, transport
from storage_admin.hosts.libvirt import control, reader, relay, watch
from storage_admin.hosts.libvirt.disks import Edit
from storage_admin.hosts.libvirt.uri import uri_of
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from tests.harness.guests import Disk, Domains, write_pattern
from tests.harness.processes import wait_until
from tests.harness.sshd import Sshd, keypair, sshd
from tests.hosts.remote import add, agent_folder, scan_folder
from tests.working import OPERATOR, create, digests, image_at, run, succeeded

__all__ = ["agent_folder"]

pytestmark = [
    pytest.mark.services,
    pytest.mark.guest,
    pytest.mark.django_db,
    pytest.mark.usefixtures("quiet", "no_reserve", "libvirtd"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "sshd") as running:
        yield running


@pytest.fixture
def key(server: Sshd, tmp_path: Path, agent_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A private key that the installer's script lets in for the agent alone."""
    monkeypatch.setattr(forced, "FOLDER", str(agent_folder))
    monkeypatch.setattr(forced, "ENTRY", f"{agent_folder}/agent")
    public = keypair(tmp_path / "key")
    install()
    server.authorize(forced.authorized_line(" ".join(public.split()[:2])))
    return (tmp_path / "key").read_text()


def install() -> None:
    done = subprocess.run(["sh"], input=forced.installer("root", "").encode(), capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def host(server: Sshd, key: str) -> Host:
    """This machine, as a host that is reached by that key."""
    return add(server, private_key=key, forced=True)


@pytest.fixture
def domain(domains: Domains, shared_folder: Path) -> Any:
    """A domain that does not run, with one disk of 64 MiB."""
    disk = create(shared_folder / "disk.qcow2", "64M")
    write_pattern(disk, "qcow2", (0, 3, 7))
    return domains.define([Disk(disk)])


def relays() -> list[psutil.Process]:
    """The relays at work on this machine, and the clients that have them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if words[-1] == "libvirt-ro" and (words[0] == "ssh" or words[0].endswith("python3")):
            found.append(process)
    return found


def test_guests_of_libvirt_are_known_and_images_are_reclaimed(host: Host, domain: Any, shared_folder: Path) -> None:
    scan_folder(host, shared_folder)
    guest = Guest.objects.get(host=host, uid=domain.UUIDString())
    image = image_at(shared_folder / "disk.qcow2")
    assert [use.disk.guest for use in image.uses.all()] == [guest]
    assert Host.objects.get(pk=host.pk).owners_unknown == ""
    assert control.states(host)[guest.uid] == "shut off"
    succeeded(run(services.submit(OPERATOR, "reclaim", image.pk, {"method": "compress"})))
    wait_until(lambda: not relays(), 10, "no relay is left")


def test_a_guest_that_runs_keeps_its_image_from_being_touched(host: Host, domain: Any, shared_folder: Path) -> None:
    scan_folder(host, shared_folder)
    domain.create()  # since the scan: only libvirt can tell
    before = digests(shared_folder)["disk.qcow2"]
    job = run(services.submit(OPERATOR, "reclaim", image_at(shared_folder / "disk.qcow2").pk, {"method": "compress"}))
    assert (job.state, job.error_code) == ("failed", "guest_running")
    domain.destroy()
    assert digests(shared_folder)["disk.qcow2"] == before


def test_a_guests_end_is_told_by_event(host: Host, domain: Any) -> None:
    uid = domain.UUIDString()
    domain.create()
    with contextlib.closing(watch.changes(host)) as changes:
        assert next(states for states in changes if states is not None)[uid] == "running"
        assert len(relays()) == 2
        began = time.monotonic()
        domain.destroy()
        for states in changes:
            if states is not None and states[uid] == "shut off":
                break
        assert time.monotonic() - began < 5
    wait_until(lambda: not relays(), 10, "no relay is left")


def test_pools_and_volumes_are_listed(host: Host, libvirtd: str, shared_folder: Path) -> None:
    local = libvirt.open(libvirtd)
    name = f"sa-test-{os.getpid()}"
    xml = f"<pool type='dir'><name>{name}</name><target><path>{shared_folder}</path></target></pool>"
    pool = local.storagePoolDefineXML(xml)
    try:
        create(shared_folder / "disk.qcow2", "64M")
        pool.create()
        facts = reader.read(host)
        assert facts is not None
        assert name in {one.name for one in facts.pools}
        volumes = reader.read_volumes(host, [name])[name]
        assert not isinstance(volumes, str)
        assert [volume.name for volume in volumes] == ["disk.qcow2"]
    finally:
        if pool.isActive():
            pool.destroy()
        pool.undefine()
        local.close()


def test_libvirt_itself_refuses_every_change_through_it(host: Host, domain: Any) -> None:
    xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    with uri_of(host) as uri:
        connection = libvirt.open(uri)  # as whoever would change something
        found = connection.lookupByUUIDString(domain.UUIDString())
        for change in (
            found.create,
            found.undefine,
            lambda: connection.defineXML(xml),
            lambda: connection.createXML(xml),
            lambda: found.setBlockIoTune("vda", {"read_bytes_sec": 1 << 20}, libvirt.VIR_DOMAIN_AFFECT_CONFIG),
            lambda: found.setBlkioParameters({"weight": 300}, libvirt.VIR_DOMAIN_AFFECT_CONFIG),
            lambda: found.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE),
            lambda: connection.storagePoolDefineXML("<pool type='dir'><name>x</name></pool>"),
        ):
            with pytest.raises(libvirt.libvirtError) as refused:
                change()
            assert refused.value.get_error_code() in {
                libvirt.VIR_ERR_OPERATION_DENIED,
                libvirt.VIR_ERR_AUTH_UNAVAILABLE,
            }
        connection.close()
    assert not domain.isActive()
    assert domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE) == xml


def test_what_needs_writing_is_refused_with_why_and_what_to_do(host: Host, domain: Any, shared_folder: Path) -> None:
    scan_folder(host, shared_folder)
    uid, image = domain.UUIDString(), image_at(shared_folder / "disk.qcow2")
    words = "only run the agent.*virsh, or register the host with an unrestricted key"
    with pytest.raises(HostError, match=words):
        control.start(host, uid)
    with pytest.raises(RefusedError, match=words):
        control.set_io(host, uid, weight=300)
    with pytest.raises(RefusedError, match=words):
        control.repoint(host, uid, [Edit("vda", "/a", "/b", "raw")], write=False)
    guest = Guest.objects.get(uid=uid)
    for kind, target, options in (
        ("reclaim", image.pk, {"when_running": "wait", "start_after": True}),
        ("convert", image.pk, {"format": "raw", "replace": True, "repoint_guest": True}),
        ("set_io_priority", guest.pk, {"weight": 300}),
    ):
        with pytest.raises(RefusedError, match=words) as refused:
            services.submit(OPERATOR, kind, target, options)
        assert refused.value.code == "tool_missing"
    told = reader.read(host)  # reading goes on
    assert told is not None
    assert uid in {domain.uid for domain in told.domains}


def test_the_socket_is_nobody_elses_and_gone_afterwards(host: Host) -> None:
    with uri_of(host) as uri:
        assert uri is not None
        assert uri.startswith("qemu+unix:///system?socket=/")
        path = Path(uri.partition("=")[2])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists()
    wait_until(lambda: not relays(), 10, "no relay is left")


def test_several_clients_at_once_have_a_connection_each_and_too_many_none(host: Host) -> None:
    with uri_of(host) as uri:
        made = [libvirt.openReadOnly(uri) for _ in range(relay.MOST)]
        assert {connection.getType() for connection in made} == {"QEMU"}
        with pytest.raises(libvirt.libvirtError):
            libvirt.openReadOnly(uri)
        for connection in made:
            connection.close()
        wait_until(lambda: not relays(), 10, "the connections have ended")
        libvirt.openReadOnly(uri).close()


HOSTILE = [
    "libvirt-ro /run/libvirt/libvirt-sock", "libvirt-ro; touch {}", "libvirt-ro\ntouch {}", "$(touch {})", "`touch {}`",
    "libvirt-ro\t", " libvirt-ro", "LIBVIRT-RO", "libvirt-sock", "-c touch {}", "touch {}", "", "libvirt-r?", "*",
    "libvirt-ro && touch {}", "scp -f /etc/shadow", "internal-sftp", "{}/../libvirt-ro", "ü" * 5000, "libvirt-ro\n",
    "libvirt-ro libvirt-ro", "'libvirt-ro'",
]  # fmt: skip


def test_any_other_word_than_the_one_starts_the_agent_as_it_is(host: Host, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for word in HOSTILE:
        with ssh.connection(transport.endpoint(host), word.replace("{}", str(canary))) as command:
            done = subprocess.run(command, input=b"", capture_output=True, timeout=30)
        told = decode(done.stdout.split(b"\n")[0])
        assert (told["event"], "relay" in told) == ("hello", False), word
        assert not canary.exists(), word


def test_a_folder_of_such_names_runs_nothing_else(host: Host, agent_folder: Path) -> None:
    """The entry starts one file by its whole name, and takes nothing from the folder that it is started in."""
    entry = (agent_folder / "agent").read_text()
    assert entry.splitlines()[-1].endswith(f'-I {transport.remote_file()} "$@"')
    assert stat.S_IMODE((agent_folder / "agent").stat().st_mode) == 0o755


@pytest.mark.parametrize("to", ["/run/libvirt/libvirt-sock", "127.0.0.1:{}"], ids=["socket", "port"])
def test_the_key_forwards_nothing_beside_it(server: Sshd, host: Host, tmp_path: Path, to: str) -> None:
    """Neither libvirt's other socket, nor a port."""
    way = f"{tmp_path}/way:{to.format(server.port)}"
    with ssh.connection(transport.endpoint(host), "libvirt-ro", "-L", way) as command:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert decode(process.stdout.readline())["relay"] == "libvirt-ro"
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(10)
                probe.connect(str(tmp_path / "way"))
                assert probe.recv(1) == b""
        finally:
            process.kill()
            said_so = process.communicate()[1]
    assert b"open failed" in said_so


def test_an_installation_touches_nothing_outside_of_the_folders_that_the_tests_have() -> None:
    """What a run of them leaves behind on a machine, an installation of the product would believe."""
    usual = {Path("/etc/storage-admin"), Path("/usr/local/lib/storage-admin")}
    assert not usual & {Path(transport.FOLDER), Path(forced.ENTRY).parent, Path(image_folders.file_path()).parent}
    script = forced.installer("root", "", ["/srv/images"])
    assert f"\nlist={image_folders.file_path()}\n" in script
    assert not [path for path in usual if f"{path}/" in script]


def test_for_another_user_sudo_lets_run_the_agent_and_its_relay_and_no_more() -> None:
    script = forced.installer("backup", "")
    rules = [line for line in script.splitlines() if "NOPASSWD" in line]
    done = subprocess.run(
        ["sh"], input="python=/usr/bin/python3\n" + script[script.rindex('agent="$python') :].partition(" > /etc")[0],
        capture_output=True, text=True,
    )  # fmt: skip
    file = f"/usr/bin/python3 -I {transport.remote_file()}"
    assert len(rules) == 1
    assert done.stdout == f"backup ALL=(root) NOPASSWD: {file}, {file} libvirt-ro\n"


def entry_says(folder: Path, script: str) -> None:
    (folder / "agent").write_text(f"#!/bin/sh\n{script}\n")


def test_an_agent_of_before_without_the_relay_is_to_be_installed_again(host: Host, agent_folder: Path) -> None:
    entry_says(agent_folder, 'echo \'{"event":"hello","protocol":1,"hash":"old","uid":0}\'; cat >/dev/null')
    with pytest.raises(HostError, match=r"too old.*agent_installer"):
        reader.read(host)
    entry_says(agent_folder, "echo hello")
    with pytest.raises(HostError, match=r"did not come from the agent.*agent_installer"):
        reader.read(host)
    entry_says(agent_folder, "echo broken >&2; exit 3")
    with pytest.raises(HostError, match="broken"):
        reader.read(host)
    install()
    assert reader.read(host) is not None


def test_a_host_without_libvirt_has_no_guests_of_it(
    host: Host, agent_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_says(
        agent_folder, 'echo \'{"event":"hello","protocol":1,"hash":"x","uid":0,"relay":"libvirt-ro","listens":false}\''
    )
    assert reader.read(host) is None
    wait_until(lambda: not relays(), 10, "no relay is left")


def test_a_host_that_lets_us_in_and_says_nothing_costs_its_time_limit_once(
    host: Host, agent_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_says(agent_folder, "exec sleep 60")
    monkeypatch.setattr(relay, "GREETING_TIMEOUT", 2.0)
    for ask in (reader.read, control.states, lambda host: next(watch.changes(host))):
        began = time.monotonic()
        with pytest.raises(HostError, match="did not answer within 2 s"):
            ask(host)
        assert time.monotonic() - began < 2 + relay.END_TIMEOUT + 2


def test_a_libvirt_that_takes_the_connection_and_says_nothing_costs_its_time_limit_once(
    host: Host, agent_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = '{"event":"hello","protocol":1,"hash":"x","uid":0,"relay":"libvirt-ro","listens":true}'
    entry_says(agent_folder, f"echo '{hello}'; exec sleep 60")
    monkeypatch.setattr(reader, "TIMEOUT", 2.0)
    began = time.monotonic()
    with pytest.raises(HostError, match="did not answer within 2 s"):
        reader.read(host)
    assert time.monotonic() - began < 2 + 2 * relay.END_TIMEOUT + 2
    assert threading.active_count() < 20


def test_a_relay_that_is_cut_is_told_and_the_next_question_works(host: Host) -> None:
    with uri_of(host) as uri:
        connection = libvirt.openReadOnly(uri)
        for process in relays():
            process.kill()
        with pytest.raises(libvirt.libvirtError):
            connection.listAllDomains()
    assert reader.read(host) is not None
