"""``ledger/``: lines and sums over REST, for everybody who may read them, of the hosts that exist for them."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from rest_framework.test import APIClient

from storage_admin.hosts import registration
from tests.factories import GIB, HostFactory, ImageFactory, StoragePoolFactory
from tests.ledger.rows import NOON, freed, held
from tests.working import ADMIN

pytestmark = pytest.mark.sql

CONTRACT = {
    "job", "image", "predicted_bytes", "before_bytes", "after_bytes", "held_bytes", "freed_bytes", "freed_at",
    "seconds",
}  # fmt: skip


def lines(client: APIClient, **query: Any) -> list[dict[str, Any]]:
    answer = client.get("/api/v1/ledger/", query)
    assert answer.status_code == 200, answer.json()
    assert answer.json()["count"] == len(answer.json()["results"])
    return list(answer.json()["results"])


def ids(client: APIClient, **query: Any) -> set[int]:
    return {line["job"] for line in lines(client, **query)}


def sums(client: APIClient, **query: Any) -> dict[str, Any]:
    answer = client.get("/api/v1/ledger/summary/", query)
    assert answer.status_code == 200, answer.json()
    return dict(answer.json())


def test_a_line_has_what_the_contract_says(viewer: APIClient) -> None:
    job = freed(5 * GIB, 2 * GIB, created_by="policy Nights", plan={"before_bytes": 10, "predicted_after_bytes": 4})
    (line,) = lines(viewer)
    assert set(line) >= CONTRACT
    assert (line["job"], line["image"], line["freed_bytes"], line["held_bytes"]) == (job.pk, job.target_id, 3 * GIB, 0)
    assert (line["predicted_bytes"], line["predicted_after_bytes"]) == (6, 5 * GIB - 6)
    assert (line["by"], line["policy"], line["undo"]) == ("policy Nights", "Nights", "none")
    assert line["freed_at"] == line["at"]


def test_what_is_held_is_a_line_that_has_freed_nothing(viewer: APIClient) -> None:
    job = held(4 * GIB, GIB, created_by="ada")
    (line,) = lines(viewer)
    assert (line["held_bytes"], line["freed_bytes"], line["freed_at"]) == (4 * GIB, 0, None)
    assert job.finished is not None
    assert (line["at"], line["policy"]) == (job.finished.isoformat().replace("+00:00", "Z"), None)


@pytest.fixture
def rows(db: None) -> dict[str, Any]:
    """Lines that differ in all that can be filtered by."""
    image = ImageFactory.create(pool__host__slug="one")
    other = ImageFactory.create(pool=StoragePoolFactory.create(host=image.host))
    far = ImageFactory.create()
    return {
        "image": image, "pool": other.pool_id, "policy": "Nights",
        "first": freed(5, 1, image, NOON, created_by="ada").pk,
        "second": freed(0, 2, other, NOON + timedelta(days=1), kind="convert", created_by="policy Nights").pk,
        "third": freed(9, 1, far, NOON + timedelta(days=40), created_by="policy Nights").pk,
        "held": held(7, 3, image, created_by="ada").pk,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, "first second third held"),
        ({"host": "one"}, "first second held"),
        ({"pool": "{pool}"}, "second"),
        ({"image": "{image.pk}"}, "first held"),
        ({"kind": "convert"}, "second"),
        ({"by": "ada"}, "first held"),
        ({"by": "ad"}, ""),
        ({"policy": "{policy}"}, "second third"),
        ({"policy": "night"}, ""),
        ({"held": "true"}, "held"),
        ({"held": "false"}, "first second third"),
        ({"from": "2026-11-21", "to": "2026-11-21"}, "second"),
        ({"from": "2026-11-20T12:00:00Z", "to": "2026-11-20T12:00:01Z"}, "first"),
        ({"from": "2026-12-01", "to": "2027-01-31", "held": "false"}, "third"),
    ],
)
def test_lines_and_sums_are_filtered_alike(
    viewer: APIClient, rows: dict[str, Any], query: dict[str, str], names: str
) -> None:
    asked = {name: value.format(**rows) for name, value in query.items()}
    wanted = {rows[name] for name in names.split()}
    assert ids(viewer, **asked) == wanted
    told = sums(viewer, **asked)
    assert told["freed_bytes"] == sum(line["freed_bytes"] for line in lines(viewer, **asked))
    assert told["held_bytes"] == sum(line["held_bytes"] for line in lines(viewer, **asked))
    assert told["freed_bytes"] == told["won_bytes"] - told["taken_bytes"]
    assert told["jobs_count"] + told["held_count"] == len(wanted)


def test_sums_are_told_by_host_pool_and_month(viewer: APIClient, rows: dict[str, Any]) -> None:
    told = sums(viewer)
    assert [(one["id"], one["freed_bytes"], one["held_bytes"]) for one in told["hosts"]][1] == (
        rows["image"].host_id, 2, 7,
    )  # fmt: skip
    assert {(one["id"], one["freed_bytes"]) for one in told["pools"]} >= {(rows["pool"], -2)}
    assert [(one["month"], one["won_bytes"], one["taken_bytes"]) for one in told["months"]] == [
        ("2026-11", 4, 2), ("2026-12", 8, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "query",
    ["host=999", "pool=999", "kind=nothing", "held=maybe", "from=yesterday", "ordering=name", "image=x", "month=1"],
)
@pytest.mark.parametrize("path", ["ledger/", "ledger/summary/"])
def test_what_makes_no_sense_is_an_error_and_not_an_empty_list(viewer: APIClient, path: str, query: str) -> None:
    answer = viewer.get(f"/api/v1/{path}?{query}")
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid")


def test_lines_come_in_pages_in_the_order_that_is_asked_for(viewer: APIClient, db: None) -> None:
    jobs = [freed(10 * number, 1) for number in range(1, 6)]
    pages = [viewer.get(f"/api/v1/ledger/?ordering=-freed_bytes&limit=2&offset={at}").json() for at in (0, 2, 4)]
    assert [line["job"] for page in pages for line in page["results"]] == [job.pk for job in reversed(jobs)]
    assert [job["job"] for job in lines(viewer)] == [job.pk for job in reversed(jobs)]


def test_only_lines_of_hosts_in_scope_exist(client_of: Callable[..., APIClient], rows: dict[str, Any]) -> None:
    limited = client_of("viewer", hosts=["one"])
    assert ids(limited) == {rows["first"], rows["second"], rows["held"]}
    told = sums(limited)
    assert ([one["id"] for one in told["hosts"]], told["freed_bytes"]) == ([rows["image"].host_id], 2)
    HostFactory.create(slug="far")
    assert limited.get("/api/v1/ledger/?host=far").status_code == 400
    assert ids(limited, host="one") == ids(limited)


def test_a_host_that_was_removed_keeps_its_name_and_its_sums(viewer: APIClient) -> None:
    host = HostFactory.create(kind="ssh", name="Old one")
    job = freed(5, 1, ImageFactory.create(pool__host=host, pool__name="p"))
    registration.remove_host(ADMIN, host)
    (line,) = lines(viewer)
    assert (line["host"], line["host_name"], line["pool"], line["pool_name"]) == (None, "Old one", None, "p")
    assert (line["image"], line["image_name"]) == (None, job.target_label)
    assert [(one["id"], one["name"], one["freed_bytes"]) for one in sums(viewer)["hosts"]] == [(None, "Old one", 4)]
    assert viewer.get(f"/api/v1/jobs/{job.pk}/").status_code == 404
    assert viewer.get("/api/v1/jobs/").json()["count"] == 0


def test_the_first_page_tells_the_same_sum(viewer: APIClient, rows: dict[str, Any]) -> None:
    won, told = viewer.get("/api/v1/overview/").json()["won_so_far"], sums(viewer)
    assert {name: told[name] for name in won} == won
