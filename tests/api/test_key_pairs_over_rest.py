"""A host gets a key pair that is created here: its public half is answered, its private half never leaves."""

import logging
from collections.abc import Callable
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from django.core.management import call_command
from django.utils import timezone
from rest_framework.test import APIClient

from images.tasks import forget_vanished
from storage_admin.accounts.models import AuditEntry
from storage_admin.hosts import addresses, forced, key_pairs, secrets
from storage_admin.hosts.models import Host, KeyPair
from tests.factories import HostFactory
from tests.harness.sshd import Sshd
from tests.hosts.remote import HOST_KEY, agent_folder, unasked
from tests.working import reread

HOSTS = "/api/v1/hosts/"
__all__ = ["agent_folder", "unasked"]


def body(address: str = "hv1.example.org", **more: object) -> dict[str, object]:
    return {"name": "hv1", "address": address, "create_key": True} | more


def public_of(private: str) -> str:
    """The public half as ``TYPE BASE64``, worked out from the private one."""
    return (
        load_ssh_private_key(private.encode(), None)
        .public_key()
        .public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        .decode()
    )


@pytest.mark.services
@pytest.mark.usefixtures("agent_folder")
def test_a_host_is_added_with_a_key_pair_that_was_created_for_it(
    admin: APIClient, ssh_server: Sshd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sent = body("127.0.0.1", port=ssh_server.port)
    asked = admin.post(HOSTS, sent, format="json")
    assert (asked.status_code, asked.json()["code"]) == (409, "host_key_unconfirmed")
    fields = asked.json()["fields"]
    assert fields["host_key"] == ssh_server.host_key
    assert fields["authorized_keys"] == fields["public_key"]

    refused = admin.post(HOSTS, sent | {"host_key": fields["host_key"]}, format="json")
    assert (refused.status_code, refused.json()["code"], Host.objects.count()) == (409, "host_unreachable", 0)

    private = secrets.unlock(KeyPair.objects.get().private_key_locked)
    assert fields["public_key"].startswith(f"{public_of(private)} storage-admin@")
    assert private.encode() not in bytes(KeyPair.objects.get().private_key_locked)
    ssh_server.authorize(fields["public_key"])
    added = admin.post(HOSTS, sent | {"host_key": fields["host_key"]}, format="json")
    assert (added.status_code, added.json()["transport"]) == (201, "ssh")
    assert secrets.unlock(Host.objects.get().private_key_locked) == private
    assert not KeyPair.objects.exists()

    entry = AuditEntry.objects.get(what="key pair created")
    assert (entry.target, entry.after) == ("127.0.0.1", {"fingerprint": addresses.fingerprint(public_of(private))})
    told = [asked.content, refused.content, added.content, caplog.text.encode()]
    told += [str(list(AuditEntry.objects.values())).encode(), admin.get(HOSTS).content]
    assert [part for part in told if private.splitlines()[2].encode() in part] == []


@pytest.mark.services
@pytest.mark.usefixtures("agent_folder")
def test_a_key_is_replaced_once_the_new_one_is_let_in(admin: APIClient, ssh_server: Sshd) -> None:
    host = HostFactory.create(
        kind="ssh", transport="ssh", address="127.0.0.1", port=ssh_server.port, user="root",
        host_key=ssh_server.host_key, private_key_locked=secrets.lock(ssh_server.private_key),
    )  # fmt: skip
    at = f"{HOSTS}{host.pk}/"
    asked = admin.patch(at, {"create_key": True}, format="json")
    assert (asked.status_code, asked.json()["code"]) == (409, "key_pair_created")
    refused = admin.patch(at, {"create_key": True}, format="json")
    assert (refused.status_code, refused.json()["code"]) == (409, "host_unreachable")
    assert secrets.unlock(reread(host).private_key_locked) == ssh_server.private_key
    ssh_server.authorize(asked.json()["fields"]["public_key"])
    assert admin.patch(at, {"create_key": True}, format="json").status_code == 200
    host.refresh_from_db()
    assert asked.json()["fields"]["public_key"].startswith(public_of(secrets.unlock(host.private_key_locked)) + " ")


@pytest.mark.usefixtures("unasked")
def test_a_pair_belongs_to_who_created_it_and_to_its_place(
    admin: APIClient, client_of: Callable[..., APIClient]
) -> None:
    def key(client: APIClient, **more: object) -> str:
        answer = client.post(HOSTS, body(**more), format="json")  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["code"]) == (409, "host_key_unconfirmed")
        return str(answer.json()["fields"]["public_key"])

    first = key(admin)
    assert key(admin) == first
    assert key(admin, address="HV1.example.org ", name="another", user="eve") == first
    others = [key(admin, address="hv2.example.org"), key(admin, port=2222), key(client_of("admin"))]
    assert len({first, *others}) == 4
    assert AuditEntry.objects.filter(what="key pair created").count() == 4


@pytest.mark.usefixtures("unasked")
def test_the_first_answer_has_the_key_also_where_the_hosts_key_is_known(
    admin: APIClient, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = admin.post(HOSTS, body(host_key=HOST_KEY, forced=True), format="json")
    fields = answer.json()["fields"]
    assert (answer.status_code, answer.json()["code"]) == (409, "key_pair_created")
    assert fields["authorized_keys"] == f'restrict,command="{forced.ENTRY}" {fields["public_key"]}'
    call_command("agent_installer", "--key", fields["public_key"])
    assert f"line='{fields['authorized_keys']}'" in capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("unasked")
def test_the_comment_names_the_dashboard(admin: APIClient, settings: object) -> None:
    settings.PUBLIC_URL = "https://storage.example.org:8443"  # type: ignore[attr-defined]
    fields = admin.post(HOSTS, body(), format="json").json()["fields"]
    assert fields["public_key"].split()[2] == "storage-admin@storage.example.org"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"private_key": "x"}, {"create_key"}),
        ({"kind": "libvirt"}, {"create_key"}),
        ({"address": "a b", "port": 0, "name": " "}, {"name"}),
        ({"address": "a b", "port": 0}, {"address", "port"}),
    ],
)
def test_what_is_wrong_is_named_and_no_pair_is_created(
    admin: APIClient, more: dict[str, object], named: set[str]
) -> None:
    answer = admin.post(HOSTS, body() | more, format="json")
    assert (answer.status_code, set(answer.json()["fields"])) == (400, named)
    assert not KeyPair.objects.exists()


@pytest.mark.usefixtures("unasked")
def test_a_pair_takes_the_role_that_the_host_takes(client_of: Callable[..., APIClient]) -> None:
    host = HostFactory.create(slug="far", kind="ssh", transport="ssh", address="192.0.2.7", user="root")
    own, other = client_of("admin", hosts=["far"]), client_of("admin", hosts=["near"])
    assert client_of("operator").post(HOSTS, body(), format="json").status_code == 403
    assert own.post(HOSTS, body(), format="json").status_code == 403
    assert other.patch(f"{HOSTS}{host.pk}/", {"create_key": True}, format="json").status_code == 404
    assert own.patch(f"{HOSTS}{host.pk}/", {"create_key": True}, format="json").status_code == 403
    assert not KeyPair.objects.exists()
    assert client_of("admin").patch(f"{HOSTS}{host.pk}/", {"create_key": True}, format="json").status_code == 409
    assert KeyPair.objects.get().address == "192.0.2.7"


@pytest.mark.usefixtures("unasked")
def test_a_pair_that_nobody_uses_goes(admin: APIClient) -> None:
    def key() -> str:
        return str(admin.post(HOSTS, body(), format="json").json()["fields"]["public_key"])

    first = key()
    forget_vanished()
    assert key() == first
    KeyPair.objects.update(created=timezone.now() - key_pairs.LASTS - timedelta(seconds=1))
    second = key()
    assert (second == first, KeyPair.objects.count()) == (False, 1)
    KeyPair.objects.update(created=timezone.now() - key_pairs.LASTS - timedelta(seconds=1))
    forget_vanished()
    assert not KeyPair.objects.exists()


@pytest.mark.usefixtures("unasked")
def test_a_pair_that_cannot_be_decrypted_any_more_is_replaced(admin: APIClient) -> None:
    first = admin.post(HOSTS, body(), format="json").json()["fields"]["public_key"]
    KeyPair.objects.update(private_key_locked=b"of another key")
    second = admin.post(HOSTS, body(), format="json").json()["fields"]["public_key"]
    assert (second == first, KeyPair.objects.count()) == (False, 1)
