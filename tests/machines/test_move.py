"""A disk goes onto a new logical volume, or from one into a file, on a real host: every byte, whoever comes between."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from tests.machines.host import MIB, POOL, Host, cut_off, host
from tests.machines.test_exclusive import used
from tests.machines.test_lvm import group
from tests.machines.test_volume_reclaim import args as place
from tests.machines.test_volume_reclaim import inside

__all__ = ["group", "host"]

pytestmark = [pytest.mark.machines]

#: Without what is active: an event of udev may activate any volume of a group that has changed.
LISTED = "udevadm settle; lvs --noheadings -o lv_name,lv_autoactivation,lv_tags vg | sort"
NOTHING = {"percent": 0.0, "bytes": 0}
IMAGE_SIZE = 9961472


@pytest.fixture
def site(group: Host) -> Iterator[Host]:
    """A thin and a thick volume of 12 MiB, with data and zeros, and an image of 9.5 MiB on a raw base."""
    fill = "dd if=/dev/urandom of=/dev/vg/{0} bs=64k seek={1} count={2} oflag=direct conv=notrunc status=none"
    group.run("lvcreate -q -V 12M -T vg/pool -n slim; lvcreate -q -y -L 12M -n solid vg; udevadm settle")
    for name in ("slim", "solid"):
        group.run("; ".join(fill.format(name, at, count) for at, count in ((0, 20), (100, 3), (191, 1))))
    new_image(group)
    group.run("udevadm settle; lvchange -an vg/solid")
    yield group
    group.run(f"rm -f {POOL}/*")


def new_image(group: Host) -> None:
    """One of 9.5 MiB on a raw base."""
    base, top = f"{POOL}/base.raw", f"{POOL}/top.qcow2"
    group.run(f"truncate -s {IMAGE_SIZE} {base}; dd if=/dev/urandom of={base} bs=1M count=3 conv=notrunc")
    group.run(f"qemu-img create -q -f qcow2 -b {base} -F raw {top}; qemu-io -f qcow2 -c 'write -P 7 5M 1M' {top}")


def wanted(site: Host, pool: str = "", name: str = "moved") -> dict[str, object]:
    group_id = site.run("vgs --noheadings -o vg_uuid vg").strip()
    volume = {"backend": "lvm", "group": "vg", "group_id": group_id, "name": name, "pool": pool}
    return {"volume": volume, "reserve": NOTHING}


def content(site: Host, name: str, size: int = 12 * MIB) -> str:
    """The digest of so many bytes of a volume, which is as active afterwards as it was."""
    was = site.run(f"lvs --noheadings -o lv_active vg/{name}").strip()
    away = "" if was else f"; udevadm settle; lvchange -an vg/{name}"
    return site.run(f"lvchange -ay vg/{name}; head -c {size} /dev/vg/{name} | sha256sum{away}")


def of_image(site: Host, path: str = f"{POOL}/top.qcow2") -> str:
    """The digest of what an image reads as."""
    return site.run(f"qemu-img convert -f qcow2 -O raw {path} /root/flat; sha256sum < /root/flat; rm /root/flat")


def into_file(site: Host, place: dict[str, object], path: str) -> None:
    """Has a volume of 12 MiB written into a new image."""
    target = {"pool_path_b64": b64(POOL.encode()), "path_b64": b64(path.encode()), "format": "qcow2"}
    told = site.ask("volume_to_file", place | {"target": target, "reserve": NOTHING})
    assert told.get("device_bytes") == told.get("virtual_size") == 12 * MIB, told


def test_a_new_volume_reads_as_the_disk_and_is_like_any_other(site: Host) -> None:
    # What a thick volume gets was somebody's: behind the end of the disk nothing of it is left.
    site.run(
        "lvcreate -q -y -L 60M -n old vg; dd if=/dev/urandom of=/dev/vg/old bs=1M oflag=direct status=none || true"
    )
    site.run("udevadm settle; lvremove -q -f vg/old")
    before = site.run(LISTED)
    for source, pool in itertools.product(("slim", "solid", "top.qcow2"), ("", "pool")):
        held, size = used(site), 12 * MIB
        if source == "top.qcow2":
            size, digest, files = IMAGE_SIZE, of_image(site), site.run(f"cd {POOL}; stat -c '%n %i %s %Y' *")
            told = site.ask("file_to_volume", site.args(source, size, "base.raw", **wanted(site, pool)))
            assert site.run(f"cd {POOL}; stat -c '%n %i %s %Y' *") == files
        else:
            digest = content(site, source)
            told = site.ask("volume_to_volume", place(site, source) | wanted(site, pool))
        assert (told.get("virtual_size"), told.get("volume_size")) == (size, 12 * MIB), (source, pool, told)
        assert content(site, "moved", size) == digest, (source, pool)
        assert site.run(f"tail -c +{size + 1} /dev/vg/moved | tr -d '\\0' | wc -c").strip() == "0"
        after = site.run(LISTED).splitlines()
        assert [line for line in after if line.split()[0] != "moved"] == before.splitlines()
        assert [line.split() for line in after if line.split()[0] == "moved"] == [["moved", "enabled"]]
        assert site.run("lvs --noheadings -o lv_active vg/moved").strip() == "active"
        assert told["after_bytes"] == (used(site) - held if pool else 12 * MIB)
        assert told["after_bytes"] <= 66 * 65536 or not pool, (source, told)
        assert told["id"] == site.run("lvs --noheadings -o lv_uuid vg/moved").strip()
        site.run("lvremove -q -f vg/moved")


def test_a_new_file_reads_as_the_volume(site: Host) -> None:
    for source in ("slim", "solid"):
        before, digest, path = site.run(LISTED), content(site, source), f"{POOL}/{source}.qcow2"
        into_file(site, place(site, source), path)
        assert site.run(LISTED) == before
        assert of_image(site, path) == digest


def test_what_stands_against_it_leaves_all_as_it_was(site: Host) -> None:
    before = site.run(LISTED)

    def code(pool: str = "pool", name: str = "moved", prepared: str = "true", after: str = "true", **more: Any) -> str:
        asked = place(site, "slim") | wanted(site, pool, name) | more
        site.run(prepared)
        answer = site.ask("volume_to_volume", asked)
        site.run(after)
        return str(answer.get("code"))

    assert code(name="solid") == "target_exists"
    assert code(pool="nowhere") == "stale_plan"
    assert code(reserve={"percent": 0.0, "bytes": 60 * MIB}) == "not_enough_space"
    assert code("", prepared="lvcreate -q -y -an -Zn -l 100%FREE -n all vg", after="lvremove -q -f vg/all") == (
        "not_enough_space"
    )
    off = "vgchange -q -an vg; lvchange -q {} vg/pool; vgchange -q -ay vg; lvchange -an vg/solid vg/idle"
    assert code(prepared=off.format("-Zn"), after=off.format("-Zy")) == "unsupported_pool"
    opened = "(sleep 1000 <>/dev/vg/slim >/dev/null 2>&1 & echo $! >/root/p)"
    assert code(prepared=opened, after="kill $(cat /root/p); udevadm settle") == "image_in_use"
    shared = "vgchange -q --{}tag RHAT_storage vg"
    assert code(prepared=shared.format("add"), after=shared.format("del")) == "shared_pool"
    assert code(prepared="lvrename vg/slim vg/other", after="lvrename vg/other vg/slim") == "stale_plan"
    assert code(name="../evil") == "invalid"
    assert site.run(LISTED) == before


#: Whoever has a device of the group open, as the agent and its tools.
KILLS = (
    r"find /proc/[0-9]*/fd -lname '/dev/dm-*' -printf '%h\n' 2>/dev/null | cut -d/ -f3 | sort -u | "
    "xargs kill -KILL; sleep 1"
)


def test_one_that_is_cut_off_in_the_middle_leaves_all_as_it_was(site: Host) -> None:
    before, digest = site.run(LISTED), content(site, "slim")
    link = "$(find -L /dev/disk/by-id -samefile /dev/vg/.sa-j9.work | head -1)"
    for how, pool in itertools.product(("kill", "cancel"), ("", "pool")):
        asked = place(site, "slim") | wanted(site, pool) | {"bandwidth_bytes_sec": MIB // 4}
        with site.agent() as agent:
            agent.request("volume_to_volume", asked, "j9")
            agent.until("progress", stage="copying")
            names = set(site.run("lvs --noheadings -o lv_name vg").split())
            assert names >= {".sa-j9.work", ".sa-j9.new"}
            assert not names & {"slim", "moved"}
            # A guest whose definition names the volume by its id does not write to it either.
            assert site.run(f'test -b "{link}"; dd if=/dev/zero of="{link}" bs=4k count=1 || echo no').endswith("no\n")
            cut_off(site, agent, how, KILLS)
        if how == "kill":
            assert {row["outcome"] for row in site.ask("recover", {"pools": []})["recovered"]} == {"reverted"}
        assert site.run(LISTED) == before, (how, pool)
    assert content(site, "slim") == digest


def test_one_that_a_thin_pool_has_no_room_for_meanwhile_is_given_up(site: Host) -> None:
    before, digest = site.run(LISTED), content(site, "solid")
    asked = place(site, "solid") | wanted(site, "pool") | {"bandwidth_bytes_sec": MIB // 4}
    with site.agent() as agent:
        agent.request("volume_to_volume", asked | {"reserve": {"percent": 0.0, "bytes": 30 * MIB}}, "j9")
        agent.until("progress", stage="copying")
        site.run("dd if=/dev/urandom of=/dev/vg/thin bs=1M seek=5 count=35 oflag=direct conv=notrunc status=none")
        assert agent.answer()["code"] == "not_enough_space"
    assert site.run(LISTED) == before
    assert content(site, "solid") == digest


@pytest.mark.parametrize("broken", ["from", "to"])
def test_one_whose_disk_has_errors_meanwhile_is_given_up(site: Host, broken: str) -> None:
    before, digest = site.run(LISTED), content(site, "solid")
    with site.agent() as agent:
        asked = place(site, "solid") | wanted(site) | {"bandwidth_bytes_sec": MIB // 4}
        agent.request("volume_to_volume", asked, "j9")
        agent.until("progress", stage="copying")
        name = "vg-.sa--j9." + {"from": "work", "to": "new"}[broken]
        # Of its last two thirds nothing is read or written any more, until somebody puts the disk right.
        table, half = site.run(f"dmsetup table {name}").strip(), 8192
        start, device, offset = table.split()[0], *table.split()[3:]
        lines = f"{start} {half} linear {device} {offset}\\n{half} {24576 - half} error"
        change = "dmsetup suspend --noflush {0}; printf '{1}\\n' | dmsetup reload {0}; dmsetup resume {0}"
        site.run(f"{change.format(name, lines)}; echo 1 >/proc/sys/vm/drop_caches")
        answer = agent.answer()
        assert answer.get("code") == "tool_failed", answer
        left = site.run("dmsetup ls").split()
        if name in left:
            site.run(change.format(name, table))
    assert site.ask("recover", {"pools": []})["recovered"] == []
    assert site.run(LISTED) == before
    assert content(site, "solid") == digest


#: What a move of an active volume calls: tag, deactivated, renamed, active; the new one made; named; the other one
#: deactivated, renamed, active, no tag; the new one without its tag.
CALLS = 11
#: By that call the new volume gets its name: from then on the move has succeeded.
NAMED = 6


def assert_whole_or_gone(told: list[Any], calls: int, named: int, as_made: list[list[str]]) -> None:
    """What deaths before and after each call leave: the old volume the same, the new one as it is made, or gone."""
    print(Counter(row[2] for row in told))  # for docs/reliability.md
    killed = [row for row in told if row[2] == "killed"]
    assert (len(killed), [row[2] for row in told[2 * calls :]]) == (2 * calls, ["done"] * 2)
    for step, when, _, said, same, made, there in told:
        published = step > named or (step, when) == (named, "after")
        assert same, (step, when)
        assert (bool(made), there) == (published, True if published else None), (step, when, said)
        if published:
            assert made == as_made, (step, when)
            assert said in (["finished"], []), (step, when)  # the latter where nothing of it was left


def test_a_death_at_any_step_leaves_the_volume_whole_and_the_new_one_complete_or_gone(site: Host) -> None:
    assert_whole_or_gone(inside(site, "moves", "slim", "pool", CALLS), CALLS, NAMED, [["enabled"]])


TRIES = 50


def assert_nothing_lost(told: list[Any]) -> None:
    """What the races say: how each ended, what was written in it, and what of that was lost by either side."""
    ends = Counter(end for end, *_ in told)
    print(ends, sum(written for _, written, *_ in told))  # for docs/reliability.md
    assert (sum(lost for _, _, lost, _ in told), sum(lost for *_, lost in told)) == (0, 0)
    assert set(ends) <= {"done", "image_in_use", "device_in_use"}
    assert ends["done"] > TRIES // 10
    assert sum(written for _, written, *_ in told) > TRIES


def test_what_a_guest_writes_that_starts_at_any_moment_is_never_lost(site: Host) -> None:
    before = site.run(LISTED)
    assert_nothing_lost(inside(site, "move_race", "slim", "pool", TRIES))
    assert site.run(LISTED) == before
