"""The test server itself: HTTPS on loopback, a certificate of its own, every request and answer held to the schema."""

import contextlib
import datetime as dt
import http.server
import ipaddress
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.endpoint import Endpoint, Token
from tests.harness.proxmox import schema, snapshots
from tests.harness.proxmox.answers import CALLS
from tests.harness.proxmox.world import SECRET, TOKEN_ID, ApiDeathError, World, lab

__all__ = ["snapshots"]  # it notes its calls

ADDRESS = "127.0.0.1"
_PREFIX = "/api2/json"
_SIGNER = "PVEAPIToken="


def reserved(given: dict[str, str]) -> bool:
    """Whether a request touches QEMU's arguments, or passes a lock over for more than to take that very one away.

    Both are root's on Proxmox VE, and by the first anything can be started on the node.
    """
    gone = given.get("delete", "")
    unlocks = gone == "lock" and given.keys() == {"delete", "skiplock", "digest"}
    return "args" in {*given, *gone.replace(",", " ").split()} or ("skiplock" in given and not unlocks)


@dataclass(frozen=True)
class Seen:
    """A request that came in, and the status that it got."""

    verb: str
    path: str
    params: dict[str, str]
    status: int


@dataclass
class ProxmoxServer:
    """A running server.

    Args:
        world: what it serves; tests change it.
        seen: requests, in their order.
        wrong: what the schema has against requests and answers: the client's mistakes, and ours.
        connections: that were opened.
        wire: the next answers, as they go over the wire instead of what is right.
    """

    world: World
    port: int
    pem: str
    fingerprint: str
    seen: list[Seen] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    connections: int = 0
    wire: list[bytes] = field(default_factory=list)
    address: str = ADDRESS

    def endpoint(self, **changes: Any) -> Endpoint:
        values: dict[str, Any] = {"address": self.address, "port": self.port, "fingerprint": self.fingerprint}
        return Endpoint(**(values | changes))

    def client(self, secret: str = SECRET, **changes: Any) -> Client:
        return Client(self.endpoint(**changes), Token(TOKEN_ID, secret), seconds=5.0)

    def verbs(self) -> list[str]:
        """The requests that change something, shortly."""
        return [f"{one.verb} {one.path}" for one in self.seen if one.verb != "GET"]


@contextlib.contextmanager
def proxmox(world: World, folder: Path, *, address: str = ADDRESS, port: int = 0) -> Iterator[ProxmoxServer]:
    """Starts a server for a world; its certificate and key lie in a folder.

    Args:
        address, port: of loopback; the nodes of a cluster have one port at several addresses.
    """
    pem = certificate(folder / "node.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "node.pem")
    digest = x509.load_pem_x509_certificate(pem.encode()).fingerprint(hashes.SHA256()).hex().upper()
    server = _Server((address, port), _Handler)
    shown = ":".join(digest[i : i + 2] for i in range(0, 64, 2))
    server.state = ProxmoxServer(world, int(server.server_address[1]), pem, shown, address=address)
    server.context = context
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def certificate(path: Path) -> str:
    """A new self-signed certificate for loopback, with its key, in one file; the certificate alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pve1")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ADDRESS))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM).decode()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    path.write_text(pem + secret)
    return pem


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    state: ProxmoxServer
    context: ssl.SSLContext

    def get_request(self) -> tuple[Any, Any]:
        plain, address = super().get_request()
        self.state.connections += 1
        # The handshake belongs to the connection's own thread.
        return self.context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what some tests are about; anything else is a mistake of the server's own."""
        error = sys.exception()
        if not isinstance(error, OSError):
            self.state.wrong.append(f"the server itself: {error!r}")


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    #: Head and body go out together: in two packets, the second waits for the other side's word on the first.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        request: socket.socket = self.request
        request.settimeout(10)
        self.request.do_handshake()
        super().setup()

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        state, url = self.server.state, urlsplit(self.path)
        path = unquote(url.path).removeprefix(_PREFIX)
        length = int(self.headers.get("Content-Length") or 0)
        text = self.rfile.read(length).decode() or url.query
        given = dict(parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text)))
        if state.wire:
            self.wfile.write(state.wire.pop(0))
            self.close_connection = True
            return
        try:
            if self.headers.get("Authorization") != f"{_SIGNER}{TOKEN_ID}={SECRET}":
                time.sleep(state.world.delay)
                raise ApiDeathError(401, "invalid token value!")
            status, body = 200, {"data": self._called(path, given)}
            reason = "OK"
        except ApiDeathError as death:
            status, reason = death.status, death.message.strip().partition("\n")[0]
            body = {"data": None, "message": death.message} | ({"errors": death.fields} if death.fields else {})
            if status == 596:
                reason = "Connection timed out"
        state.seen.append(Seen(self.command, path, given, status))
        self._send(status, reason, b"" if status in (401, 596) else json.dumps(body).encode())

    def _called(self, path: str, given: dict[str, str]) -> Any:
        state = self.server.state
        found = schema.match(self.command, path)
        if found is None:
            state.wrong.append(f"{self.command} {path} is no call of the schema")
            raise ApiDeathError(501, f"Method '{self.command} {path}' not implemented")
        call, in_path = found
        if reserved(given):
            state.wrong.append(f"{call} with {given}: nobody is to ask for that")
        errors = schema.wrong(call, given, in_path)
        if errors:
            state.wrong.append(f"{call}: {errors}")
            raise ApiDeathError(400, "Parameter verification failed.\n", errors)
        world = state.world
        if in_path.get("node", world.node) != world.node:
            name = in_path["node"]
            why = f"failed to get address info for: {name}: Name or service not known"
            raise ApiDeathError(500, f"hostname lookup '{name}' failed - {why}\n")
        check = schema.load()["calls"][call].get("check")
        if check:
            world.demand(check[0].format(**in_path), check[1])
        data = CALLS[call](world, in_path | given)
        state.wrong.extend(f"{call} answers: {why}" for why in schema.wrong_answer(call, data))
        return data

    def _send(self, status: int, reason: str, body: bytes) -> None:
        self.send_response(status, reason)
        self.send_header("Content-Type", "application/json;charset=UTF-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ProxmoxServer]:
    """The node of the tests' data. At the end nothing may be wrong with any request or answer."""
    with proxmox(lab(), tmp_path) as running:
        yield running
    assert running.wrong == []
