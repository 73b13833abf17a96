"""Images that are gone are forgotten by hand or after a time; nothing that is there, or may come back, is."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from images import tasks
from images.models import Image, ImageSample
from images.scan import vanished
from storage_admin.accounts.models import SYSTEM, AuditEntry
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import StoragePool
from tests.factories import ImageFactory, JobFactory, StoragePoolFactory
from tests.working import refused_as, reread

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
DAY = timedelta(days=1)


@pytest.fixture
def pool() -> StoragePool:
    return StoragePoolFactory.create(last_scanned=timezone.now())


def gone(pool: StoragePool, days: float = 1, **more: Any) -> Image:
    return ImageFactory.create(pool=pool, **{"state": "missing", "missing_since": timezone.now() - days * DAY} | more)


@pytest.mark.parametrize("state", ["missing", "deleted"])
def test_a_vanished_image_is_forgotten_with_its_history_and_its_jobs_stay(pool: StoragePool, state: str) -> None:
    image, stays = gone(pool, state=state), ImageFactory.create(pool=pool)
    ImageSample.objects.create(image=image, at=timezone.now())
    job = JobFactory.create(target=image, state="succeeded", finished=timezone.now())
    vanished.forget(SYSTEM, image)
    assert list(Image.every.all()) == [stays]
    assert not ImageSample.objects.exists()
    job.refresh_from_db()
    assert AuditEntry.objects.get().target == image.path


@pytest.mark.parametrize("state", ["ok", "chain_broken", "unreadable", "set_aside", "modifying"])
def test_what_is_still_there_is_never_forgotten(pool: StoragePool, state: str) -> None:
    image = ImageFactory.create(pool=pool, state=state)
    with pytest.raises(InvalidError):
        vanished.forget(SYSTEM, image)
    assert vanished.forget_old(timezone.now() + 1000 * DAY, DAY) == 0
    assert Image.every.filter(pk=image.pk).exists()


@pytest.mark.parametrize("job", [{"state": "queued"}, {"state": "running"}, {"undo_state": "available"}])
def test_what_a_job_works_on_or_can_bring_back_is_not_forgotten(pool: StoragePool, job: dict[str, Any]) -> None:
    image = gone(pool, days=200)
    JobFactory.create(target=image, **{"state": "succeeded"} | job)
    assert refused_as(vanished.forget, SYSTEM, image) == "busy"
    assert vanished.forget_old(timezone.now(), 90 * DAY) == 0
    assert Image.every.filter(pk=image.pk).exists()


@pytest.mark.parametrize(("kept_days", "left"), [(0, 3), (90, 2), (20, 1)])
def test_time_forgets_what_vanished_longer_ago_than_is_kept(
    pool: StoragePool, settings: Any, kept_days: int, left: int
) -> None:
    for days in (1, 30, 100):
        gone(pool, days=days)
    deleted = gone(pool, days=1000, state="deleted", deleted_at=timezone.now())
    settings.VANISHED_KEEP_DAYS = kept_days
    tasks.forget_vanished()
    assert Image.every.filter(state="missing").count() == left
    assert Image.every.filter(pk=deleted.pk).exists(), "what a job deleted is part of its story"


def test_time_forgets_nothing_of_a_pool_that_was_not_seen_since(pool: StoragePool) -> None:
    image = gone(pool, days=200)
    StoragePool.objects.filter(pk=pool.pk).update(last_scanned=timezone.now() - 100 * DAY)
    assert vanished.forget_old(timezone.now(), 90 * DAY) == 0
    assert Image.every.filter(pk=image.pk).exists()


def test_what_cannot_be_forgotten_holds_up_nobody(pool: StoragePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vanished, "AT_ONCE", 2)
    kept = [gone(pool, days=200) for _ in range(3)]
    for image in kept:
        JobFactory.create(target=image, state="succeeded", undo_state="available")
    later = [gone(pool, days=200) for _ in range(3)]
    assert vanished.forget_old(timezone.now(), 90 * DAY) == 2
    assert vanished.forget_old(timezone.now(), 90 * DAY) == 1
    assert set(Image.every.all()) == set(kept)
    assert not Image.every.filter(pk__in=[image.pk for image in later]).exists()


def test_an_overlay_of_a_forgotten_base_is_still_broken(pool: StoragePool) -> None:
    base = gone(pool, days=200)
    overlay = ImageFactory.create(pool=pool, backing=base, backing_file=base.path, backing_key=base.path_key)
    vanished.forget(SYSTEM, base)
    assert (reread(overlay).backing_id, overlay.state) == (None, "chain_broken")
