"""Other machines, by the OpenSSH client: one connection for each piece of work, the host's key pinned.

Each connection is a process of its own (``ControlMaster=no``), so that no job's end can end another. What is said here
stands on the command line, where it goes before whatever the user's configuration says. Keys lie in memory
(``/dev/shm``) as files for as long as a connection needs them, and nowhere else in the clear.
"""

import contextlib
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError
from storage_admin.hosts.shells import Done

CONNECT_TIMEOUT = 10
#: After so many seconds without a sign of life a connection is given up: three questions, ten seconds apart.
ALIVE_INTERVAL, ALIVE_COUNT = 10, 3
#: What the OpenSSH client exits with when it is the connection that failed. A remote command's own 255 looks the same.
CONNECTION_FAILED = 255

#: Runs a command, ends it after so many seconds where that machine has a timeout(1) that can, and says after a mark how
#: it ended: what the client exits with does not tell the end of a command from that of the connection.
REPORTED = (
    'mark=$1 limit=$2; shift 2; if timeout -k 1 1 true 2>/dev/null; then timeout -k 5 "$limit" "$@"; else "$@"; fi; '
    'echo "$mark $?" >&2'
)
#: What timeout(1) exits with: the command ended when it was told to, or had to be killed.
TIME_IS_UP = (124, 137)
#: Seconds that a connection may take before and after its command.
AROUND = CONNECT_TIMEOUT + 10
#: Seconds for the end of a connection that says no more.
END_TIMEOUT = 3.0

#: These go before the user's configuration. Hosts behind a jump host stay possible: ProxyJump is left to it.
PINNED = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "GlobalKnownHostsFile": "/dev/null",
    "KnownHostsCommand": "none",
    "VerifyHostKeyDNS": "no",
    "UpdateHostKeys": "no",
    "CheckHostIP": "no",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ControlPersist": "no",
    "ConnectTimeout": str(CONNECT_TIMEOUT),
    "ConnectionAttempts": "1",
    "ServerAliveInterval": str(ALIVE_INTERVAL),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "SendEnv": "-*",
    "Tunnel": "no",
    "LogLevel": "INFO",
}
#: Options that a client of a few years ago does not know, and does not need.
YOUNG = ("KnownHostsCommand",)


@dataclass(frozen=True)
class Endpoint:
    """Where a host is reached, by fields that were checked (:mod:`storage_admin.hosts.addresses`).

    Args:
        host_key: the only key that it may show.
        private_key: ours; empty for the keys and the ssh-agent of the user that the dashboard runs as.
    """

    address: str
    port: int
    user: str
    host_key: str
    private_key: str = field(default="", repr=False)

    @property
    def is_root(self) -> bool:
        """Whether nobody has to be asked for root's rights there."""
        return self.user == "root"


@contextlib.contextmanager
def connection(endpoint: Endpoint, remote: str | None, *options: str) -> Iterator[list[str]]:
    """The argument list of an OpenSSH client, and the files that it needs as long as the context lasts.

    Args:
        remote: what the user's shell there is to run; ``None`` for nothing, as with a forced command.
        options: more options of the client.
    """
    with private_folder() as folder:
        alias = "storage-admin"
        (folder / "known_hosts").write_text(f"{alias} {endpoint.host_key}\n")
        pinned = PINNED | {"UserKnownHostsFile": str(folder / "known_hosts"), "HostKeyAlias": alias}
        pinned["HostKeyAlgorithms"] = _algorithms(endpoint.host_key)
        if endpoint.private_key:
            key = folder / "key"
            with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(endpoint.private_key)
            pinned |= {"IdentityFile": str(key), "IdentitiesOnly": "yes", "IdentityAgent": "none"}
        pinned = {"IgnoreUnknown": ",".join(YOUNG)} | pinned
        words = [word for name, value in pinned.items() for word in ("-o", f"{name}={value}")]
        if "-L" not in options:
            words += ["-o", "ClearAllForwardings=yes"]
        command = ["ssh", "-p", str(endpoint.port), "-l", endpoint.user, *words, *options, "--", endpoint.address]
        yield command if remote is None else [*command, remote]


def _algorithms(host_key: str) -> str:
    """Only the pinned kind is asked for: a host with several would else show one that is not known."""
    kind = host_key.split(maxsplit=1)[0]
    return "rsa-sha2-512,rsa-sha2-256" if kind == "ssh-rsa" else kind


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder in memory that nobody else can enter; what a process that was killed leaves of it is cleared later."""
    folder = Path(tempfile.mkdtemp(prefix=f"storage-admin-{os.getpid()}-", dir=_memory()))  # mode 0700
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 (a private folder in it)


def clear_leftovers() -> None:
    """Removes what processes that were killed have left in memory: the keys to hosts."""
    for folder in Path(_memory() or tempfile.gettempdir()).glob("storage-admin-*"):
        match = re.fullmatch(r"storage-admin-(\d+)-[A-Za-z0-9_]+", folder.name)
        if match and folder.stat().st_uid == os.geteuid() and not Path(f"/proc/{match.group(1)}").exists():
            shutil.rmtree(folder, ignore_errors=True)


class SshShell:
    """Plain commands on a host, as root: by ``sudo -n`` where the user is another one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        """See :meth:`storage_admin.hosts.shells.Shell.run`."""
        mark, began = secrets.token_hex(16), time.monotonic()
        reported = ["sh", "-c", REPORTED, "sh", mark, str(math.ceil(seconds)), *argv]
        done = self._client(as_root(self._endpoint, reported), stdin, seconds + AROUND)
        said, found, code = done.stderr.rpartition(mark.encode() + b" ")
        if not found:
            return self._connected(done)
        ended = Done(int(code), done.stdout, said)
        if ended.exit_code in TIME_IS_UP and time.monotonic() - began >= seconds:
            raise HostError(
                _("{program} did not end within {seconds:.0f} s on {address} and was ended there.").format(
                    program=argv[0], seconds=seconds, address=self._endpoint.address
                )
            )
        return ended

    def run_text(self, remote: str) -> Done:
        """A line for the user's shell there, as the user.

        Raises:
            HostError: the host cannot be reached, or does not answer within 30 s.
        """
        return self._connected(self._client(remote, b"", 30.0))

    def _client(self, remote: str, stdin: bytes, seconds: float) -> Done:
        with connection(self._endpoint, remote) as command:
            try:
                done = subprocess.run(command, input=stdin, capture_output=True, timeout=seconds, check=False)
            except subprocess.TimeoutExpired:
                raise HostError(
                    _("{address} did not answer within {seconds:.0f} s.").format(
                        address=self._endpoint.address, seconds=seconds
                    )
                ) from None
        return Done(done.returncode, done.stdout, done.stderr)

    def _connected(self, done: Done) -> Done:
        if done.exit_code == CONNECTION_FAILED:
            raise HostError(why_not(self._endpoint, done.stderr), "host_unreachable")
        return done


def as_root(endpoint: Endpoint, argv: list[str]) -> str:
    """A command as a line for the user's shell there; every usual shell reads it alike."""
    return shlex.join(argv if endpoint.is_root else ["sudo", "-n", "--", *argv])


def end(process: "subprocess.Popen[bytes]") -> None:
    """Closes a process's pipes, upon which it ends; else it is killed. One that has ended is left as it is."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_words(process: "subprocess.Popen[bytes]", most: int = 1 << 16) -> bytes:
    """What a connection that has ended said on standard error: a process that it has left may hold that open."""
    if process.stderr is None:
        raise TypeError("the connection's pipe is missing")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT)
    os.set_blocking(process.stderr.fileno(), False)
    try:
        return os.read(process.stderr.fileno(), most)
    except BlockingIOError:
        return b""


def why_not(endpoint: Endpoint, stderr: bytes) -> str:
    """Why a connection failed, in a sentence that says what to do."""
    said = stderr.decode("utf-8", "replace").strip()
    where = f"{endpoint.user}@{endpoint.address}:{endpoint.port}"
    if "HOST IDENTIFICATION HAS CHANGED" in said or "Host key verification failed" in said:
        return _(
            "The host key of {where} differs from the pinned one. If the host was reinstalled, compare its new "
            "key, then accept it. Otherwise, someone may be intercepting the connection."
        ).format(where=where)
    if "Permission denied" in said:
        return _("{where} rejected the key. Add its public key to ~{user}/.ssh/authorized_keys there.").format(
            where=where, user=endpoint.user
        )
    if "no matching host key type" in said:
        return _("{where} no longer has a host key of the pinned type. Compare its new key, then accept it.").format(
            where=where
        )
    last = said.rsplit("\n", 1)[-1][-200:]
    return f"{where} cannot be reached: {last or 'the connection ended'}"


def scan_keys(address: str, port: int) -> list[str]:
    """The public keys that a host shows, the strongest kind first. They prove nothing: somebody has to compare them.

    Raises:
        HostError: it does not answer.
    """
    kinds = ["ed25519", "ecdsa", "rsa"]
    command = ["ssh-keyscan", "-T", str(CONNECT_TIMEOUT), "-p", str(port), "-t", ",".join(kinds), address]
    try:
        done = subprocess.run(command, capture_output=True, timeout=3 * CONNECT_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise HostError(
            _("{address}, port {port}, does not answer.").format(address=address, port=port), "host_unreachable"
        ) from None
    found = [line.split(None, 1)[1] for line in done.stdout.decode("ascii", "replace").splitlines() if " " in line]
    keys = [key for kind in kinds for key in found if key.startswith(("ssh-" + kind, kind + "-"))]
    if not keys:
        sentence = _("No SSH server answers at {address}, port {port}. Check the address and port.")
        raise HostError(sentence.format(address=address, port=port), "host_unreachable")
    return keys
