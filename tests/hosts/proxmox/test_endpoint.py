"""What is typed about a server of Proxmox VE: hostile values start nothing and connect to nobody."""

import socket
from typing import Any

import pytest

from storage_admin.errors import InvalidError
from storage_admin.hosts.proxmox.client import Client
from storage_admin.hosts.proxmox.endpoint import Endpoint, Token, fingerprint
from storage_admin.hosts.proxmox.tls import shown_fingerprint
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import SECRET, TOKEN_ID
from tests.working import invalid_fields

ADDRESSES = (
    "", " ", "-oProxyCommand=id", "https://pve1", "pve1/api2", "pve1:8006", "pve1:8006/x", "root@pve1", "pve1@evil",
    "pve1?x=1", "pve1#x", "pve1\\evil", "pve 1", "pve1\nHost: x", "pve1\r\n\r\nx", "pve1\0", "..", ".pve1", "pve1..x",
    "-pve1", "pve1-", "pvé1", "\uff11\uff12\uff17.0.0.1", "[::1]", "[::1]:8006", "::1%eth0", "fe80::1%lo", "127.1",
    "0x7f000001",
    "2130706433", "0177.0.0.1", "127.0.0.1.", "127.0.0.256", "1.2.3.4.5", "a" * 64, ".".join(["a" * 60] * 5), "$(id)",
    "`id`", "pve1;id", "pve1|id", "pve1&id", "*", "%00", "%2e", "pve1%2f", "<script>", "{{7*7}}", "file:///etc/passwd",
    "unix:/run/x.sock", None, 7, b"pve1",
)  # fmt: skip
PORTS = (0, -1, 65536, 10**9, "0", "8006;id", "\uff18\uff10\uff10\uff16", "0x1f46", "8006.0", 1.5, True, " 8006 ")
TOKEN_IDS = (
    "", "root@pam", "root!x", "@pam!x", "root@pam!", "root@pam!x\nX-Evil: 1", "root@pam!x\r\n", "root@pam!x y",
    "ro ot@pam!x", "root@pam!x=secret", "röt@pam!x", "root@pam!1x", "a:b@pam!x", "a/b@pam!x", "root@pam!" + "x" * 99,
    None,
)  # fmt: skip
SECRETS = ("", "short", "x" * 200, "abc\r\nX-Evil: 1", "0f5a1d2c 1111", "séééééécret", "a" * 12 + "\n", None)
FINGERPRINTS = ("AB", "AB:CD", "Z" * 64, "A" * 40, "A" * 63, "A" * 65, "SHA256:" + "A" * 43, "A" * 64 + "\n1")


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whom anybody tries to reach, by name or by address."""
    tried: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: tried.append(address))

    def look_up(*args: Any, **_: Any) -> list[Any]:
        tried.append(args)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return tried


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_is_no_address_connects_to_nobody(address: Any, connections: list[Any]) -> None:
    with pytest.raises(InvalidError):
        shown_fingerprint(Endpoint(address))
    assert connections == []


@pytest.mark.parametrize("port", PORTS)
def test_what_is_no_port_is_refused(port: Any, connections: list[Any]) -> None:
    with pytest.raises(InvalidError):
        shown_fingerprint(Endpoint("192.0.2.1", port))
    assert connections == []


@pytest.mark.parametrize("token_id", TOKEN_IDS)
def test_what_is_no_token_is_refused(token_id: Any) -> None:
    assert "token_id" in invalid_fields(Token, token_id, SECRET)


@pytest.mark.parametrize("secret", SECRETS)
def test_what_is_no_secret_is_refused_without_being_repeated(secret: Any) -> None:
    with pytest.raises(InvalidError) as error:
        Token(TOKEN_ID, secret)
    assert not secret or str(secret) not in str(error.value)


@pytest.mark.parametrize("text", FINGERPRINTS)
def test_a_fingerprint_is_of_sha256_or_nothing(text: str) -> None:
    with pytest.raises(InvalidError):
        Endpoint("192.0.2.1", fingerprint=text)


def test_a_fingerprint_may_be_written_in_any_way() -> None:
    shown = ":".join(["AB"] * 32)
    assert fingerprint("ab" * 32) == fingerprint(f" {shown.lower()} ") == shown
    assert fingerprint("") == ""


def test_parts_of_a_path_stay_parts(server: ProxmoxServer, client: Client) -> None:
    for part in ("../access", "a/../../b", "x?y=1", "x#y", "%2e%2e", "/etc"):
        with pytest.raises(Exception, match=r"not support this call|400|rejected"):
            client.get("nodes", part, "storage")
    assert all(one.path.startswith("/nodes/") and one.path.endswith("/storage") for one in server.seen)
    assert all(not one.params for one in server.seen)
    for part in ("", ".", "..", "a b", "a\nb", "\x7f"):
        before = len(server.seen)
        with pytest.raises(Exception, match="is not a valid name"):
            client.get("nodes", part, "storage")
        assert len(server.seen) == before
    server.wrong.clear()  # none of these is a name that the client would ever ask for by itself


def test_addresses_of_both_kinds_and_names_are_taken() -> None:
    assert Endpoint("PVE1.Example.org").netloc == "pve1.example.org:8006"
    assert Endpoint("2001:DB8::1", 443).netloc == "[2001:db8::1]:443"
    assert Endpoint("192.0.2.1", 8007).netloc == "192.0.2.1:8007"
