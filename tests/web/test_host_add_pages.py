"""Hosts are added, and reached otherwise, by plain forms: tried first, compared, and no secret on any page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from storage_admin.accounts.models import AuditEntry
from storage_admin.hosts import secrets
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job
from tests.factories import HostFactory, JobFactory
from tests.harness.proxmox.cluster import cluster
from tests.harness.proxmox.server import ProxmoxServer, server
from tests.harness.proxmox.world import SECRET, TOKEN_ID
from tests.harness.sshd import Sshd
from tests.web.html import errors_of, tags_of, text_of
from tests.working import client_as, reread

__all__ = ["server"]

ADD = "/hosts/add/"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[ProxmoxServer, ProxmoxServer]]:
    with cluster(tmp_path) as running:
        yield running


def hidden(answer: Any) -> dict[str, str]:
    """What the page's form carries on, as a browser without a script would send it."""
    found: dict[str, str] = {}
    for tag, attributes in tags_of(answer):
        if tag != "input" or "name" not in attributes or attributes["name"] == "csrfmiddlewaretoken":
            continue
        left_out = attributes.get("type") == "radio" and "checked" not in attributes
        if attributes.get("type") != "checkbox" and "disabled" not in attributes and not left_out:
            found[str(attributes["name"])] = attributes.get("value") or ""
    return found


def boxes(answer: Any) -> list[str]:
    """The nodes that are ticked."""
    return [
        attributes["value"] or ""
        for tag, attributes in tags_of(answer)
        if tag == "input" and attributes.get("name") == "node" and "checked" in attributes
    ]


def typed(server: ProxmoxServer, **more: str) -> dict[str, str]:
    return {
        "kind": "proxmox", "name": "", "address": server.address, "port": str(server.port), "token_id": TOKEN_ID,
        "token_secret": SECRET,
    } | more  # fmt: skip


@pytest.mark.parametrize("kind", ["ssh", "proxmox", "libvirt-tls", "libvirt-ssh"])
def test_each_way_has_its_form_and_htmx_gets_the_form_alone(admin: Client, kind: str) -> None:
    page, fragment = admin.get(f"{ADD}?kind={kind}"), admin.get(f"{ADD}?kind={kind}", headers={"HX-Request": "true"})
    assert f'name="kind" value="{kind}"' in page.content.decode()
    assert "<h1" in page.content.decode()
    assert "<h1" not in fragment.content.decode()
    assert 'id="form"' in fragment.content.decode()


def test_a_node_is_added_once_its_certificate_was_compared(admin: Client, server: ProxmoxServer) -> None:
    first = admin.post(ADD, typed(server))
    assert server.fingerprint in text_of(first)
    assert SECRET not in first.content.decode()
    assert server.seen == []  # no request, and so no token, before the certificate is confirmed
    assert not Host.objects.exists()
    second = admin.post(ADD, hidden(first) | {"token_secret": ""}, follow=True)
    assert "pve1 is added" in text_of(second)
    host = Host.objects.get()
    assert (host.kind, host.transport, host.node, host.name) == ("proxmox", "api", "pve1", "pve1")
    assert host.tls_fingerprint == server.fingerprint
    assert secrets.unlock(host.token_locked) == SECRET
    assert Job.objects.filter(kind="scan", target_id=host.pk, state="queued").exists()
    assert SECRET not in str(list(AuditEntry.objects.values()))
    assert AuditEntry.objects.get(what="host added").target == "pve1"
    assert "host_secrets" not in admin.session


def test_a_fingerprint_that_is_typed_counts_more_than_the_one_that_was_shown(
    admin: Client, server: ProxmoxServer
) -> None:
    first = admin.post(ADD, typed(server))
    assert server.fingerprint in text_of(first)
    # They are not equal: the node itself says another one.
    refused = admin.post(ADD, hidden(first) | {"tls_fingerprint": "AB:" * 31 + "AB"})
    assert refused.status_code == 409
    assert "a certificate that differs from the pinned one" in text_of(refused)
    assert server.seen == []  # the token went nowhere
    assert not Host.objects.exists()


def test_what_is_wrong_stands_beside_its_field_and_nothing_is_saved(admin: Client, server: ProxmoxServer) -> None:
    wrong = {"address": "a b", "port": "0", "token_id": "root", "token_secret": "x", "tls_fingerprint": "12"}
    answer = admin.post(ADD, typed(server, **wrong))
    assert answer.status_code == 400
    assert {"port", "token_id"} <= set(errors_of(answer))
    refused = admin.post(ADD, typed(server, tls_fingerprint=server.fingerprint, token_secret="0" * 36))
    assert refused.status_code == 409
    assert "Check its ID, secret and expiry date" in text_of(refused)
    assert not Host.objects.exists()


def test_a_secret_stays_here_between_two_steps_and_belongs_to_one_session(admin: Client, server: ProxmoxServer) -> None:
    answer = admin.post(ADD, typed(server, address="a b"))
    page = answer.content.decode()
    assert SECRET not in page
    assert "Kept for this form" in page
    assert SECRET not in str(dict(admin.session.items()))
    sent = hidden(answer) | {"address": server.address, "tls_fingerprint": server.fingerprint}
    other = client_as(username="eve", role="admin")
    assert other.post(ADD, sent).status_code == 400
    assert admin.post(ADD, sent).status_code == 302
    assert Host.objects.count() == 1


def test_every_node_of_a_cluster_is_offered_and_becomes_a_host_of_its_own(
    admin: Client, nodes: tuple[ProxmoxServer, ProxmoxServer]
) -> None:
    first, second = nodes
    answer = admin.post(ADD, typed(first, tls_fingerprint=first.fingerprint))
    assert boxes(answer) == ["pve1", "pve2"]
    assert "choosing" in hidden(answer)
    none = admin.post(ADD, hidden(answer))
    assert (none.status_code, Host.objects.count()) == (400, 0)
    assert "Select at least one node" in none.content.decode()
    done = admin.post(ADD, hidden(answer) | {"node": ["pve1", "pve2"]}, follow=True)
    assert "pve1, pve2 are added" in text_of(done)
    rows = Host.objects.order_by("name").values_list("name", "node", "cluster", "address", "tls_fingerprint")
    assert list(rows) == [
        ("pve1", "pve1", "lab", "127.0.0.1", first.fingerprint),
        ("pve2", "pve2", "lab", "127.0.0.2", second.fingerprint),
    ]  # fmt: skip
    again = admin.post(ADD, typed(first, tls_fingerprint=first.fingerprint))
    assert boxes(again) == []
    assert text_of(again).count("registered as") == 2


def test_where_one_chosen_node_does_not_answer_none_is_saved(
    admin: Client, nodes: tuple[ProxmoxServer, ProxmoxServer]
) -> None:
    first, _ = nodes
    answer = admin.post(ADD, typed(first, tls_fingerprint=first.fingerprint))
    sent = hidden(answer) | {"node": ["pve1", "pve2"], "address-pve2": "127.0.0.3"}
    wrong = admin.post(ADD, sent)
    assert (wrong.status_code, Host.objects.count()) == (400, 0)
    assert "127.0.0.3" in wrong.content.decode()
    assert admin.post(ADD, hidden(wrong) | {"node": ["pve1"]}).status_code == 302
    assert Host.objects.get().node == "pve1"


@pytest.mark.services
def test_a_node_gets_ssh_as_well_when_it_is_added_or_later(
    admin: Client, server: ProxmoxServer, ssh_server: Sshd
) -> None:
    both = {"by_ssh": "on", "ssh_port": str(ssh_server.port), "private_key": ssh_server.private_key, "user": "root"}
    both |= {"key": "given"}
    first = admin.post(ADD, typed(server, tls_fingerprint=server.fingerprint, **both))
    page = first.content.decode()
    assert "SHA256:" in page
    assert "PRIVATE KEY" not in page
    assert admin.post(ADD, hidden(first) | {"by_ssh": "on"}).status_code == 302
    host = Host.objects.get()
    assert (host.transport, host.ssh_port) == ("api+ssh", ssh_server.port)
    assert "PRIVATE KEY" in secrets.unlock(host.private_key_locked)

    change = f"/hosts/{host.pk}/connection/"
    form = admin.get(change)
    assert SECRET not in form.content.decode()
    assert admin.post(change, hidden(form)).status_code == 302  # without the box: by the API alone from now on
    assert (reread(host).transport, secrets.unlock(host.token_locked)) == ("api", SECRET)
    asked = admin.post(change, hidden(admin.get(change)) | both)
    assert "SHA256:" in asked.content.decode()
    assert admin.post(change, hidden(asked) | {"by_ssh": "on"}).status_code == 302
    assert (reread(host).transport, Host.objects.count()) == ("api+ssh", 1)


@pytest.mark.services
def test_a_host_that_was_installed_anew_gets_its_new_key_pinned_once_it_was_compared(
    admin: Client, ssh_server: Sshd
) -> None:
    before = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHi0Rc1lVQc8Yy5mCqGvTBxN8Z2mKc1M1Yd4vW2pVqfX"
    host = HostFactory.create(
        kind="ssh", transport="ssh", address="127.0.0.1", port=ssh_server.port, user="root", host_key=before,
        private_key_locked=secrets.lock(ssh_server.private_key),
    )  # fmt: skip
    change = f"/hosts/{host.pk}/connection/"
    refused = admin.post(change, hidden(admin.get(change)))
    assert (refused.status_code, "differs from the pinned one" in text_of(refused)) == (409, True)
    asked = admin.post(change, hidden(refused) | {"new_key": "on"})
    assert "SHA256:" in asked.content.decode()
    assert reread(host).host_key == before
    assert admin.post(change, hidden(asked) | {"new_key": "on"}).status_code == 302
    assert reread(host).host_key not in ("", before)


@pytest.mark.services
def test_a_key_that_was_compared_counts_for_the_address_that_showed_it(admin: Client, ssh_server: Sshd) -> None:
    form = {"kind": "ssh", "name": "far", "port": str(ssh_server.port), "private_key": ssh_server.private_key}
    first = admin.post(ADD, form | {"address": "127.0.0.1"})
    assert hidden(first)["host_key"]
    elsewhere = admin.post(ADD, hidden(first) | {"address": "localhost"})
    assert "Host key of localhost" in text_of(elsewhere)
    assert not Host.objects.exists()


@pytest.mark.services
@pytest.mark.guest
def test_libvirt_through_ssh_is_tried_before_it_is_saved(admin: Client, ssh_server: Sshd, libvirtd: str) -> None:
    form = {
        "kind": "libvirt-ssh", "name": "far", "address": "127.0.0.1", "port": str(ssh_server.port),
        "private_key": ssh_server.private_key,
    }  # fmt: skip
    first = admin.post(ADD, form)
    assert "SHA256:" in first.content.decode()
    assert "PRIVATE KEY" not in first.content.decode()
    assert admin.post(ADD, hidden(first)).status_code == 302
    host = Host.objects.get()
    assert (host.kind, host.transport, host.user) == ("libvirt", "ssh", "root")


def test_a_host_without_an_agent_says_what_is_true_of_it(viewer: Client) -> None:
    HostFactory.create(
        name="far", kind="libvirt", transport="tls", slug="far", capabilities={"agent": False, "libvirt": "present"}
    )
    missing = [{"feature": "move", "detail": "Needs Datastore.AllocateSpace."}]
    HostFactory.create(
        name="pve", kind="proxmox", transport="api", slug="pve",
        capabilities={"agent": False, "missing_rights": missing},
    )  # fmt: skip
    text = text_of(viewer.get("/hosts/"))
    assert "qemu-img" not in text
    assert "Images on far cannot be changed" in text
    assert re.search(r"move disks to another storage missing Needs Datastore.AllocateSpace", text)
    assert re.search(r"see the guests and their disks granted none", text)


def test_the_number_of_jobs_in_the_sidebar_follows(viewer: Client) -> None:
    page = viewer.get("/hosts/").content.decode()
    address = re.search(r'hx-get="(/jobs/count/[^"]*)"', page)
    assert address is not None
    assert viewer.get(address[1]).status_code == 204
    JobFactory.create(state="running")
    fresh = viewer.get(address[1])
    assert (fresh.status_code, text_of(fresh).split()[0]) == (200, "1")
    assert address[1] not in fresh.content.decode()


def test_boxes_of_a_saved_connection_are_ticked_as_it_is(admin: Client) -> None:
    def ticked(box: str, **values: str) -> bool:
        host = HostFactory.create(address="192.0.2.7", user="root", **values)
        page = admin.get(f"/hosts/{host.pk}/connection/").content.decode()
        (found,) = [found for _, found in tags_of(page) if found.get("id") == box]
        return "checked" in found

    assert [ticked("forced", kind="ssh", transport=how) for how in ("ssh", "forced")] == [False, True]
    assert [ticked("by_ssh", kind="proxmox", transport=how) for how in ("api", "api+ssh")] == [False, True]
