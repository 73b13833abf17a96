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

from images.models import Policy, PolicyRun
from images.policies import preview, runs
from storage_admin.jobs import automation
from storage_admin.jobs.models import Job
from storage_admin.web.pages import policy_run
from storage_admin.web.pages.policies import SHOWN
from tests.factories import (
    GIB,
    HostFactory,
    ImageFactory,
    JobFactory,
    PolicyFactory,
    PolicyPickFactory,
    PolicyRunFactory,
    StoragePoolFactory,
    UserFactory,
)
from tests.policies.test_runs import end, estimated
from tests.web.html import errors_of, inline_code, tags_of, text_of
from tests.working import ADMIN

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]
FORM = {
    "name": "nightly", "cron": "0 22 * * 1-5", "timezone": "Europe/Berlin", "window_minutes": "360",
    "quiet_minutes": "30", "enabled": "on", "kind": "reclaim", "option-method": "auto", "option-undo_hours": "12",
    "min_reclaimable_mib": "1.5", "min_reclaimable_percent": "5", "min_age_hours": "168", "min_chain_depth": "1",
    "max_jobs_per_host": "2", "name_pattern": "web*",
}  # fmt: skip


def wins(**columns: Any) -> Any:
    return ImageFactory.create(**{"reclaimable_bytes": GIB} | estimated(8) | columns)


def test_a_policy_is_made_in_the_form_and_changed_there(admin: Client) -> None:
    host = HostFactory.create(name="pve1")
    answer = admin.post("/policies/add/", FORM | {"hosts": [str(host.pk)], "formats": ["qcow2"]})
    made = Policy.objects.get()
    assert answer["Location"] == f"/policies/{made.pk}/"
    assert (made.options["undo_hours"], made.min_reclaimable_bytes, made.hosts) == (12, 1_572_864, [host.pk])
    for shown in (f"/policies/{made.pk}/", f"/policies/{made.pk}/change/"):
        assert re.search(r" 22:00 to \w+ 04:00 Europe/Berlin", text_of(admin.get(shown).content.decode()))
    page = admin.get(f"/policies/{made.pk}/change/").content.decode()
    kept = held(page)
    assert (kept["name"], kept["min_reclaimable_mib"], kept["option-undo_hours"]) == (["nightly"], ["1.5"], ["12"])
    off = {name: value for name, value in FORM.items() if name != "enabled"}
    admin.post(f"/policies/{made.pk}/change/", off | {"option-bandwidth_bytes_sec": "50", "all": ["hosts", "formats"]})
    made.refresh_from_db()
    assert (made.enabled, made.options["bandwidth_bytes_sec"], made.hosts) == (False, 50 << 20, [])


def held(page: str) -> dict[str, list[str]]:
    """What a browser would post of the form on a page as it is."""
    form = page[page.index('aria-label="Policy"') : page.index('id="answer"')]
    values: dict[str, list[str]] = {}
    chosen = ""
    for tag, found in tags_of(form):
        if tag == "select":
            chosen = found["name"] or ""
        elif tag == "option" and "selected" in found:
            values[chosen] = [found["value"] or ""]
        elif tag == "input" and "name" in found and (found.get("type") != "checkbox" or "checked" in found):
            values.setdefault(found["name"] or "", []).append(found.get("value", "on") or "")
    return values


@pytest.fixture
def narrow() -> Policy:
    """One whose host and pool were removed, with formats that the form offers to nobody else."""
    pool = StoragePoolFactory.create()
    policy = PolicyFactory.create(
        hosts=[pool.host_id], pools=[pool.pk], formats=["subvol", "unknown"], kind="analyze", options={}
    )
    pool.host.delete()
    return policy


def test_a_change_of_another_field_leaves_what_a_policy_is_for_as_it_is_though_it_was_removed(
    admin: Client, narrow: Policy
) -> None:
    address = f"/policies/{narrow.pk}/change/"
    page = admin.get(address).content.decode()
    assert f"host {narrow.hosts[0]} (removed)" in text_of(page)
    assert f"pool {narrow.pools[0]} (removed)" in text_of(page)
    assert admin.post(address, held(page) | {"name": "renamed"}).status_code == 302
    after = Policy.objects.get()
    assert (after.name, after.hosts, after.pools) == ("renamed", narrow.hosts, narrow.pools)
    assert after.formats == ["subvol", "unknown"]


@pytest.mark.parametrize(("name", "one"), [("hosts", "host"), ("pools", "pool"), ("formats", "format")])
def test_a_list_that_named_something_means_all_only_when_somebody_says_so(
    admin: Client, narrow: Policy, name: str, one: str
) -> None:
    address = f"/policies/{narrow.pk}/change/"
    unchecked = held(admin.get(address).content.decode())
    del unchecked[name]
    answer = admin.post(address, unchecked)
    assert answer.status_code == 400
    assert f"No {one} is checked any more: check those that it is for, or “All {name}" in text_of(
        answer.content.decode()
    )
    assert "Not yet" in text_of(admin.get(address, unchecked).content.decode())
    assert getattr(Policy.objects.get(), name) == getattr(narrow, name)
    assert admin.post(address, unchecked | {"all": [name]}).status_code == 302
    assert getattr(Policy.objects.get(), name) == []
    # From now on none checked means all, as in a new one.
    page = admin.get(address).content.decode()
    assert f"all-{name}" not in page
    assert admin.post(address, held(page)).status_code == 302


def test_what_was_removed_can_be_taken_out_on_purpose(admin: Client, narrow: Policy) -> None:
    host = HostFactory.create()
    address = f"/policies/{narrow.pk}/change/"
    changed = held(admin.get(address).content.decode()) | {"hosts": [str(host.pk)], "all": ["pools"]}
    assert admin.post(address, changed).status_code == 302
    assert (Policy.objects.get().hosts, Policy.objects.get().pools) == ([host.pk], [])


@pytest.mark.parametrize("wrong", ["987654", "9" * 40, "-1", "all", ""])
def test_a_host_that_there_is_not_never_makes_a_new_policy_one_for_all_hosts(admin: Client, wrong: str) -> None:
    answer = admin.post("/policies/add/", FORM | {"hosts": [wrong]})
    assert answer.status_code == 400
    assert "Hosts: There is no such host" in text_of(answer.content.decode())
    assert not Policy.objects.exists()


def test_a_host_that_was_removed_while_the_form_was_filled_in_stays_checked_in_it(admin: Client) -> None:
    answer = admin.post("/policies/add/", FORM | {"hosts": ["987654"]})
    assert held(answer.content.decode())["hosts"] == ["987654"]


def test_a_number_that_was_emptied_is_previewed_as_it_is_kept(admin: Client) -> None:
    one = wins(name="web-01")
    JobFactory.create(
        target=one, kind="reclaim", state="succeeded", finished=timezone.now() - timedelta(days=2),
        result={"before_bytes": 5 * GIB, "after_bytes": 4 * GIB},
    )  # fmt: skip
    policy = PolicyFactory.create(
        min_age_hours=168, min_reclaimable_percent=90, min_chain_depth=2, min_reclaimable_bytes=9
    )
    address = f"/policies/{policy.pk}/change/"
    optional = ("min_age_hours", "min_reclaimable_percent", "min_chain_depth", "min_reclaimable_mib")
    emptied = {name: [""] for name in optional}
    form = held(admin.get(address).content.decode()) | emptied
    assert "web-01" in text_of(admin.get(address, form).content.decode())
    assert admin.post(address, form).status_code == 302
    after = Policy.objects.get()
    assert (after.min_age_hours, after.min_reclaimable_percent, after.min_chain_depth) == (0, 0, 1)
    assert after.min_reclaimable_bytes == 0


@pytest.mark.parametrize("name", ["window_minutes", "quiet_minutes", "max_jobs_per_host"])
def test_a_number_that_a_policy_cannot_be_without_is_asked_for(admin: Client, name: str) -> None:
    policy = PolicyFactory.create()
    form = held(admin.get(f"/policies/{policy.pk}/change/").content.decode()) | {name: [""]}
    for answer in (
        admin.get(f"/policies/{policy.pk}/change/", form),
        admin.post(f"/policies/{policy.pk}/change/", form),
    ):
        assert "Give a whole number." in text_of(answer.content.decode())


def test_what_makes_no_sense_is_said_with_what_was_typed_still_there(admin: Client) -> None:
    answer = admin.post("/policies/add/", FORM | {"cron": "0 99 * * *", "max_jobs_per_host": "many"})
    page = text_of(answer.content.decode())
    assert answer.status_code == 400
    assert "Not saved." in page
    assert errors_of(answer.content.decode()) == ["cron", "max_jobs_per_host"]
    assert 'value="0 99 * * *"' in answer.content.decode()
    page = text_of(admin.post("/policies/add/", FORM | {"cron": "0 99 * * *"}).content.decode())
    assert "Cron: The field for the hour cannot be read" in page
    assert not Policy.objects.exists()


def test_what_a_plan_refuses_is_neither_counted_nor_summed(admin: Client) -> None:
    wins(name="web-01")
    wins(name="web-02", header={"data_file": "data.raw"})
    page = text_of(admin.get("/policies/add/", FORM | {"name_pattern": ""}).content.decode())
    assert "1, about 1 GiB; 1 refused" in page
    assert "external data file Its data lies in a file of its own" in page


def test_what_all_of_it_comes_to_is_the_same_on_every_page_of_a_preview(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(SHOWN + 5):
        wins(name=f"web-{number:02}", header={"data_file": "data.raw"} if number < 10 else {})
    address = f"/policies/{PolicyFactory.create().pk}/preview/"
    for begin in (0, SHOWN):
        page = text_of(admin.get(f"{address}?chosen={begin}").content.decode())
        assert "20 in the order of gain; together about 20 GiB; 10 refused by their plans" in page
    monkeypatch.setattr(preview, "PLANNED_TOGETHER", 5)
    for begin in (0, 4, SHOWN):
        page = text_of(admin.get(f"{address}?chosen={begin}").content.decode())
        assert "25 in the order of gain; together about 25 GiB; 5 of the first 5 refused by their plans" in page
        assert f"{begin + 1}\u2013" in page


def test_the_form_shows_the_choice_and_the_next_windows_as_it_is_filled_in(admin: Client) -> None:
    wins(name="web-01")
    wins(name="web-02", in_use=True, in_use_detail="guest web is running")
    wins(name="db")
    answer = admin.get("/policies/add/", FORM, headers={"HX-Request": "true"})
    page = text_of(answer.content.decode())
    assert "<html" not in answer.content.decode()
    assert "web-01" in page
    assert "guest web is running" in page
    assert "Its name does not match" in page
    assert "Not yet" in text_of(
        admin.get("/policies/add/", FORM | {"cron": "soon"}, headers={"HX-Request": "true"}).content.decode()
    )
    # Without JavaScript the whole page says the same.
    assert "web-01" in text_of(admin.get("/policies/add/", FORM).content.decode())


def test_another_kind_brings_its_own_options(admin: Client) -> None:
    headers = {"HX-Request": "true"}
    asked = FORM | {"kind": "analyze", "options_of": "reclaim"}
    page = admin.get("/policies/add/", asked, headers=headers).content.decode()
    assert 'name="option-mode"' in page
    assert 'hx-swap-oob="true"' in page
    assert "option-undo_hours" not in page
    same = admin.get("/policies/add/", FORM | {"options_of": "reclaim"}, headers=headers).content.decode()
    assert "hx-swap-oob" not in same
    for kind in ("flatten", "check", "benchmark"):
        assert admin.get("/policies/add/", FORM | {"kind": kind}).status_code == 200


def test_only_a_new_policy_that_reclaims_asks_for_a_gain_that_nobody_typed(admin: Client) -> None:
    ImageFactory.create(name="web-01", reclaimable_bytes=None, declared_format="qcow2")
    new = held(admin.get("/policies/add/").content.decode()) | {"name": ["new"]}
    assert new["min_reclaimable_mib"] == ["100"]
    analyze = new | {"kind": ["analyze"]}
    headers = {"HX-Request": "true"}
    page = admin.get("/policies/add/", analyze, headers=headers).content.decode()
    assert "web-01" in text_of(page)
    [gain] = [found for _tag, found in tags_of(page) if found.get("name") == "min_reclaimable_mib"]
    assert gain["value"] == "0"
    back = analyze | {"kind": ["reclaim"], "options_of": ["analyze"], "min_reclaimable_mib": ["0"]}
    assert 'value="100"' in admin.get("/policies/add/", back, headers=headers).content.decode()
    typed = admin.get("/policies/add/", analyze | {"min_reclaimable_mib": ["7"]}, headers=headers).content.decode()
    assert 'name="min_reclaimable_mib"' not in typed
    admin.post("/policies/add/", analyze)
    assert Policy.objects.get().min_reclaimable_bytes == 0
    admin.post("/policies/add/", new | {"name": ["another"]})
    assert Policy.objects.get(name="another").min_reclaimable_bytes == 100 << 20


def test_a_policy_runs_by_hand_and_its_run_says_what_became_of_it(operator: Client) -> None:
    wins(name="web-01")
    wins(name="web-02", in_use=None)
    policy = PolicyFactory.create()
    answer = operator.post(f"/policies/{policy.pk}/run/")
    run = PolicyRun.objects.get()
    assert answer["Location"] == f"/policies/{policy.pk}/runs/{run.pk}/"
    assert "It has not chosen yet" in text_of(operator.get(answer["Location"]).content.decode())
    runs.work(timezone.now())
    end(before_bytes=4 * GIB, after_bytes=3 * GIB, freed_bytes=GIB)
    runs.work(timezone.now())
    page = text_of(operator.get(answer["Location"]).content.decode())
    for words in ("finished", "web-01", "web-02", "who uses it is not known", "1 GiB", f"job {Job.objects.get().pk}"):
        assert words.lower() in page.lower(), words
    job = operator.get(f"/jobs/{Job.objects.get().pk}/").content.decode()
    assert f'href="/policies/{policy.pk}/runs/{run.pk}/"' in job
    assert "1 GiB" in text_of(operator.get("/policies/").content.decode())
    assert "by hand, the-operator" in text_of(operator.get(f"/policies/{policy.pk}/").content.decode())


def test_a_run_is_stopped_from_its_page(operator: Client) -> None:
    run = PolicyRunFactory.create()
    operator.post(f"/policies/{run.policy_id}/runs/{run.pk}/stop/")
    run.refresh_from_db()
    assert (run.state, run.detail) == ("stopped", "Stopped by the-operator.")


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
    page = text_of(operator.get(f"/policies/{policy.pk}/preview/").content.decode())
    assert "web-01" in page
    assert "db-01" not in page
    page = text_of(operator.get(f"/policies/{policy.pk}/preview/?code=other_name").content.decode())
    assert "db-01" in page
    assert "Its name does not match" in page
    for number in range(SHOWN):
        wins(name=f"db-{number + 10}")
    page = operator.get(f"/policies/{policy.pk}/preview/?code=other_name").content.decode()
    assert f"1\u2013{SHOWN} of {SHOWN + 1}" in text_of(page)
    [last] = re.findall(r'rel="next" href="([^"]+)"', page)
    page = text_of(operator.get(last.replace("&amp;", "&")).content.decode())
    assert f"{SHOWN + 1}\u2013{SHOWN + 1} of {SHOWN + 1}" in page
    assert f"db-{SHOWN + 9}" in page


def test_pausing_all_automation_shows_on_every_page_until_it_goes_on(admin: Client, viewer: Client) -> None:
    admin.post("/automation/", {"paused": "true", "reason": "a move"})
    assert automation.is_paused()
    for address in ("/", "/jobs/", "/policies/"):
        page = text_of(viewer.get(address).content.decode())
        assert "All automation is paused by the-admin" in page
        assert "a move" in page
    assert "Let it go on" not in text_of(viewer.get("/jobs/").content.decode())
    admin.post("/automation/", {"paused": "false"})
    assert "All automation is paused" not in text_of(viewer.get("/").content.decode())


def test_each_role_may_do_its_part(browser_of: Callable[[str], Client]) -> None:
    run = PolicyRunFactory.create()
    base = f"/policies/{run.policy_id}/"
    viewer, operator = browser_of("viewer"), browser_of("operator")
    for client in (viewer, operator):
        for address in ("/policies/add/", f"{base}change/"):
            assert client.get(address).status_code == 403
        for address in (f"{base}remove/", "/automation/"):
            assert client.post(address).status_code == 403
    for address in (f"{base}run/", f"{base}runs/{run.pk}/stop/"):
        assert viewer.post(address).status_code == 403
    assert viewer.get(f"{base}preview/").status_code == 403
    assert operator.get(f"{base}preview/").status_code == 200
    assert Policy.objects.exists()
    assert browser_of("admin").post(f"{base}remove/")["Location"] == "/policies/"
    assert not Policy.objects.exists()


def test_a_user_who_is_limited_to_some_hosts_sees_no_policy_that_reaches_others(
    browser_of: Callable[[str], Client],
) -> None:
    host = HostFactory.create(slug="mine")
    mine, other = PolicyFactory.create(hosts=[host.pk]), PolicyFactory.create()
    client = Client()
    user = UserFactory.create(role="admin", hosts=["mine"])
    client.force_login(user, "django.contrib.auth.backends.ModelBackend")
    page = text_of(client.get("/policies/").content.decode())
    assert mine.name in page
    assert other.name not in page
    assert client.get(f"/policies/{other.pk}/").status_code == 404
    wins(name="web-of-theirs")
    for code in ("other_host", "gone", ""):
        page = text_of(client.get(f"/policies/{mine.pk}/preview/?code={code}").content.decode())
        assert "web-of-theirs" not in page
        assert "other host" not in page
    run = PolicyRunFactory.create(policy=mine, left_out={"other_host": 4711})
    assert "4,711" not in text_of(client.get(f"/policies/{mine.pk}/runs/{run.pk}/").content.decode())
    assert "4,711" in text_of(browser_of("viewer").get(f"/policies/{mine.pk}/runs/{run.pk}/").content.decode())
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
        tags = tags_of(page)
        ids = [found["id"] for _, found in tags if "id" in found]
        assert len(ids) == len(set(ids)), address
        assert {found["for"] for tag, found in tags if tag == "label"} <= set(ids), address
