"""Policies in the browser's pages: made in a form that shows the choice, run by hand, read; the switch for all."""

import re
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from images.models import Policy, PolicyRun
from images.policies import preview, runs
from storage_admin.jobs.models import Job
from storage_admin.web.pages.policies import SHOWN
from tests.api.policies import wins
from tests.factories import (
    GIB,
    HostFactory,
    ImageFactory,
    JobFactory,
    PolicyFactory,
    PolicyRunFactory,
    StoragePoolFactory,
)
from tests.policies.test_runs import end
from tests.web.html import errors_of, tags_of, text_of
from tests.working import reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


FORM = {
    "name": "nightly", "cron": "0 22 * * 1-5", "timezone": "Europe/Berlin", "window_minutes": "360",
    "quiet_minutes": "30", "enabled": "on", "kind": "reclaim", "option-method": "auto", "option-undo_hours": "12",
    "min_reclaimable_mib": "1.5", "min_reclaimable_percent": "5", "min_age_hours": "168", "min_chain_depth": "1",
    "max_jobs_per_host": "2", "name_pattern": "web*",
}  # fmt: skip


def test_a_policy_is_made_in_the_form_and_changed_there(admin: Client) -> None:
    host = HostFactory.create(name="pve1")
    answer = admin.post("/policies/add/", FORM | {"hosts": [str(host.pk)], "formats": ["qcow2"]})
    made = Policy.objects.get()
    assert answer["Location"] == f"/policies/{made.pk}/"
    assert (made.options["undo_hours"], made.min_reclaimable_bytes, made.hosts) == (12, 1_572_864, [host.pk])
    for shown in (f"/policies/{made.pk}/", f"/policies/{made.pk}/change/"):
        assert re.search(r" 22:00 to \w+ 04:00 Europe/Berlin", text_of(admin.get(shown)))
    page = admin.get(f"/policies/{made.pk}/change/").content.decode()
    kept = held(page)
    assert (kept["name"], kept["min_reclaimable_mib"], kept["option-undo_hours"]) == (["nightly"], ["1.5"], ["12"])
    off = {name: value for name, value in FORM.items() if name != "enabled"}
    admin.post(f"/policies/{made.pk}/change/", off | {"option-bandwidth_bytes_sec": "50", "all": ["hosts", "formats"]})
    assert (reread(made).enabled, made.options["bandwidth_bytes_sec"], made.hosts) == (False, 50 << 20, [])


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
    assert f"No {one} is selected. Select at least one, or “All {name}" in text_of(answer)
    assert "Incomplete" in text_of(admin.get(address, unchecked))
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
    assert "Not saved. Hosts: " in text_of(answer)
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
    assert "web-01" in text_of(admin.get(address, form))
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
        assert "Enter a whole number." in text_of(answer)


def test_what_makes_no_sense_is_said_with_what_was_typed_still_there(admin: Client) -> None:
    answer = admin.post("/policies/add/", FORM | {"cron": "0 99 * * *", "max_jobs_per_host": "many"})
    page = text_of(answer)
    assert answer.status_code == 400
    assert "Not saved." in page
    assert errors_of(answer) == ["cron", "max_jobs_per_host"]
    assert 'value="0 99 * * *"' in answer.content.decode()
    page = text_of(admin.post("/policies/add/", FORM | {"cron": "0 99 * * *"}))
    assert "Cron: The hour field is not valid" in page
    assert not Policy.objects.exists()


def test_what_a_plan_refuses_is_neither_counted_nor_summed(admin: Client) -> None:
    wins(name="web-01")
    wins(name="web-02", header={"data_file": "data.raw"})
    page = text_of(admin.get("/policies/add/", FORM | {"name_pattern": ""}))
    assert "1, about 1 GiB; 1 refused" in page
    assert "refused The data of the image is in a separate data file" in page


def test_what_all_of_it_comes_to_is_the_same_on_every_page_of_a_preview(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(SHOWN + 5):
        wins(name=f"web-{number:02}", header={"data_file": "data.raw"} if number < 10 else {})
    address = f"/policies/{PolicyFactory.create().pk}/preview/"
    for begin in (0, SHOWN):
        page = text_of(admin.get(f"{address}?chosen={begin}"))
        assert "20, largest savings first; total about 20 GiB; 10 refused by their plans" in page
    monkeypatch.setattr(preview, "PLANNED_TOGETHER", 5)
    for begin in (0, 4, SHOWN):
        page = text_of(admin.get(f"{address}?chosen={begin}"))
        assert "25, largest savings first; total about 25 GiB; 5 of the first 5 refused by their plans" in page
        assert f"{begin + 1}\u2013" in page


def test_the_form_shows_the_choice_and_the_next_windows_as_it_is_filled_in(admin: Client) -> None:
    wins(name="web-01")
    wins(name="web-02", in_use=True, in_use_detail="guest web is running")
    wins(name="db")
    answer = admin.get("/policies/add/", FORM, headers={"HX-Request": "true"})
    page = text_of(answer)
    assert "<html" not in answer.content.decode()
    assert "web-01" in page
    assert "guest web is running" in page
    assert "The name does not match" in page
    assert "Incomplete" in text_of(admin.get("/policies/add/", FORM | {"cron": "soon"}, headers={"HX-Request": "true"}))
    # Without JavaScript the whole page says the same.
    assert "web-01" in text_of(admin.get("/policies/add/", FORM))


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
    assert "Selection pending" in text_of(operator.get(answer["Location"]))
    runs.work(timezone.now())
    end(before_bytes=4 * GIB, after_bytes=3 * GIB, freed_bytes=GIB)
    runs.work(timezone.now())
    page = text_of(operator.get(answer["Location"]))
    job = f"job {Job.objects.get().pk}"
    for words in ("finished", "web-01", "web-02", "not known who uses the image", "1 gib", job):
        assert words in page.lower(), words
    job = operator.get(f"/jobs/{Job.objects.get().pk}/").content.decode()
    assert f'href="/policies/{policy.pk}/runs/{run.pk}/"' in job
    assert "1 GiB" in text_of(operator.get("/policies/"))
    assert "manual, the-operator" in text_of(operator.get(f"/policies/{policy.pk}/"))


def test_a_run_is_stopped_from_its_page(operator: Client) -> None:
    run = PolicyRunFactory.create()
    operator.post(f"/policies/{run.policy_id}/runs/{run.pk}/stop/")
    assert (reread(run).state, run.detail) == ("stopped", "Stopped by the-operator.")
