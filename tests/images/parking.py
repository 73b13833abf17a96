"""An image whose jobs wait for its guests, and what there is around them, by rows alone."""

from typing import Any

import pytest
from django.utils import timezone

from images.models import Image
from images.rewrite import wait_for_guests
from storage_admin.guests.models import Guest
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.models import Job
from tests.factories import GuestFactory, ImageFactory, ImageUseFactory, JobFactory, StoragePoolFactory
from tests.working import OPERATOR, reread


@pytest.fixture(autouse=True)
def rung(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ids: list[int] = []
    for module in (wait_for_guests, reaper):
        monkeypatch.setattr(module, "ring_now", ids.append)
    return ids


def used_by(image: Image, name: str = "web", state: str = "running", kind: str = "vm") -> Guest:
    """A guest of a hypervisor that only scans read, with the image as its disk."""
    guest = GuestFactory.create(host=image.host, name=name, state=state, kind=kind)
    ImageUseFactory.create(image=image, disk__guest=guest)
    if state == "running":
        Image.every.filter(pk=image.pk).update(in_use=True, in_use_detail=f"guest {name} is running")
    return guest


@pytest.fixture
def image() -> Image:
    return ImageFactory.create(pool=StoragePoolFactory.create(capacity_bytes=None, available_bytes=None))


def submit(image: Image, **options: Any) -> Job:
    return services.submit(OPERATOR, "reclaim", image.pk, {"when_running": "wait", **options})


def parked(image: Image, **options: Any) -> Job:
    job = submit(image, **options)
    assert claims.claim(job.pk, "w") is None
    assert reread(job).parked_at is not None, job.waiting_for
    return job


def shut_down(guest: Guest) -> None:
    """As a scan finds it that begins now."""
    Guest.objects.filter(pk=guest.pk).update(state="shut off")
    Image.every.filter(uses__disk__guest=guest).update(in_use=False)
    now = timezone.now()
    JobFactory.create(kind="scan", target=guest.host, state="succeeded", started=now, finished=now)
