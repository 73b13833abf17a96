"""Zeros of thin volumes go back to their pool, of a real host: every byte as before, whoever comes in between."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from storage_admin.hosts.models import Host as Row
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan
from tests.factories import StoragePoolFactory
from tests.machines.host import MIB, Host, cut_off, host
from tests.machines.test_exclusive import used
from tests.machines.test_lvm import group, row
from tests.working import ADMIN, refused_as, run, said, scan, succeeded, work

__all__ = ["group", "host", "row"]

pytestmark = [pytest.mark.machines, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

NAME = "vm-901-disk-0"
#: Without what is active: an event of udev may activate any volume of a group that has changed.
LISTED = "udevadm settle; lvs --noheadings -o lv_name,lv_autoactivation,lv_tags vg"
FILL = "dd if=/dev/{} of=/dev/vg/{} bs=64k seek={} count={} oflag=direct conv=notrunc status=none"


@pytest.fixture
def site(group: Host, row: Row) -> Iterator[Host]:
    """A thin volume, inactive: 4 MiB of data, 10 MiB of zeros with one chunk of data in them, 6 MiB unmapped."""
    fills = (("urandom", 0, 64), ("zero", 64, 160), ("urandom", 100, 1))
    group.run(f"lvcreate -q -V 20M -T vg/pool -n {NAME}; udevadm settle")
    group.run("; ".join(FILL.format(what, NAME, seek, count) for what, seek, count in fills) + "; udevadm settle")
    StoragePoolFactory.create(volumes=True, host=row, name="local-lvm", kind="lvmthin", path="lvmthin vg/pool")
    scan(row)
    group.run(f"lvchange -an vg/{NAME}")
    yield group
    group.run("umount /mnt/volume 2>/dev/null || true")


def volume(name: str = NAME) -> Image:
    return Image.every.get(name=name, missing_since=None)


def content(host: Host, name: str = NAME) -> str:
    """The digest of a volume, which is as active afterwards as it was."""
    was = host.run(f"lvs --noheadings -o lv_active vg/{name}").strip()
    away = "" if was else f"; udevadm settle; lvchange -an vg/{name}"
    return host.run(f"lvchange -ay vg/{name}; sha256sum < /dev/vg/{name}{away}")


def listed(host: Host) -> dict[str, list[str]]:
    return {(words := line.split())[0]: words[1:] for line in host.run(LISTED).splitlines()}


def plan(name: str = NAME) -> Plan:
    return services.plan(ADMIN, "reclaim", volume(name).pk, {})


def reclaim(name: str = NAME) -> Job:
    return work("reclaim", volume(name).pk, ADMIN)


@pytest.mark.parametrize("active", [True, False])
def test_zeros_go_back_to_the_pool_as_was_foretold_and_every_byte_stays(site: Host, row: Row, active: bool) -> None:
    before, digest = listed(site), content(site)
    if active:
        site.run(f"lvchange -ay vg/{NAME}; udevadm settle")
    assert plan().won_bytes is None
    assert work("analyze", volume().pk, ADMIN).state == "succeeded"
    foretold = plan()
    assert (foretold.refusals, foretold.won_bytes) == ((), 159 * 64 * 1024)
    held = used(site)
    job = succeeded(reclaim())
    result = job.result or {}
    assert (result["before_bytes"], result["after_bytes"]) == (14 * MIB, 65 * 64 * 1024)
    assert held - used(site) == result["freed_bytes"] == job.freed_bytes == foretold.won_bytes
    assert listed(site) == before
    assert bool(site.run(f"lvs --noheadings -o lv_active vg/{NAME}").strip()) is active
    assert site.run("dmsetup ls | grep storage-admin || true") == ""
    assert content(site) == digest
    assert scan(row)["vanished"] == 0
    again = reclaim()
    assert (again.state, (again.result or {})["freed_bytes"]) == ("succeeded", 0)
    assert not [line for line in said(again) if "lvrename" in line]


def args(site: Host, name: str = NAME) -> dict[str, object]:
    told = site.run(f"lvs --noheadings -o vg_uuid,lv_uuid vg/{name}").split()
    return {"backend": "lvm", "group": "vg", "group_id": told[0], "name": name, "id": told[1], "idle_io": False}


def test_only_volumes_whose_pool_zeroes_and_that_nobody_needs_now_give_back(site: Host, row: Row) -> None:
    before = listed(site)
    assert refused_as(services.submit, ADMIN, "reclaim", volume("thick").pk, {}) == "unsupported_pool"

    def code(name: str = NAME, prepared: str = "", after: str = "") -> str:
        asked = args(site, name)
        site.run(prepared or "true")
        answer = site.ask("reclaim_volume", asked)
        site.run(after or "true")
        return str(answer.get("code"))

    assert code("thick") == "unsupported_pool"
    site.run("lvcreate -q -y -L 8M -n outside vg; lvchange -pr vg/outside; udevadm settle; lvchange -an vg/outside")
    site.run("lvcreate -q -s --thinpool vg/pool -n external vg/outside; udevadm settle")
    assert code("external", after="lvremove -q -f vg/external vg/outside") == "unsupported_pool"
    # The kernel's table is what counts, also where LVM's metadata say otherwise by now.
    for option, back in (("-Zn", "-Zy"), ("--discards ignore", "--discards passdown")):
        off = "vgchange -q -an vg; lvchange -q {} vg/pool; lvchange -q -ay vg/pool"
        assert code(prepared=off.format(option), after=off.format(back)) == "unsupported_pool", option
    used_by = (
        f"lvchange -ay vg/{NAME}; udevadm settle; (sleep 1000 <>/dev/vg/{NAME} >/dev/null 2>&1 & echo $! >/root/p)"
    )
    assert (
        code(prepared=used_by, after=f"kill $(cat /root/p); udevadm settle; lvchange -an vg/{NAME}") == "image_in_use"
    )
    shared = "vgchange -q --{}tag RHAT_storage vg"
    assert code(prepared=shared.format("add"), after=shared.format("del")) == "shared_pool"
    assert code(prepared=f"lvrename vg/{NAME} vg/other", after=f"lvrename vg/other vg/{NAME}") == "stale_plan"
    assert code(prepared="vgchange -q -an vg", after="vgchange -q -ay vg; lvchange -an vg/" + NAME) == "busy"
    assert listed(site) == before
    assert site.run("dmsetup ls | grep storage-admin || true") == ""


#: What a reclaim of an active volume calls: a tag, deactivated, renamed, renamed back, active, no tag.
CALLS = 6


def inside(site: Host, *argv: object) -> list[Any]:
    """What a program of ``volume_inside.py`` says, line by line."""
    site.machine.run("cat >/root/inside.py", (Path(__file__).parent / "volume_inside.py").read_bytes())
    command = site.machine.command(" ".join(["python3 /root/inside.py", *map(str, argv)]))
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stderr)
    assert done.returncode == 0, done.stdout[-500:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_death_at_any_step_leaves_the_volume_whole_under_its_own_name(site: Host) -> None:
    told = inside(site, "deaths", NAME, CALLS)
    ends = ["killed"] * (2 * CALLS) + ["done"] * 2
    assert [(end, left, same) for _, _, end, _, left, same in told] == [(end, "0", True) for end in ends]
    assert len(listed(site)) == len([name for name in listed(site) if not name.startswith(".sa-")])


def test_the_row_of_one_that_died_in_the_middle_is_true_after_a_recovery(site: Host, row: Row) -> None:
    site.run(f"lvchange -ay vg/{NAME}; udevadm settle")
    before, digest = listed(site), content(site)
    dies = '#!/bin/sh\\nlvm lvrename "$@"\\nkill -KILL $PPID\\nsleep 1\\n'
    site.run(f"mv /usr/sbin/lvrename /root/; printf '{dies}' >/usr/sbin/lvrename; chmod +x /usr/sbin/lvrename")
    try:
        job = run(services.submit(ADMIN, "reclaim", volume().pk, {}))
    finally:
        site.run("mv /root/lvrename /usr/sbin/")
    assert job.state == "interrupted"
    Job.objects.filter(pk=job.pk).update(needs_recovery=True)
    assert NAME not in listed(site)
    work("recover", row.pk)
    scan(row)
    assert (volume().state, Job.objects.get(pk=job.pk).needs_recovery) == ("ok", False)
    assert (listed(site), content(site)) == (before, digest)


#: Whoever has the device of the job open.
KILLS = r"""device=$(dmsetup info -c --noheadings -o blkdevname storage-admin-j9)
find /proc/[0-9]*/fd -lname "/dev/$device" -printf '%h\n' 2>/dev/null | cut -d/ -f3 | sort -u |
    xargs kill -KILL
sleep 1"""


@pytest.mark.parametrize("how", ["kill", "cancel"])
@pytest.mark.parametrize("stage", ["reading", "discarding"])
def test_one_that_is_cut_off_in_the_middle_leaves_the_volume_whole(site: Host, row: Row, how: str, stage: str) -> None:
    before, digest = listed(site), content(site)
    with site.agent() as agent:
        agent.request("reclaim_volume", args(site) | {"bandwidth_bytes_sec": MIB // 16}, "j9")
        if stage == "discarding":
            agent.until("ready")
            agent.say("go", generation=1)
        agent.until("progress", stage=stage)
        names, device = listed(site), site.run("dmsetup ls | grep -c storage-admin").strip()
        assert (NAME in names, device) == (stage == "reading", "1")
        cut_off(site, agent, how, KILLS)
    if how == "kill":
        assert site.run("dmsetup ls | grep -c storage-admin").strip() == "1"
        work("recover", row.pk)
    assert listed(site) == before
    assert site.run("dmsetup ls | grep storage-admin || true") == ""
    assert content(site) == digest


def test_a_scan_meanwhile_misses_nothing(site: Host, row: Row) -> None:
    with site.agent() as agent:
        agent.request("reclaim_volume", args(site) | {"bandwidth_bytes_sec": MIB // 4}, "j9")
        agent.until("ready")
        agent.say("go", generation=1)
        agent.until("progress", stage="discarding")
        assert NAME not in listed(site)
        result = scan(row)
        assert (result["vanished"], volume().state) == (0, "ok")
        assert agent.answer()["changed"]
    assert scan(row)["vanished"] == 0


def test_a_pool_that_is_full_takes_writes_again(site: Host, row: Row) -> None:
    digest = content(site)
    site.run("lvchange -q --errorwhenfull y vg/pool; lvcreate -q -V 100M -T vg/pool -n full; udevadm settle")
    site.run("dd if=/dev/urandom of=/dev/vg/full bs=1M oflag=direct status=none || true")
    assert "out_of_data_space" in site.run("dmsetup status --noflush vg-pool-tpool")
    job = succeeded(reclaim())
    assert (job.result or {})["freed_bytes"] == 159 * 64 * 1024
    assert " rw " in site.run("dmsetup status --noflush vg-pool-tpool")
    assert content(site) == digest
    site.run(FILL.format("urandom", "full", 1500, 16))


def test_zeros_that_a_snapshot_shares_free_nothing_and_are_not_said_to(site: Host, row: Row) -> None:
    site.run(f"lvcreate -q -s -n snap vg/{NAME}")
    digest, held = content(site), used(site)
    scan(row)
    assert work("exclusive", row.pk).state == "succeeded"
    assert work("analyze", volume().pk, ADMIN).state == "succeeded"
    assert plan().won_bytes == 0
    result = reclaim().result or {}
    assert (result["freed_bytes"], held - used(site)) == (0, 0)
    assert result["before_bytes"] - result["after_bytes"] == 159 * 64 * 1024
    assert content(site) == digest


TRIES = 50


def test_what_a_guest_writes_that_starts_at_any_moment_is_never_lost(site: Host) -> None:
    before = listed(site)
    told = inside(site, "race", NAME, TRIES)
    ends = Counter(end for end, _, _ in told)
    print(ends, sum(written for _, written, _ in told))  # for docs/reliability.md
    assert sum(lost for _, _, lost in told) == 0
    assert set(ends) <= {"done", "image_in_use"}
    assert ends["done"] > TRIES // 10
    assert sum(written for _, written, _ in told) > TRIES
    assert listed(site) == before


def test_devices_that_come_and_go_hide_no_pool(site: Host) -> None:
    [(told, times)] = inside(site, "pools", 4)
    print(times)  # for docs/reliability.md
    assert told == [1]
