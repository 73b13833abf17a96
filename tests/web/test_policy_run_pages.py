"""Policies in the browser's pages: made in a form that shows the choice, run by hand, read; the switch for all."""

import csv
import io
import re
from collections.abc import Callable
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from images.models import PolicyRun
from storage_admin.jobs import automation
from storage_admin.web.pages import policy_run
from storage_admin.web.pages.policies import SHOWN
from tests.api.policies import wins
from tests.factories import (
    GIB,
    HostFactory,
    ImageFactory,
    JobFactory,
    PolicyFactory,
    PolicyPickFactory,
    PolicyRunFactory,
)
from tests.web.html import flat, inline_code, labels_of, text_of
from tests.working import ADMIN, client_as

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


def test_a_run_page_refreshes_while_it_is_at_work_and_rests_when_it_has_ended(viewer: Client) -> None:
    run = PolicyRunFactory.create()
    assert 'hx-trigger="every 2s"' in viewer.get(f"/policies/{run.policy_id}/runs/{run.pk}/").content.decode()
    PolicyRun.objects.update(state="finished", finished=timezone.now())
    assert 'hx-trigger="every 2s"' not in viewer.get(f"/policies/{run.policy_id}/runs/{run.pk}/").content.decode()


def test_a_run_of_many_jobs_has_pages_that_stay_while_it_is_at_work(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_run, "JOBS_PER_PAGE", 2)
    monkeypatch.setattr(policy_run, "PICKS_PER_PAGE", 2)
    run = PolicyRunFactory.create(chosen_at=timezone.now())
    nowhere: dict[str, Any] = {"image": None, "host": None, "pool": None}
    skipped = {"state": "skipped", "code": "busy"}
    for number in range(5):
        PolicyPickFactory.create(run=run, place=number, label=f"job-{number}", **nowhere)
        PolicyPickFactory.create(run=run, place=9, label=f"left-{number}", **nowhere, **skipped)
    address = f"/policies/{run.policy_id}/runs/{run.pk}/"
    first = viewer.get(address).content.decode()
    assert labels(first) == ["job-0", "job-1", "left-0", "left-1"]
    assert "1\u20132 of 5" in text_of(first)
    second = viewer.get(f"{address}?code=busy&page=3&jobs=2").content.decode()
    assert labels(second) == ["job-2", "job-3", "left-4"]
    [asks] = re.findall(r'hx-get="(/policies/[^"]+)"', second)
    htmx = {"HX-Request": "true"}
    assert viewer.get(unescape(asks), headers=htmx).status_code == 204
    run.picks.filter(place=2).update(label="job-two")
    part = viewer.get(unescape(asks), headers=htmx).content.decode()
    assert labels(part) == ["job-two", "job-3"]
    [again] = re.findall(r'hx-get="([^"]+)"', part)
    assert viewer.get(unescape(again), headers=htmx).status_code == 204
    for shown in (second, part):
        [following] = re.findall(r'rel="next" href="([^"]*jobs=3[^"]*)"', shown)
        assert labels(viewer.get(address + unescape(following)).content.decode()) == ["job-4", "left-4"]
    for wrong, shown in (("99", "job-4"), ("x", "job-0"), ("-1", "job-4"), ("%00", "job-0")):
        assert shown in labels(viewer.get(f"{address}?jobs={wrong}").content.decode()), wrong


def labels(page: str) -> list[str]:
    return re.findall(r'<span class="name" title="([^"]+)"', page)


def test_all_that_a_run_looked_at_is_to_be_had_as_csv(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_run, "JOBS_PER_PAGE", 1)
    run = PolicyRunFactory.create()
    image = ImageFactory.create(name="web-01")
    job = JobFactory.create(target=image, state="succeeded", freed_bytes=0, undo_bytes=GIB)
    done = PolicyPickFactory.create(
        run=run, place=1, image=image, host=image.host, pool=image.pool, label="web-01", state="succeeded", job=job,
        predicted_bytes=2 * GIB,
    )  # fmt: skip
    PolicyPickFactory.create(run=run, place=2, image=None, host=None, pool=None, label="=gone", state="chosen")
    PolicyPickFactory.create(run=run, place=3, label="b", state="skipped", code="busy", reason="Another job has it.")
    PolicyPickFactory.create(label="of another run")
    address = f"/policies/{run.policy_id}/runs/{run.pk}/picks.csv"
    assert f'href="{address}"' in viewer.get(address.removesuffix("picks.csv")).content.decode()
    answer: Any = viewer.get(address)
    assert answer["Content-Disposition"].startswith(f'attachment; filename="policy-run-{run.pk}-20')
    first, second, third = csv.DictReader(io.StringIO(answer.getvalue().decode(), newline=""))
    assert first == {
        "id": str(done.pk), "place": "1", "image_id": str(image.pk), "name": "web-01", "host": image.host.name,
        "pool": image.pool.name, "state": "succeeded", "code": "", "reason": "", "job": str(job.pk),
        "predicted_bytes": str(2 * GIB), "won_bytes": "0", "held_bytes": str(GIB),
    }  # fmt: skip
    assert (second["name"], second["image_id"], second["host"], second["job"], second["won_bytes"]) == (
        "'=gone", "", "", "", "",
    )  # fmt: skip
    assert (third["state"], third["code"], third["reason"]) == ("skipped", "busy", "Another job has it.")
    other = PolicyFactory.create()
    assert viewer.get(f"/policies/{other.pk}/runs/{run.pk}/picks.csv").status_code == 404


def test_the_runs_of_a_policy_are_to_be_had_as_csv(viewer: Client) -> None:
    policy = PolicyFactory.create()
    due = timezone.now().replace(microsecond=0)
    missed = PolicyRunFactory.create(policy=policy, due=due, state="missed", detail="No worker was there.", by="")
    run = PolicyRunFactory.create(policy=policy, due=due - timedelta(days=1), state="finished", finished=due)
    for number, freed in enumerate((GIB, None)):
        job = JobFactory.create(kind="reclaim", target=ImageFactory.create(), freed_bytes=freed, undo_bytes=number)
        state = "failed" if freed is None else "succeeded"
        PolicyPickFactory.create(run=run, place=number, state=state, job=job, predicted_bytes=2 * GIB)
    PolicyPickFactory.create(run=run, place=9, state="skipped", code="busy")
    PolicyRunFactory.create()  # of another policy
    address = f"/policies/{policy.pk}/runs.csv"
    assert f'href="{address}"' in viewer.get(f"/policies/{policy.pk}/").content.decode()
    answer: Any = viewer.get(address)
    assert answer["Content-Disposition"].startswith(f'attachment; filename="policy-{policy.pk}-runs-20')
    first, second = csv.DictReader(io.StringIO(answer.getvalue().decode(), newline=""))
    assert (first["id"], first["state"], first["detail"]) == (str(missed.pk), "missed", "No worker was there.")
    assert {first[name] for name in ("jobs", "failed", "left_out", "predicted_bytes", "won_bytes", "held_bytes")} == {
        ""
    }
    assert second["due"] == (due - timedelta(days=1)).isoformat().replace("+00:00", "Z")
    counted = {name: second[name] for name in ("jobs", "failed", "left_out", "predicted_bytes", "won_bytes")}
    assert counted == {
        "jobs": "2", "failed": "1", "left_out": "1", "predicted_bytes": str(4 * GIB), "won_bytes": str(GIB),
    }  # fmt: skip


def test_the_preview_page_lists_what_the_policy_is_not_for_when_asked(operator: Client) -> None:
    wins(name="web-01")
    wins(name="db-01")
    policy = PolicyFactory.create(name_pattern="web*")
    page = text_of(operator.get(f"/policies/{policy.pk}/preview/"))
    assert "web-01" in page
    assert "db-01" not in page
    page = text_of(operator.get(f"/policies/{policy.pk}/preview/?code=other_name"))
    assert "db-01" in page
    assert "The name does not match" in page
    for number in range(SHOWN):
        wins(name=f"db-{number + 10}")
    page = operator.get(f"/policies/{policy.pk}/preview/?code=other_name").content.decode()
    assert f"1\u2013{SHOWN} of {SHOWN + 1}" in text_of(page)
    [last] = re.findall(r'rel="next" href="([^"]+)"', flat(page))
    page = text_of(operator.get(last.replace("&amp;", "&")))
    assert f"{SHOWN + 1}\u2013{SHOWN + 1} of {SHOWN + 1}" in page
    assert f"db-{SHOWN + 9}" in page


def test_pausing_all_automation_shows_on_every_page_until_it_goes_on(admin: Client, viewer: Client) -> None:
    answer = admin.post("/automation/", {"paused": "true", "reason": "a move"}, follow=True)
    assert automation.is_paused()
    assert [str(said) for said in answer.context["messages"]] == ["Automation is paused."]
    for address in ("/", "/jobs/", "/policies/"):
        page = text_of(viewer.get(address))
        assert "All automation is paused. Paused by the-admin" in page
        assert "a move" in page
    assert "Resume" not in text_of(viewer.get("/jobs/"))
    admin.post("/automation/", {"paused": "false"})
    assert "All automation is paused" not in text_of(viewer.get("/"))


def test_a_user_who_is_limited_to_some_hosts_sees_no_policy_that_reaches_others(
    browser_of: Callable[[str], Client],
) -> None:
    host = HostFactory.create(slug="mine")
    mine, other = PolicyFactory.create(hosts=[host.pk]), PolicyFactory.create()
    client = client_as(role="admin", hosts=["mine"])
    page = text_of(client.get("/policies/"))
    assert mine.name in page
    assert other.name not in page
    assert client.get(f"/policies/{other.pk}/").status_code == 404
    wins(name="web-of-theirs")
    for code in ("other_host", "gone", ""):
        page = text_of(client.get(f"/policies/{mine.pk}/preview/?code={code}"))
        assert "web-of-theirs" not in page
        assert "other host" not in page
    run = PolicyRunFactory.create(policy=mine, left_out={"other_host": 4711})
    assert "4,711" not in text_of(client.get(f"/policies/{mine.pk}/runs/{run.pk}/"))
    assert "4,711" in text_of(browser_of("viewer").get(f"/policies/{mine.pk}/runs/{run.pk}/"))
    assert client.post("/automation/", {"paused": "true"}).status_code == 403
    assert not automation.is_paused()


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_pages_are_whole_and_escape_what_strangers_name(browser_of: Callable[[str], Client], role: str) -> None:
    name = '<script>alert("x")</script>'
    automation.switch(ADMIN, paused=True, reason=name)
    run = PolicyRunFactory.create(policy__name=name, state="missed", detail=name, finished=timezone.now())
    PolicyPickFactory.create(run=run, label=name, image__name=name)
    PolicyPickFactory.create(run=run, label=name, image__name=name, state="skipped", code="busy", reason=name)
    base = f"/policies/{run.policy_id}/"
    addresses = ["/policies/", base, f"{base}runs/{run.pk}/"]
    addresses += [f"{base}preview/"] if role != "viewer" else []
    addresses += ["/policies/add/", f"{base}change/"] if role == "admin" else []
    client = browser_of(role)
    for address in addresses:
        answer = client.get(address)
        page = answer.content.decode()
        assert answer.status_code == 200, address
        assert inline_code(page) == [], address
        assert "<script>alert" not in page, address
        assert labels_of(page) == ([], []), address
