"""Hosts are added and reached otherwise over REST: what is to be confirmed is answered, and no secret."""

import pytest
from rest_framework.test import APIClient

from storage_admin.accounts.models import AuditEntry
from tests.harness.proxmox.server import ProxmoxServer, server
from tests.harness.proxmox.world import SECRET, TOKEN_ID

__all__ = ["server"]

HOSTS = "/api/v1/hosts/"


def body(server: ProxmoxServer, **more: object) -> dict[str, object]:
    return {
        "kind": "proxmox", "name": "pve", "address": server.address, "port": server.port, "token_id": TOKEN_ID,
        "token_secret": SECRET,
    } | more  # fmt: skip


def test_a_node_is_added_once_its_certificate_is_confirmed(admin: APIClient, server: ProxmoxServer) -> None:
    asked = admin.post(HOSTS, body(server), format="json")
    assert asked.status_code == 409
    assert server.fingerprint in asked.content.decode()
    added = admin.post(HOSTS, body(server, tls_fingerprint=server.fingerprint), format="json")
    assert (added.status_code, added.json()["transport"]) == (201, "api")
    assert SECRET not in asked.content.decode() + added.content.decode()
    entry = AuditEntry.objects.get(what="host added")
    assert (entry.target, (entry.after or {})["address"]) == ("pve", server.address)
    assert SECRET not in str(entry.after)
    again = admin.post(HOSTS, body(server, tls_fingerprint=server.fingerprint), format="json")
    assert (again.status_code, set(again.json()["fields"])) == (400, {"node"})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"token_id": "root"}, {"token_id"}),
        ({"address": "-oProxyCommand=x", "token_secret": "x"}, {"address", "token_secret"}),
        ({"tls_fingerprint": "12"}, {"tls_fingerprint"}),
        ({"kind": "libvirt", "transport": "tls", "ca_cert": "x"}, {"ca_cert", "client_cert", "client_key"}),
        ({"kind": "libvirt", "transport": "ssh", "user": "-x"}, {"user"}),
    ],
)
def test_each_wrong_field_is_named_and_nothing_is_asked(
    admin: APIClient, server: ProxmoxServer, fields: dict[str, object], named: set[str]
) -> None:
    answer = admin.post(HOSTS, body(server, **fields), format="json")
    assert (answer.status_code, set(answer.json()["fields"])) == (400, named)
    assert server.connections == 0
