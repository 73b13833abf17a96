"""A clone of ZFS and what it stands on exchange their parts, of a real host: every byte of both as before."""

import pytest

from images.models import Image
from storage_admin.hosts.models import Host as Row
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.machines.host import Host, host
from tests.machines.test_zfs import WRITE, row, tank
from tests.working import ADMIN, refused_as, scan, succeeded, work

__all__ = ["host", "row", "tank"]

pytestmark = [pytest.mark.machines, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

CLONED = f"""
zfs create -s -V 32M 'tank/old one'; udevadm settle
{WRITE} count=6 of='/dev/zvol/tank/old+one'; zfs snapshot 'tank/old one@first'
{WRITE} count=4 of='/dev/zvol/tank/old+one'; zfs snapshot 'tank/old one@second'
{WRITE} count=2 of='/dev/zvol/tank/old+one'; zfs snapshot 'tank/old one@third'
zfs clone 'tank/old one@second' tank/new; udevadm settle
{WRITE} seek=20 count=3 of=/dev/zvol/tank/new; zpool sync; udevadm settle
"""
CONTENT = "sha256sum < '/dev/zvol/tank/old+one'; sha256sum < /dev/zvol/tank/new"
SNAPSHOTS = "zfs list -H -t snapshot -o name -s createtxg -r tank | grep -e new -e 'old one'"


def image(name: str) -> Image:
    return Image.every.get(name=name)


def promote(name: str) -> Job:
    return work("flatten", image(name).pk, ADMIN)


def test_a_clone_and_its_origin_exchange_their_parts_and_every_byte_stays(tank: Host, row: Row) -> None:
    tank.run(CLONED)
    scan(row)
    content = tank.run(CONTENT)
    used = int(tank.run("zfs list -Hp -o used tank"))
    assert image("new").backing == image("old+one")
    plan = services.plan(ADMIN, "flatten", image("new").pk, {})
    assert (plan.refusals, plan.method, plan.scratch_bytes) == ((), "promote", 0)
    job = succeeded(promote("new"))
    assert tank.run(SNAPSHOTS).splitlines() == ["tank/new@first", "tank/new@second", "tank/old one@third"]
    assert tank.run(CONTENT) == content
    assert abs(int(tank.run("zpool sync; zfs list -Hp -o used tank")) - used) < 1 << 20
    assert job.freed_bytes is None
    scan(row)
    assert (image("new").backing, image("old+one").backing) == (None, image("new"))
    tank.run("zfs destroy -r 'tank/old one'")  # what it is for
    assert tank.run(CONTENT.rpartition("; ")[2]).split() == content.splitlines()[1].split()


def test_nothing_of_proxmox_ve_is_turned_round_and_nothing_that_would_not_fit(tank: Host, row: Row) -> None:
    tank.run(CLONED)
    scan(row)
    before = tank.run(SNAPSHOTS)
    linked = image("vm-102-disk-0").pk
    assert refused_as(services.submit, ADMIN, "flatten", linked, {}) == "in_snapshot_chain"
    names = {"dataset": "tank/data/vm-102-disk-0", "origin": "tank/data/base-101-disk-0"}
    assert tank.ask("promote", names)["code"] == "in_snapshot_chain"
    assert tank.ask("promote", {"dataset": "tank/new", "origin": "tank/small"})["code"] == "stale_plan"
    assert tank.ask("promote", {"dataset": "-a", "origin": "tank"})["code"] == "invalid"
    assert refused_as(services.submit, ADMIN, "flatten", image("plain+disk").pk, {}) == "stale_plan"
    assert refused_as(services.submit, ADMIN, "reclaim", image("plain+disk").pk, {}) == "unsupported_pool"
    tank.run("zfs snapshot tank/new@first")
    assert promote("new").error_code == "target_exists"
    tank.run("zfs destroy tank/new@first")
    assert tank.run(SNAPSHOTS) == before
    dies = '#!/bin/sh\\n[ $1 != promote ] || kill -KILL $PPID\\nexec zfs.real "$@"\\n'
    tank.run(f"mv /sbin/zfs /sbin/zfs.real; printf '{dies}' >/sbin/zfs; chmod +x /sbin/zfs")
    try:
        assert promote("new").state == "interrupted"
    finally:
        tank.run("sleep 2; mv /sbin/zfs.real /sbin/zfs")
    assert sorted(tank.run(SNAPSHOTS).split("\n")) in (sorted(before.split("\n")), [
        "", "tank/new@first", "tank/new@second", "tank/old one@third",
    ])  # fmt: skip
