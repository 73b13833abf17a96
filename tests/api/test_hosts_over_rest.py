"""Hosts are added and reached otherwise over REST: what is to be confirmed is answered, and no secret."""

from collections.abc import Callable
from typing import Any

import pytest
from rest_framework.test import APIClient

from storage_admin.accounts.models import AuditEntry
from storage_admin.hosts import asking, ssh
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.models import Host
from tests.factories import HostFactory
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


#: What of a host's connection is sent, one at a time.
CONNECTIONS: tuple[dict[str, Any], ...] = (
    {"address": "192.0.2.8"}, {"port": 2222}, {"user": "eve"}, {"host_key": "ssh-ed25519 AAAA"}, {"private_key": ""},
    {"token_id": "root@pam!x", "token_secret": "x"}, {"tls_fingerprint": ""}, {"ssh_port": 23},
    {"ca_cert": "x", "client_cert": "x", "client_key": "x"}, {"name": "other", "address": "192.0.2.8"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "transport"),
    [("ssh", "ssh"), ("ssh", "forced"), ("libvirt", "tls"), ("libvirt", "ssh"), ("proxmox", "api+ssh")],
)
def test_where_a_host_is_reached_is_not_for_who_is_limited_to_it(
    client_of: Callable[..., APIClient], monkeypatch: pytest.MonkeyPatch, kind: str, transport: str
) -> None:
    asked: list[object] = []
    for module, name in ((asking, "ask"), (reader, "read"), (ssh, "scan_keys"), (ssh, "connection")):
        monkeypatch.setattr(module, name, lambda *of, **more: asked.append(of))
    host = HostFactory.create(
        slug="far", name="far", kind=kind, transport=transport, address="192.0.2.7", port=22, ssh_port=22, user="root"
    )
    before = Host.objects.filter(pk=host.pk).values().get()
    limited = client_of("admin", hosts=["far"])
    for values in CONNECTIONS:
        answer = limited.patch(f"{HOSTS}{host.pk}/", values, format="json")
        assert (answer.status_code, answer.json()["code"], asked) == (403, "forbidden", []), values
    assert Host.objects.filter(pk=host.pk).values().get() == before


def test_name_and_limits_of_a_host_are_for_who_is_limited_to_it(client_of: Callable[..., APIClient]) -> None:
    host = HostFactory.create(slug="far", kind="ssh", transport="ssh", address="192.0.2.7")
    answer = client_of("admin", hosts=["far"]).patch(f"{HOSTS}{host.pk}/", {"name": "x", "max_jobs": 3}, format="json")
    assert (answer.status_code, answer.json()["name"], answer.json()["max_jobs"]) == (200, "x", 3)
