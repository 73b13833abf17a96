"""Hosts by ssh as an admin adds them, and work on them: inventory, a rewrite, a lost connection, a forced command."""

import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from django.test import Client

from images.models import Image
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.errors import InvalidError, UnconfirmedError
from storage_admin.hosts import asking, forced, registration, transport
from storage_admin.hosts.models import Host
from storage_admin.hosts.services import register_folder
from storage_admin.hosts.ssh import SshShell, connection
from storage_admin.jobs import services
from tests.agent.harness import leftovers, make_image
from tests.harness.filesystems import new_program
from tests.harness.processes import wait_until
from tests.harness.sshd import Sshd, keypair, sessions_of
from tests.hosts.remote import add, agent_folder, authorized, pool, scanned, server
from tests.working import (
    ADMIN,
    OPERATOR,
    create,
    fails_as,
    image_at,
    invalid_fields,
    refused_as,
    run,
    said,
    scan,
    succeeded,
)

__all__ = ["agent_folder", "authorized", "pool", "server"]

pytestmark = [
    pytest.mark.services,
    pytest.mark.qemu,
    pytest.mark.django_db,
    pytest.mark.usefixtures("quiet", "no_reserve", "no_hypervisor", "agent_folder"),
]


def test_the_key_that_a_host_shows_has_to_be_confirmed(server: Sshd) -> None:
    with pytest.raises(UnconfirmedError) as unconfirmed:
        add(server, host_key="")
    assert unconfirmed.value.shown["host_key"] == server.host_key
    assert unconfirmed.value.shown["fingerprint"] in unconfirmed.value.detail
    assert not Host.objects.exists()
    host = add(server, host_key=unconfirmed.value.shown["host_key"])
    assert (host.kind, host.slug, host.transport) == ("ssh", "hv1", "ssh")


def test_a_connection_that_does_not_work_is_not_saved(server: Sshd, tmp_path: Path) -> None:
    keypair(tmp_path / "other")
    for changes in (
        {"private_key": (tmp_path / "other").read_text()},
        {"host_key": " ".join((tmp_path / "other.pub").read_text().split()[:2])},
        {"port": 1},
    ):
        assert refused_as(add, server, **changes) == "host_unreachable"
    assert not Host.objects.exists()


def test_fields_that_are_wrong_are_each_named(server: Sshd) -> None:
    assert set(
        invalid_fields(
            add, server, name=" ", address="-oProxyCommand=x", port="0", user="a b", private_key="x", host_key="y"
        )
    ) == {"name", "address", "port", "user", "private_key", "host_key"}


def test_secrets_are_encrypted_and_nowhere_shown(server: Sshd, client: Client) -> None:
    host = Host.objects.get(pk=add(server).pk)
    marker = server.private_key.splitlines()[2]
    assert marker.encode() not in bytes(host.private_key_locked)
    assert marker not in str(list(AuditEntry.objects.values()))
    assert marker not in str(transport.endpoint(host))
    assert transport.endpoint(host).private_key == server.private_key


def test_images_of_a_remote_host_are_listed_and_reclaimed_there(server: Sshd, pool: Path) -> None:
    make_image(pool / "base.qcow2")
    create(pool / "top.qcow2", base="base.qcow2")
    host = scanned(server, pool)
    assert [(image.name, image.chain_depth) for image in Image.objects.filter(host=host).order_by("name")] == [
        ("base.qcow2", 1),
        ("top.qcow2", 2),
    ]
    assert Host.objects.get(pk=host.pk).status == "ok"
    job = succeeded(run(services.submit(OPERATOR, "reclaim", image_at(pool / "base.qcow2").pk, {"method": "compress"})))
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    assert leftovers(pool) == set()


def test_an_agent_that_has_vanished_from_its_host_is_installed_again_within_the_same_attempt(
    server: Sshd, pool: Path
) -> None:
    make_image(pool / "vm.qcow2")
    host = scanned(server, pool)
    installed = Path(transport.remote_file())
    for how in ("job", "question", "upload"):
        installed.unlink()
        if how == "job":
            job = run(services.submit(OPERATOR, "reclaim", image_at(pool / "vm.qcow2").pk, {"method": "compress"}))
            assert (job.state, [line for line in said(job) if "Traceback" in line]) == ("succeeded", [])
        elif how == "question":
            assert asking.ask(host, "attached", {})["attached"] == []
        else:
            assert list(asking.told(host, "attached", {}))[-1]["event"] == "result"
        assert installed.exists()
    shutil.rmtree(installed.parent)
    installed.parent.write_text("in the way")
    with fails_as(HostError, "host_unreachable"):
        asking.ask(host, "attached", {})


def test_a_folder_of_a_remote_host_is_registered_as_it_is_there(server: Sshd, tmp_path: Path) -> None:
    host = add(server)
    (tmp_path / "images").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "images")
    assert register_folder(ADMIN, host, str(tmp_path / "link")).path == str(tmp_path / "images")
    for path, said_so in (("missing", "does not exist"), ("file", "is a file")):
        with pytest.raises(InvalidError, match=said_so):
            register_folder(ADMIN, host, str(tmp_path / path))


@pytest.mark.parametrize("how", ["client", "session", "agent"])
def test_a_lost_connection_ends_the_work_and_leaves_the_original(server: Sshd, pool: Path, how: str) -> None:
    make_image(pool / "vm.qcow2", size="64M")
    before = (pool / "vm.qcow2").read_bytes()
    host = scanned(server, pool)
    options = {"method": "compress", "bandwidth_bytes_sec": 1 << 20}
    job = services.submit(OPERATOR, "reclaim", image_at(pool / "vm.qcow2").pk, options)
    killer = threading.Thread(target=cut, args=(server, how, pool))
    killer.start()
    ended = run(job)
    killer.join()
    assert (ended.state, ended.error_code) == ("interrupted", "interrupted"), (ended.error_detail, said(ended))
    assert (pool / "vm.qcow2").read_bytes() == before
    wait_until(lambda: all(process.name() != "qemu-img" for process in tools(pool)), 10, "the tool ends")
    scan(host)
    recovery = ended.host.jobs.filter(kind="recover", state="queued").first()
    if recovery is not None:
        assert run(recovery).state == "succeeded"
    assert leftovers(pool) == set()
    assert (pool / "vm.qcow2").read_bytes() == before


def tools(pool: Path) -> list[psutil.Process]:
    """Processes that name the pool."""
    running = psutil.process_iter(["cmdline"])
    return [process for process in running if any(str(pool) in word for word in process.info["cmdline"] or ())]


def cut(server: Sshd, how: str, pool: Path) -> None:
    """Waits for the work to begin, and cuts the connection at one of its links."""
    wait_until(lambda: any(one.stat().st_size for one in pool.glob(".sa-*.new")), 30, "the work has begun")
    if how == "session":
        for session in sessions_of(server):
            os.kill(session, signal.SIGKILL)
        return
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        ours = str(server.port) in words if how == "client" else words[-1:] == [transport.remote_file()]
        if ours and words[0].endswith("ssh" if how == "client" else "python3"):
            process.send_signal(signal.SIGKILL)


def test_a_silent_network_ends_the_work(server: Sshd, pool: Path) -> None:
    """The client stands still: no end-of-file comes, and the agent's patience decides."""
    make_image(pool / "vm.qcow2", size="64M")
    before = (pool / "vm.qcow2").read_bytes()
    host = add(server)
    with transport.agent_command(host) as command:
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert b"hello" in client.stdout.readline()
        client.send_signal(signal.SIGSTOP)
        file, everything = transport.remote_file(), psutil.process_iter(["cmdline"])
        agents = [one for one in everything if (one.info["cmdline"] or [])[-1:] == [file]]
        assert agents
        _, alive = psutil.wait_procs(agents, timeout=60)
        client.kill()
        client.wait()
    assert not alive
    assert (pool / "vm.qcow2").read_bytes() == before


def test_with_a_forced_command_the_key_runs_the_agent_and_nothing_else(
    authorized: Sshd, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forced, "FOLDER", transport.FOLDER)
    monkeypatch.setattr(forced, "ENTRY", f"{transport.FOLDER}/agent")
    public = keypair(tmp_path / "key")
    with pytest.raises(RefusedError, match="agent_installer"):
        add(authorized, private_key=(tmp_path / "key").read_text(), forced=True)
    script = forced.installer("root", "")
    assert subprocess.run(["sh"], input=script.encode(), capture_output=True).returncode == 0
    authorized.authorize(forced.authorized_line(" ".join(public.split()[:2])))
    create(pool / "vm.qcow2")
    host = scanned(authorized, pool, private_key=(tmp_path / "key").read_text(), forced=True)
    assert (host.transport, image_at(pool / "vm.qcow2").state) == ("forced", "ok")
    where = transport.endpoint(host)
    touched = tmp_path / "touched"
    SshShell(where).run_text(f"touch {touched}")
    assert not touched.exists()
    with connection(where, None, "-W", f"127.0.0.1:{authorized.port}") as command:
        done = subprocess.run(command, capture_output=True, timeout=20, input=b"")
    assert b"SSH-2.0" not in done.stdout


def test_an_agent_of_another_version_behind_a_forced_command_is_refused_with_what_to_do(
    authorized: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = keypair(tmp_path / "key")
    entry = new_program(
        tmp_path / "agent", '#!/bin/sh\necho \'{"event":"hello","protocol":1,"hash":"old","uid":0}\'\ncat >/dev/null\n'
    )
    authorized.authorize(f'restrict,command="{entry}" {" ".join(public.split()[:2])}')
    with fails_as(RefusedError, "agent_outdated", "agent_installer"):
        add(authorized, private_key=(tmp_path / "key").read_text(), forced=True)


def test_a_host_goes_with_all_that_is_known_of_it_and_nothing_of_its_files(server: Sshd, pool: Path) -> None:
    create(pool / "vm.qcow2")
    host = scanned(server, pool)
    for job in host.jobs.filter(state="queued"):
        services.cancel(ADMIN, job)
    registration.remove_host(ADMIN, host)
    assert not Host.objects.exists()
    assert not Image.every.exists()
    assert (pool / "vm.qcow2").exists()
