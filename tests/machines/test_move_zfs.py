"""A disk goes onto a new volume of ZFS, or from one, on a real host: every byte, whoever comes between."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from storage_admin.agent.protocol import b64
from storage_admin.hosts.models import Host as Row
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.machines import test_move as logical
from tests.machines.host import MIB, POOL, Host, cut_off, host
from tests.machines.test_lvm import group, row
from tests.machines.test_volume_reclaim import args as logical_place
from tests.machines.test_zfs_orphans import KILL, UNWRAP, WRAPPED
from tests.working import ADMIN, run, said, scan, work

__all__ = ["group", "host", "row"]

pytestmark = [pytest.mark.machines]

#: All that a job may change.
STATE = (
    "udevadm settle; zfs get -Hp -r -t filesystem,volume -o name,property,value,source "
    "guid,volmode,storage-admin:aside tank; find /dev/zvol -type l | sort; "
    "lvs --noheadings -o lv_name,lv_autoactivation,lv_tags"
)
DEVICES = {"slim": "/dev/vg/slim", "solid": "/dev/vg/solid", "disk": "/dev/zvol/tank/data/disk"}
#: Where a new volume is made, and its device.
TARGETS = {"zfs": "/dev/zvol/tank/other/moved", "thick": "/dev/vg/moved", "thin": "/dev/vg/moved"}


@pytest.fixture(scope="module")
def tank(host: Host) -> Iterator[Host]:
    """A ZFS pool with two datasets."""
    host.run("modprobe zfs; truncate -s 512M /root/zd1; zpool create -o ashift=12 -m none tank /root/zd1")
    host.run("zfs create tank/data; zfs create tank/other")
    yield host
    host.run("zpool destroy -f tank; rm /root/zd1")


@pytest.fixture
def site(tank: Host, group: Host) -> Iterator[Host]:
    """Volumes of LVM, thin and thick, and of ZFS, of 12 MiB, with data and zeros; an image of 9.5 MiB on a raw base."""
    fill = "dd if=/dev/urandom of={0} bs=64k seek={1} count={2} oflag=direct conv=notrunc status=none"
    group.run("lvcreate -q -V 12M -T vg/pool -n slim; lvcreate -q -y -L 12M -n solid vg")
    group.run("zfs create -s -V 12M tank/data/disk; udevadm settle")
    for path in DEVICES.values():
        group.run("; ".join(fill.format(path, at, count) for at, count in ((0, 20), (100, 3), (191, 1))))
    logical.new_image(group)
    group.run("udevadm settle; zpool sync")
    yield group
    each = "for one in $(zfs list -Ho name -t volume); do"
    group.run(f"rm -f {POOL}/*; {each} for try in 1 2 3 4 5; do zfs destroy -R $one && break; sleep 1; done; done")


def place(site: Host, name: str) -> dict[str, object]:
    if name != "disk":
        return logical_place(site, name)
    told = site.run("zpool get -Ho value guid tank; zfs get -Hpo value guid tank/data/disk").split()
    return {"backend": "zfs", "group": "tank/data", "group_id": told[0], "name": name, "id": told[1], "idle_io": False}


def wanted(site: Host, where: str = "zfs", name: str = "moved", dataset: str = "tank/other") -> dict[str, object]:
    ids = site.run("zpool get -Ho value guid tank; vgs --noheadings -o vg_uuid vg").split()
    if where == "zfs":
        volume = {"backend": "zfs", "group": dataset, "group_id": ids[0], "name": name, "pool": ""}
    else:
        pool = "pool" if where == "thin" else ""
        volume = {"backend": "lvm", "group": "vg", "group_id": ids[1], "name": name, "pool": pool}
    return {"volume": volume, "reserve": logical.NOTHING}


def content(site: Host, path: str, size: int = 12 * MIB) -> str:
    """The digest of so many bytes of a volume."""
    return site.run(f"udevadm settle; head -c {size} {path} | sha256sum")


def without_moved(state: str) -> list[str]:
    return sorted(line for line in state.splitlines() if "moved" not in line)


@pytest.mark.parametrize(
    ("source", "where"),
    [("top.qcow2", "zfs"), ("disk", "zfs"), ("disk", "thin"), ("disk", "thick"), ("slim", "zfs"), ("solid", "zfs")],
)
def test_a_new_volume_reads_as_the_disk_and_is_like_any_other(site: Host, source: str, where: str) -> None:
    before, size = site.run(STATE), 12 * MIB
    if source == "top.qcow2":
        size, digest, files = (
            logical.IMAGE_SIZE,
            logical.of_image(site),
            site.run(f"cd {POOL}; stat -c '%n %i %s %Y' *"),
        )
        told = site.ask("file_to_volume", site.args(source, size, "base.raw", **wanted(site, where)))
        assert site.run(f"cd {POOL}; stat -c '%n %i %s %Y' *") == files
    else:
        digest = content(site, DEVICES[source])
        told = site.ask("volume_to_volume", place(site, source) | wanted(site, where))
        assert content(site, DEVICES[source]) == digest
    assert (told.get("virtual_size"), told.get("volume_size")) == (
        size,
        -(-size // (4 * MIB)) * 4 * MIB if where != "zfs" else size,
    ), told
    path = TARGETS[where]
    assert content(site, path, size) == digest
    assert site.run(f"tail -c +{size + 1} {path} | tr -d '\\0' | wc -c").strip() == "0"
    after = site.run(STATE)
    assert without_moved(after) == without_moved(before)
    if where == "zfs":
        assert "tank/other/moved\tvolmode\tdefault\tdefault" in after.splitlines()
        assert "tank/other/moved\tstorage-admin:aside\t-\t-" in after.splitlines()
        taken, own = site.run("zpool sync; zfs get -Hpo value usedbydataset,guid tank/other/moved").split()
        assert (told["after_bytes"], told["id"]) == (int(taken), own)
        assert 0 < int(taken) < 6 * MIB


@pytest.mark.parametrize("source", ["disk"])
def test_a_new_file_reads_as_the_volume(site: Host, source: str) -> None:
    before, digest, path = site.run(STATE), content(site, DEVICES[source]), f"{POOL}/{source}.qcow2"
    logical.into_file(site, place(site, source), path)
    assert site.run(STATE) == before
    assert logical.of_image(site, path) == digest


LOCKED = (
    "printf 12345678 >/root/k; zfs create -o encryption=on -o keyformat=passphrase -o keylocation=file:///root/k {0}; "
)
OPENED = "(exec sleep 1000 <>/dev/zvol/tank/data/disk >/dev/null 2>&1 & echo $! >/root/p); sleep 1"


def test_what_stands_against_it_leaves_all_as_it_was(site: Host) -> None:
    before = site.run(STATE)

    def code(
        prepared: str = "true", after: str = "true", name: str = "moved", dataset: str = "tank/other", **more: Any
    ) -> str:
        asked = place(site, "disk") | wanted(site, "zfs", name, dataset) | more
        site.run(prepared)
        answer = site.ask("volume_to_volume", asked)
        site.run(after)
        return str(answer.get("code"))

    ends = "zfs destroy -r {0}"
    assert code("zfs create tank/other/moved", ends.format("tank/other/moved")) == "target_exists"
    assert code(name="disk", dataset="tank/data") == "target_exists"
    assert code(reserve={"percent": 0.0, "bytes": 480 * MIB}) == "not_enough_space"
    assert code("zfs set quota=8M tank/other", "zfs set quota=none tank/other") == "not_enough_space"
    assert code(OPENED, "kill $(cat /root/p); sleep 1; udevadm settle") == "image_in_use"
    assert code("zfs snapshot tank/data/disk@a", "zfs destroy tank/data/disk@a") == "has_overlays"
    assert code("zpool set multihost=on tank", "zpool set multihost=off tank") == "shared_pool"
    renamed = "zfs rename tank/data/{0} tank/data/{1}; udevadm settle"
    assert code(renamed.format("disk", "o"), renamed.format("o", "disk")) == "stale_plan"
    locked = f"{LOCKED.format('tank/more')} zfs unload-key tank/more"
    assert code(locked, ends.format("tank/more"), dataset="tank/more") == "unsupported_pool"
    hides = "zfs create -o volmode=none tank/more"
    assert code(hides, ends.format("tank/more"), dataset="tank/more") == "unsupported_pool"
    for name in ("../evil", ".sa-j1.new", "a b", "-a", "a@b"):
        assert code(name=name) == "invalid"
    assert site.run(STATE) == before


def test_a_volume_whose_key_is_not_loaded_stays(site: Host) -> None:
    site.run(f"{LOCKED.format('tank/more')} zfs destroy tank/data/disk; zfs create -s -V 12M tank/more/disk")
    asked = place(site, "slim") | wanted(site) | {"backend": "zfs", "group": "tank/more", "name": "disk"}
    asked |= {"group_id": site.run("zpool get -Ho value guid tank").strip()}
    asked |= {"id": site.run("udevadm settle; zfs get -Hpo value guid tank/more/disk").strip()}
    site.run("zfs unload-key tank/more 2>/dev/null || zfs unload-key -r tank/more; udevadm settle")
    before = site.run(STATE)
    assert site.ask("volume_to_volume", asked)["code"] == "unsupported_pool"
    assert site.run(STATE) == before
    site.run("zfs destroy -r tank/more")


def test_one_that_fills_up_meanwhile_is_given_up(site: Host) -> None:
    before = site.run(STATE)
    asked = place(site, "disk") | wanted(site) | {"bandwidth_bytes_sec": MIB // 16}
    asked |= {"reserve": {"percent": 0.0, "bytes": 64 * MIB}}
    with site.agent() as agent:
        agent.request("volume_to_volume", asked, "j9")
        agent.until("progress", stage="copying")
        site.run(f"zfs set reservation=$(($(zfs get -Hpo value available tank) - {32 * MIB})) tank/data")
        told = agent.answer()
    site.run("zfs set reservation=none tank/data")
    assert told.get("code") == "not_enough_space"
    assert site.run(STATE) == before


@pytest.mark.parametrize("reserved", ["none", "auto"])
def test_an_image_is_not_written_onto_a_sparse_volume_whose_pool_others_fill_meanwhile(
    site: Host, reserved: str
) -> None:
    site.run(f"zfs set refreservation={reserved} tank/data/disk")
    asked = site.args("top.qcow2", logical.IMAGE_SIZE, "base.raw", device_b64=b64(DEVICES["disk"].encode()))
    asked |= {"bandwidth_bytes_sec": MIB // 4, "reserve": {"percent": 0.0, "bytes": 64 * MIB}}
    with site.agent() as agent:
        agent.request("to_device", asked, "j9")
        agent.until("ready")
        agent.say("go", generation=agent.generation)
        agent.until("progress", stage="copying")
        site.run(f"zfs set reservation=$(($(zfs get -Hpo value available tank) - {32 * MIB})) tank/other")
        told = agent.answer()
    site.run("zfs set reservation=none tank/other")
    assert (
        told.get("code", told.get("virtual_size")) == {"none": "not_enough_space", "auto": logical.IMAGE_SIZE}[reserved]
    )


#: Whoever has a device of a volume open, as the agent and its tools.
KILLS = (
    r"find /proc/[0-9]*/fd \( -lname '/dev/zd*' -o -lname '/dev/dm-*' \) -printf '%h\n' 2>/dev/null | cut -d/ -f3 | "
    "sort -u | xargs kill -KILL; sleep 1"
)


@pytest.mark.parametrize(("source", "where"), [("disk", "zfs"), ("disk", "thick"), ("slim", "zfs")])
def test_one_that_is_cut_off_in_the_middle_leaves_all_as_it_was(site: Host, source: str, where: str) -> None:
    before, digest = site.run(STATE), content(site, DEVICES[source])
    work = "/dev/zvol/tank/data/.sa-j9.work" if source == "disk" else "/dev/vg/.sa-j9.work"
    for how in ("kill", "cancel"):
        asked = place(site, source) | wanted(site, where) | {"bandwidth_bytes_sec": MIB // 4}
        with site.agent() as agent:
            agent.request("volume_to_volume", asked, "j9")
            agent.until("progress", stage="copying")
            names = site.run("lvs --noheadings -o lv_name; zfs list -Ho name").split()
            assert {one.rpartition("/")[2] for one in names} >= {".sa-j9.work", ".sa-j9.new"}
            assert not {source, "tank/data/disk" if source == "disk" else "", "moved"} & set(names)
            # Who finds the device by whatever name does not write to it; who takes snapshots of all has some of it.
            site.run(
                f"test -b {work} && ! dd if=/dev/zero of={work} bs=4k count=1 2>/dev/null && zfs snapshot -r tank@all"
            )
            cut_off(site, agent, how, KILLS)
        if how == "kill":
            assert {row["outcome"] for row in site.ask("recover", {"pools": []})["recovered"]} == {"reverted"}
        site.run("zfs destroy -r tank@all")
        assert site.run(STATE) == before, how
    assert content(site, DEVICES[source]) == digest


def inside(site: Host, *argv: object) -> list[Any]:
    """What a program of ``zvol_inside.py`` says, line by line."""
    for name in ("volume_inside.py", "zvol_inside.py"):
        own = f"/root/tests/machines/{name}"
        site.machine.run(f"mkdir -p /root/tests/machines; cat >{own}", Path(__file__).with_name(name).read_bytes())
    line = " ".join(["cd /root; python3 -m tests.machines.zvol_inside", *map(str, argv)])
    done = subprocess.run(site.machine.command(line), capture_output=True, text=True)
    print(done.stderr)
    assert done.returncode == 0, done.stdout[-500:]
    return [json.loads(line) for line in done.stdout.splitlines()]


#: What a move between two datasets calls: journal, no device, renamed, a device; the new one made, its id noted; named;
#: the other one without a device, renamed, its mode set and inherited, no journal; the new one's mode, and no journal.
CALLS = 14
#: By that call the new volume gets its name: from then on the move has succeeded.
NAMED = 7


def test_a_death_at_any_step_leaves_the_volume_whole_and_the_new_one_complete_or_gone(site: Host) -> None:
    as_made = [["volmode", "default", "default"], ["storage-admin:aside", "-", "-"]]
    logical.assert_whole_or_gone(inside(site, "moves", "disk", CALLS), CALLS, NAMED, as_made)


def test_what_a_guest_writes_that_starts_at_any_moment_is_never_lost(site: Host) -> None:
    before = site.run(STATE)
    logical.assert_nothing_lost(inside(site, "race", "disk", logical.TRIES))
    assert site.run(STATE) == before


@pytest.mark.django_db
@pytest.mark.usefixtures("quiet", "no_reserve")
@pytest.mark.parametrize(
    ("command", "when", "is_moved"),
    [("create*", "after", False), ("rename*.new*", "before", False), ("rename*.new*", "after", True),
     ("'inherit storage-admin'*", "after", True)],
)  # fmt: skip
def test_the_row_of_a_job_that_was_cut_off_says_what_is_there(
    site: Host, row: Row, command: str, when: str, is_moved: bool
) -> None:
    before, digest = site.run(STATE), content(site, DEVICES["slim"])
    scan(row)
    pool, image = StoragePool.objects.get(kind="zfs"), Image.objects.get(name="slim")
    dies = {"before": f"{KILL}; exit 9", "after": KILL}[when]
    site.run(WRAPPED.format(command=command, **{"before": "", "after": "", "more": "", when: dies}))
    try:
        job = run(services.submit(ADMIN, "move", image.pk, {"target_pool": pool.pk, "target_name": "moved"}))
    finally:
        site.run(UNWRAP)
    assert job.state == "interrupted", (job.error_code, job.error_detail, said(job))
    site.run("while pgrep -f 'sh /usr/sbin/[z]fs' >/dev/null; do sleep 0.2; done")
    Job.objects.filter(pk=job.pk).update(needs_recovery=True)
    work("recover", row.pk)
    job.refresh_from_db()
    assert job.state == ("succeeded" if is_moved else "interrupted"), said(job)
    assert without_moved(site.run(STATE)) == without_moved(before)
    made = site.run("zfs list -Ho name,storage-admin:aside | grep moved || true").split()
    assert made == (["tank/moved", "-"] if is_moved else [])
    if is_moved:
        assert content(site, "/dev/zvol/tank/moved") == digest
        assert job.freed_bytes == -(job.result or {})["after_bytes"] != 0
    assert content(site, DEVICES["slim"]) == digest
