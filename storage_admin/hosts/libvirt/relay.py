"""libvirt on a host whose key can only run the agent: its read-only socket, by the agent's relay.

As with a socket that ssh forwards, there is a private socket here at which libvirt is asked. Behind each connection to
it stands one ssh process, which runs the relay (:mod:`storage_admin.agent.relay`). What changes something is refused
by libvirt there, and before that by us, with a sentence that says what to do.
"""

import contextlib
import os
import selectors
import socket
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

from django.utils.translation import gettext as _

from storage_admin.agent import protocol, relay
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import ssh, transport
from storage_admin.hosts.models import Host

#: Seconds until the relay has greeted, and for a connection's end.
GREETING_TIMEOUT, END_TIMEOUT = 30.0, 3.0
#: Connections at once. A question makes one.
MOST = 4
LONGEST_GREETING = 1 << 16
_INSTALL = (
    "Run the output of `manage.py agent_installer` there as root. Repeat this after each upgrade of the dashboard."
)


def why_read_only(host: Host) -> str:
    """Why libvirt on a host can be read and not told to do anything, and what to do; empty where it can."""
    if host.transport != Host.Transport.FORCED or transport.is_here(host):
        return ""
    return _(
        "libvirt on {host} is read-only, because the SSH key of the host can only run the agent. Make the change "
        "on the host with virsh, or register the host with an unrestricted key."
    ).format(host=host.name)


def refuse_to_write(host: Host) -> None:
    """Raises RefusedError (``tool_missing``) where libvirt on a host can only be read."""
    if why := why_read_only(host):
        raise RefusedError("tool_missing", why)


@contextlib.contextmanager
def relayed(where: ssh.Endpoint) -> Iterator[str | None]:
    """The URI of libvirt on a host, valid as long as the context lasts; ``None`` where no libvirt listens there.

    Raises:
        HostError: the host cannot be reached, its agent has no relay, or what listens there is not libvirt.
    """
    with contextlib.ExitStack() as stack:
        command = stack.enter_context(ssh.connection(where, protocol.RELAY))
        first = _Relay(command, where)
        stack.callback(first.end)
        if not first.greeted():
            yield None
            return
        folder = stack.enter_context(ssh.private_folder())
        door = stack.enter_context(_Door(folder / "libvirt", command, where, first))
        yield f"qemu+unix:///system?socket={urllib.parse.quote(str(door.path))}"


class _Relay:
    """One ssh process that runs the relay."""

    def __init__(self, command: list[str], where: ssh.Endpoint) -> None:
        self._where = where
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def greeted(self) -> bool:
        """Whether libvirt listens there.

        Raises:
            HostError: no relay, or one that says why there is no way to libvirt.
        """
        try:
            told: dict[str, Any] = protocol.decode(self._line())
        except (ValueError, RecursionError):
            raise HostError(
                _("The response from {address} did not come from the agent. {advice}").format(
                    address=self._where.address, advice=_INSTALL
                )
            ) from None
        if told["event"] == protocol.ERROR:
            raise HostError(str(told.get("detail", "")))
        if told.get("protocol") != protocol.VERSION or told.get("relay") != protocol.RELAY:
            raise HostError(
                _("The agent on {address} is too old to query libvirt. {advice}").format(
                    address=self._where.address, advice=_INSTALL
                )
            )
        return bool(told.get("listens"))

    def _line(self) -> bytes:
        """The first line, and not a byte of what follows: that is libvirt's."""
        pipe, line, deadline = _of(self._process.stdout), bytearray(), time.monotonic() + GREETING_TIMEOUT
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not line.endswith(b"\n") and len(line) < LONGEST_GREETING:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.stop()
                    raise HostError(
                        _(
                            "The agent on {address} did not answer within {greeting:.0f} s. Check the connection and "
                            "try again."
                        ).format(address=self._where.address, greeting=GREETING_TIMEOUT),
                        "host_unreachable",
                    )
                byte = os.read(pipe, 1)
                if not byte:
                    raise self._ended(bytes(line))
                line += byte
        return bytes(line)

    def _ended(self, said: bytes) -> HostError:
        stderr = ssh.last_words(self._process, LONGEST_GREETING)
        if self._process.returncode == ssh.CONNECTION_FAILED:
            return HostError(ssh.why_not(self._where, stderr), "host_unreachable")
        words = (stderr or said).decode("utf-8", "replace").strip()[-300:]
        return HostError(f"The agent on {self._where.address} cannot query libvirt: {words or 'it exited'}. {_INSTALL}")

    def carry(self, client: socket.socket) -> None:
        """Carries bytes between a client and the relay, until one of them ends."""
        ways = [(client.fileno(), _of(self._process.stdin)), (_of(self._process.stdout), client.fileno())]
        relay.carry(ways, client.fileno())

    def stop(self) -> None:
        """Has it end soon: whoever waits for what it says hears the end."""
        self._process.terminate()

    def end(self) -> None:
        """Ends the process; also one that has ended."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _of(pipe: IO[bytes] | None) -> int:
    if pipe is None:
        raise TypeError("the connection's pipe is missing")
    return pipe.fileno()


class _Door:
    """The private socket at which libvirt is asked, and who comes in by it."""

    def __init__(self, path: Path, command: list[str], where: ssh.Endpoint, first: _Relay) -> None:
        self.path = path
        self._command, self._where = command, where
        self._first: _Relay | None = first
        self._lock = threading.Lock()
        self._closed = False
        self._open: dict[_Relay, threading.Thread] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._accepting = threading.Thread(target=self._accept, name="libvirt-relay", daemon=True)

    def __enter__(self) -> Self:
        self._listener.bind(str(self.path))
        self.path.chmod(0o600)  # in a folder that nobody else can enter
        self._listener.listen(MOST)
        self._accepting.start()
        return self

    def __exit__(self, *__: object) -> None:
        with self._lock:
            self._closed = True
            at_work = dict(self._open)
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends the waiting for clients
        for one in at_work:
            one.stop()
        for thread in (self._accepting, *at_work.values()):
            thread.join(2 * END_TIMEOUT)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, __ = self._listener.accept()
                self._let_in(client)

    def _let_in(self, client: socket.socket) -> None:
        with self._lock:
            if self._closed or len(self._open) >= MOST:
                client.close()
                return
            one, self._first = self._first, None
            fresh = one is None
            try:
                one = one or _Relay(self._command, self._where)
            except OSError:  # no process can be started now; the next client may have more luck
                client.close()
                return
            thread = threading.Thread(target=self._serve, args=(client, one, fresh), name="libvirt-relay", daemon=True)
            self._open[one] = thread
            thread.start()

    def _serve(self, client: socket.socket, one: _Relay, fresh: bool) -> None:
        # A connection that does not come about is one that ends at once: libvirt's library says so to who asked.
        with client, contextlib.suppress(HostError):
            if not fresh or one.greeted():
                one.carry(client)
        one.end()
        with self._lock:
            self._open.pop(one, None)
