"""Connections to Proxmox VE: whom they trust, what they tell when it goes wrong, and whom they tell the secret."""

import logging
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.endpoint import Endpoint, Token
from storage_admin.hosts.proxmox.errors import (
    ApiError,
    DeniedError,
    NoAnswerError,
    NotKnownError,
    NotThereError,
    of_answer,
)
from storage_admin.hosts.proxmox.tls import shown_fingerprint
from tests.harness.proxmox.server import ADDRESS, ProxmoxServer
from tests.harness.proxmox.world import SECRET, TOKEN_ID, recorded
from tests.working import fails_as

OTHER = ":".join(["AB"] * 32)


def test_a_pinned_certificate_is_taken(server: ProxmoxServer) -> None:
    assert shown_fingerprint(server.endpoint(fingerprint="")) == server.fingerprint
    assert server.seen == []
    with server.client() as client:
        assert client.get("version")["release"] == "9.2"


def test_another_certificate_than_the_pinned_one_gets_no_request(server: ProxmoxServer) -> None:
    with (
        server.client(fingerprint=OTHER) as client,
        fails_as(HostError, "host_unreachable", "a certificate that differs"),
    ):
        client.get("version")
    assert server.connections > 0
    assert server.seen == []


@pytest.fixture
def known_authority(server: ProxmoxServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine knows the authority that has signed the server's certificate."""
    (tmp_path / "known.pem").write_text(server.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "known.pem"))


def test_without_a_pin_an_authority_must_have_signed_it(server: ProxmoxServer) -> None:
    with server.client(fingerprint="") as client, pytest.raises(HostError, match="no trusted CA"):
        client.get("version")
    assert server.seen == []


@pytest.mark.usefixtures("known_authority")
def test_without_a_pin_an_authority_that_this_machine_knows_will_do(server: ProxmoxServer) -> None:
    with server.client(fingerprint="") as client:
        assert client.get("version")["release"] == "9.2"


@pytest.mark.usefixtures("known_authority")
def test_a_certificate_for_another_name_is_refused(server: ProxmoxServer) -> None:
    with server.client(fingerprint="", address="localhost") as client, pytest.raises(HostError, match="another name"):
        client.get("version")
    assert server.seen == []


def test_the_environment_weakens_nothing(server: ProxmoxServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "ca.pem").write_text(server.pem)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("CURL_CA_BUNDLE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    with server.client(fingerprint="") as client, pytest.raises(HostError, match="no trusted CA"):
        client.get("version")
    with server.client() as client:
        assert client.get("version")["release"] == "9.2"


def test_nobody_there_is_told_soon() -> None:
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        port = int(taken.getsockname()[1])
        client = Client(Endpoint(ADDRESS, port, OTHER), Token(TOKEN_ID, SECRET))
        with client, fails_as(HostError, "host_unreachable", r"cannot be reached: .*refused"):
            client.get("version")
        with pytest.raises(HostError, match=r"does not respond like a Proxmox VE server: .*refused"):
            shown_fingerprint(Endpoint(ADDRESS, port))


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind((ADDRESS, 0))
        silent.listen()
        port = int(silent.getsockname()[1])
        began = time.monotonic()
        client = Client(Endpoint(ADDRESS, port, OTHER), Token(TOKEN_ID, SECRET), seconds=0.5)
        with client, fails_as(HostError, "host_unreachable"):
            client.get("version")
        with pytest.raises(HostError, match="timed out"):
            shown_fingerprint(Endpoint(ADDRESS, port), seconds=0.3)
    assert time.monotonic() - began < 5


def test_a_bad_token_is_told_by_the_status_line(server: ProxmoxServer) -> None:
    server.world.delay = 0.2
    words = r"rejected the API token: invalid token value!\. Check"
    with server.client(secret="wrong-" + SECRET) as client, pytest.raises(ApiError, match=words) as error:
        client.get("version")
    assert (error.value.status, error.value.code) == (401, "token_refused")
    assert TOKEN_ID in error.value.detail


def test_the_secret_is_in_no_exception_log_or_repr(server: ProxmoxServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    answers = (
        b"",
        b"HTTP/1.1 500 " + SECRET.encode() + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 400 x\r\nContent-Length: 200\r\n\r\n" + f'{{"errors":{{"a":"{SECRET}"}}}}'.encode().ljust(200),
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n<a>",
        b"garbage",
    )
    with server.client() as client:
        for answer in answers:
            server.wire.append(answer)
            _tell(client, told)
        server.world.rights = {}
        _tell(client, told, "cluster", "status")
        told += [repr(client), str(vars(client.endpoint)), repr(Token(TOKEN_ID, SECRET))]
    with server.client(fingerprint=OTHER) as client:
        _tell(client, told)
    assert len(told) == 10
    assert SECRET not in "\n".join([*told, caplog.text])


def _tell(client: Client, told: list[str], *path: str) -> None:
    with pytest.raises((HostError, RefusedError)) as raised:
        client.get(*(path or ("version",)))
    chain: BaseException | None = raised.value
    words = traceback.format_exception(raised.value, chain=True)
    while chain is not None:
        words += [repr(chain), str(vars(chain))]
        chain = chain.__cause__ or chain.__context__
    told.append("".join(words))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 302 Found\r\nLocation: https://192.0.2.1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n<html>hello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 500 \r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 500 x\r\nContent-Length: 4\r\n\r\nnull",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"data":',
    ],
)  # fmt: skip
def test_what_is_no_answer_of_the_api_is_an_error(server: ProxmoxServer, client: Client, answer: bytes) -> None:
    server.wire.append(answer)
    with pytest.raises(HostError):
        client.get("version")


def test_an_endless_answer_is_given_up(server: ProxmoxServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_admin.hosts.proxmox.tls.MAX_ANSWER", 1000)
    server.wire.append(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b" " * 5000)
    with pytest.raises(HostError):
        client.get("version")


def test_what_no_database_could_hold_is_replaced(server: ProxmoxServer, client: Client) -> None:
    body = rb'{"data":{"\ud800a":["\ud83d\ude00","\udfff",7]}}'
    server.wire.append(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert client.get("version") == {"\ufffda": ["\U0001f600", "\ufffd", 7]}


def test_nested_nonsense_is_an_error(server: ProxmoxServer, client: Client) -> None:
    body = b"[" * 200_000
    server.wire.append(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    with pytest.raises(HostError, match="does not respond like the Proxmox VE API"):
        client.get("version")


def test_errors_are_told_as_proxmox_words_them() -> None:
    kinds = {
        "GET /nodes/pve1/qemu/103/config": (NotThereError, "qemu-server/103.conf' does not exist"),
        "GET /nodes/pve1/lxc/100/config": (NotThereError, "lxc/100.conf' does not exist"),
        "GET /nodes/pve1/qemu/100/config?snapshot=nope": (NotThereError, "snapshot 'nope' does not exist"),
        "GET /nodes/pve2/qemu/100/config": (ApiError, "hostname lookup 'pve2' failed"),
        "GET /nodes/pve1/storage/nosuch/content": (NotThereError, "storage 'nosuch' does not exist"),
        "GET /nodes/pve1/storage/nfs-dead/content": (ApiError, "storage 'nfs-dead' is not online"),
        "GET /nodes/pve1/storage/disabled/content": (ApiError, "is disabled"),
        "GET /nodes/pve1/storage/other-node/content": (ApiError, "is not available on node 'pve1'"),
        "GET /nodes/pve1/storage/store/content?vmid=12": (ApiError, "vmid: invalid format"),
        "GET /nodes/pve1/nosuch": (NotKnownError, "may be too old"),
        "GET /nodes/pve1/storage?foo=1": (ApiError, "foo: property is not defined in schema"),
        "PUT /nodes/pve1/qemu/100/config as auditor": (DeniedError, "lacks VM.Config.Disk or VM.Config.CDROM"),
        "GET /nodes/pve1/storage/store/content as vmadmin": (
            DeniedError,
            "lacks Datastore.Audit or Datastore.AllocateSpace on /storage/store.",
        ),
        "broken header": (ApiError, "Unsupported qcow2 version 9"),
        "fifo": (NoAnswerError, "one of its storages may hang"),
    }
    answers = recorded()["errors"]
    assert answers.keys() == kinds.keys()
    for name, (kind, words) in kinds.items():
        status, _, reason = answers[name]["status"].partition(" ")
        body = answers[name]["body"] or {}
        error = of_answer("Proxmox VE", int(status), reason, body.get("message", ""), body.get("errors"))
        assert type(error) is kind, name
        assert words in error.detail, name
        assert "\n" not in error.detail


def test_a_lock_and_a_change_in_between_are_refusals() -> None:
    for said, code in {
        "VM is locked (backup)": "guest_locked",
        "CT is locked (snapshot-delete)": "guest_locked",
        "checksum mismatch (file change by other user?)": "stale_plan",
        "detected modified configuration - file changed by other user? Try again.": "stale_plan",
        "can't lock file '/var/lock/qemu-server/lock-100.conf' - got timeout": "busy",
    }.items():
        error = of_answer("Proxmox VE", 500, said, said + "\n")
        assert isinstance(error, RefusedError)
        assert error.code == code
        assert isinstance(
            of_answer("Proxmox VE", 400, "Parameter verification failed.", fields={"x": said}), RefusedError
        )


def test_one_connection_carries_many_requests(server: ProxmoxServer, client: Client) -> None:
    for _ in range(5):
        client.get("version")
    assert server.connections == 1
