"""Folders as pools, what admins set, and how the agent is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError
from storage_admin.hosts import services, transport
from storage_admin.hosts.models import Host, StoragePool
from tests.factories import HostFactory, ImageFactory, JobFactory, StoragePoolFactory
from tests.harness.filesystems import new_program
from tests.working import ADMIN, fails_as, reread

pytestmark = pytest.mark.django_db


@pytest.fixture
def host() -> Host:
    return HostFactory.create(slug="local")


def test_this_machine_is_made_once() -> None:
    first = services.ensure_local_host()
    assert services.ensure_local_host() == first
    assert (first.slug, first.kind) == ("local", "local")


def test_a_folder_becomes_a_pool_under_its_real_path(host: Host, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "link").symlink_to("images")
    pool = services.register_folder(ADMIN, host, f"{tmp_path}/link/../link/")
    assert (pool.path, pool.name, pool.source) == (f"{tmp_path}/images", "images", "admin")
    assert AuditEntry.objects.get().what == "pool registered"
    with pytest.raises(InvalidError, match="already registered as a pool"):
        services.register_folder(ADMIN, host, f"{tmp_path}/images")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("images", "absolute path"), ("", "absolute path"), ("/no/such/folder", "does not exist"),
        ("/a\0b", "absolute path"),
        ("/etc", "operating system"), ("/etc/../usr/lib", "operating system"), ("/", "operating system"),
        ("/proc/self", "operating system"), ("/var/lib", "operating system"), ("/" + "x" * 5000, "cannot be checked"),
    ],
)  # fmt: skip
def test_what_is_no_place_for_images_is_no_pool(host: Host, path: str, words: str) -> None:
    with pytest.raises(InvalidError, match=words) as invalid:
        services.register_folder(ADMIN, host, path)
    assert set(invalid.value.fields) == {"path"}
    assert not StoragePool.objects.exists()


def test_a_file_is_no_pool(host: Host, tmp_path: Path) -> None:
    (tmp_path / "disk.raw").write_bytes(b"x")
    with pytest.raises(InvalidError, match="is a file"):
        services.register_folder(ADMIN, host, str(tmp_path / "disk.raw"))


def test_a_folder_may_have_any_name(host: Host, tmp_path: Path) -> None:
    raw = bytes(tmp_path) + b"/odd\xff\n\x1b"
    Path(os.fsdecode(raw)).mkdir()
    pool = services.register_folder(ADMIN, host, os.fsdecode(raw))
    assert bytes(pool.path_bytes) == raw
    assert pool.path == f"{tmp_path}/odd\\xff\\n\\x1b"


def test_settings_out_of_range_change_nothing(host: Host) -> None:
    pool = StoragePoolFactory.create(host=host)
    for act in (
        lambda: services.update_pool(ADMIN, pool, warn_percent=0),
        lambda: services.update_pool(ADMIN, pool, warn_percent=101),
        lambda: services.update_pool(ADMIN, pool, name="  "),
        lambda: services.update_host(ADMIN, host, max_jobs=0),
        lambda: services.update_host(ADMIN, host, name=""),
    ):
        with pytest.raises(InvalidError):
            act()
    assert reread(pool).warn_percent == 85


@pytest.mark.parametrize("source", ["libvirt", "standard", "proxmox"])
def test_a_pool_of_somebody_else_is_not_removed(source: str) -> None:
    with pytest.raises(InvalidError, match="comes from"):
        services.remove_pool(ADMIN, StoragePoolFactory.create(source=source))


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_pool_is_not_removed_under_a_job(state: str) -> None:
    image = ImageFactory.create()
    JobFactory.create(kind="reclaim", target=image, state=state)
    with pytest.raises(InvalidError, match="running"):
        services.remove_pool(ADMIN, image.pool)
    assert StoragePool.objects.filter(pk=image.pool_id).exists()


def started_by(host: Host) -> list[str]:
    with transport.agent_command(host) as command:
        return command


def test_root_starts_the_agent_directly_and_it_greets(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    command = started_by(host)
    assert command[0] == sys.executable
    done = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    assert transport.agent_bundle().hash.encode() in done.stdout.splitlines()[0]


def test_another_user_starts_it_by_sudo_where_that_needs_no_password(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sudo = new_program(tmp_path / "sudo", '#!/bin/sh\ntest "$1" = -n || exit 1\nshift\nexec "$@"\n')
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: str(sudo))
    monkeypatch.setattr(transport, "FOLDER", str(tmp_path / "none is installed"))
    command = started_by(host)
    assert command[:3] == [str(sudo), "-n", sys.executable]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    assert b'"hello"' in done.stdout.splitlines()[0]


@pytest.mark.parametrize("answer", [None, "#!/bin/sh\necho a password is required >&2\nexit 1\n"])
def test_without_that_right_it_says_which_command_gives_it(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    monkeypatch.setattr(transport, "FOLDER", str(tmp_path))
    Path(transport.remote_file()).touch()  # installed for another user, whom a rule allows it
    sudo = tmp_path / "sudo"
    if answer is not None:
        new_program(sudo, answer)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: None if answer is None else str(sudo))
    with fails_as(RefusedError, "host_unreachable", "agent_installer --user"):
        started_by(host)


@pytest.mark.parametrize("transport_of", ["api", "tls"])
def test_where_there_is_no_ssh_no_agent_can_run(transport_of: str) -> None:
    with pytest.raises(RefusedError, match="no agent can run"):
        started_by(HostFactory.create(kind="proxmox", transport=transport_of))
