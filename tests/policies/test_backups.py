"""Policies that ask for a backup: what they take and leave out, before a run and right before a job."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from images.models import Image, Policy, PolicyPick
from images.policies import rules as choosing
from images.policies import services
from images.policies.rules import choose
from images.policies.shape import Rules
from images.policies.submitting import _left_out_by_now
from storage_admin.guests import backups
from storage_admin.guests.models import GuestBackup, GuestDisk
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox.backups import Backup, Backups, Gap
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from storage_admin.jobs import kinds
from tests.factories import ImageFactory, ImageUseFactory, PolicyFactory, PolicyRunFactory, StoragePoolFactory
from tests.working import ADMIN, at_most_queries, client_as, invalid_fields

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
NOW = timezone.now().replace(microsecond=0)
CODE = "backup_too_old"


def backed_up(host: Host, *, days_ago: float | None = 1, gaps: tuple[Gap, ...] = ()) -> None:
    at = int((NOW - timedelta(days=days_ago or 0)).timestamp())
    newest = () if days_ago is None else (Backup(100, "vm", at, "pbs:backup/vm/100/x"),)
    backups.record(host, ProxmoxFacts("pve1", backups=Backups(newest, ("pbs",), gaps)), NOW)


def image(**disk: Any) -> Image:
    one = ImageFactory.create(
        name="vm-100-disk-0.qcow2", reclaimable_bytes=1 << 30, first_seen=NOW - timedelta(days=90)
    )
    guest = {"disk__guest__kind": "vm", "disk__guest__uid": "100", "disk__guest__state": "running"}
    ImageUseFactory.create(image=one, **guest | {"disk__in_backups": True} | disk)
    return one


def codes(policy: Policy) -> dict[int, str]:
    found = choose(Rules.of(policy), NOW)
    assert all(skip.reason.endswith((".", "UTC.")) for skip in found.skips)
    return {skip.id: skip.code for skip in found.skips} | {one.id: "" for one in found.chosen}


@pytest.mark.parametrize(("days_ago", "code"), [(0.5, ""), (6.9, ""), (7.1, CODE), (None, CODE)])
def test_an_image_is_taken_while_its_last_backup_is_young_enough(days_ago: float | None, code: str) -> None:
    one = image()
    backed_up(one.host, days_ago=days_ago)
    assert codes(PolicyFactory.create(backup_max_days=7)) == {one.pk: code}
    assert codes(PolicyFactory.create()) == {one.pk: ""}


def test_the_newest_that_is_known_is_enough_where_more_may_exist() -> None:
    one = image()
    backed_up(one.host, gaps=(Gap("pbs2 is away."),))
    assert codes(PolicyFactory.create(backup_max_days=7)) == {one.pk: ""}


@pytest.mark.parametrize("in_backups", [False, None])
def test_a_disk_that_is_not_known_to_be_in_it_is_left_out(in_backups: bool | None) -> None:
    one = image(disk__in_backups=in_backups)
    backed_up(one.host)
    assert codes(PolicyFactory.create(backup_max_days=7)) == {one.pk: CODE}


def test_where_nothing_tells_of_backups_nothing_is_taken() -> None:
    one, orphan = ImageFactory.create(reclaimable_bytes=1 << 30), ImageFactory.create(reclaimable_bytes=1 << 30)
    ImageUseFactory.create(image=one)
    assert codes(PolicyFactory.create(backup_max_days=3650)) == {one.pk: CODE, orphan.pk: CODE}


def test_an_image_of_a_guest_that_is_gone_is_left_out() -> None:
    one = image()
    backed_up(one.host)
    GuestDisk.objects.all().delete()
    assert codes(PolicyFactory.create(backup_max_days=7)) == {one.pk: CODE}


@pytest.mark.parametrize("kind", ["trim", "delete_old_snapshots"])
def test_guests_are_asked_for_theirs_with_all_their_disks(kind: str) -> None:
    one = image()
    backed_up(one.host)
    guest = one.uses.get().disk.guest
    guest.snapshots = [{"name": "old", "created": 1, "external": False, "files": []}]
    guest.save()
    options = kinds.get(kind).clean({"older_than_days": 3} if kind == "delete_old_snapshots" else {})
    policy = PolicyFactory.create(kind=kind, options=options, backup_max_days=7)
    assert codes(policy) == {guest.pk: ""}
    GuestDisk.objects.create(guest=guest, target="scsi1", path="/b", in_backups=False)
    assert codes(policy) == {guest.pk: CODE}
    run = PolicyRunFactory.create(policy=policy)
    left_out = _left_out_by_now(run, Rules.of(policy), [guest.pk], NOW)
    assert {pk: code for pk, (code, _why) in left_out.items()} == {guest.pk: CODE}


def test_it_is_looked_at_again_right_before_the_job() -> None:
    one = image()
    backed_up(one.host)
    rules = Rules.of(PolicyFactory.create(backup_max_days=7))
    assert choosing.left_out_by_now(rules, [one.pk], NOW) == {}
    assert choosing.left_out_by_now(rules, [one.pk], NOW + timedelta(days=8))[one.pk][0] == CODE
    GuestBackup.objects.all().delete()
    assert choosing.left_out_by_now(rules, [one.pk], NOW)[one.pk][0] == CODE


def test_more_images_cost_no_more_queries() -> None:
    pool = StoragePoolFactory.create()
    backed_up(pool.host)
    rules = Rules.of(PolicyFactory.create(backup_max_days=7))

    def more(count: int) -> None:
        for _one in range(count):
            row = ImageFactory.create(pool=pool, reclaimable_bytes=1 << 30, first_seen=NOW - timedelta(days=90))
            ImageUseFactory.create(image=row, disk__guest__kind="vm", disk__in_backups=True)

    more(3)
    with at_most_queries(20):
        choose(rules, NOW)
    more(40)
    with at_most_queries(20):
        assert len(choose(rules, NOW).skips) == 43


@pytest.mark.parametrize("days", [0, 3651, "7", 1.5, True])
def test_only_a_whole_number_of_days_or_none_is_taken(days: object) -> None:
    client = client_as(role="admin")
    body = {"name": "n", "cron": "0 22 * * *", "backup_max_days": days}
    answer = client.post("/api/v1/policies/", body, content_type="application/json")
    assert (answer.status_code, "backup_max_days" in answer.content.decode()) == (400, True)


def test_it_is_kept_shown_and_taken_back_over_rest() -> None:
    client = client_as(role="admin")
    body = {"name": "n", "cron": "0 22 * * *", "backup_max_days": 30}
    made = client.post("/api/v1/policies/", body, content_type="application/json").json()
    assert made["backup_max_days"] == 30
    change, address = {"backup_max_days": None}, f"/api/v1/policies/{made['id']}/"
    assert client.patch(address, change, content_type="application/json").json()["backup_max_days"] is None


def test_a_policy_on_pools_can_ask_for_none() -> None:
    columns = {"name": "n", "cron": "0 22 * * *", "kind": "benchmark", "backup_max_days": 3}
    assert "backup_max_days" in invalid_fields(services.create, ADMIN, columns)


def test_runs_of_earlier_versions_ask_for_none() -> None:
    kept = Rules.of(PolicyFactory.create(backup_max_days=7)).as_json()
    assert kept["backup_max_days"] == 7
    del kept["backup_max_days"]
    assert Rules.from_json(kept).backup_max_days is None


def test_the_form_takes_it_and_leaves_it_out_where_it_is_empty() -> None:
    policy = PolicyFactory.create(backup_max_days=7)
    client = client_as(role="admin")
    address = f"/policies/{policy.pk}/change/"
    page = client.get(address).content.decode()
    assert 'name="backup_max_days"' in page
    given = {
        "name": policy.name, "cron": "0 22 * * *", "timezone": "UTC", "window_minutes": "360", "quiet_minutes": "30",
        "kind": "reclaim", "max_jobs_per_host": "1", "backup_max_days": "14",
    }  # fmt: skip
    client.post(address, given)
    assert Policy.objects.get().backup_max_days == 14
    client.post(address, given | {"backup_max_days": "0"})
    assert Policy.objects.get().backup_max_days == 14
    client.post(address, given | {"backup_max_days": ""})
    assert Policy.objects.get().backup_max_days is None


def test_the_reason_stands_in_the_preview() -> None:
    one = image()
    backed_up(one.host, days_ago=9)
    policy = PolicyFactory.create(backup_max_days=7)
    answer = client_as(role="admin").get(f"/api/v1/policies/{policy.pk}/preview/").json()
    assert [skip["code"] for skip in answer["skipped"]] == [CODE]
    assert PolicyPick.objects.count() == 0
