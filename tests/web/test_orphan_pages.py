"""The page of orphans, and the steps from there."""

import csv
import io
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from images.models import Image
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from tests.factories import GIB, HostFactory, ImageFactory, JobFactory, StoragePoolFactory
from tests.web.html import inline_code, labels_of, text_of
from tests.working import at_most_queries

EVIDENCE = ["libvirt on pve1 was queried: none of its 2 guests uses it.", "No overlay uses it."]


@pytest.fixture
def pool(db: None) -> StoragePool:
    host = HostFactory.create(slug="local", name="pve1", capabilities={"libvirt": "present"}, last_seen=timezone.now())
    return StoragePoolFactory.create(host=host, name="local", path="/pool")


def said(answer: Any) -> str:
    return text_of(answer)


def orphan(pool: StoragePool, name: str = "left.qcow2", **more: Any) -> Image:
    return ImageFactory.create(pool=pool, name=name, orphan=True, orphan_evidence=EVIDENCE, **more)


def aside(pool: StoragePool, name: str = "aside.qcow2", *, due: bool = False, **more: Any) -> Image:
    until = timezone.now() + timedelta(days=-1 if due else 7)
    image = ImageFactory.create(
        pool=pool, name=name, orphan=None, state="set_aside", aside_since=timezone.now() - timedelta(days=9),
        aside_until=until, aside_by="ada", **more,
    )  # fmt: skip
    image.aside_job = JobFactory.create(kind="set_aside", target=image, state="succeeded", finished=timezone.now())
    image.save()
    return image


def test_each_orphan_stands_there_with_its_evidence_and_the_sum(viewer: Client, pool: StoragePool) -> None:
    orphan(pool)
    orphan(pool, "other.raw", allocated_size=GIB)
    ImageFactory.create(pool=pool, name="used.qcow2")
    page = said(viewer.get("/orphans/"))
    assert "2 unused images, 5 GiB physical" in page
    for sentence in (*EVIDENCE, "Its content was last changed at 2023-11-14 22:13 UTC.", "These facts are from"):
        assert sentence in page
    assert "used.qcow2" not in page
    assert "Set aside…" not in page


def test_one_file_on_an_export_of_two_hosts_counts_once_on_each_and_on_both(viewer: Client, pool: StoragePool) -> None:
    other = StoragePoolFactory.create(host__capabilities={"libvirt": "present"}, shared_key=pool.shared_key)
    for one in (pool, other):
        orphan(one, allocated_size=100 * GIB, inode="7")
    for filters in ("", f"?host={pool.host_id}", f"?host={other.host_id}"):
        assert "1 unused image, 100 GiB physical" in said(viewer.get(f"/orphans/{filters}"))


def test_what_names_of_one_file_occupy_counts_once(viewer: Client, pool: StoragePool) -> None:
    for name in ("a.raw", "b.raw", "c.raw"):
        orphan(pool, name, allocated_size=100 * GIB, inode="7", nlink=3)
    assert "3 unused images, 100 GiB physical" in said(viewer.get("/orphans/"))


def test_where_nobody_could_need_any_they_are_counted_and_shown_on_request(viewer: Client, pool: StoragePool) -> None:
    bare = StoragePoolFactory.create(host=HostFactory.create(capabilities={"libvirt": "absent"}))
    orphan(bare, "demo.qcow2")
    page = said(viewer.get("/orphans/"))
    assert "demo.qcow2" not in page
    assert "1 more image is unused on hosts without a hypervisor" in page
    assert "demo.qcow2" in said(viewer.get("/orphans/?everywhere=true"))
    pve = StoragePoolFactory.create(host=HostFactory.create(capabilities={"proxmox": True, "libvirt": "absent"}))
    orphan(pve, "vm-9-disk-0.raw")
    assert "vm-9-disk-0.raw" in said(viewer.get("/orphans/"))


def test_filters_by_host_pool_and_age(viewer: Client, pool: StoragePool) -> None:
    orphan(pool)
    orphan(pool, "young.raw", mtime_ns=int(timezone.now().timestamp() * 1e9))
    other = StoragePoolFactory.create(host=pool.host, name="second")
    orphan(other, "second.raw")

    def names(query: str) -> set[str]:
        page = said(viewer.get(f"/orphans/?{query}"))
        return {name for name in ("left.qcow2", "young.raw", "second.raw") if name in page}

    assert names(f"host={pool.host_id}") == {"left.qcow2", "young.raw", "second.raw"}
    assert names(f"pool={other.pk}") == {"second.raw"}
    assert names("age=30") == {"left.qcow2", "second.raw"}
    assert "Ignored invalid filters: age, pool" in said(viewer.get("/orphans/?age=x&pool=-1&host="))


def test_the_list_is_written_as_csv_with_its_evidence(viewer: Client, pool: StoragePool) -> None:
    orphan(pool, "=cmd.raw")
    orphan(pool, "young.raw", mtime_ns=int(timezone.now().timestamp() * 1e9))
    answer: Any = viewer.get("/orphans/export.csv?age=30")
    lines = list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))
    assert [(line["allocated_size"], line["last_changed"][:10]) for line in lines] == [(str(4 * GIB), "2023-11-14")]
    assert lines[0]["name"].startswith("'=")
    assert EVIDENCE[0] in lines[0]["evidence"]


def test_what_is_not_known_is_counted_with_its_reason(viewer: Client, pool: StoragePool) -> None:
    for name in ("a.raw", "b.raw"):
        ImageFactory.create(pool=pool, name=name, orphan=None, orphan_evidence=["Lines were not understood: args."])
    page = said(viewer.get("/orphans/"))
    assert "pve1: Lines were not understood: args. 2 8 GiB" in page
    assert "2 images whose use is unknown" in page


def test_no_orphans_is_not_said_while_images_cannot_be_judged(viewer: Client, pool: StoragePool) -> None:
    assert "No orphans" in said(viewer.get("/orphans/"))
    for name in ("a.raw", "b.raw"):
        ImageFactory.create(pool=pool, name=name, orphan=None, orphan_evidence=["Lines were not understood: args."])
    page = said(viewer.get("/orphans/"))
    assert "No orphans" not in page
    assert page.index("Use of 2 images is unknown. pve1: Lines were not understood: args.") < page.index(
        "No known orphans"
    )
    orphan(pool)
    page = said(viewer.get("/orphans/"))
    assert page.index("Use of 2 images is unknown.") < page.index("left.qcow2")


def test_what_is_set_aside_says_who_when_until_and_how_much(admin: Client, viewer: Client, pool: StoragePool) -> None:
    waiting, due = aside(pool), aside(pool, "due.qcow2", due=True)
    page = admin.get("/orphans/").content.decode()
    assert inline_code(page) == []
    text = said(admin.get("/orphans/"))
    assert "2 images, 8 GiB held. Deleting an image frees its space." in text
    assert "ada" in text
    assert f"/images/{due.pk}/delete/" in page
    assert f"/images/{waiting.pk}/delete/" not in page
    assert "Restore" not in said(viewer.get("/orphans/")).replace("Restored", "")
    assert "Set aside 2 images, 8 GiB" in said(viewer.get(f"/pools/{pool.pk}/"))


def test_what_images_hold_is_unknown_where_one_of_them_was_not_measured(viewer: Client, pool: StoragePool) -> None:
    unmeasured: dict[str, Any] = {"allocated_size": None, "file_size": None}
    aside(pool)
    aside(pool, "vm-9-disk-0", **unmeasured)
    for name, more in (("vm-8-disk-0", unmeasured), ("vm-7-disk-0", {})):
        ImageFactory.create(pool=pool, name=name, orphan=None, orphan_evidence=["Unread."], **more)
    page = said(viewer.get("/orphans/"))
    assert "2 images; how much they hold is unknown. Deleting an image frees its space." in page
    assert "pve1: Unread. 2 unknown" in page
    assert "Set aside 2 images, unknown" in said(viewer.get(f"/pools/{pool.pk}/"))
    assert viewer.get(f"/api/v1/pools/{pool.pk}/").json()["aside_bytes"] is None


def test_a_pool_or_host_with_images_set_aside_is_not_forgotten(admin: Client, pool: StoragePool) -> None:
    image = aside(pool)
    refused = admin.post(f"/pools/{pool.pk}/remove/", {"confirm": pool.name})
    assert (refused.status_code, "Restore or delete them first" in said(refused)) == (400, True)
    HostFactory.create(slug="far", name="far", kind="ssh")
    Image.every.filter(pk=image.pk).update(host=Host.objects.get(slug="far"))
    admin.post(f"/hosts/{Host.objects.get(slug='far').pk}/remove/", {"confirm": "far"})
    assert Host.objects.filter(slug="far").exists()
    Image.every.filter(pk=image.pk).update(aside_since=None)
    admin.post(f"/pools/{pool.pk}/remove/", {"confirm": pool.name})
    assert not StoragePool.objects.filter(pk=pool.pk).exists()


def test_setting_aside_shows_its_plan_first_and_then_queues_a_job(admin: Client, pool: StoragePool) -> None:
    image = orphan(pool)
    page = said(admin.get(f"/images/{image.pk}/set-aside/"))
    assert "is renamed within its folder" in page
    assert EVIDENCE[0] in page
    answer = admin.post(f"/images/{image.pk}/set-aside/", {"grace_days": "30"})
    job = Job.objects.get(kind="set_aside")
    assert (answer.status_code, answer["Location"]) == (302, f"/jobs/{job.pk}/")
    assert job.options == {"grace_days": 30}
    answer = admin.post(f"/images/{image.pk}/set-aside/", {"grace_days": "30"})
    assert answer.status_code == 409
    assert "(busy)" in said(answer)
    assert admin.post(f"/images/{image.pk}/set-aside/", {"grace_days": "many"}).status_code == 409


def test_restoring_is_one_click(admin: Client, pool: StoragePool) -> None:
    image = aside(pool)
    assert admin.post(f"/images/{image.pk}/restore/").status_code == 302
    assert Job.objects.filter(kind="restore_aside", target_id=image.pk).count() == 1


def test_deleting_takes_the_typed_name_and_the_end_of_the_grace_period(admin: Client, pool: StoragePool) -> None:
    waiting, due = aside(pool), aside(pool, "due.qcow2", due=True)
    assert "grace_period" in said(admin.get(f"/images/{waiting.pk}/delete/"))
    answer = admin.post(f"/images/{waiting.pk}/delete/", {"confirm_name": waiting.name})
    assert (answer.status_code, "(grace_period)" in said(answer)) == (409, True)
    answer = admin.post(f"/images/{due.pk}/delete/", {"confirm_name": "due"})
    assert (answer.status_code, "due.qcow2 was not deleted. Type its name" in said(answer)) == (400, True)
    assert not Job.objects.filter(kind="delete_aside").exists()
    assert admin.post(f"/images/{due.pk}/delete/", {"confirm_name": "due.qcow2"}).status_code == 302


def test_the_images_page_says_what_it_is_and_what_can_be_done(admin: Client, pool: StoragePool) -> None:
    page = said(admin.get(f"/images/{orphan(pool).pk}/"))
    assert "Set aside…" in page
    assert EVIDENCE[1] in page
    page = said(admin.get(f"/images/{aside(pool).pk}/"))
    assert "by ada" in page
    assert "grace_period" in page
    assert "set aside. Restore it first" in page
    named = ImageFactory.create(
        pool=pool, orphan=False, orphan_evidence=["It is listed as unused0 of VM web (vm 104)."]
    )
    assert "It is listed as unused0 of VM web (vm 104)." in said(admin.get(f"/images/{named.pk}/"))


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a\\x1b[2J b", "x" * 255]
)
def test_hostile_names_are_shown_as_names(admin: Client, pool: StoragePool, name: str) -> None:
    images = [orphan(pool, name, path=f"/pool/1/{name}"), aside(pool, name)]
    Image.every.filter(pk=images[1].pk).update(aside_until=timezone.now())
    pages = [
        "/orphans/",
        f"/images/{images[0].pk}/set-aside/",
        *(f"/images/{images[1].pk}/{word}/" for word in ("restore", "delete")),
    ]
    for address in pages:
        page = admin.get(address).content.decode()
        assert inline_code(page) == []
        assert "<img src=x" not in page
        assert labels_of(page) == ([], []), address
    assert admin.post(pages[-1], {"confirm_name": name}).status_code == 302


def test_the_page_takes_few_queries_for_any_number_of_rows(admin: Client, pool: StoragePool) -> None:
    for number in range(60):
        orphan(pool, f"left{number}.raw")
        aside(pool, f"aside{number}.raw")
    with at_most_queries(25):
        assert admin.get("/orphans/").status_code == 200
