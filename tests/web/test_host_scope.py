"""Somebody who is limited to one host, while another host has everything: nothing of that one is in any answer."""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.http import StreamingHttpResponse
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils import timezone

from images.models import Image, ImageUse
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.models import Host
from tests.benchmarks.factories import BenchmarkFactory, SampleFactory, WatchFactory
from tests.factories import (
    GIB,
    AlertFactory,
    AuditEntryFactory,
    HostFactory,
    ImageFactory,
    ImageSampleFactory,
    ImageUseFactory,
    JobFactory,
    JobLogFactory,
    PolicyFactory,
    PolicyPickFactory,
    PolicyRunFactory,
    PoolSampleFactory,
    StoragePoolFactory,
    TokenFactory,
)
from tests.working import client_as

pytestmark = pytest.mark.sql

#: All ids of the other host's things begin with it, all names with the word, and all its sizes are TiB.
FIRST = 987_650_000
WORD = "bravo"
TIB = 1024 * GIB
SIGNS = (WORD, "TiB", str(7 * TIB), str(FIRST)[:5])

#: Addresses with filters that name what is out of scope.
ASKED = (
    "/images/?host={host_id}&pool={pool_id}&guest={guest_id}", "/jobs/?host={host_id}&image={image_id}",
    "/guests/?host={host_id}", "/benchmarks/?pool={pool_id}", "/benchmarks/compare/?ids={run_id}",
    "/benchmarks/start/?pool={pool_id}", "/api/v1/images/?host={host_id}", "/api/v1/images/?host=bravo",
    "/api/v1/images/?pool={pool_id}", "/api/v1/images/?guest={guest_id}", "/api/v1/jobs/?host={host_id}",
    "/api/v1/benchmarks/compare/?ids={run_id}", "/api/v1/benchmarks/profiles/?pool={pool_id}",
    "/images/?search=bravo", "/jobs/?search=bravo", "/guests/?search=bravo",
    "/api/v1/images/?search=bravo", "/images/export.csv?search=bravo",
)  # fmt: skip


def everything_on(slug: str, first: int = 0) -> dict[str, int]:
    """One of everything on a host; ids from ``first`` on, its sizes in TiB where that is given.

    Returns:
        Ids by the names that they have in addresses.
    """
    ids = iter(range(first + 1, first + 100))

    def own() -> dict[str, int]:
        return {"pk": next(ids)} if first else {}

    size = TIB if first else GIB
    now = timezone.now()
    host = HostFactory.create(
        **own(), slug=slug, name=f"{slug} host", status=Host.Status.UNREACHABLE, status_detail=f"{slug} is away",
        owners_unknown=f"{slug}: nobody knows", capabilities={"libvirt": "present"},
    )  # fmt: skip
    pool = StoragePoolFactory.create(
        **own(), host=host, name=f"{slug}-pool", capacity_bytes=7 * size, available_bytes=size // 8, images_count=4,
        allocated_bytes=5 * size, virtual_bytes=9 * size, reclaimable_bytes=2 * size, undo_bytes=size,
    )  # fmt: skip
    for days in (3, 1):
        PoolSampleFactory.create(
            pool=pool, at=now - timedelta(days=days), capacity_bytes=7 * size, available_bytes=days * size
        )
    sizes = {"virtual_size": 7 * size, "allocated_size": 7 * size}
    base = ImageFactory.create(**own(), pool=pool, name=f"{slug}-base.qcow2", overlays_count=1, **sizes)
    image = ImageFactory.create(
        **own(), backing=base, name=f"{slug}-disk.qcow2", reclaimable_bytes=7 * size, reclaimable_low=6 * size,
        reclaimable_high=8 * size, reclaimable_method="compress", analyzed_at=now, **sizes,
    )  # fmt: skip
    for state in ("chain_broken", "missing", "format_mismatch", "unreadable", "outside_pool"):
        ImageFactory.create(
            **own(), pool=pool, name=f"{slug}-{state}.qcow2", state=state, state_detail=f"{slug}: {state}", **sizes
        )
    ImageFactory.create(
        **own(), pool=pool, name=f"{slug}-lost.qcow2", orphan=True, orphan_evidence=[f"{slug}: nobody"], **sizes
    )
    ImageSampleFactory.create(image=image, allocated_size=7 * size)
    use = ImageUseFactory.create(image=image, disk__guest__name=f"{slug}-guest", disk__guest__state="running",
                                 **{f"disk__guest__{name}": value for name, value in own().items()})  # fmt: skip
    result = {"before_bytes": 7 * size, "after_bytes": size, "freed_bytes": 6 * size, "held_bytes": 7 * size}
    jobs = [
        JobFactory.create(
            **own(), kind=kind, target=target, state=state, finished=None if state in {"queued", "running"} else now,
            started=now, result=result if state == "succeeded" else None, undo_state=undo, undo_bytes=7 * size,
            undo_expires=now + timedelta(hours=1), error_detail=f"{slug}: {state}",
        )
        for kind, target, state, undo in (
            ("scan", host, "queued", "none"), ("reclaim", image, "running", "none"),
            ("reclaim", base, "failed", "none"), ("flatten", image, "interrupted", "none"),
            ("reclaim", image, "succeeded", "available"),
        )
    ]  # fmt: skip
    for job in jobs:
        JobLogFactory.create(job=job, text=f"{slug}: a line")
    run = BenchmarkFactory.create(**own(), pool=pool, created_by=f"{slug}-user")
    SampleFactory.create(benchmark=run)
    watch = WatchFactory.create(**own(), pool=pool, problem=f"{slug}: does not start")
    policy = PolicyFactory.create(**own(), name=f"{slug}-nights", hosts=[host.pk], pools=[pool.pk])
    policy_run = PolicyRunFactory.create(**own(), policy=policy)
    PolicyPickFactory.create(run=policy_run, image=image, job=jobs[-1])
    alert = AlertFactory.create(
        **own(), key=f"pool_over_threshold:{pool.pk}", host=slug, title=f"{slug}-pool is full", target_kind="pool",
        target_id=pool.pk, target_label=f"{slug}-pool", detail=f"{slug}: {7 * size} bytes",
    )  # fmt: skip
    return {
        "host_id": host.pk, "pool_id": pool.pk, "image_id": image.pk, "job_id": jobs[-1].pk,
        "guest_id": use.disk.guest.pk, "run_id": run.pk, "watch_id": watch.pk, "policy_id": policy.pk,
        "policy_run_id": policy_run.pk, "alert_id": alert.pk,
    }  # fmt: skip


#: What the API's ``pk`` is of, by the first part of the address.
KINDS = {
    "hosts": "host_id", "pools": "pool_id", "guests": "guest_id", "images": "image_id", "jobs": "job_id",
    "benchmarks": "run_id", "benchmark-watches": "watch_id", "policies": "policy_id", "alerts": "alert_id",
    "ledger": "job_id",
}  # fmt: skip


def routes(patterns: list[Any] | None = None, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The name and the address of every view that there is, its parameters in pointed brackets."""
    for pattern in get_resolver().url_patterns if patterns is None else patterns:
        route = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from routes(pattern.url_patterns, route)
        elif isinstance(pattern, URLPattern) and not route.startswith("api/v1/^"):
            yield str(pattern.name), route


def address(route: str, ids: dict[str, int]) -> str:
    """The address of one host's thing; what a parameter is of is told by its name, or by what stands before it."""
    parts: list[str] = []
    for part in route.split("/"):
        if part.startswith("<"):
            kind, _, name = part.strip("<>").partition(":")
            before = parts[-1] if parts else ""
            if name in {"run", "run_id"} and before == "runs":
                name = "policy_run_id"
            known = ids.get(KINDS.get(before, "") if name == "pk" else name, 1)
            parts.append(str(uuid4()) if kind == "uuid" else str(known))
        else:
            parts.append(part)
    return "/" + "/".join(parts)


def body_of(answer: Any) -> str:
    """An answer without its CSRF tokens, whose letters come by chance."""
    if isinstance(answer, StreamingHttpResponse):
        return b"".join(answer.streaming_content).decode()  # type: ignore[arg-type]
    return re.sub(r"\b[0-9A-Za-z]{64}\b", "", answer.content.decode())


def told(body: str, signs: tuple[str, ...]) -> list[str]:
    """Which signs of the other host stand in an answer, with what is around them."""
    return [body[max(0, body.index(sign) - 60) : body.index(sign) + 40] for sign in signs if sign in body]


Ids = dict[str, int]


@pytest.fixture
def worlds(db: None) -> tuple[Ids, Ids]:
    """Ids on the host that somebody is limited to, and ids on the other one."""
    mine = everything_on("alpha")
    theirs = everything_on(WORD, FIRST)
    TokenFactory.create(name=f"{WORD}-token", hosts=[WORD])
    AuditEntryFactory.create(target=f"{WORD}-disk.qcow2")
    return mine, theirs


def limited(role: str) -> Client:
    client = client_as(username="limited", role=role, hosts=["alpha"])
    client.defaults["REMOTE_ADDR"] = "192.0.2.7"
    return client


@pytest.mark.parametrize(("role", "htmx"), [("viewer", False), ("operator", True), ("admin", False)])
def test_no_name_id_or_size_of_another_host_is_in_any_answer(worlds: tuple[Ids, Ids], role: str, htmx: bool) -> None:
    mine, theirs = worlds
    client = limited(role)
    headers = {"HX-Request": "true"} if htmx else {}
    leaks, opened = [], 0
    for route in sorted({route for _, route in routes()}):
        if route.startswith(("login", "logout", "healthz", "api/v1/docs", "api/v1/schema")):
            continue
        own = client.get(address(route, mine), headers=headers)
        assert own.status_code < 500, route
        opened += own.status_code == 200
        leaks += [(address(route, mine), found) for found in told(body_of(own), SIGNS)]
        if "<" not in route:
            continue
        foreign = client.get(address(route, theirs), headers=headers)
        if any(str(FIRST)[:5] in part for part in address(route, theirs).split("/")):
            assert foreign.status_code in {403, 404, 405}, route
        # The id is what was asked for, and may be told back.
        leaks += [(address(route, theirs), found) for found in told(body_of(foreign), SIGNS[:-1])]
    assert leaks == []
    assert opened > 35


def test_who_is_limited_to_nothing_sees_all_of_it(worlds: tuple[Ids, Ids]) -> None:
    _, theirs = worlds
    client = client_as(role="admin")
    shown = {}
    for route in ("images/", "jobs/", "hosts/", "guests/", "benchmarks/", "", "api/v1/images/", "api/v1/jobs/",
                  "images/export.csv", "api/v1/images/<int:pk>/chain/", "pools/<int:pool_id>/"):  # fmt: skip
        shown[route] = told(body_of(client.get(address(route, theirs))), (WORD,))
    assert all(shown.values()), shown


def test_a_guest_of_another_host_on_a_shared_storage_is_not_named(
    worlds: tuple[Ids, Ids],
) -> None:
    mine, theirs = worlds
    disk = GuestDisk.objects.get(guest=theirs["guest_id"])
    ImageUse.objects.filter(disk=disk).update(image=mine["image_id"])
    client = limited("admin")
    for asked in ("/images/", "/images/{image_id}/", "/api/v1/images/", "/api/v1/images/{image_id}/chain/",
                  "/images/export.csv", "/", "/api/v1/overview/", "/images/{image_id}/reclaim/",
                  "/api/v1/pools/{pool_id}/frees/", "/pools/{pool_id}/"):  # fmt: skip
        assert told(body_of(client.get(asked.format(**mine))), SIGNS) == [], asked
    nodes = client.get(f"/api/v1/images/{mine['image_id']}/chain/").json()["nodes"]
    (node,) = (one for one in nodes if one["id"] == mine["image_id"])
    assert node["freed_if_deleted"] == 0
    # The other way round: a disk of a guest of one's own, whose image the other host lists.
    own = GuestDisk.objects.get(guest=mine["guest_id"])
    ImageUse.objects.filter(disk=own).delete()
    ImageUse.objects.create(disk=own, image_id=theirs["image_id"])
    for asked in ("/guests/", "/guests/{guest_id}/", "/api/v1/guests/{guest_id}/", "/guests/export.csv",
                  "/guests/{guest_id}/live-merge/", "/guests/{guest_id}/live-copy/"):  # fmt: skip
        assert told(body_of(client.get(asked.format(**mine))), SIGNS) == [], asked


@pytest.mark.parametrize("linked", ["", "local:9000/base-9000-disk-0.qcow2/101/vm-101-disk-0.qcow2"])
@pytest.mark.parametrize("used", ["image", "base"])
def test_no_plan_names_a_guest_of_another_host(worlds: tuple[Ids, Ids], used: str, linked: str) -> None:
    mine, theirs = worlds
    image = Image.objects.get(pk=mine["image_id"])
    assert image.backing is not None
    ImageUse.objects.filter(disk=GuestDisk.objects.get(guest=theirs["guest_id"])).update(
        image=image if used == "image" else image.backing
    )
    GuestDisk.objects.filter(guest=theirs["guest_id"]).update(volume=linked, records_chain=not linked)
    theirs_of = Guest.objects.filter(pk=theirs["guest_id"])
    theirs_of.update(state="shut off", kind="vm" if linked else "domain")
    Host.objects.filter(pk=mine["host_id"]).update(capabilities={"proxmox": "9.0", "qemu-img": "10.0"})
    options: dict[str, dict[str, Any]] = {
        "convert": {"format": "raw"},
        "attach": {"writable": True},
        "create": {"name": "n.qcow2", "format": "qcow2", "backing": image.backing.pk, "pool": mine["pool_id"]},
        "rebase": {"base": image.backing.pk},
        "move": {"target_pool": mine["pool_id"]},
        "grow": {"size_bytes": 8 * GIB},
    }
    without = ["reclaim", "flatten", "commit", "export", "keys", "shrink", "set_aside", "delete", "sparsify", "bitmaps"]
    client, planned = limited("admin"), 0
    for kind in (*without, *options):
        for target in (image.pk, image.backing.pk):
            body = {"kind": kind, "image": target, "options": options.get(kind, {}), "dry_run": True}
            answer = client.post("/api/v1/jobs/", body, content_type="application/json")
            planned += answer.status_code == 200
            assert told(body_of(answer), SIGNS[:1]) == [], (kind, answer.json())
    assert planned > 14
    # A job that would wait says for whom.
    theirs_of.update(state="running")
    Image.objects.filter(pk__in=[image.pk, image.backing.pk]).update(in_use=True)
    waited = 0
    for kind in ("reclaim", "flatten", "convert", "grow"):
        for target in (image.pk, image.backing.pk):
            given = options.get(kind, {}) | {"when_running": "wait"}
            body = {"kind": kind, "image": target, "options": given, "dry_run": True}
            answer = client.post("/api/v1/jobs/", body, content_type="application/json")
            assert (answer.status_code, told(body_of(answer), SIGNS[:1])) == (200, []), (kind, answer.json())
            waited += any("waits until" in line for line in answer.json()["warnings"])
    assert waited > 3


@pytest.mark.parametrize("role", ["viewer", "admin"])
def test_no_filter_reaches_another_host(worlds: tuple[Ids, Ids], role: str) -> None:
    _, theirs = worlds
    client = limited(role)
    leaks = []
    for asked in ASKED:
        body = body_of(client.get(asked.format(**theirs))).replace("search=bravo", "").replace('value="bravo"', "")
        leaks += [(asked, found) for found in told(body, ("bravo-", "bravo host", "TiB", str(7 * TIB)))]
    assert leaks == []


def test_what_is_changed_on_another_host_is_not_there(worlds: tuple[Ids, Ids]) -> None:
    _, theirs = worlds
    client = limited("admin")
    leaks = []
    for route in sorted({route for _, route in routes()}):
        asked = address(route, theirs)
        if str(FIRST)[:5] not in asked:
            continue
        for method in ("post", "patch", "delete"):
            if asked.startswith("/api/") or method == "post":
                answer = getattr(client, method)(asked, {}, content_type="application/json")
                assert answer.status_code in {403, 404, 405}, (method, asked, body_of(answer)[:300])
                leaks += [(asked, found) for found in told(body_of(answer), SIGNS[:-1])]
    assert leaks == []
    for kind, name in (("analyze", "image"), ("scan", "host"), ("benchmark", "pool")):
        for dry in (True, False):
            body = {"kind": kind, name: theirs[f"{name}_id"], "dry_run": dry}
            answer = client.post("/api/v1/jobs/", body, content_type="application/json")
            assert (answer.status_code, told(body_of(answer), SIGNS[:-1])) == (404, []), kind
    assert Image.objects.filter(host__slug=WORD).count() == 8


def test_sums_and_counts_are_the_same_with_and_without_another_host(db: None) -> None:
    everything_on("alpha")
    client = limited("admin")

    def seen() -> list[Any]:
        overview = client.get("/api/v1/overview/").json()
        overview.pop("at")
        lists = ("hosts", "pools", "images", "guests", "jobs", "benchmarks", "benchmark-watches", "policies", "alerts")
        counts = [client.get(f"/api/v1/{name}/").json()["count"] for name in lists]
        return [overview, counts, client.get("/jobs/count/").content, client.get("/alerts/count/").content]

    before = seen()
    everything_on(WORD, FIRST)
    assert seen() == before


def test_the_numbers_for_prometheus_are_not_for_who_is_limited(worlds: tuple[Ids, Ids]) -> None:
    assert limited("admin").get("/metrics").status_code == 401
    local = client_as(hosts=["alpha"])
    assert local.get("/metrics").status_code == 401
