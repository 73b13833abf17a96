"""The URI by which libvirt on a host is asked. It is built here, from checked fields alone.

A libvirt URI can name a command to run; nobody types one. Over ssh, libvirt's own socket there is forwarded into a
private folder by our own, pinned, connection, and libvirt is asked at that socket. With a key that can only run the
agent, it is the read-only socket, by the agent's relay (:mod:`storage_admin.hosts.libvirt.relay`). Over TLS, the host's
certificate has to be signed by the authority in its row (:mod:`storage_admin.hosts.libvirt.tls`), else in the data
folder's ``pki/<slug>/``, else ``pki/`` (``cacert.pem``, with our own ``clientcert.pem`` and ``clientkey.pem``), else in
libvirt's usual places.

The fields are checked once more here, whatever wrote them into the row.
"""

import contextlib
import os
import selectors
import shlex
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from django.conf import settings
from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError
from storage_admin.errors import InvalidError
from storage_admin.hosts import addresses, ssh, transport
from storage_admin.hosts.libvirt import relay, tls
from storage_admin.hosts.libvirt.process import GoneError
from storage_admin.hosts.models import Host

LOCAL = "qemu:///system"
#: Where a libvirt daemon listens: the one of old, and the modular one.
SOCKETS = ("/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock")
TLS_PORT = 16514
#: Seconds until the sockets of a host are known.
LOOK_TIMEOUT = 30.0
#: What libvirt looks for in a folder of certificates.
CERTIFICATES, PRIVATE_KEY = ("cacert.pem", "clientcert.pem"), "clientkey.pem"
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
        with tls.folder_of(host) as own:
            yield _tls(host, own)
    elif host.transport == Host.Transport.FORCED:
        with relay.relayed(_checked(host, transport.endpoint(host))) as uri:
            yield uri
    elif transport.by_ssh(host):
        with _forwarded(_checked(host, transport.endpoint(host))) as uri:
            yield uri
    elif host.kind == Host.Kind.LOCAL:
        raise HostError(transport.no_way_to(host), "host_unreachable")  # guests there cannot be excluded from here
    else:
        yield None  # a hypervisor whose own API tells of its guests


@contextlib.contextmanager
def reached(host: Host) -> Iterator[str]:
    """As :func:`uri_of`; raises HostError also where no libvirt listens there."""
    with uri_of(host) as uri:
        if uri is None:
            raise HostError(
                _("libvirt is not listening on {host}. Check that its service is running.").format(host=host.name)
            )
        yield uri


@contextlib.contextmanager
def listening(host: Host) -> Iterator[str]:
    """As :func:`uri_of`, of a libvirt that may be at work on what was asked of it.

    Raises:
        GoneError: nobody listens there, or the host cannot be reached.
        HostError: the host has no way to its libvirt.
    """
    with contextlib.ExitStack() as stack:
        try:
            uri = stack.enter_context(uri_of(host))
        except HostError as error:
            if error.code != "host_unreachable":
                raise
            raise GoneError(error.detail, error.code) from error
        if uri is None:
            raise GoneError(_("No libvirt listens on {host}.").format(host=host.name))
        yield uri


def _tls(host: Host, own: Path | None) -> str:
    try:
        address, port = addresses.address(host.address), addresses.port(host.port, TLS_PORT)
    except InvalidError as error:
        raise _wrong(host, error) from None
    where = f"[{address}]" if ":" in address else address
    folder = own or _certificates(host)
    query = f"?{urllib.parse.urlencode({'pkipath': str(folder)}, quote_via=urllib.parse.quote)}" if folder else ""
    return f"qemu+tls://{where}:{port}/system{query}"


def _certificates(host: Host) -> Path | None:
    """The folder with our certificate for a host, or for all; ``None`` where libvirt is to look where it always does.

    Raises:
        HostError: a file is missing in it, or others may read the key.
    """
    names, shared = (*CERTIFICATES, PRIVATE_KEY), Path(settings.DATA_DIR).resolve() / "pki"
    folder = shared / host.slug
    if not host.slug or not folder.is_dir():
        folder = shared
    missing = [name for name in names if not (folder / name).is_file()]
    if folder == shared and len(missing) == len(names):
        return None
    if missing:
        raise HostError(
            _("{folder} does not contain {missing}. libvirt over TLS needs all of its certificate files.").format(
                folder=folder, missing=", ".join(missing)
            )
        )
    if (folder / PRIVATE_KEY).stat().st_mode & 0o077:
        raise HostError(
            _("Other users can access the dashboard's private key. Run: chmod 600 {folder}").format(
                folder=folder / PRIVATE_KEY
            )
        )
    return folder


def _checked(host: Host, where: ssh.Endpoint) -> ssh.Endpoint:
    """An endpoint of which nothing is but what it should be.

    Raises:
        HostError: a field of the row is something else.
    """
    try:
        return replace(
            where, address=addresses.address(where.address), port=addresses.port(where.port, 22),
            user=addresses.user(where.user), host_key=addresses.host_key(where.host_key),
        )  # fmt: skip
    except InvalidError as error:
        raise _wrong(host, error) from None


def _wrong(host: Host, error: InvalidError) -> HostError:
    return HostError(
        _("{host} was not contacted, because its connection settings are invalid. {detail}").format(
            host=host.name, detail=error.detail
        )
    )


@contextlib.contextmanager
def _forwarded(where: ssh.Endpoint) -> Iterator[str | None]:
    with ssh.private_folder() as folder:
        local = {remote: f"{folder}/{number}" for number, remote in enumerate(SOCKETS)}
        forwards = [word for remote, own in local.items() for word in ("-L", f"{own}:{remote}")]
        options = ["-o", "StreamLocalBindMask=0177", "-o", "ExitOnForwardFailure=yes", *forwards]
        look = shlex.join(["sh", "-c", _LOOK, "sh", *SOCKETS])
        with ssh.connection(where, look, *options) as command:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
            try:
                there = _told(process, where)
                yield f"qemu+unix:///system?socket={urllib.parse.quote(local[there[0]])}" if there else None
            finally:
                ssh.end(process)


def _told(process: "subprocess.Popen[bytes]", where: ssh.Endpoint) -> list[str]:
    """The sockets that are there.

    A connection that stands although nothing runs there any more, as on a host whose disk hangs, is given up as well.
    """
    if process.stdout is None or process.stderr is None:
        raise TypeError("the connection's pipes are missing")
    said, pipe, deadline = b"", process.stdout.fileno(), time.monotonic() + LOOK_TIMEOUT
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while b"." not in (lines := [line.strip() for line in said.split(b"\n")[:-1]]):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                process.terminate()
                sentence = _("{address} did not answer within {seconds:.0f} s.")
                raise HostError(sentence.format(address=where.address, seconds=LOOK_TIMEOUT), "host_unreachable")
            chunk = os.read(pipe, 4096)
            if not chunk:
                raise HostError(ssh.why_not(where, ssh.last_words(process)), "host_unreachable")
            said += chunk
    return [socket for socket in SOCKETS if socket.encode() in lines]
