"""Pools that fill up within hours: when that is told of, and when not. Figures and times are made up."""

import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from images.alert_rules.looking import look_at_space
from images.scan import minutes
from storage_admin.agent.protocol import HostError, unb64
from storage_admin.events.models import Alert
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host, PoolMinute, PoolSample, StoragePool
from tests.factories import GIB, HostFactory, PoolSampleFactory, StoragePoolFactory
from tests.working import reread

pytestmark = pytest.mark.django_db

START = datetime(2026, 3, 4, 12, 0, 7, tzinfo=UTC)
#: How much of a pool of 100 GiB is used, in GiB, at a minute.
Course = Callable[[float], float]


class Site:
    """A host whose pools are as full as a course says, and every second round that looks at them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked = START, 0
        self.courses: dict[str, Course] = {}
        self.metadata: Course | None = None
        monkeypatch.setattr(timezone, "now", lambda: self.now)
        monkeypatch.setattr(asking, "ask", self._answer)
        self.host = HostFactory.create(slug="far", kind="ssh", transport="ssh")

    @property
    def minute(self) -> float:
        return (self.now - START).total_seconds() / 60

    def pool(self, course: Course, **values: Any) -> StoragePool:
        pool = StoragePoolFactory.create(host=self.host, available_bytes=int((100 - course(0)) * GIB), **values)
        self.courses[pool.path] = course
        return pool

    def _answer(self, host: Host, verb: str, args: dict[str, Any], **_: Any) -> dict[str, Any]:
        assert (host, verb) == (self.host, "space")
        self.asked += 1
        folders, thin = [], []
        for path in args["folders_b64"]:
            row = StoragePool(path=unb64(path).decode())
            used = self.courses[row.path](self.minute)
            folders.append({"fs_key": f"far:{row.path[5:]}", "capacity_bytes": 100 * GIB, "reserved_bytes": 0})
            folders[-1]["available_bytes"] = int((100 - used) * GIB)
        if args["thin"] and self.metadata is not None:
            sizes = {"size": 100 * GIB, "used": 40 * GIB, "metadata_size": GIB}
            thin.append({"group": "vg", "name": "pool", "mode": "rw", "needs_check": False, **sizes})
            thin[-1]["metadata_used"] = int(self.metadata(self.minute) / 100 * GIB)
        return {"folders": folders, "thin": thin}

    def run(self, until: float) -> list[float]:
        """Goes on until a minute, and gives the minutes at which the alert was opened."""
        known, opened = Alert.objects.count(), []
        while self.minute < until:
            self.now += timedelta(minutes=1)
            minutes.look(self.now)
            look_at_space(self.now)
            found = Alert.objects.filter(kind="pool_days_until_full").count()
            opened += [self.minute] if found > known else []
            known = found
        return opened

    def is_open(self) -> bool:
        return Alert.objects.filter(kind="pool_days_until_full", closed=None).exists()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


def ramp(start: float, length: float, low: float = 40.0) -> Course:
    return lambda minute: low + (100 - low) * min(max((minute - start) / length, 0.0), 1.0)


@pytest.mark.parametrize(
    ("length", "start", "noise"),
    [
        *((10, start / 10, noise) for start in range(120, 170, 7) for noise in (0.0, 0.3)),
        (60, 14.4, 0.3),
        (600, 12, 0.3),
    ],
)
def test_a_ramp_is_told_of_a_fifth_of_its_way_before_the_end(
    site: Site, length: int, start: float, noise: float
) -> None:
    chance, course = random.Random(7), ramp(start, length)
    site.pool(lambda minute: min(course(minute) + chance.uniform(-noise, noise), 100.0))
    opened = site.run(start + 0.8 * length)
    assert opened, "in time"
    assert opened[0] - start > 0.4 * length, "no earlier than it is clear"
    assert site.is_open()


@pytest.mark.parametrize("length", [10, 60])
def test_metadata_of_a_thin_pool_that_fills_up_is_told_of_as_data_is(site: Site, length: int) -> None:
    site.metadata = ramp(12.3, length)
    StoragePoolFactory.create(
        host=site.host, kind="lvmthin", source="lvm", path="/dev/vg/pool", available_bytes=60 * GIB, volume_facts={}
    )
    assert site.run(12.3 + 0.8 * length)
    assert Alert.objects.get(kind="pool_days_until_full").detail.count("metadata of the thin pool") == 1


def test_a_thin_pool_that_the_kernel_lets_nobody_write_to_is_told_of_until_it_is_repaired() -> None:
    pool = StoragePoolFactory.create(kind="lvmthin", available_bytes=90 * GIB)
    key = f"pool_over_threshold:{pool.pk}"
    told = []
    for mode, needs_check in (("rw", False), ("ro", False), ("Fail", False), ("rw", True), ("rw", False)):
        StoragePool.objects.update(volume_facts={"mode": mode, "needs_check": needs_check})
        look_at_space(timezone.now())
        told.append(list(Alert.objects.filter(closed=None).values_list("key", "severity")))
    assert told == [[], *([[(key, "danger")]] * 3), []]


def nightly(low: float, high: float) -> Course:
    """A backup of two hours each day, which is deleted at its end."""
    return lambda minute: low + (high - low) * (minute % 1440) / 120 if minute % 1440 < 120 else low


@pytest.mark.parametrize(
    ("course", "until"),
    [
        (lambda minute: 80 + random.Random(minute).uniform(-1, 1), 90),
        (lambda minute: 96 + random.Random(minute).gauss(0, 0.3), 90),
        (lambda minute: 80.0, 60),
        (lambda minute: 60 + min(max(minute - 20, 0) * 0.6, 5.0), 60),  # a copy of 5 GiB
        (lambda minute: 80.0 if minute < 20.2 else 93.0, 60),  # one between two looks
        (nightly(50, 80), 125),
    ],
    ids=["noise", "noise of a full pool", "quiet", "a copy", "a quick copy", "a backup"],
)
def test_what_does_not_go_on_rising_is_not_told_of(site: Site, course: Course, until: float) -> None:
    site.pool(course)
    assert site.run(until) == []
    assert site.asked >= until * 0.9, "it was looked at each minute"


@pytest.mark.sql
def test_a_backup_that_fills_most_of_a_pool_each_night_is_not_told_of_and_a_rise_beyond_it_is(site: Site) -> None:
    course = nightly(40, 90)
    pool = site.pool(lambda minute: ramp(0, 120)(minute) if minute > 0 else course(minute))
    for minute in range(-5 * 1440, 0, 15):
        at, used = START + timedelta(minutes=minute), course(minute)
        PoolSampleFactory.create(pool=pool, at=at, available_bytes=int((100 - used) * GIB))
    opened = site.run(119)
    assert opened
    assert opened[0] > 95, "what is as high as on other days is told of at 80 minutes otherwise"


def test_it_closes_when_it_goes_on_no_longer_or_space_is_back(site: Site) -> None:
    site.pool(lambda minute: ramp(12, 20)(min(minute, 28.0)) if minute < 80 else 50.0)
    site.run(27)
    assert site.is_open()
    site.run(60)
    assert not site.is_open()
    site.run(100)
    assert Alert.objects.filter(closed=None).count() == 0


def test_a_host_that_is_asked_no_more_keeps_its_alert_and_is_left_alone_for_five_minutes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.pool(ramp(12, 60))
    site.run(60)
    assert site.is_open()
    before, asked = site.asked, []

    def silent(host: Host, *_: Any, **__: Any) -> dict[str, Any]:
        asked.append(host)
        raise HostError("gone", "host_unreachable")

    monkeypatch.setattr(asking, "ask", silent)
    site.run(75)
    assert (site.asked, len(asked)) == (before, 3)
    assert site.is_open()


def test_quiet_hosts_are_asked_every_five_minutes_and_half_full_ones_every_minute(site: Site) -> None:
    pool = site.pool(lambda minute: 30.0 if minute < 60 else 55.0)
    site.run(60)
    assert 11 <= site.asked <= 13
    before = site.asked
    site.run(120)
    assert 54 <= site.asked - before <= 60
    assert reread(pool).used_percent == 55.0
    assert site.now - pool.space_at <= timedelta(minutes=1)  # type: ignore[operator]


@pytest.mark.sql
def test_looks_of_a_day_are_kept_and_thinned_out(site: Site) -> None:
    pool = StoragePoolFactory.create()
    for minute in range(0, 30 * 60, 3):
        PoolMinute.objects.create(pool=pool, at=START - timedelta(minutes=minute), used_bytes=1)
    for _ in range(2):
        minutes.thin_out(START)
        ages = [(START - one.at).total_seconds() / 60 for one in PoolMinute.objects.all()]
        assert max(ages) <= 1440
        assert 60 <= sum(age <= 180 for age in ages) <= 61
        assert 126 <= sum(age > 180 for age in ages) <= 128


@pytest.mark.sql
def test_of_old_scans_one_a_day_is_kept_for_each_pool(site: Site) -> None:
    pools = StoragePoolFactory.create(), StoragePoolFactory.create()
    for pool in pools:
        for hour in range(0, 40 * 24, 6):
            at = START - timedelta(hours=hour)
            PoolSample.objects.create(pool=pool, at=at, capacity_bytes=2, available_bytes=1)
    for _ in range(2):
        minutes.thin_out(START)
        for pool in pools:
            ages = [(START - one.at).total_seconds() / 86400 for one in PoolSample.objects.filter(pool=pool)]
            assert sum(age <= 31 for age in ages) == 31 * 4 + 1
            assert 9 <= sum(age > 31 for age in ages) <= 10


@pytest.mark.sql
def test_a_fleet_is_asked_some_hosts_at_a_time_and_nobody_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [StoragePoolFactory.create(host__kind="ssh", host__transport="ssh") for _ in range(40)]
    lock, at_once, asked = threading.Lock(), [0], list[int]()

    def answer(host: Host, _verb: str, args: dict[str, Any], **_: Any) -> dict[str, Any]:
        with lock:
            at_once.append(at_once[-1] + 1)
            asked.append(host.pk)
        time.sleep(0.02)
        with lock:
            at_once.append(at_once[-1] - 1)
        return {"folders": [None for _ in args["folders_b64"]], "thin": []}

    monkeypatch.setattr(asking, "ask", answer)
    now = timezone.now()
    minutes.look(now)
    minutes.look(now)
    assert sorted(asked) == sorted(pool.host_id for pool in pools)
    assert 2 <= max(at_once) <= minutes.AT_ONCE
    Host.objects.update(status="unreachable")
    minutes.look(now + timedelta(hours=1))
    assert len(asked) == 40
