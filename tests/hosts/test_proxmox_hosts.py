"""Nodes of Proxmox VE as an admin adds them, and what a scan by the API alone shows."""

from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError, UnconfirmedError
from storage_admin.guests.models import Guest
from storage_admin.hosts import secrets
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.proxmox import registration
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import JobFactory
from tests.harness.proxmox.server import ProxmoxServer, proxmox, server
from tests.harness.proxmox.world import SECRET, TOKEN_ID, lab
from tests.working import ADMIN, OPERATOR, reread, run, succeeded

__all__ = ["server"]

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


def add(server: ProxmoxServer, **changes: object) -> Host:
    endpoint = server.endpoint()
    fields: dict[str, object] = {
        "name": "pve", "address": endpoint.address, "port": endpoint.port, "token_id": TOKEN_ID, "token_secret": SECRET,
        "tls_fingerprint": endpoint.fingerprint,
    }  # fmt: skip
    return registration.add_node(ADMIN, registration.WantedNode(**(fields | changes)))  # type: ignore[arg-type]


def test_a_certificate_that_nobody_known_has_signed_is_to_be_confirmed(server: ProxmoxServer) -> None:
    with pytest.raises(UnconfirmedError) as unconfirmed:
        add(server, tls_fingerprint="")
    assert unconfirmed.value.shown["tls_fingerprint"] == server.endpoint().fingerprint
    assert not Host.objects.exists()
    with pytest.raises(RefusedError):
        add(server, tls_fingerprint="AB" * 32)
    host = add(server)
    assert (host.kind, host.transport, bool(host.node)) == ("proxmox", "api", True)


def test_a_token_that_is_not_taken_is_not_saved_and_never_shown(server: ProxmoxServer) -> None:
    with pytest.raises(RefusedError) as refused:
        add(server, token_secret="00000000-0000-4000-8000-000000000000")
    assert "00000000" not in refused.value.detail
    for changes in ({"token_id": "root"}, {"token_secret": "x"}, {"address": "a b"}, {"node": "nowhere"}):
        with pytest.raises(InvalidError):
            add(server, **changes)
    assert not Host.objects.exists()
    host = add(server)
    assert SECRET.encode() not in bytes(host.token_locked)
    assert SECRET not in str(list(AuditEntry.objects.values()))


def test_a_scan_by_the_api_alone_shows_guests_and_storages_and_that_lines_may_be_hidden(server: ProxmoxServer) -> None:
    host = add(server)
    succeeded(run(services.submit(OPERATOR, "scan", host.pk, {})))
    assert reread(host).status == "ok"
    assert "SSH" in host.owners_unknown
    assert set(Guest.objects.filter(host=host).values_list("kind", flat=True)) == {"vm", "container"}
    pools = StoragePool.objects.filter(host=host)
    assert pools.filter(capacity_bytes__gt=0).exists()
    assert run(services.submit(OPERATOR, "scan", host.pk, {})).state == "succeeded"
    assert pools.count() == len(set(pools.values_list("name", flat=True)))


def test_a_node_that_does_not_answer_keeps_its_guests_with_the_time_they_were_seen(
    server: ProxmoxServer, tmp_path: Path
) -> None:
    host = add(server)
    assert run(services.submit(OPERATOR, "scan", host.pk, {})).state == "succeeded"
    known = set(Guest.objects.filter(host=host).values_list("uid", flat=True))
    Host.objects.filter(pk=host.pk).update(port=1)
    job = run(services.submit(OPERATOR, "scan", host.pk, {}))
    assert (job.state, job.error_code) == ("failed", "host_unreachable")
    assert reread(host).status == "unreachable"
    assert host.last_seen is not None
    assert set(Guest.objects.filter(host=host).values_list("uid", flat=True)) == known


def test_a_node_is_registered_once(server: ProxmoxServer) -> None:
    add(server)
    with pytest.raises(InvalidError, match="already registered as pve"):
        add(server, name="again")
    assert Host.objects.count() == 1


def test_another_token_is_tried_before_it_takes_the_place_of_the_first(server: ProxmoxServer) -> None:
    host = add(server)
    before = bytes(host.token_locked)
    with pytest.raises(RefusedError):
        registration.change_node(ADMIN, host, {"token_secret": "00000000-0000-4000-8000-000000000000"})
    assert bytes(reread(host).token_locked) == before
    Host.objects.filter(pk=host.pk).update(address="192.0.2.1")
    registration.change_node(ADMIN, reread(host), {"address": server.endpoint().address})
    assert (reread(host).address, host.transport, host.node) == (server.endpoint().address, "api", "pve1")
    entry = AuditEntry.objects.filter(what="host changed").latest("id")
    assert SECRET not in str(entry.__dict__)


def test_a_stored_token_is_not_sent_to_an_address_that_it_was_not_given_for(
    server: ProxmoxServer, tmp_path: Path
) -> None:
    host = add(server)
    (tmp_path / "other").mkdir()
    with proxmox(lab(), tmp_path / "other") as other:
        there = {"address": other.address, "port": other.port, "tls_fingerprint": other.fingerprint}
        with pytest.raises(InvalidError, match="secret again") as refused:
            registration.change_node(ADMIN, host, there)
        assert (set(refused.value.fields), other.connections) == ({"token_secret"}, 0)
        assert reread(host).port == server.port
        registration.change_node(ADMIN, host, there | {"token_secret": SECRET})
    assert reread(host).port == other.port


def test_a_host_is_not_taken_elsewhere_while_a_job_rewrites_something_there(server: ProxmoxServer) -> None:
    host = add(server)
    Host.objects.filter(pk=host.pk).update(address="192.0.2.1")
    job = JobFactory.create(kind="reclaim", host=reread(host), state="running", rewrites=True)
    with pytest.raises(InvalidError, match="a job is running on pve"):
        registration.change_node(ADMIN, host, {"address": server.address})
    assert reread(host).address == "192.0.2.1"
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    registration.change_node(ADMIN, host, {"address": server.address})


def test_a_secret_that_cannot_be_read_any_more_is_asked_for_and_replaced(server: ProxmoxServer) -> None:
    host = add(server)
    Host.objects.filter(pk=host.pk).update(token_locked=Fernet(Fernet.generate_key()).encrypt(b"x"))
    host.refresh_from_db()
    with pytest.raises(InvalidError, match="Give the secret again") as refused:
        registration.change_node(ADMIN, host, {"address": server.address})
    assert set(refused.value.fields) == {"token_secret"}
    registration.change_node(ADMIN, host, {"token_secret": SECRET})
    assert secrets.unlock(reread(host).token_locked) == SECRET
