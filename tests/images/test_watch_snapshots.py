"""Guests whose snapshots were forgotten are told of, until these are deleted."""

from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from images.alert_rules.looking import look
from images.alert_rules.snapshots import MANY, OLD
from storage_admin.events.models import Alert
from storage_admin.guests.models import Guest
from tests.factories import GuestFactory, ImageFactory, ImageUseFactory
from tests.working import client_as

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def snapshot(name: str, at: datetime | None) -> dict[str, object]:
    return {"name": name, "created": None if at is None else int(at.timestamp()), "external": False}


def told() -> list[str]:
    look(timezone.now())
    return sorted(Alert.objects.filter(closed=None).values_list("key", flat=True))


def test_a_guest_with_an_old_snapshot_or_with_many_is_told_of_until_they_are_deleted() -> None:
    now = timezone.now()
    old = GuestFactory.create(snapshots=[snapshot("old", now - OLD - timedelta(hours=1)), snapshot("new", now)])
    many = GuestFactory.create(snapshots=[snapshot(f"s{number}", None) for number in range(MANY)])
    GuestFactory.create(snapshots=[snapshot("young", now - OLD + timedelta(hours=1)), snapshot("undated", None)])
    GuestFactory.create()
    assert set(told()) == {f"snapshots_forgotten:{old.pk}", f"snapshots_forgotten:{many.pk}"}
    alert = Alert.objects.get(target_id=old.pk)
    assert (alert.severity, alert.host, alert.target_kind) == ("warning", old.host.slug, "guest")
    assert f"/guests/{old.pk}/" in client_as(role="viewer").get("/alerts/").content.decode()
    Guest.objects.filter(pk=old.pk).update(snapshots=[])
    assert told() == [f"snapshots_forgotten:{many.pk}"]


def test_the_list_of_guests_says_how_many_there_are_and_how_old() -> None:
    created = timezone.now() - timedelta(days=40)
    guest = GuestFactory.create(snapshots=[snapshot("old", created), snapshot("undated", None)])
    page = client_as(role="viewer").get("/guests/").content.decode()
    assert "2 snapshots" in page
    row = client_as(role="viewer").get(f"/api/v1/guests/{guest.pk}/").json()
    assert row["snapshots"] == [
        {"name": "old", "created": f"{created:%Y-%m-%dT%H:%M:%SZ}", "external": False},
        {"name": "undated", "created": None, "external": False},
    ]


def test_snapshots_that_hold_half_of_a_guests_disks_are_told_of() -> None:
    now = timezone.now()
    one = {"id": "1", "name": "one", "size": 0, "created": int(now.timestamp())}
    grown, small = (
        ImageFactory.create(
            snapshots=[one], virtual_size=1000,
            estimate={"basis": {"snapshots": [{"created": one["created"], "held_bytes": held}]}}, analyzed_at=now,
        )
        for held in (500, 499)
    )  # fmt: skip
    large = ImageUseFactory.create(image=grown).disk.guest
    ImageUseFactory.create(image=small)
    assert told() == [f"snapshots_forgotten:{large.pk}"]
    assert "500 bytes" in Alert.objects.get(target_id=large.pk).detail
