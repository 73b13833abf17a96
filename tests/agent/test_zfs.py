"""What ZFS said on a real machine (zfs 2.1.11), read as what each volume takes."""

from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host import zfs
from storage_admin.agent.programs import tools
from storage_admin.agent.verbs.scan import volumes
from tests.agent.recording import RecordingIO
from tests.harness.filesystems import new_program

DATA = Path(__file__).parents[1] / "data" / "zfs"
MIB = 1 << 20
POOLS, DATASETS = ((DATA / f"{name}.txt").read_text().splitlines() for name in ("zpool", "zfs"))
NAMES = ("zpool", "zfs")


def told(pools: list[str], datasets: list[str]) -> dict[str, Any]:
    lists = ((zfs.POOLS, pools), (zfs.DATASETS, datasets))
    return zfs.parsed(*([dict(zip(names, line.split("\t"), strict=True)) for line in lines] for names, lines in lists))


def line(of: str, **columns: str) -> str:
    """A line of the recorded list with other columns."""
    known = next(one for one in DATASETS if one.split("\t")[0] == of)
    return "\t".join((dict(zip(zfs.DATASETS, known.split("\t"), strict=True)) | columns).values())


def test_what_is_a_volume_and_what_each_takes() -> None:
    found = {one["name"]: one for one in told(POOLS, DATASETS)["datasets"]}
    volumes = {name: one["volume"] for name, one in found.items() if one["volume"]}
    assert {name: (one["size"], one["has_snapshots"], one["block"]) for name, one in volumes.items()} == {
        "tank/data/vm-100-disk-0": (64 * MIB, True, True),
        "tank/data/base-101-disk-0": (64 * MIB, True, True),
        "tank/data/vm-102-disk-0": (64 * MIB, False, True),
        "tank/data/subvol-103-disk-0": (32 * MIB, False, False),
        "tank/small/vm-104-disk-0": (16 * MIB, False, True),
        "tank/plain disk": (32 * MIB, False, True),
    }
    thick = found["tank/data/vm-100-disk-0"]
    assert thick["data"] + thick["snapshots"] + thick["reserved"] == thick["used"]
    assert thick["reserved"] > 0
    assert found["tank/data/vm-102-disk-0"]["origin"] == "tank/data/base-101-disk-0"
    assert (found["tank/data"]["mountpoint"], found["tank/small"]["bounded"]) == ("/vms", True)


@pytest.mark.parametrize(
    "name", ["tank/-\x1b[31m", "tank/<script>", "tank/a\\xff", "tank//a", "/tank", "tank/a/", "", "tank/" + "x" * 256]
)
def test_a_name_that_zfs_gives_to_none_is_none(name: str) -> None:
    usual = told(POOLS, DATASETS)
    assert told(POOLS, [*DATASETS, line("tank/plain disk", name=name)]) == usual
    pool = "\t".join([name, *POOLS[0].split("\t")[1:]])
    assert told([*POOLS, pool], DATASETS) == usual


@pytest.mark.parametrize(("health", "is_told"), [("DEGRADED", True), ("FAULTED", False), ("SUSPENDED", False)])
def test_nothing_is_told_of_what_is_in_a_pool_that_has_failed(health: str, is_told: bool) -> None:
    found = told([POOLS[0].replace("ONLINE", health)], DATASETS)
    assert (bool(found["datasets"]), bool(found["pools"][0]["why"])) == (is_told, not is_told)


def listed(*groups: str, cache: bool = True) -> list[str]:
    """As ``zpool list -HpvP`` tells of the pool ``tank``, by its groups of disks, between others."""
    lines = ["other", "\traidz3-0\t1", *[f"\t/dev/x{number}\t1" for number in range(9)], "tank\t1\t2"]
    for number, group in enumerate(groups):
        kind, _, disks = group.partition(" ")
        lines += [f"\t{kind}-{number}\t1\t2", *[f"\t/dev/sd{number}{disk}\t3" for disk in range(int(disks))]]
    return [*lines, *(["cache              -      -", "\t/dev/sdz\t1"] * cache), "tank2", "\tmirror-0\t1"]


@pytest.mark.parametrize(
    ("groups", "ashift", "found"),
    [
        (["raidz1 4"], 12, {"disks": 4, "parity": 1, "sector": 4096}),
        (["raidz2 6", "raidz2 6"], 9, {"disks": 6, "parity": 2, "sector": 512}),
        (["raidz2 6", "raidz2 7"], 12, None),
        (["raidz1 4", "raidz2 4"], 12, None),
        (["raidz1 4", "mirror 2"], 12, None),
        (["mirror 2", "raidz1 4"], 12, None),
        (["draid1:2d:4c:0s 4"], 12, None),
        (["raidz1 4"], 0, None),
        (["raidz1 4"], None, None),
        (["raidz1 1"], 12, None),
        ([], 12, None),
    ],
)
def test_parity_and_padding_are_told_only_where_all_vdevs_are_alike(
    groups: list[str], ashift: int | None, found: dict[str, int] | None
) -> None:
    for cache in (True, False):
        assert zfs.raidz(listed(*groups, cache=cache), "tank", ashift) == found


@pytest.mark.parametrize("odd", ["\treplacing-1\t-", "\tspare-1\t-", "\t1234567890123456789\t-"])
def test_nothing_is_told_while_a_disk_is_replaced_or_missing(odd: str) -> None:
    lines = listed("raidz1 4")
    at = lines.index("\t/dev/sd01\t3")
    assert zfs.raidz([*lines[:at], odd, *lines[at:]], "tank", 12) is None


CUT = f"head -c 300 {DATA}/zfs.txt"
STRANGE = "printf 'tank\\t1\\n'"
NONSENSE = f"tr 0-9 x <{DATA}/zfs.txt"


@pytest.mark.parametrize("answer", ["exit 5", "echo no", "kill -9 $$", CUT, STRANGE, NONSENSE, "sleep 100"])
def test_where_zfs_does_not_answer_it_is_said_and_nothing_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    for name, does in (("zpool", f"cat {DATA}/zpool.txt"), ("zfs", answer)):
        new_program(tmp_path / name, f"#!/bin/sh\n{does}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(tools, "LIST", tools.Limits(wall_seconds=1))
    io: Any = RecordingIO()
    (found,) = (one for one in volumes(io) if one["backend"] == "zfs")
    assert (bool(found["why"]), set(found)) == (True, {"backend", "why"})


@pytest.mark.parametrize(
    ("name", "value", "is_marked"),
    [("disk", "-", False), ("disk", "j1.5.default.disk", True), ("disk", "j1.6.default.disk", False),
     (".sa-j1.aside", "j1.5.=dev.disk", True), (".sa-j1.new", "j1.0.new.disk", True), ("copy", "j1.0.new.disk", False)],
)  # fmt: skip
def test_a_scan_tells_which_volumes_jobs_have_marked(name: str, value: str, is_marked: bool) -> None:
    """What is copied, or inherited, names another id than the dataset's own."""
    mark = {"name": f"tank/{name}", "guid": "5", zfs.PROPERTY: value}
    (one,) = told(POOLS, [line("tank/small/vm-104-disk-0", **mark)])["datasets"]
    assert one["journal"] == is_marked
