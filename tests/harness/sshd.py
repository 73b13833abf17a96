"""Real OpenSSH servers on loopback, each a host of its own: own host key, own user's keys, own port."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from storage_admin.agent.folders.image_folders import VARIABLE
from storage_admin.hosts.ssh import Endpoint
from tests.harness.processes import Daemon, free_port

ADDRESS = "127.0.0.1"


def keypair(path: Path, kind: str = "ed25519") -> str:
    """A new key without passphrase; its public half."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "test", "-f", str(path)], check=True)
    return path.with_name(path.name + ".pub").read_text().strip()


@dataclass
class Sshd:
    """A running server.

    Args:
        folder: its configuration and keys.
        private_key: takes a user in.
    """

    folder: Path
    port: int
    host_key: str
    private_key: str
    daemon: Daemon = field(repr=False)

    def endpoint(self, user: str = "root", **changes: object) -> Endpoint:
        """How it is reached."""
        values: dict[str, object] = {
            "address": ADDRESS, "port": self.port, "user": user, "host_key": self.host_key,
            "private_key": self.private_key,
        }  # fmt: skip
        return Endpoint(**(values | changes))  # type: ignore[arg-type]

    def authorize(self, line: str) -> None:
        """Makes that the only line of the users' authorized keys."""
        (self.folder / "authorized_keys").write_text(line + "\n")


@contextlib.contextmanager
def sshd(folder: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[Sshd]:
    """Starts a server. Needs root, who is the user that may come in.

    Args:
        options: lines of its configuration, which count more than its own.
        environment: what sessions see beside their own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    host_key = keypair(folder / "host_key")
    public = keypair(folder / "user_key")
    (folder / "authorized_keys").write_text(public + "\n")
    port = free_port()
    lines = [
        *options,  # of two lines that say different things, the first one counts
        f"ListenAddress {ADDRESS}:{port}", f"HostKey {folder}/host_key", f"AuthorizedKeysFile {folder}/authorized_keys",
        f"PidFile {folder}/sshd.pid", "UsePAM no", "StrictModes no", "PermitRootLogin yes", "PasswordAuthentication no",
        "MaxStartups 200", "PrintMotd no",
    ]  # fmt: skip
    # A shell that another one started reads no ~/.bashrc: what this machine's root has there took most of the time.
    given = {"SHLVL": "1", VARIABLE: os.environ[VARIABLE]} | (environment or {})
    lines.append("SetEnv " + " ".join(f"{name}={value}" for name, value in given.items()))  # only one such line counts
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    argv = ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")]
    with Daemon(argv, folder / "sshd.log") as daemon:
        daemon.wait_for(lambda: _listens(port), 20, "sshd listens")
        key = (folder / "user_key").read_text()
        yield Sshd(folder, port, " ".join(host_key.split()[:2]), key, daemon)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((ADDRESS, port)) == 0


def sessions_of(server: Sshd) -> list[int]:
    """The process ids of the server's sessions."""
    found = subprocess.run(
        ["ps", "--no-headers", "-o", "pid=", "--ppid", str(server.daemon.pid)], capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]
