"""The URI by which libvirt on a host is asked. It is built here, from checked fields alone.

A libvirt URI can name a command to run; nobody types one. Over ssh, libvirt's own socket there is forwarded into a
private folder by our own, pinned, connection, and libvirt is asked at that socket.
"""

import contextlib
import shlex
import subprocess
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from storage_admin.agent.protocol import HostError
from storage_admin.hosts import ssh, transport
from storage_admin.hosts.models import Host

LOCAL = "qemu:///system"
#: Where a libvirt daemon listens: the one of old, and the modular one.
SOCKETS = ("/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock")
TLS_PORT = 16514
#: Says which of the sockets are there, and stays as long as we do.
_LOOK = 'for one in "$@"; do test -S "$one" && echo "$one"; done; echo .; cat >/dev/null'


@contextlib.contextmanager
def uri_of(host: Host) -> Iterator[str | None]:
    """The URI of libvirt on a host, valid as long as the context lasts; ``None`` where no libvirt listens there.

    Raises:
        HostError: the host cannot be reached, or has no way to its libvirt.
    """
    if transport.is_here(host):
        yield LOCAL if any(Path(socket).exists() for socket in SOCKETS) else None
    elif host.transport == Host.Transport.TLS:
        yield _tls(host)
    elif host.transport == Host.Transport.FORCED:
        raise HostError(
            f"libvirt on {host.name} cannot be asked: the key for it can only run the agent. Register the host with a "
            "key that may do more, or with libvirt over TLS."
        )
    elif transport.by_ssh(host):
        with _forwarded(transport.endpoint(host)) as uri:
            yield uri
    elif host.kind == Host.Kind.LOCAL:
        raise HostError(transport.no_way_to(host), "host_unreachable")  # guests there cannot be excluded from here
    else:
        yield None  # a hypervisor whose own API tells of its guests


def _tls(host: Host) -> str:
    address = f"[{host.address}]" if ":" in host.address else host.address
    return f"qemu+tls://{address}:{host.port or TLS_PORT}/system"


@contextlib.contextmanager
def _forwarded(where: ssh.Endpoint) -> Iterator[str | None]:
    with tempfile.TemporaryDirectory(prefix="storage-admin-libvirt-") as folder:  # mode 0700
        local = {remote: f"{folder}/{number}" for number, remote in enumerate(SOCKETS)}
        forwards = [word for remote, own in local.items() for word in ("-L", f"{own}:{remote}")]
        options = ["-o", "StreamLocalBindMask=0177", "-o", "ExitOnForwardFailure=yes", *forwards]
        look = shlex.join(["sh", "-c", _LOOK, "sh", *SOCKETS])
        with ssh.connection(where, look, *options) as command:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
            with _ended(process):
                there = _told(process, where)
                yield f"qemu+unix:///system?socket={urllib.parse.quote(local[there[0]])}" if there else None


def _told(process: "subprocess.Popen[bytes]", where: ssh.Endpoint) -> list[str]:
    """The sockets that are there. The connection's own time limits end the wait."""
    found: list[str] = []
    if process.stdout is None or process.stderr is None:
        raise TypeError("the connection's pipes are missing")
    for line in process.stdout:
        text = line.decode("utf-8", "replace").strip()
        if text == ".":
            return found
        if text in SOCKETS:
            found.append(text)
    raise HostError(ssh.why_not(where, process.stderr.read()), "host_unreachable")


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
