"""How fast rewriting jobs may go on a host: an admin says it, and a job may say otherwise."""

from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from images.rewrite import record
from storage_admin.accounts.models import AuditEntry, ForbiddenError
from storage_admin.errors import InvalidError
from storage_admin.hosts import services
from storage_admin.hosts.models import Host
from tests.factories import HostFactory, JobFactory, UserFactory
from tests.working import ADMIN, OPERATOR, reread

pytestmark = pytest.mark.django_db

MIB = 1 << 20


@pytest.fixture
def host() -> Host:
    return HostFactory.create()


@pytest.mark.parametrize(
    ("on_host", "asked", "speed"),
    [
        ({}, {}, (None, True)),
        ({"bandwidth_bytes_sec": 5 * MIB, "idle_io": False}, {}, (5 * MIB, False)),
        ({"bandwidth_bytes_sec": 5 * MIB}, {"bandwidth_bytes_sec": None, "idle_io": None}, (5 * MIB, True)),
        ({"bandwidth_bytes_sec": 5 * MIB}, {"bandwidth_bytes_sec": 9 * MIB, "idle_io": False}, (9 * MIB, False)),
        ({"idle_io": False}, {"idle_io": True}, (None, True)),
    ],
)
def test_a_job_goes_as_fast_as_it_says_and_else_as_its_host_says(
    on_host: dict[str, Any], asked: dict[str, Any], speed: tuple[int | None, bool]
) -> None:
    job = JobFactory.create(target=HostFactory.create(**on_host), options=asked)
    found = record.speed_for(job)
    assert (found.bandwidth_bytes_sec, found.idle_io) == speed


def test_an_admin_sets_and_takes_away_a_hosts_limit(host: Host) -> None:
    services.update_host(ADMIN, host, bandwidth_bytes_sec=20 * MIB, idle_io=False)
    services.update_host(ADMIN, host, max_jobs=2)
    assert (reread(host).bandwidth_bytes_sec, host.idle_io, host.max_jobs) == (20 * MIB, False, 2)
    services.update_host(ADMIN, host, bandwidth_bytes_sec=None)
    assert (reread(host).bandwidth_bytes_sec, host.idle_io) == (None, False)
    first = AuditEntry.objects.order_by("id").first()
    assert first is not None
    assert first.before == {"idle_io": True, "bandwidth_bytes_sec": None}


def test_nobody_else_sets_it_and_not_to_what_no_job_can_work_with(host: Host) -> None:
    with pytest.raises(ForbiddenError):
        services.update_host(OPERATOR, host, idle_io=False)
    for value in (0, -1, MIB - 1, 1 << 63):
        with pytest.raises(InvalidError):
            services.update_host(ADMIN, host, bandwidth_bytes_sec=value)
    assert (reread(host).bandwidth_bytes_sec, host.idle_io) == (None, True)


def api_of(role: str) -> APIClient:
    client = APIClient()
    client.force_authenticate(UserFactory.create(role=role))
    return client


def test_the_api_tells_and_changes_it(host: Host) -> None:
    path, body = f"/api/v1/hosts/{host.pk}/", {"bandwidth_bytes_sec": 30 * MIB, "idle_io": False}
    assert api_of("operator").patch(path, body, format="json").status_code == 403
    admin = api_of("admin")
    row = admin.patch(path, body, format="json").json()
    assert (row["bandwidth_bytes_sec"], row["idle_io"]) == (30 * MIB, False)
    assert admin.patch(path, {"name": "x"}, format="json").json()["bandwidth_bytes_sec"] == 30 * MIB
    assert admin.patch(path, {"bandwidth_bytes_sec": None}, format="json").json()["bandwidth_bytes_sec"] is None


def test_the_hosts_page_changes_it(host: Host, client: Client) -> None:
    client.force_login(UserFactory.create(role="admin"))
    address, form = f"/hosts/{host.pk}/", {"name": host.name, "max_jobs": "1"}

    def saved(**fields: str) -> tuple[int | None, bool]:
        client.post(address, form | fields)
        return reread(host).bandwidth_bytes_sec, host.idle_io

    assert saved(bandwidth_mib="40") == (40 * MIB, False)
    assert 'name="bandwidth_mib"' in client.get("/hosts/").content.decode()
    assert saved() == (40 * MIB, False)
    assert saved(bandwidth_mib="40", idle_io="on") == (40 * MIB, True)
    assert saved(bandwidth_mib="fast", idle_io="on") == (40 * MIB, True)
    Host.objects.update(bandwidth_bytes_sec=MIB + 5)
    assert saved(bandwidth_mib="1") == (MIB + 5, False)
    assert saved(bandwidth_mib="") == (None, False)
