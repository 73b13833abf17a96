"""Hosts by ssh: pinned keys, nothing of the user's configuration in between, the agent installed once."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent.protocol import HostError
from storage_admin.hosts import ssh, transport
from storage_admin.hosts.addresses import fingerprint
from tests.harness.sshd import Sshd, keypair, sshd
from tests.working import fails_as

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def test_a_command_runs_with_its_arguments_as_they_are(server: Sshd) -> None:
    odd = ["printf", "%s|", "a b", "$HOME", "`id`", "'", '"', "\n", "*", "-n", "ü"]
    done = ssh.SshShell(server.endpoint()).run(odd)
    assert (done.exit_code, done.stdout.decode()) == (0, "|".join(odd[2:]) + "|")
    assert ssh.SshShell(server.endpoint()).run(["cat"], stdin=b"\0\xff").stdout == b"\0\xff"


@pytest.mark.parametrize(
    ("script", "code"), [("exit 7", 7), ("exit 255", 255), ("kill -KILL $$", 137), ("kill -SEGV $$", 139)]
)
def test_how_a_command_ended_is_told_from_how_the_connection_did(server: Sshd, script: str, code: int) -> None:
    done = ssh.SshShell(server.endpoint()).run(["sh", "-c", f"echo out; echo err >&2; {script}"])
    assert (done.exit_code, done.stdout, done.stderr.split(b"\n")[0]) == (code, b"out\n", b"err")


def test_a_connection_that_is_cut_off_under_a_command_is_told_as_that(server: Sshd) -> None:
    with fails_as(HostError, "host_unreachable"):
        ssh.SshShell(server.endpoint()).run(["sh", "-c", "kill -KILL $(ps -o ppid= -p $(ps -o ppid= -p $PPID))"])


def test_a_command_that_hangs_is_ended_on_the_host(server: Sshd, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with fails_as(HostError, "tool_failed", r"did not end within 1 s on 127\.0\.0\.1 and was ended there"):
        ssh.SshShell(server.endpoint()).run(["sh", "-c", f"echo $$ >{note}; while :; do sleep 600; done"], seconds=1)
    assert not Path(f"/proc/{int(note.read_text())}").exists()


def test_another_host_key_than_the_pinned_one_is_refused(server: Sshd, tmp_path: Path) -> None:
    other = " ".join(keypair(tmp_path / "other").split()[:2])
    with pytest.raises(HostError, match="differs from the pinned one"):
        ssh.SshShell(server.endpoint(host_key=other)).run(["true"])
    rsa = " ".join(keypair(tmp_path / "rsa", "rsa").split()[:2])
    with pytest.raises(HostError, match="a host key of the pinned type"):
        ssh.SshShell(server.endpoint(host_key=rsa)).run(["true"])


def test_a_key_that_is_not_taken_is_told_with_what_to_do(server: Sshd, tmp_path: Path) -> None:
    keypair(tmp_path / "other")
    with pytest.raises(HostError, match="authorized_keys"):
        ssh.SshShell(server.endpoint(private_key=(tmp_path / "other").read_text())).run(["true"])


def test_nobody_there_is_told_soon(server: Sshd) -> None:
    with pytest.raises(HostError, match=r"cannot be reached: .*refused"):
        ssh.SshShell(server.endpoint(port=1)).run(["true"])


def test_the_users_configuration_weakens_nothing(server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh" / "config").write_text(
        "Host *\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n ControlMaster auto\n"
        f" ControlPath {tmp_path}/control\n ControlPersist 60\n RemoteCommand touch {tmp_path}/ran\n ForwardAgent yes\n"
    )
    other = " ".join(keypair(tmp_path / "other").split()[:2])
    with ssh.connection(server.endpoint(host_key=other), "true") as command:
        done = subprocess.run(
            [command[0], "-F", str(tmp_path / ".ssh" / "config"), *command[1:]], capture_output=True, timeout=30
        )
    assert done.returncode == 255
    with ssh.connection(server.endpoint(), "true") as command:
        done = subprocess.run(
            [command[0], "-F", str(tmp_path / ".ssh" / "config"), *command[1:]], capture_output=True, timeout=30
        )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "control").exists()
    assert not (tmp_path / "ran").exists()


def test_the_private_key_is_nowhere_when_a_connection_is_over(server: Sshd) -> None:
    with ssh.connection(server.endpoint(), "true") as command:
        key = next(Path(word.removeprefix("IdentityFile=")) for word in command if word.startswith("IdentityFile="))
        assert key.stat().st_mode & 0o777 == 0o600
        assert key.parent.stat().st_mode & 0o777 == 0o700
        assert server.private_key not in " ".join(command)
    assert not key.parent.exists()
    assert "PRIVATE" not in repr(server.endpoint())


def test_what_a_killed_worker_left_in_memory_is_cleared() -> None:
    program = (
        "import os, signal; from storage_admin.hosts import ssh;"
        "c = ssh.connection(ssh.Endpoint('192.0.2.1', 22, 'root', 'ssh-ed25519 AAAA', 'secret'), 'true');"
        " c.__enter__(); print(os.getpid(), flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([str(root / ".venv/bin/python"), "-c", program], capture_output=True, cwd=root, text=True)
    left = list(Path("/dev/shm").glob(f"storage-admin-{int(done.stdout)}-*"))
    assert len(left) == 1
    ssh.clear_leftovers()
    assert not left[0].exists()


def test_the_keys_that_a_host_shows_are_read_with_their_fingerprints(server: Sshd) -> None:
    keys = ssh.scan_keys("127.0.0.1", server.port)
    assert keys == [server.host_key]
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(server.folder / "host_key.pub")], capture_output=True, text=True
    ).stdout
    assert fingerprint(keys[0]) in shown


def test_the_agent_is_installed_once_and_belongs_to_root(
    server: Sshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    monkeypatch.setattr(transport, "FOLDER", str(folder))
    transport.install(server.endpoint())
    installed = Path(transport.remote_file())
    assert installed.read_bytes() == transport.agent_bundle().path.read_bytes()
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o022, installed.stat().st_mode & 0o022) == (0, 0, 0)
    before = installed.stat()
    transport.install(server.endpoint())
    assert installed.stat().st_ino == before.st_ino
    assert [entry.name for entry in folder.iterdir()] == [installed.name]


def test_an_agent_that_did_not_arrive_whole_is_not_installed(
    server: Sshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    done = ssh.SshShell(server.endpoint()).run(
        ["sh", "-c", transport.INSTALL, "sh", str(folder), str(folder / "agent.pyz"), "0" * 32], stdin=b"half"
    )
    assert done.exit_code == 1
    assert b"whole" in done.stderr
    assert list(folder.iterdir()) == []


def test_a_folder_that_somebody_else_owns_takes_no_agent(server: Sshd, tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    subprocess.run(["chown", "65534", str(folder)], check=True)
    done = ssh.SshShell(server.endpoint()).run(
        ["sh", "-c", transport.INSTALL, "sh", str(folder), str(folder / "agent.pyz"), "0" * 32], stdin=b"x"
    )
    assert done.exit_code == 1
    assert b"belong to root" in done.stderr
