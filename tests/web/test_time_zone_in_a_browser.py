"""A browser tells its time zone, and sees times and charts in it."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Page

from storage_admin.accounts.middleware import ZONE_COOKIE
from tests.factories import ImageFactory, ImageSampleFactory, UserFactory
from tests.web.browser import log_in

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

CHART = "Chart.getChart(document.querySelector('canvas'))"
TICKS = f"{CHART}.scales.x.ticks.map((tick) => [tick.value, tick.label])"
TITLE = f"{CHART}.options.scales.x.title.text"
TOOLTIP = f"{CHART}.options.plugins.tooltip.callbacks.title([{{ parsed: {{ x: %d }} }}])"
#: In Berlin the clocks are put back in between.
NIGHT = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)


def test_times_and_charts_are_in_the_zone_of_the_browser(stranger: Callable[..., Page]) -> None:
    UserFactory.create(username="ann")
    image = ImageFactory.create(first_seen=NIGHT, seen=NIGHT, pool__last_scanned=None)
    for days in range(-2, 3):
        ImageSampleFactory.create(image=image, at=NIGHT + timedelta(days=days))
    page = stranger(timezone_id="Europe/Berlin", viewport={"width": 420, "height": 900})
    page.goto("/login/")
    log_in(page, "ann")
    page.wait_for_url("/")
    (cookie,) = [one for one in page.context.cookies() if one.get("name") == ZONE_COOKIE]
    assert (cookie.get("value"), cookie.get("sameSite"), cookie.get("path")) == ("Europe/Berlin", "Lax", "/")

    page.goto(f"/images/{image.pk}/")
    assert page.get_by_text("2026-10-25 02:30 CEST").count() == 1
    assert page.evaluate(TITLE) == "Europe/Berlin"
    midnights = [datetime(2026, 10, day, hour, tzinfo=UTC) for day, hour in ((23, 22), (24, 22), (25, 23), (26, 23))]
    assert page.evaluate(TICKS) == [
        [at.timestamp(), f"2026-10-{day}"] for at, day in zip(midnights, range(24, 28), strict=True)
    ]
    shown = [page.evaluate(TOOLTIP % (NIGHT + timedelta(hours=hours)).timestamp()) for hours in (0, 1)]
    assert shown == ["2026-10-25 02:30 +02:00", "2026-10-25 02:30 +01:00"]

    page.goto("/ledger/")
    page.get_by_label("From (Europe/Berlin)").fill("2026-10-26")
    page.wait_for_url("**zone=Europe%2FBerlin*")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
