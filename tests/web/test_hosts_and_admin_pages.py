"""Hosts, pools, tokens, the audit trail: what admins decide."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.test import Client
from django.utils import timezone

from images.models import Image
from images.selectors import forecasts
from storage_admin.accounts.models import Token
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job
from tests.factories import (
    GIB,
    AuditEntryFactory,
    GuestDiskFactory,
    HostFactory,
    ImageFactory,
    PoolSampleFactory,
    StoragePoolFactory,
)
from tests.web.conftest import Filled
from tests.web.html import errors_of, flat, tags_of, text_of
from tests.working import client_as


def test_an_admin_registers_a_folder_and_a_scan_of_it_is_queued(
    browser_of: Callable[[str], Client], filled: Filled, tmp_path: Path
) -> None:
    address = f"/hosts/{filled.host.pk}/folders/"
    assert browser_of("operator").post(address, {"path": str(tmp_path)}).status_code == 403
    text = text_of(browser_of("admin").post(address, {"path": str(tmp_path)}, follow=True))
    assert f"{tmp_path} is registered" in text
    assert StoragePool.objects.filter(host=filled.host, path=str(tmp_path)).exists()
    assert Job.objects.filter(kind="scan", target_id=filled.host.pk).exists()


@pytest.mark.parametrize("path", ["relative", "/etc", "/nothing/here", "", "<script>alert(1)</script>"])
def test_a_bad_folder_gets_a_sentence_beside_the_field(admin: Client, filled: Filled, path: str) -> None:
    answer = admin.post(f"/hosts/{filled.host.pk}/folders/", {"path": path})
    assert answer.status_code == 400
    assert errors_of(answer) == ["path"]
    assert StoragePool.objects.count() == 1


def test_forgetting_a_pool_wants_its_name(admin: Client, filled: Filled) -> None:
    address = f"/pools/{filled.pool.pk}/remove/"
    filled.host.jobs.update(state="succeeded", undo_state="none")
    assert "Not confirmed" in admin.post(address, {"confirm": "x"}, follow=True).content.decode()
    assert StoragePool.objects.filter(pk=filled.pool.pk).exists()
    assert "Its files are unchanged." in admin.post(address, {"confirm": "local"}, follow=True).content.decode()
    assert not StoragePool.objects.filter(pk=filled.pool.pk).exists()


@pytest.mark.parametrize(("volumes", "told"), [(False, "0, 0 B"), (True, "unknown")])
def test_files_that_nobody_has_counted_are_not_shown_as_none(viewer: Client, volumes: bool, told: str) -> None:
    pool = StoragePoolFactory.create(volumes=volumes, last_scanned=timezone.now())
    assert f"Other files {told} " in flat(text_of(viewer.get(f"/pools/{pool.pk}/")))


@pytest.mark.sql
def test_a_pools_largest_images_are_those_that_are_there_and_unknown_ones_come_last(viewer: Client) -> None:
    pool = StoragePoolFactory.create()
    for name, size in (("unknown", None), ("small", GIB), ("large", 9 * GIB)):
        ImageFactory.create(pool=pool, name=name, allocated_size=size, file_size=None)
    for state in Image.NOT_THERE:
        ImageFactory.create(pool=pool, name=state, allocated_size=90 * GIB, state=state)
    assert largest(viewer, pool) == ["large", "small", "unknown"]


def test_time_to_full_is_told_as_exactly_as_its_range(viewer: Client) -> None:
    pool = StoragePoolFactory.create(available_bytes=20 * GIB)
    for age in range(12):  # by 1.9 or 2.1 GiB a day in turn; not to the moment, which may belong to either day
        free = 20 * GIB + int((2 * age + (age % 2) / 10) * GIB)
        at = timezone.now() - timedelta(days=age, minutes=1)
        PoolSampleFactory.create(pool=pool, at=at, available_bytes=free)
    told = forecasts([pool])[pool.pk]
    assert 9.0 < told.low < told.days < told.high < 11.0
    text = flat(viewer.get(f"/pools/{pool.pk}/").content.decode())
    assert f"{told.days:g} days" in text
    assert f"{told.low:.1f} to {told.high:.1f} days, from the last 12 days" in text


def test_of_a_storage_that_is_listed_at_another_node_the_largest_images_are_that_ones(viewer: Client) -> None:
    shared = {"name": "nfs", "path": "/mnt/pve/nfs", "source": "proxmox", "network": True}
    lister, pool = (
        StoragePoolFactory.create(host=HostFactory.create(kind="proxmox", cluster="c"), **shared) for _ in range(2)
    )
    ImageFactory.create(pool=lister, name="vm-1-disk-0")
    assert largest(viewer, pool) == ["vm-1-disk-0"]


def largest(client: Client, pool: StoragePool) -> list[str]:
    return [image.name for image in client.get(f"/pools/{pool.pk}/").context["largest"]]


@pytest.mark.parametrize(("hosts", "offered"), [([], True), (["far"], False)])
def test_where_a_host_is_reached_is_offered_to_admins_of_all_hosts_alone(
    db: None, hosts: list[str], offered: bool
) -> None:
    host = HostFactory.create(slug="far", kind="ssh", transport="ssh", address="192.0.2.7")
    client = client_as(role="admin", hosts=hosts)
    leads = {str(found.get("href")) for tag, found in tags_of(client.get("/hosts/")) if tag == "a"}
    for address in (f"/hosts/{host.pk}/connection/", "/hosts/add/"):
        assert (address in leads) is offered, address
        assert client.get(address).status_code == (200 if offered else 403)
    assert f'action="/hosts/{host.pk}/"' in client.get("/hosts/").content.decode()


def test_missing_tools_are_named_with_what_they_are_for(viewer: Client) -> None:
    HostFactory.create(capabilities={"qemu_img": None, "tools": {"setpriv": True}})
    text = text_of(viewer.get("/hosts/"))
    assert "qemu-img missing every job on an image" in text
    assert "setpriv available" in text
    assert "ionice unknown" in text
    assert "deleted files" not in text, "no job looks for them"


@pytest.mark.parametrize(("found", "warned"), [("landlock", False), ("namespaces", False), (None, True)])
def test_a_host_that_cannot_keep_tools_from_other_files_says_so(
    viewer: Client, found: str | None, warned: bool
) -> None:
    HostFactory.create(capabilities={"confinement": found})
    text = text_of(viewer.get("/hosts/"))
    assert ("Images that users other than root can write are refused" in text) is warned
    assert (f"Landlock or namespaces available {found}" in text) is not warned


def test_cache_and_discard_modes_come_with_advice(viewer: Client) -> None:
    GuestDiskFactory.create(cache="unsafe", discard="")
    text = text_of(viewer.get("/guests/"))
    assert "a power cut can destroy" in text
    assert "Set discard=unmap" in text


def test_a_tokens_secret_is_shown_once(admin: Client, filled: Filled) -> None:
    answer = admin.post("/tokens/", {"name": "nightly", "role": "operator", "expires_days": "30"})
    page = answer.content.decode()
    token = Token.objects.get(name="nightly")
    assert (token.role, token.created_by, token.expired) == ("operator", "the-admin", False)
    assert "sa_" in page
    assert answer["Cache-Control"] == "no-store"
    assert "sa_" not in admin.get("/tokens/").content.decode()
    admin.post(f"/tokens/{token.pk}/delete/")
    assert not Token.objects.filter(pk=token.pk).exists()


@pytest.mark.parametrize(
    "form", [{"role": "god"}, {"expires_days": "0"}, {"expires_days": "99999999999999999999"}, {"hosts": "x"}]
)
def test_a_bad_token_is_not_made(admin: Client, filled: Filled, form: dict[str, str]) -> None:
    before = Token.objects.count()
    answer = admin.post("/tokens/", {"name": "a", "role": "viewer"} | form)
    assert answer.status_code == 400
    assert Token.objects.count() == before


def test_the_audit_trail_is_searched(admin: Client, filled: Filled) -> None:
    admin.post("/tokens/", {"name": "nightly", "role": "viewer"})
    assert "nightly" in text_of(admin.get("/audit/?search=nightly"))
    assert "No entries match your filters" in text_of(admin.get("/audit/?search=zebra"))


def test_the_audit_trail_shows_what_changed_and_options_as_words(admin: Client) -> None:
    AuditEntryFactory.create(
        before={"name": "a", "options": {"undo_hours": 24, "method": "auto"}, "hosts": []},
        after={"name": "a", "options": {"undo_hours": 12, "method": "auto"}, "hosts": []},
    )
    AuditEntryFactory.create(before=None, after={"options": {"method": "copy", "idle_io": None}, "hosts": []})
    page = flat(admin.get("/audit/"))
    assert "option undo_hours:<del>24</del>→ 12" in page
    assert "name: " not in page
    assert "options: method copy<" in page
    assert "hosts: all" in page
