"""Signed-in browsers for each role, and rows for every page to show."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from images.models import Image
from storage_admin.events.models import Alert
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from tests.factories import (
    GIB,
    AlertFactory,
    AuditEntryFactory,
    DeliveryFactory,
    HostFactory,
    ImageFactory,
    ImageSampleFactory,
    ImageUseFactory,
    JobFactory,
    JobLogFactory,
    PoolSampleFactory,
    StoragePoolFactory,
    TokenFactory,
    WebhookFactory,
)
from tests.web.browser import admins_page, chromium, page, said, stranger
from tests.working import client_as

__all__ = ["admins_page", "chromium", "page", "said", "stranger"]


@pytest.fixture
def browser_of(db: None) -> Callable[[str], Client]:
    """``browser_of("viewer")``: a client that is signed in with that role."""

    def make(role: str) -> Client:
        client = client_as(username=f"the-{role}", role=role)
        client.get("/jobs/count/")  # the first request notes where the session is from; those that count come later
        return client

    return make


@pytest.fixture
def viewer(browser_of: Callable[[str], Client]) -> Client:
    return browser_of("viewer")


@pytest.fixture
def operator(browser_of: Callable[[str], Client]) -> Client:
    return browser_of("operator")


@pytest.fixture
def admin(browser_of: Callable[[str], Client]) -> Client:
    return browser_of("admin")


@dataclass(frozen=True)
class Filled:
    """Rows for every page: a chain of three, a guest, jobs in several states."""

    host: Host
    pool: StoragePool
    base: Image
    image: Image
    guest: Guest
    running: Job
    done: Job
    alert: Alert

    def pages(self) -> list[str]:
        """The address of every page that only reads."""
        return [
            "/", "/images/", "/images/attached/", "/orphans/?everywhere=true", "/hosts/", "/guests/",
            "/guests/snapshots/", "/jobs/",
            "/password/", "/account/",
            "/ledger/", f"/images/{self.image.pk}/",
            f"/images/{self.base.pk}/", f"/images/{self.image.pk}/reclaim/", f"/jobs/{self.running.pk}/",
            f"/jobs/{self.done.pk}/", f"/pools/{self.pool.pk}/", f"/guests/{self.guest.pk}/",
            "/alerts/", f"/alerts/{self.alert.pk}/",
        ]  # fmt: skip


ADMIN_PAGES = ["/webhooks/", "/tokens/", "/users/", "/audit/"]


@pytest.fixture
def filled(db: None) -> Filled:
    return fill()


def fill(name: str = "vm-104-disk-0.qcow2") -> Filled:
    """Makes the rows.

    Args:
        name: shown as the name of everything whose name strangers choose.
    """
    now = timezone.now()
    host = HostFactory.create(slug="local", name="pve1")
    pool = StoragePoolFactory.create(
        host=host, name="local", allocated_bytes=6 * GIB, virtual_bytes=20 * GIB, images_count=3
    )
    for days in (3, 2, 1):
        PoolSampleFactory.create(pool=pool, at=now - timedelta(days=days), available_bytes=(40 + days) * GIB)
    base = ImageFactory.create(pool=pool, name="base.qcow2", overlays_count=1)
    middle = ImageFactory.create(backing=base, name="middle.qcow2", overlays_count=1)
    image = ImageFactory.create(
        backing=middle, name=name, path=f"{pool.path}/{name}", reclaimable_bytes=2 * GIB, reclaimable_low=GIB,
        reclaimable_high=3 * GIB, reclaimable_method="compress", analyzed_at=now,
    )  # fmt: skip
    for days in (9, 4):
        ImageSampleFactory.create(image=image, at=now - timedelta(days=days), allocated_size=days * GIB)
    kept = {"name": name, "created": int(now.timestamp()) - 40 * 86400, "external": False, "files": []}
    use = ImageUseFactory.create(
        image=image, disk__guest__name=name, disk__target="vda", disk__cache="writeback", disk__guest__snapshots=[kept]
    )
    running = JobFactory.create(
        kind="reclaim", target=base, target_label=name, state="running", progress=46.3, stage="copying",
        done_bytes=GIB, total_bytes=4 * GIB, bytes_per_sec=300_000_000, eta_seconds=66, started=now,
        message=name, commands=[{"argv": ["qemu-img", "check", name], "exit_code": 0}],
    )  # fmt: skip
    JobLogFactory.create(job=running, text=f"looking at {name}")
    done = JobFactory.create(
        kind="reclaim", target=image, target_label=name, state="succeeded", progress=100, started=now, finished=now,
        undo_state="available", undo_bytes=4 * GIB, undo_expires=now + timedelta(hours=24),
        result={"before_bytes": 4 * GIB, "predicted_after_bytes": 2 * GIB, "after_bytes": 2 * GIB,
                "held_bytes": 4 * GIB, "freed_bytes": 0, "freed_at": None, "swapped": True},
    )  # fmt: skip
    JobFactory.create(
        kind="reclaim", target=middle, target_label=name, state="failed", error_code="image_in_use",
        error_detail=f"{name} is in use.", finished=now, started=now,
    )  # fmt: skip
    TokenFactory.create(name=name[:90])
    AuditEntryFactory.create(target=name)
    AlertFactory.create(key="host_unreachable:9", title=f"{name} does not answer"[:200], closed=now, host="local")
    alert = AlertFactory.create(
        title=f"{name} is over its threshold"[:200], detail=name, host="local", target_kind="pool", target_id=pool.pk,
        target_label=name,
    )  # fmt: skip
    hook = WebhookFactory.create(name=name[:90], url="https://example.org/hook?token=secret")
    DeliveryFactory.create(webhook=hook, state="given_up", attempts=7, problem=name)
    return Filled(host, pool, base, image, use.disk.guest, running, done, alert)
