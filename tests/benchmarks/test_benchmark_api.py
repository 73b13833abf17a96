"""benchmarks/ over REST: start, watch, read, compare, paste."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from benchmarks.models import Benchmark
from storage_admin.accounts.models import AuditEntry
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job
from tests.benchmarks.conftest import Measured
from tests.benchmarks.factories import BenchmarkFactory
from tests.factories import HostFactory, StoragePoolFactory

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet"), pytest.mark.sql]
DATA = Path(__file__).parent.parent / "data" / "benchmarks"
API = "/api/v1/benchmarks/"


def get(client: APIClient, path: str, status: int = 200) -> Any:
    answer = client.get(f"{API}{path}")
    assert answer.status_code == status, answer.json()
    return answer.json()


def post(client: APIClient, path: str, body: dict[str, Any], status: int, **headers: str) -> Any:
    answer = client.post(f"{API}{path}", body, format="json", headers=headers)
    assert answer.status_code == status, answer.json()
    return answer.json()


def test_a_run_is_started_and_found_again(operator: APIClient, pool: StoragePool) -> None:
    body = {"kind": "cluster_size", "pool": pool.pk, "host": pool.host.pk, "options": {"quick": True, "repetitions": 2}}
    started = post(operator, "", body, 202)
    assert (started["kind"], started["pool"], started["host"], started["state"]) == (
        "cluster_size", pool.pk, pool.host.pk, "queued",
    )  # fmt: skip
    assert started["options"]["repetitions"] == 2
    assert Job.objects.get().pk == started["job"]
    assert get(operator, "?kind=cluster_size")["results"] == [started]
    assert get(operator, "?kind=dd")["count"] == 0
    assert get(operator, f"{started['id']}/") == started


def test_the_same_key_gets_the_same_run(operator: APIClient, pool: StoragePool) -> None:
    body = {"kind": "dd", "pool": pool.pk}
    first = post(operator, "", body, 202, **{"Idempotency-Key": "once"})
    assert post(operator, "", body, 202, **{"Idempotency-Key": "once"})["id"] == first["id"]
    assert Benchmark.objects.count() == 1


def test_a_refusal_has_its_code_and_what_to_do(operator: APIClient, pool: StoragePool) -> None:
    StoragePool.objects.update(available_bytes=0)
    answer = post(operator, "", {"kind": "dd", "pool": pool.pk}, 409)
    assert answer["code"] == "not_enough_space"
    assert "Choose a smaller size" in answer["detail"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kind": "dd"}, "pool"), ({"kind": "hdparm"}, "kind"), ({"kind": "dd", "argv": ["rm"]}, "argv"),
        ({"kind": "dd", "options": {"argv": ["rm"]}}, "argv"), ({"kind": "dd", "options": {"kind": "fio"}}, "options"),
    ],
)  # fmt: skip
def test_a_body_that_says_something_else_is_invalid(
    operator: APIClient, pool: StoragePool, body: dict[str, Any], field: str
) -> None:
    answer = post(operator, "", body | ({} if field == "pool" else {"pool": pool.pk}), 400)
    assert field in answer["fields"]


def test_a_pool_of_another_host_than_said_is_invalid(operator: APIClient, pool: StoragePool) -> None:
    body = {"kind": "dd", "pool": pool.pk, "host": HostFactory.create().pk}
    assert "host" in post(operator, "", body, 400)["fields"]


def test_results_are_median_and_spread_with_advice(viewer: APIClient, pool: StoragePool, measured: Measured) -> None:
    run = measured(pool, {"64K": [21e6, 19e6, 20e6], "4K": [5e6, 6e6, 7e6]}, environment={"kernel": "6.1"})
    told = get(viewer, f"{run.pk}/results/")
    assert told["results"][0] == {
        "metric": "write_rate", "unit": "B/s", "setting": {"cluster_size": "64K"}, "median": 20e6, "min": 19e6,
        "max": 21e6, "repetitions": 3, "note": "",
    }  # fmt: skip
    assert told["environment"] == {"kernel": "6.1"}
    (advice,) = told["advice"]
    assert (advice["topic"], advice["measurable"]) == ("Cluster size", True)
    assert advice["sentence"].startswith("On fast, 64K writes 3.3 times faster than 4K")


def test_a_run_that_did_not_end_well_gives_no_advice(viewer: APIClient, pool: StoragePool, measured: Measured) -> None:
    run = measured(pool, {"64K": [30e6, 31e6], "4K": [5e6, 6e6]}, finished=None)
    told = get(viewer, f"{run.pk}/results/")
    assert len(told["results"]) == 2
    assert told["advice"] == []


def test_runs_are_compared_in_the_order_asked_for_beside_what_was_published(
    viewer: APIClient, pool: StoragePool, measured: Measured
) -> None:
    runs = [measured(pool, {"64K": [value]}) for value in (1.0, 2.0, 3.0)]
    told = get(viewer, f"compare/?ids={runs[2].pk},{runs[0].pk}")
    assert [run["benchmark"]["id"] for run in told["runs"]] == [runs[2].pk, runs[0].pk]
    assert [run["results"][0]["median"] for run in told["runs"]] == [3, 1]
    (series,) = told["published"]
    assert (series["kind"], series["measured_on"]) == ("cluster_size", "one Samsung SSD")


def test_the_list_is_filtered_and_ordered(viewer: APIClient, pool: StoragePool, measured: Measured) -> None:
    other = StoragePoolFactory.create(host__slug="other")
    first = measured(pool, {"64K": [1.0]}, finished=timezone.now())
    second = measured(other, {"64K": [1.0]}, kind="dd", quick=False, finished=timezone.now() - timedelta(days=1))
    drop = {"metric": "write_rate", "unit": "B/s", "setting": {}, "value": 1, "usual": 2, "usual_worst": 1.5,
            "ratio": 2, "runs": 3}  # fmt: skip
    third = measured(pool, {"64K": [1.0]}, regressions=[drop], finished=None)
    assert third.job is not None
    Job.objects.filter(pk=third.job.pk).update(state="failed")
    pasted = BenchmarkFactory.create(pool=None, source="pasted", kind="bonnie", finished=timezone.now())

    def ids(query: str) -> list[int]:
        return [row["id"] for row in viewer.get(f"/api/v1/benchmarks/{query}").json()["results"]]

    assert ids("") == [pasted.pk, third.pk, second.pk, first.pk]
    assert ids("?ordering=id") == [first.pk, second.pk, third.pk, pasted.pk]
    assert ids("?state=succeeded&source=run&ordering=finished") == [second.pk, first.pk]
    assert ids("?state=succeeded") == [pasted.pk, second.pk, first.pk]
    assert ids("?state=failed") == ids("?dropped=true") == [third.pk]
    assert ids("?dropped=false&quick=true") == [first.pk]
    assert ids("?quick=false") == ids("?kind=dd") == ids("?host=other") == [second.pk]
    assert ids(f"?pool={pool.pk}&ordering=-id") == [third.pk, first.pk]
    for wrong in ("ordering=pool", "quick=1", "dropped=", "state=odd", "kind=x", "pool=0", "nothing=1"):
        assert viewer.get(f"/api/v1/benchmarks/?{wrong}").status_code == 400, wrong


@pytest.mark.parametrize("ids", ["x", "1,,2", "-1", ",".join(map(str, range(1, 14))), "9" * 30])
def test_ids_that_are_none_are_invalid(viewer: APIClient, ids: str) -> None:
    assert "ids" in get(viewer, f"compare/?ids={ids}", 400)["fields"]


def test_profiles_tell_the_cost_before_the_start(viewer: APIClient, pool: StoragePool) -> None:
    pool.host.capabilities["tools"] = {"fio": False}
    pool.host.save()
    told = {(one["kind"], one["quick"]): one for one in get(viewer, f"profiles/?pool={pool.pk}")["results"]}
    assert len(told) == 16
    quick = told["preallocation", True]
    assert quick["available"]
    assert set(quick["cost"]) == {"bytes_written", "scratch_bytes", "seconds_about"}
    assert {"preallocation": "falloc"} in quick["steps"]
    assert (told["fio", True]["available"], told["fio", True]["package"]) == (False, "fio")
    assert get(viewer, "profiles/", 400)["fields"]["pool"]


def test_an_old_result_line_is_kept_and_can_be_compared(operator: APIClient, pool: StoragePool) -> None:
    pasted = post(operator, "paste/", {"text": (DATA / "bonnie-1.96.csv").read_text()}, 201)
    assert (pasted["source"], pasted["label"], pasted["job"], pasted["pool"], pasted["state"]) == (
        "pasted", "TEST", None, None, "succeeded",
    )  # fmt: skip
    rows = {row["metric"]: row for row in get(operator, f"{pasted['id']}/results/")["results"]}
    assert rows["seq_write_rate"]["median"] == 374_271 * 1024
    assert (rows["seeks"]["median"], rows["seeks"]["note"]) == (None, "too quick to measure")
    assert get(operator, f"compare/?ids={pasted['id']}")["runs"][0]["benchmark"] == pasted
    assert AuditEntry.objects.filter(what="benchmark pasted").count() == 1


def test_pasted_lines_of_one_machine_are_repetitions(operator: APIClient, db: None) -> None:
    pasted = post(operator, "paste/", {"text": (DATA / "bonnie-2.00a-two-tests.csv").read_text()}, 201)
    rows = {row["metric"]: row for row in get(operator, f"{pasted['id']}/results/")["results"]}
    assert (rows["putc_rate"]["min"], rows["putc_rate"]["max"]) == (1227 * 1024, 1571 * 1024)
    assert rows["putc_rate"]["repetitions"] == 2


@pytest.mark.parametrize("text", ["", "hello", "1.96,1", "1.96" + "," * 47])
def test_what_is_no_result_line_is_said_in_a_sentence(operator: APIClient, db: None, text: str) -> None:
    assert post(operator, "paste/", {"text": text}, 400)["fields"]["text"]
    assert not Benchmark.objects.exists()


def test_lines_of_different_machines_are_not_thrown_together(operator: APIClient, db: None) -> None:
    text = (DATA / "bonnie-1.96.csv").read_text() + (DATA / "bonnie-1.98.csv").read_text()
    assert "different machines" in post(operator, "paste/", {"text": text}, 400)["detail"]


def test_a_token_of_other_hosts_sees_no_run_of_this_one(
    client_of: Callable[..., APIClient], pool: StoragePool, measured: Measured
) -> None:
    run = measured(pool, {"64K": [1.0]})
    StoragePoolFactory.create(host__slug="other")
    limited = client_of("operator", hosts=["other"])
    assert get(limited, "")["count"] == 0
    get(limited, f"{run.pk}/results/", 404)
    get(limited, f"compare/?ids={run.pk}", 404)
    post(limited, "", {"kind": "dd", "pool": pool.pk}, 404)
    post(limited, "paste/", {"text": (DATA / "bonnie-1.96.csv").read_text()}, 403)
