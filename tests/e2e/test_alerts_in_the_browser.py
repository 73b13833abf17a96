"""A filesystem fills up: an alert is opened, told to a webhook, acknowledged, and closed when there is room again."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.browser import Tab
from tests.e2e.rest import Rest
from tests.harness.processes import wait_until
from tests.harness.receiver import receiver
from tests.harness.services import Dashboard

pytestmark = pytest.mark.browser

#: What the scheduler has done each minute, now.
LOOK = "from django.utils import timezone; from images.alert_rules.looking import look; look(timezone.now())"


def test_a_filesystem_that_fills_up_is_an_alert_until_there_is_room_again(
    seen: Tab, page: Page, dashboard: Dashboard, rest: Rest, small_filesystem: Path
) -> None:
    pool = rest.post("pools/", {"host": "local", "path": str(small_filesystem), "name": "tiny"}, expect=201)
    title = re.compile("tiny is over its threshold of 85 %")
    with receiver() as there:

        def told() -> list[tuple[str, int]]:
            heard = [got.json for got in there.got]
            return [(one["event"], one["data"]["target"]["id"]) for one in heard if one["event"] != "test"]

        seen.open("/webhooks/")
        page.get_by_label("Name", exact=True).fill("chat")
        page.get_by_label("URL", exact=True).fill(there.url)
        page.get_by_label(re.compile("^alert.opened")).check()
        page.get_by_label(re.compile("^alert.closed")).check()
        page.get_by_role("button", name="Add webhook").click()
        expect(page.locator("#secret")).to_have_text(re.compile("^whsec_"))
        page.get_by_role("link", name="chat").click()
        page.get_by_role("button", name="Send test").click()
        # The dashboard has lived through other tests: their alerts may be told here as well.
        sent = page.locator("tbody tr", has_text=re.compile(r"· test\b"))
        expect(sent.get_by_text("delivered")).to_be_visible(timeout=30_000)
        assert [got.json["event"] for got in there.got].count("test") == 1

        seen.open("/alerts/?state=new")
        expect(page.get_by_text(title)).to_have_count(0)
        filler = small_filesystem / "filler.raw"
        filler.write_bytes(b"\1" * int(shutil.disk_usage(small_filesystem).free * 0.92))
        rest.scan()
        dashboard.manage("shell", "-c", LOOK)
        row = page.locator("tbody tr", has_text=title)
        expect(row).to_be_visible(timeout=30_000)  # the page looks by itself
        expect(page.locator(".side .count").filter(has_text=re.compile(r"^\d+$")).first).to_be_visible(timeout=30_000)
        wait_until(lambda: ("alert.opened", pool["id"]) in told(), 30, "the webhook is told")
        row.get_by_role("button", name="Acknowledge").click()
        expect(page.get_by_text("Acknowledged: ")).to_be_visible()
        seen.open("/alerts/?state=acknowledged")
        expect(row).to_contain_text("admin")

        filler.unlink()
        rest.scan()
        dashboard.manage("shell", "-c", LOOK)
        expect(row).to_have_count(0, timeout=30_000)
        seen.open("/alerts/?state=closed")
        expect(row.first).to_contain_text("over")
        wait_until(lambda: ("alert.closed", pool["id"]) in told(), 30, "the webhook is told")

        def hook() -> dict[str, Any]:
            return dict(next(one for one in rest.get("webhooks/")["results"] if one["name"] == "chat"))

        wait_until(lambda: not hook()["failing"], 60, "what a busy machine delivered late is tried again")
        assert hook()["given_up"] == 0
        seen.open(f"/webhooks/{hook()['id']}/")
        page.get_by_text("Delete…").click()
        page.get_by_role("button", name="Delete chat").click()
        expect(page.get_by_text("receives no more events")).to_be_visible()
