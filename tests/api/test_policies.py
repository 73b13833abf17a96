"""Policies over REST: what is kept, what is refused by its field, who sees which."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from rest_framework.test import APIClient

from images.models import Policy
from images.policies.preview import CODES
from images.policies.reasons import NOT_MEANT
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent import protocol
from storage_admin.jobs.models import Job
from tests.api.policies import NIGHTLY, URL, wins
from tests.factories import GIB, HostFactory, PolicyFactory, PolicyRunFactory, StoragePoolFactory
from tests.harness.services import ROOT

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


def test_a_policy_is_made_read_changed_and_deleted_and_all_of_it_is_in_the_audit_trail(admin: APIClient) -> None:
    answer = admin.post(URL, NIGHTLY, format="json")
    assert answer.status_code == 201, answer.json()
    made = answer.json()
    assert (made["window_minutes"], made["quiet_minutes"], made["kind"], made["last_run"]) == (360, 30, "reclaim", None)
    assert made["options"]["undo_hours"] == 24
    assert made["next_window"]["opens"] < made["next_window"]["last_start"] < made["next_window"]["closes"]
    address = f"{URL}{made['id']}/"
    assert admin.get(address).json() == made
    off = admin.patch(address, {"enabled": False, "options": {"undo_hours": 0}}, format="json").json()
    assert (off["enabled"], off["options"]["undo_hours"], off["next_window"]) == (False, 0, None)
    assert admin.delete(address).status_code == 204
    trail = AuditEntry.objects.filter(target="nightly").order_by("id").values_list("what", "before", "after")
    created, changed, deleted = ((what, *(hours(of) for of in states)) for what, *states in trail)
    assert created == ("policy created", None, 24)
    assert changed == ("policy changed", 24, 0)
    assert deleted == ("policy deleted", 0, None)


def preview(client: APIClient, policy: Policy, query: str = "") -> Any:
    return client.get(f"{URL}{policy.pk}/preview/{query}").json()


def hours(state: Any) -> Any:
    return state and state["options"]["undo_hours"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"name": " "}, "name"),
        ({"cron": "0 22 * *"}, "cron"),
        ({"timezone": "Mars/Base"}, "timezone"),
        ({"quiet_minutes": 360}, "quiet_minutes"),
        ({"window_minutes": 0}, "window_minutes"),
        ({"hosts": [987654]}, "hosts"),
        ({"pools": [987654]}, "pools"),
        ({"formats": ["floppy"]}, "formats.0"),
        ({"name_pattern": "! template*"}, "name_pattern"),
        ({"name_pattern": "web* !"}, "name_pattern"),
        ({"timezone": "localtime"}, "timezone"),
        ({"min_reclaimable_percent": 101}, "min_reclaimable_percent"),
        ({"max_jobs_per_host": 0}, "max_jobs_per_host"),
        ({"kind": "convert"}, "kind"),
        ({"options": {"method": "magic"}}, "options"),
        ({"kind": "analyze", "options": {"when_running": "wait"}}, "options"),
        ({"kind": "live_flatten", "options": {"disk": "vda"}}, "options"),
        ({"options": {"start_after": True}}, "options"),
        ({"kind": "check", "options": {"repair": "all"}}, "options"),
        ({"kind": "flatten", "options": {"down_to": 3}}, "options"),
        ({"kind": "benchmark", "options": {}}, "options"),
        ({"kind": "benchmark", "options": {"kind": "dd"}, "formats": ["raw"]}, "formats"),
        ({"nmae": "x"}, "nmae"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_its_field(admin: APIClient, wrong: dict[str, Any], field: str) -> None:
    answer = admin.post(URL, NIGHTLY | wrong, format="json")
    assert answer.status_code == 400
    assert field in answer.json()["fields"], answer.json()
    assert not Policy.objects.exists()


def test_a_pool_has_to_be_on_one_of_the_hosts(admin: APIClient) -> None:
    host, pool = HostFactory.create(), StoragePoolFactory.create()
    answer = admin.post(URL, NIGHTLY | {"hosts": [host.pk], "pools": [pool.pk]}, format="json")
    assert "not among the selected hosts" in answer.json()["fields"]["pools"]


def test_the_preview_tells_the_choice_in_order_and_every_reason(operator: APIClient) -> None:
    small, large = wins(name="small", reclaimable_bytes=GIB // 2), wins(name="large")
    running = wins(name="running", in_use=True, in_use_detail="guest web is running")
    locked = wins(name="locked", header={"data_file": "data.raw"})
    raw = wins(name="other", declared_format="raw")
    policy = PolicyFactory.create(formats=["qcow2"])
    found = preview(operator, policy)
    assert [(one["image"], one["label"]) for one in found["chosen"]] == [(large.pk, "large"), (small.pk, "small")]
    assert found["chosen"][0]["predicted_bytes"] == GIB
    skipped = {one["image"]: (one["code"], one["reason"]) for one in found["skipped"]}
    words = "The image is in use: guest web is running. A policy never shuts down a guest."
    assert skipped[running.pk] == ("guest_running", words)
    assert skipped[locked.pk][0] == "external_data_file"
    assert raw.pk not in skipped
    word = "In a format that the policy does not include."
    assert {"code": "other_format", "word": word, "count": 1, "meant": False} in found["left_out"]
    assert len(found["windows"]) == 5
    assert (found["chosen_count"], found["skipped_count"]) == (3, 1)
    assert Job.objects.count() == 0
    for code, one in (("busy", None), ("guest_running", running), ("external_data_file", locked)):
        only = preview(operator, policy, f"?code={code}")
        assert [skip["image"] for skip in only["skipped"]] == ([one.pk] if one else []), code
        assert only["skipped_count"] == (code == "guest_running")


def test_those_that_a_policy_is_not_for_are_listed_page_by_page_when_asked_for(operator: APIClient) -> None:
    host = HostFactory.create()
    pool, other = (StoragePoolFactory.create(host=host) for _ in range(2))
    wins(name="web", pool=pool)
    unmeant: dict[str, Any] = {
        "other_name": [wins(name=f"db{number}", pool=pool) for number in range(5)],
        "other_format": [wins(name="web.raw", pool=pool, declared_format="raw")],
        "other_pool": [wins(name="web", pool=other)],
        "other_host": [wins(name="web")],
        "gone": [wins(name="web-gone", pool=pool, state="missing")],
        "listed_elsewhere": [],
    }
    policy = PolicyFactory.create(hosts=[host.pk], pools=[pool.pk], formats=["qcow2"], name_pattern="web*")
    for code, images in unmeant.items():
        found = preview(operator, policy, f"?code={code}")
        assert [one["image"] for one in found["skipped"]] == [image.pk for image in images], code
        counts = [one["count"] for one in found["left_out"] if one["code"] == code]
        assert found["skipped_count"] == len(images) == sum(counts)
    third = preview(operator, policy, "?code=other_name&limit=2&offset=3")
    assert [one["label"] for one in third["skipped"]] == ["db3", "db4"]
    assert third["skipped_count"] == 5
    first = third["skipped"][0]
    assert (first["pool"], first["host"], first["code"], first["reason"]) == (
        pool.pk, host.pk, "other_name", "The name does not match the patterns of the policy.",
    )  # fmt: skip
    everything = PolicyFactory.create()
    for code in ("other_host", "other_pool", "other_name", "other_format"):
        assert preview(operator, everything, f"?code={code}")["skipped"] == [], code


def test_pools_that_a_policy_for_pools_is_not_for_are_listed_too(operator: APIClient) -> None:
    host = HostFactory.create()
    pool = StoragePoolFactory.create(host=host, name="fast")
    unmeant = {
        "other_host": StoragePoolFactory.create(name="fast"),
        "other_pool": StoragePoolFactory.create(host=host, name="fast2"),
        "other_name": StoragePoolFactory.create(host=host, name="slow"),
    }
    named = [pool.pk, unmeant["other_name"].pk]
    policy = PolicyFactory.create(
        kind="benchmark", options={"kind": "dd"}, hosts=[host.pk], pools=named, name_pattern="fast*"
    )
    for code, one in unmeant.items():
        found = preview(operator, policy, f"?code={code}")
        assert [(skip["image"], skip["pool"], skip["code"]) for skip in found["skipped"]] == [(None, one.pk, code)]
        assert [one["count"] for one in found["left_out"] if one["code"] == code] == [1]


@pytest.mark.parametrize("code", ["buzy", "other", "ok", "%00", "gone,busy"])
def test_a_code_that_there_is_not_is_an_error(operator: APIClient, code: str) -> None:
    for answer in (
        operator.get(f"{URL}{PolicyFactory.create().pk}/preview/?code={code}"),
        operator.post(f"{URL}preview/?code={code}", NIGHTLY, format="json"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid")
        assert answer.json()["fields"]["code"].startswith("This code does not exist")


def test_every_code_that_is_documented_can_be_asked_for() -> None:
    told = set()
    for page in ("policies.md", "refusals.md"):
        for line in (ROOT / "docs" / page).read_text().splitlines():
            if re.match(r"\| `[a-z_]+`", line):
                told |= set(re.findall(r"`([a-z_]+)`", line.split("|")[1]))
    assert len(told) > 45
    # How a job ends is no reason to leave an image out.
    assert told - {protocol.BOTH_KEPT, protocol.STRANGERS_KEPT} <= CODES
    assert set(NOT_MEANT) <= CODES


def test_what_is_on_hosts_that_somebody_does_not_see_is_neither_counted_nor_listed(
    client_of: Callable[..., APIClient],
) -> None:
    host = HostFactory.create(slug="mine")
    pool = StoragePoolFactory.create(host=host)
    own = wins(name="own", pool=StoragePoolFactory.create(host=host))
    wins(name="theirs")
    wins(name="lost", state="missing")
    everybody, limited = client_of("operator"), client_of("operator", hosts=["mine"])
    for policy in (PolicyFactory.create(pools=[pool.pk]), PolicyFactory.create(hosts=[host.pk], pools=[pool.pk])):
        for code in ("other_pool", "other_host", "gone"):
            address = f"{URL}{policy.pk}/preview/?code={code}"
            found, whole = limited.get(address).json(), everybody.get(address).json()
            assert {one["image"] for one in found["skipped"]} <= {own.pk}
            assert {one["code"]: one["count"] for one in found["left_out"]} == {"other_pool": 1}
            assert sum(one["count"] for one in whole["left_out"]) == 3
        PolicyRunFactory.create(policy=policy, left_out={"other_host": 2, "gone": 1, "other_name": 4, "too_little": 5})
        for client, codes in ((limited, "other_name too_little"), (everybody, "gone other_host other_name too_little")):
            [run] = client.get(f"{URL}{policy.pk}/runs/").json()["results"]
            assert sorted(one["code"] for one in run["left_out"]) == codes.split()


def test_what_does_not_fit_beside_what_is_chosen_already_says_so(operator: APIClient) -> None:
    pool = StoragePoolFactory.create(capacity_bytes=100 * GIB, available_bytes=9 * GIB)
    for name in ("a", "b"):
        wins(name=name, pool=pool)
    policy = PolicyFactory.create(options={"method": "copy"})
    found = preview(operator, policy)
    assert [one["label"] for one in found["chosen"]] == ["a"]
    assert [(one["label"], one["code"]) for one in found["skipped"]] == [("b", "not_enough_space")]


def test_a_draft_is_previewed_without_being_made(operator: APIClient) -> None:
    wins()
    answer = operator.post(f"{URL}preview/", NIGHTLY, format="json")
    assert answer.json()["chosen_count"] == 1
    assert not Policy.objects.exists()
