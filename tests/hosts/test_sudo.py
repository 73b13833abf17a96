"""A user who is not root, on a real sshd, with the real sudo: with the rule that the dashboard names, and without."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent.folders.image_folders import VARIABLE
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import forced, transport
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from tests.agent.harness import leftovers, make_image
from tests.harness.filesystems import new_folder, new_program
from tests.harness.sshd import Sshd, sshd
from tests.hosts.remote import add, scanned
from tests.working import OPERATOR, fails_as, image_at, run, succeeded

pytestmark = [
    pytest.mark.services, pytest.mark.qemu, pytest.mark.django_db,
    pytest.mark.usefixtures("quiet", "no_reserve", "no_hypervisor"),
]  # fmt: skip

#: A user with a shell that the tests' PostgreSQL has brought.
USER = "postgres"
RULES = Path("/etc/sudoers.d/storage-admin-tests")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """Its keys, and the agent, can be read by the user who is to come in."""
    folder = Path(tempfile.mkdtemp(prefix="sa-sudo-", dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setattr(transport, "FOLDER", str(folder / "lib"))
    monkeypatch.setattr(transport, "_installed", set())
    try:
        # Accounts of services have no password; without PAM, sshd takes such a one for locked.
        with sshd(folder / "sshd", "UsePAM yes") as running:
            yield running
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def may_become_root() -> Iterator[None]:
    kept = f"Defaults:{USER} env_keep += {VARIABLE}\n"  # where the tests' list of folders is, which sudo takes away
    RULES.write_text(f"{kept}{USER} ALL=(root) NOPASSWD: ALL\n")
    RULES.chmod(0o440)
    yield
    RULES.unlink()


def test_without_a_rule_the_host_is_not_added_and_the_rule_is_named(server: Sshd) -> None:
    with pytest.raises((HostError, RefusedError)) as refused:
        add(server, user=USER)
    assert f"manage.py agent_installer --user {USER}" in str(refused.value)
    assert not Host.objects.exists()


@pytest.mark.usefixtures("may_become_root")
def test_with_the_rule_images_are_listed_and_reclaimed_as_root(server: Sshd, tmp_path: Path) -> None:
    pool = new_folder(tmp_path / "pool", mode=0o700)
    make_image(pool / "disk.qcow2")
    scanned(server, pool, user=USER)
    job = succeeded(run(services.submit(OPERATOR, "reclaim", image_at(pool / "disk.qcow2").pk, {"method": "compress"})))
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    assert leftovers(pool) == set()


def test_sudo_understands_the_rule_of_the_printed_installer(tmp_path: Path) -> None:
    script = forced.installer(USER, "")
    printing = script[script.rindex('agent="$python') :].partition(" > /etc")[0]
    rule = subprocess.run(
        ["sh"], input="python=/usr/bin/python3\n" + printing, capture_output=True, text=True, check=True
    )
    (tmp_path / "rules").write_text(rule.stdout)
    (tmp_path / "rules").chmod(0o440)
    checked = subprocess.run(["visudo", "-c", "-f", tmp_path / "rules"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_sudo_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "SUDO_TIMEOUT", 0.5)
    new_program(tmp_path / "sudo", "#!/bin/sh\nexec sleep 15\n")
    began = time.monotonic()
    with fails_as(HostError, "host_unreachable"):
        transport._allows(str(tmp_path / "sudo"), "true")
    assert time.monotonic() - began < 10
