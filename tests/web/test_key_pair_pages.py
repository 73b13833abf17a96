"""The forms of hosts create a key pair, and show its public half until a host is saved. No script is needed."""

import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from django.test import Client

from storage_admin.hosts import forced, secrets
from storage_admin.hosts.models import Host, KeyPair
from tests.harness.proxmox.cluster import cluster
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.sshd import Sshd
from tests.hosts.remote import unasked
from tests.web.html import tags_of, text_of
from tests.web.test_host_add_pages import ADD, hidden, typed

__all__ = ["unasked"]


def form(**more: str) -> dict[str, str]:
    first = {"kind": "ssh", "name": "hv1", "address": "hv1.example.org", "port": "", "user": "root", "key": "create"}
    return first | more


def keys(answer: Any) -> list[str]:
    """The public keys on a page, each with its comment."""
    found = re.findall(r"ssh-ed25519 \S+ storage-admin@[A-Za-z0-9.-]+", text_of(answer))
    return sorted(set(found))


def chosen(answer: Any) -> str:
    """How the key is given: the radio button that is on."""
    radios = [found for tag, found in tags_of(answer) if tag == "input" and found.get("name") == "key"]
    return next(str(radio["value"]) for radio in radios if "checked" in radio)


@pytest.mark.parametrize(("kind", "offered"), [("ssh", 1), ("libvirt-ssh", 1), ("proxmox", 1), ("libvirt-tls", 0)])
def test_a_key_pair_is_the_first_offer_wherever_there_is_ssh(admin: Client, kind: str, offered: int) -> None:
    page = admin.get(f"{ADD}?kind={kind}")
    assert page.content.decode().count('value="create"') == offered
    assert not offered or chosen(page) == "create"
    assert not KeyPair.objects.exists()


@pytest.mark.services
def test_a_host_is_added_with_a_created_pair(admin: Client, ssh_server: Sshd) -> None:
    first = admin.post(ADD, form(address="127.0.0.1", port=str(ssh_server.port)))
    (public,) = keys(first)
    assert hidden(first)["host_key"] == ssh_server.host_key
    private = secrets.unlock(KeyPair.objects.get().private_key_locked)

    early = admin.post(ADD, hidden(first))
    assert (early.status_code, keys(early), chosen(early)) == (409, [public], "create")
    assert "rejected the key" in text_of(early)

    ssh_server.authorize(public)
    assert admin.post(ADD, hidden(early)).status_code == 302
    assert secrets.unlock(Host.objects.get().private_key_locked) == private
    assert not KeyPair.objects.exists()
    pages = [first, early, admin.get("/hosts/"), admin.get(f"/hosts/{Host.objects.get().pk}/connection/")]
    assert [page for page in pages if "PRIVATE KEY" in page.content.decode()] == []
    assert "host_secrets" not in admin.session


@pytest.mark.usefixtures("unasked")
def test_what_root_runs_is_shown_for_the_user_and_the_port_that_were_typed(admin: Client) -> None:
    page = admin.post(ADD, form(user="storage", port="2222"))
    (public,) = keys(page)
    text = text_of(page)
    assert "manage.py agent_installer --user storage | ssh -p 2222 root@hv1.example.org sh" in text
    assert f"agent_installer --key '{public}' --user storage | ssh -p 2222 root@hv1.example.org sh" in text
    assert forced.authorized_line(" ".join(public.split()[:2])) in text
    assert "~storage/.ssh/authorized_keys" in text


@pytest.mark.usefixtures("unasked")
def test_a_created_key_counts_for_nothing_where_another_one_is_pasted(admin: Client, ssh_key: str) -> None:
    first = admin.post(ADD, form())
    pasted = admin.post(ADD, hidden(first) | {"key": "given", "private_key": ssh_key, "host_key": ""})
    assert (keys(pasted), chosen(pasted)) == ([], "given")
    back = admin.post(ADD, hidden(pasted) | {"key": "create", "host_key": ""})
    assert keys(back) == keys(first)


@pytest.fixture
def ssh_key() -> str:
    made = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return made.decode()


@pytest.mark.usefixtures("unasked")
def test_one_pair_does_for_the_nodes_of_a_cluster(admin: Client, tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        first: ProxmoxServer = nodes[0]
        sent = typed(first, key="create", tls_fingerprint=first.fingerprint)
        alone = admin.post(ADD, sent)
        assert (keys(alone), chosen(alone), KeyPair.objects.count()) == ([], "create", 0)
        offered = admin.post(ADD, sent | {"by_ssh": "on"})
        assert len(keys(offered)) == 1
        compared = admin.post(ADD, hidden(offered) | {"by_ssh": "on", "node": ["pve1", "pve2"]})
        assert keys(compared) == keys(offered)
        assert KeyPair.objects.count() == 1
