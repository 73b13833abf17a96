"""Images over REST: what a row says, filters, order, search, declared formats, chains, history."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from tests.factories import (
    GIB,
    GuestDiskFactory,
    HostFactory,
    ImageFactory,
    ImageSampleFactory,
    ImageUseFactory,
    StoragePoolFactory,
)
from tests.working import reread

pytestmark = pytest.mark.sql


def names(client: APIClient, query: str) -> list[str]:
    response = client.get(f"/api/v1/images/?{query}")
    assert response.status_code == 200, response.json()
    return [row["name"] for row in response.json()["results"]]


def test_a_row_says_what_is_known_and_null_where_nothing_is(viewer: APIClient) -> None:
    image = ImageFactory.create(
        format="raw", declared_format="", compression="", preallocation="", cluster_size=None, virtual_size=None,
        in_use=None, orphan=None, encrypted=None,
    )  # fmt: skip
    row = viewer.get(f"/api/v1/images/{image.pk}/").json()
    unknown = {
        "declared_format", "compression", "preallocation", "cluster_size", "virtual_size", "in_use", "orphan",
        "encrypted", "exclusive_bytes", "snapshot_bytes", "reservation_bytes", "full_bytes",
        "backing", "backing_file", "backing_format", "reclaimable_bytes", "reclaimable_low", "reclaimable_high",
        "reclaimable_method", "analyzed_at", "missing_since", "aside_since", "aside_until", "aside_by", "deleted_at",
        "exclusive_at", "last_backup",
    }  # fmt: skip
    assert {name for name, value in row.items() if value is None} == unknown
    assert row["allocated_size"] == 4 * GIB
    assert (row["host"], row["pool"]) == (image.host_id, image.pool_id)


def test_every_field_of_the_contract_is_there(viewer: APIClient) -> None:
    contract = """id host pool path name format declared_format virtual_size allocated_size file_size cluster_size
    compression preallocation backing_file backing_format backing chain_depth overlays_count snapshots encrypted in_use
    guests state state_detail orphan orphan_evidence reclaimable_bytes reclaimable_low reclaimable_high
    reclaimable_method analyzed_at last_scanned"""
    row = viewer.get(f"/api/v1/images/{ImageFactory.create().pk}/").json()
    assert set(contract.split()) <= set(row)
    del row["header"]  # in a list nobody needs it
    assert viewer.get("/api/v1/images/").json()["results"] == [row]


def test_an_overlay_names_its_base_and_its_guests(viewer: APIClient) -> None:
    base = ImageFactory.create(name="base.qcow2")
    use = ImageUseFactory.create(
        image=ImageFactory.create(backing=base),
        disk__guest__name="web",
        disk__guest__state="running",
        disk__target="vda",
    )
    row = viewer.get(f"/api/v1/images/{use.image.pk}/").json()
    assert (row["backing"], row["backing_file"], row["backing_format"], row["chain_depth"]) == (
        base.pk,
        base.path,
        "qcow2",
        2,
    )
    assert row["guests"] == [{"id": use.disk.guest.pk, "name": "web", "state": "running", "target": "vda"}]


def test_snapshots_have_times_not_seconds_and_a_senseless_time_is_unknown(viewer: APIClient) -> None:
    snapshots = [
        {"id": "1", "name": "before", "size": 0, "created": 1_700_000_000},
        {"id": "2", "name": "bomb", "size": 5, "created": 1 << 62},
    ]
    row = viewer.get(f"/api/v1/images/{ImageFactory.create(snapshots=snapshots).pk}/").json()
    assert row["snapshots"] == [
        {"name": "before", "size": 0, "created": "2023-11-14T22:13:20Z", "held_bytes": None},
        {"name": "bomb", "size": 5, "created": None, "held_bytes": None},
    ]


def test_images_that_a_scan_at_work_found_are_not_shown_yet(viewer: APIClient) -> None:
    image = ImageFactory.create(listed=False)
    assert names(viewer, "") == []
    assert viewer.get(f"/api/v1/images/{image.pk}/").status_code == 404


def test_vanished_images_are_listed_and_marked(viewer: APIClient) -> None:
    ImageFactory.create(state="missing", missing_since=timezone.now())
    (row,) = viewer.get("/api/v1/images/").json()["results"]
    assert row["state"] == "missing"
    assert row["missing_since"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("host=alpha", "a b"), ("pool={pool}", "a"), ("host={host}", "a b"), ("guest={guest}", "a"),
        ("format=raw", "b"),
        ("state=missing", "c"), ("min_chain_depth=3", "b"), ("max_chain_depth=2", "a c"),
        ("min_chain_depth=2&max_chain_depth=2", "c"), ("min_reclaimable=5", "a"), ("min_reclaimable=0", "a b"),
        ("in_use=true", "a"), ("in_use=false", "b"), ("in_use=null", "c"), ("in_use=unknown", "c"),
        ("orphan=true", "b"),
        ("orphan=false", "a"), ("orphan=null", "c"), ("search=alph", "a b"), ("search=SRV", "a b c"),
        ("search=%25", ""),
        ("search=_", ""), ("host=alpha&format=raw", "b"), ("host=alpha&state=missing", ""),
        ("ordering=name", "a b c"), ("ordering=-name", "c b a"), ("ordering=-reclaimable_bytes", "a b c"),
        ("ordering=reclaimable_bytes", "b a c"), ("ordering=-chain_depth", "b c a"), ("ordering=host", "a b c"),
        ("limit=2", "a b"), ("limit=2&offset=2", "c"), ("offset=3", ""), ("", "a b c"),
    ],
)  # fmt: skip
def test_filters_search_and_order(viewer: APIClient, query: str, found: str) -> None:
    alpha, beta = HostFactory.create(slug="alpha", name="A"), HostFactory.create(slug="beta", name="B")
    pools = [StoragePoolFactory.create(host=alpha, path=f"/srv/alpha{number}") for number in (1, 2)]
    other = StoragePoolFactory.create(host=beta, path="/srv/beta")
    a = ImageFactory.create(pool=pools[0], name="a", in_use=True, reclaimable_bytes=9)
    raw = {"format": "raw", "declared_format": "raw"}
    ImageFactory.create(pool=pools[1], name="b", **raw, chain_depth=3, in_use=False, orphan=True, reclaimable_bytes=3)
    ImageFactory.create(pool=other, name="c", state="missing", chain_depth=2, in_use=None, orphan=None)
    use = ImageUseFactory.create(image=a)
    ImageUseFactory.create(image=a, disk=GuestDiskFactory.create(guest=use.disk.guest))
    filled = query.format(pool=pools[0].pk, host=alpha.pk, guest=use.disk.guest.pk)
    assert names(viewer, filled) == found.split()


def test_pages_link_to_each_other_and_count_everything(viewer: APIClient) -> None:
    ImageFactory.create_batch(5)
    first = viewer.get("/api/v1/images/?limit=2&ordering=-id").json()
    assert (first["count"], first["previous"]) == (5, None)
    seen, page = [], first
    while page:
        seen += [row["id"] for row in page["results"]]
        page = viewer.get(page["next"]).json() if page["next"] else None
    assert seen == sorted(seen, reverse=True)
    assert len(seen) == 5


def test_an_admin_declares_a_format_and_takes_it_back(admin: APIClient) -> None:
    image = ImageFactory.create(name="disk", declared_format="", declared_by="")
    path = f"/api/v1/images/{image.pk}/"
    assert admin.patch(path, {"declared_format": "qcow2"}, format="json").json()["declared_format"] == "qcow2"
    assert admin.patch(path, {"declared_format": None}, format="json").json()["declared_format"] is None


@pytest.mark.parametrize(
    ("body", "field"),
    [({"declared_format": "docx"}, "declared_format"),
     ({"declared_format": 5}, "declared_format"),
     ({"declared_format": "raw", "state": "ok"}, "state"), ({"declared_format": ["raw"]}, "declared_format")],
)  # fmt: skip
def test_a_declaration_that_makes_no_sense_changes_nothing(admin: APIClient, body: dict[str, Any], field: str) -> None:
    image = ImageFactory.create(admin_format="raw")
    response = admin.patch(f"/api/v1/images/{image.pk}/", body, format="json")
    assert (response.status_code, list(response.json()["fields"])) == (400, [field])
    assert reread(image).admin_format == "raw"


def test_a_chain_over_rest(viewer: APIClient) -> None:
    base = ImageFactory.create(allocated_size=3 * GIB)
    use = ImageUseFactory.create(image=ImageFactory.create(backing=base, allocated_size=GIB), disk__guest__name="web")
    chain = viewer.get(f"/api/v1/images/{base.pk}/chain/").json()
    assert chain["edges"] == [{"from": use.image.pk, "to": base.pk}]
    assert (chain["allocated_size"], chain["virtual_size"]) == (4 * GIB, 20 * GIB)
    nodes = [(node["needed_by"], node["freed_if_deleted"]) for node in chain["nodes"]]
    assert nodes == [([use.image.pk], 0), (["web"], 0)]


def test_history_is_oldest_first(viewer: APIClient) -> None:
    image = ImageFactory.create()
    for days in (1, 3, 2):
        ImageSampleFactory.create(image=image, at=timezone.now() - timedelta(days=days), allocated_size=days)
    ImageSampleFactory.create()
    page = viewer.get(f"/api/v1/images/{image.pk}/history/?limit=2").json()
    assert (page["count"], [row["allocated_size"] for row in page["results"]]) == (3, [3, 2])
    assert [row["allocated_size"] for row in viewer.get(page["next"]).json()["results"]] == [1]


STRANGE = ("-f", "a,b", "nbd:x", "<script>alert(1)</script>", "x" * 255, "\\x1b[31m", "日本.raw", "'; DROP TABLE x;--")


def test_names_of_strangers_are_data(viewer: APIClient) -> None:
    for name in STRANGE:
        image = ImageFactory.create(name=name)
        assert viewer.get(f"/api/v1/images/{image.pk}/").json()["name"] == name
        assert name in [row["name"] for row in viewer.get("/api/v1/images/", {"search": name}).json()["results"]]
