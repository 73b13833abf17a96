"""Pages and REST look at an image again, and show the old fact until they know better."""

from pathlib import Path
from typing import Any

import pytest
from django.urls import reverse

from storage_admin.jobs.models import Job
from tests.images.readers import scanned_while_read
from tests.web.confirming import confirm, hidden, planned
from tests.web.html import tags_of
from tests.working import client_as, image_at, scan

PRIMARY = "btn btn-primary"
pytestmark = [
    pytest.mark.django_db, pytest.mark.qemu,
    pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve", "patient_looks"),
]  # fmt: skip


def test_the_plan_page_shows_the_old_fact_at_once_and_then_the_new_one(path: Path) -> None:
    client = client_as(role="operator")
    address = reverse("check", args=[image_at(path).pk])
    with scanned_while_read(path):
        page = client.get(address).content.decode()
        assert ("image_in_use" in page, f'hx-get="{address}?look=1"' in page) == (True, True)
        looked = client.get(f"{address}?look=1", headers={"HX-Request": "true"})
        assert ("image_in_use" in looked.content.decode(), "HX-Reswap" in looked) == (False, False)
    shown = {"shown": hidden(looked.content.decode())["shown"]}
    again = client.get(address, {"look": "1", **shown}, headers={"HX-Request": "true"})
    assert (again["HX-Reswap"], 'id="facts-age" hx-swap-oob="true"' in again.content.decode()) == ("none", True)


@pytest.mark.parametrize("was", ["in use", "missing"])
def test_an_images_page_is_fetched_anew_where_a_look_tells_something_else(path: Path, was: str) -> None:
    client = client_as(role="operator")
    if was == "missing":
        away = path.rename(path.with_name("away"))
        scan(image_at(path).host)
        away.rename(path)
    else:
        with scanned_while_read(path):
            pass
    address = reverse("image", args=[image_at(path).pk])
    check = f'href="{reverse("check", args=[image_at(path).pk])}"'

    def shown() -> tuple[str, bool, bool, Any]:
        page = client.get(address)
        text = page.content.decode()
        look_at = next(one["hx-get"] or "" for _, one in tags_of(text) if "shown=" in (one.get("hx-get") or ""))
        return look_at, f'<span class="chip warn">{was}</span>' in text, check in text, page.context["image"].seen

    look_at, told, offered, seen = shown()
    assert (told, offered) == (True, was == "in use")
    looked = client.get(look_at, headers={"HX-Request": "true"})
    assert (looked.status_code, looked["HX-Trigger"]) == (204, "facts-changed")
    look_at, told, offered, now = shown()
    assert (told, offered, now > seen) == (False, True, True)
    again = client.get(look_at, headers={"HX-Request": "true"})
    assert ("HX-Trigger" in again, 'id="facts-age" hx-swap-oob="true"' in again.content.decode()) == (False, True)


def test_an_orphans_page_shows_the_old_fact_at_once_and_then_the_new_one(path: Path) -> None:
    client = client_as(role="admin")
    address = reverse("set_aside", args=[image_at(path).pk])

    def plan_in(page: str) -> tuple[bool, bool, bool]:
        button = next(found for tag, found in tags_of(page) if tag == "button" and found.get("class", "") == PRIMARY)
        return "image_in_use" in page, "disabled" in button, "is in use" in page

    with scanned_while_read(path):
        page = client.get(address).content.decode()
        assert (plan_in(page)[:2], f'hx-get="{address}"' in page) == ((True, True), True)
        looked = client.get(address, {"shown": hidden(page)["shown"]}, headers={"HX-Request": "true"})
        assert plan_in(looked.content.decode()) == (False, False, False)
    shown = {"shown": hidden(looked.content.decode())["shown"]}
    again = client.get(address, shown, headers={"HX-Request": "true"})
    assert (again["HX-Reswap"], 'id="facts-age" hx-swap-oob="true"' in again.content.decode()) == ("none", True)
    assert client.post(address, {"grace_days": "7"}).status_code == 302


def test_a_job_without_an_undo_copy_is_confirmed_also_where_the_last_scan_stood_against_it(path: Path) -> None:
    client = client_as(role="operator")
    form, address = {"undo_hours": "0", "method": "copy"}, reverse("reclaim", args=[image_at(path).pk])
    shown = planned(client.get(address, form).content.decode())
    with scanned_while_read(path):
        assert client.post(address, form | shown).status_code == 409
    assert not Job.objects.filter(kind="reclaim").exists()


def test_many_images_are_planned_and_queued_together_as_they_are_now(path: Path) -> None:
    client = client_as(role="operator")
    image = image_at(path)
    with scanned_while_read(path):
        form = {"image": str(image.pk), "method": "copy", "undo_hours": "1", "confirmed": "1"}
        confirm(client, reverse("images_reclaim"), form)
    assert Job.objects.filter(kind="reclaim", target_id=image.pk, state="queued").count() == 1


def test_a_plan_by_rest_is_of_the_image_as_it_is_now(path: Path) -> None:
    client = client_as(role="operator")
    body = {"kind": "check", "image": image_at(path).pk, "dry_run": True}
    with scanned_while_read(path):
        answer = client.post("/api/v1/jobs/", body, content_type="application/json")
    assert (answer.status_code, answer.json()["refusals"]) == (200, [])
