"""Lists cost the same number of queries whatever their length, and stay quick."""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from rest_framework.test import APIClient

from images.models import Image
from images.selectors import lists
from storage_admin.hosts.models import Host
from tests.benchmarks.factories import BenchmarkFactory, WatchFactory
from tests.factories import GIB, GuestDiskFactory, ImageFactory, ImageUseFactory, JobFactory, StoragePoolFactory
from tests.ledger.rows import freed

pytestmark = pytest.mark.sql

LISTS = {
    "images": 15,
    "jobs": 6,
    "guests": 7,
    "pools": 7,
    "hosts": 6,
    "overview": 30,
    "ledger": 6,
    "ledger/summary": 6,
    "benchmarks": 6,
    "benchmark-watches": 6,
}


def queries(client: APIClient, path: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        response = client.get(path)
    assert response.status_code == 200, response.json()
    return len(captured)


def populate(count: int) -> None:
    base = ImageFactory.create()
    for number in range(count):
        image = ImageFactory.create(backing=base, reclaimable_bytes=number, state="ok")
        use = ImageUseFactory.create(image=image)
        GuestDiskFactory.create(guest=use.disk.guest)
        JobFactory.create(target=image, kind="reclaim", state="running")
        JobFactory.create(target=image, kind="reclaim", state="failed", finished=timezone.now())
        freed(GIB, number, image)
        StoragePoolFactory.create()
        BenchmarkFactory.create()
        WatchFactory.create()


@pytest.mark.parametrize("path", LISTS)
def test_more_rows_cost_no_more_queries(viewer: APIClient, path: str) -> None:
    populate(3)
    viewer.get(f"/api/v1/{path}/")  # notes the token's use once
    few = queries(viewer, f"/api/v1/{path}/")
    populate(12)
    assert queries(viewer, f"/api/v1/{path}/") == few <= LISTS[path]


@pytest.mark.parametrize("limited", [False, True])
def test_the_list_of_images_keeps_its_budget_with_every_filter(
    client_of: Callable[..., APIClient], limited: bool
) -> None:
    populate(5)
    image = Image.objects.filter(uses__isnull=False).select_related("host", "pool").first()
    assert image is not None
    client = client_of("viewer", hosts=[image.host.slug] if limited else [])
    use: Any = image.uses.select_related("disk").get()
    query = (
        f"host={image.host.slug}&pool={image.pool_id}&guest={use.disk.guest_id}&format=qcow2&state=ok&min_chain_depth=1"
        "&max_chain_depth=9&min_reclaimable=0&in_use=false&orphan=false&search=disk&ordering=-reclaimable_bytes&limit=1000"
    )
    assert queries(client, f"/api/v1/images/?{query}") <= 15
    assert client.get(f"/api/v1/images/?{query}").json()["count"] == 1


#: To write an image's row with its indexes takes PostgreSQL ten times as long.
MANY = {"sqlite": 10_000, "postgresql": 2_000}


def make_images(count: int) -> int:
    """So many images in a pool of their own; the answer is how many."""
    pool = StoragePoolFactory.create()
    like = ImageFactory.build(pool=pool, host=pool.host)
    values = {f.attname: getattr(like, f.attname) for f in Image._meta.concrete_fields if f.attname != "id"}
    Image.every.bulk_create(
        [
            Image(
                **values
                | {
                    "name": f"vm-{n % 997}-disk-{n}.qcow2",
                    "path": f"/srv/vm-{n}",
                    "path_key": f"{n:032d}",
                    "inode": str(n),
                }
                | {
                    "allocated_size": n * 4096,
                    "reclaimable_bytes": None if n % 3 else n % GIB,
                    "chain_depth": n % 7 + 1,
                }
            )
            for n in range(count)
        ],
        batch_size=2000,
    )
    return count


@pytest.mark.parametrize("ordering", ["", "name", "-allocated_size", "-reclaimable_bytes", "reclaimable_bytes"])
def test_a_page_reads_an_index_and_does_not_sort_every_row(viewer: APIClient, ordering: str) -> None:
    make_images(2000)
    with CaptureQueriesContext(connection) as captured:
        assert viewer.get(f"/api/v1/images/?{urlencode({'ordering': ordering} if ordering else {})}").status_code == 200
    picked = next(query["sql"] for query in captured if "LIMIT 50" in query["sql"])
    plan = explained(picked)
    assert "image_by_" in plan, plan
    assert "TEMP B-TREE FOR ORDER BY" not in plan, plan


def explained(sql: str) -> str:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # So few rows are sorted as quickly; what is asked is whether the index can be used.
            # Without statistics it takes the table for empty, and any index will do.
            cursor.execute("ANALYZE images_image")
            cursor.execute("SET LOCAL enable_sort = off; SET LOCAL enable_seqscan = off")
            cursor.execute(f"EXPLAIN {sql}")
        else:
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
        return "\n".join(str(row) for row in cursor.fetchall())


@pytest.mark.parametrize(
    "query",
    ["format=qcow2&min_chain_depth=2", "max_chain_depth=3", "min_reclaimable=1", "in_use=false", "state=ok", "host={}"],
)
def test_what_a_filter_finds_is_counted_in_an_index(viewer: APIClient, query: str) -> None:
    make_images(2000)
    with CaptureQueriesContext(connection) as captured:
        query = query.format(Host.objects.get().pk)
        assert viewer.get(f"/api/v1/images/?{query}").json()["count"] > lists.FEW
    counted = next(found["sql"] for found in captured if "COUNT(*)" in found["sql"])
    # PostgreSQL knows from its statistics what is cheaper, and in a test there are none.
    assert connection.vendor == "postgresql" or "image_filters" in explained(counted), explained(counted)


def test_a_search_reads_an_index(viewer: APIClient) -> None:
    make_images(2000)
    with CaptureQueriesContext(connection) as captured:
        assert viewer.get("/api/v1/images/?search=vm-1999").json()["count"] == 1
    found = next(query["sql"] for query in captured if "LIKE" in query["sql"])
    assert connection.vendor == "postgresql" or "image_filters" in explained(found), explained(found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("few", [500, 22, 1])
@pytest.mark.parametrize(
    "ordering", ["name", "-name", "reclaimable_bytes", "-reclaimable_bytes", "-virtual_size", "id"]
)
def test_pages_are_pieces_of_the_whole_list_wherever_they_begin(
    viewer: APIClient, ordering: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_images(23)
    path = f"/api/v1/images/?ordering={ordering}"
    whole = [row["id"] for row in viewer.get(f"{path}&limit=1000").json()["results"]]
    assert len(set(whole)) == 23
    monkeypatch.setattr(lists, "FEW", few)
    for size in (4, 5, 23):
        paged = []
        for offset in range(0, 28, size):
            answer = viewer.get(f"{path}&limit={size}&offset={offset}").json()
            paged += [row["id"] for row in answer["results"]]
            assert answer["count"] == 23
        assert paged == whole
