"""What LVM said on a real machine (lvm2 2.03.16), read as what each volume takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host import lvm
from storage_admin.agent.programs import tools
from storage_admin.agent.verbs.scan import volumes
from tests.agent.recording import RecordingIO
from tests.harness.filesystems import new_program

DATA = Path(__file__).parents[1] / "data" / "lvm"
MIB = 1 << 20


def lines(name: str, kind: str) -> list[dict[str, str]]:
    told: list[dict[str, str]] = json.loads((DATA / name).read_text())["report"][0][kind]
    return told


STRANGE = 'echo \'{"report": [{"vg": [{"vg_name": "vg0", "vg_uuid": "", "vg_size": ""}]}]}\''
#: On no disk that this machine could have.
GROUPS = [line | {"pv_name": ""} for line in lines("vgs.json", "vg")]
VOLUMES = [line | {"lv_uuid": f"id of {line['lv_name']}"} for line in lines("lvs.json", "lv")]


def told(*more: dict[str, str]) -> dict[str, Any]:
    return lvm.parsed(GROUPS, [*VOLUMES, *more])


def test_each_volume_takes_what_its_parts_take_and_nothing_hidden_is_one() -> None:
    found = {one["name"]: (one["pool"], one["size"], one["allocated"], one["origin"]) for one in told()["volumes"]}
    assert found == {
        "thick": ("", 32 * MIB, 32 * MIB, ""),
        "idle": ("", 24 * MIB, 24 * MIB, ""),
        "st": ("", 16 * MIB, 16 * MIB, ""),
        "web-1.qcow2": ("", 12 * MIB, 12 * MIB, ""),
        "mirrored": ("", 16 * MIB, 40 * MIB, ""),  # two legs, and metadata of each
        "oldm": ("", 8 * MIB, 20 * MIB, ""),
        "classic": ("", 32 * MIB, 8 * MIB, "thick"),
        "thin1": ("pool0", 40 * MIB, 5 * MIB, ""),
        "snap1": ("pool0", 40 * MIB, None, "thin1"),  # it is inactive
    }


def test_one_that_a_job_works_on_is_told_of_by_its_own_name() -> None:
    usual = next(line for line in VOLUMES if line["lv_name"] == "thin1")
    for tags, name in (("mine,sa-j1.ay.web", "web"), ("sa-j2.ay.web", ".sa-j1.work"), ("", ".sa-j1.work")):
        assert told(usual | {"lv_name": ".sa-j1.work", "lv_tags": tags})["volumes"][-1]["name"] == name


def test_volumes_and_thin_pools_are_all_that_is_not_free() -> None:
    found = told()
    spare = 4 * MIB
    (pool,) = found["pools"]
    assert (pool["size"], pool["used"], pool["metadata_size"]) == (64 * MIB, 64 * MIB * 781 // 10_000, 4 * MIB)
    assert pool["metadata_percent"] == 10.94
    thick = sum(one["allocated"] for one in found["volumes"] if not one["pool"])
    (group,) = found["groups"]
    assert thick + pool["size"] + pool["metadata_size"] + spare == group["size"] - group["free"]


@pytest.mark.parametrize("name", ["-f", "..", "a/b", "a b", "a\n", "", "\x1b[31m", "[hidden]", "x" * 128])
def test_a_name_that_lvm_gives_to_none_is_none(name: str) -> None:
    usual = next(line for line in VOLUMES if line["lv_name"] == "thick")
    assert told(usual | {"lv_name": name}) == told()
    assert told(usual | {"vg_name": name}) == told()
    assert lvm.parsed([*GROUPS, GROUPS[0] | {"vg_name": name}], VOLUMES) == told()


def test_nothing_is_told_of_the_volumes_of_two_groups_with_one_name() -> None:
    found = lvm.parsed([*GROUPS, GROUPS[0] | {"vg_uuid": "x"}], VOLUMES)
    assert (len(found["groups"]), bool(found["groups"][0]["why"])) == (1, True)
    assert (found["volumes"], found["pools"]) == ([], [])


@pytest.mark.parametrize("layout", ["cache", "writecache", "vdo,sparse", "raid,raid5,cache", "unknown"])
def test_what_is_kept_in_ways_that_are_not_added_up_is_not_known(layout: str) -> None:
    usual = next(line for line in VOLUMES if line["lv_name"] == "thick")
    found = told(usual | {"lv_name": "other", "lv_layout": layout})["volumes"][-1]
    assert (found["name"], found["allocated"], found["size"]) == ("other", None, 32 * MIB)


def test_a_host_without_lvm_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("setpriv", "prlimit"):
        (tmp_path / tool).symlink_to(tools.find(tool))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tools, "_SEARCH_PATH", str(tmp_path))
    io: Any = RecordingIO()
    assert list(volumes(io)) == []


@pytest.mark.parametrize("answer", ["exit 5", "echo no", "echo '[]'", "echo '{\"report\": [1]}'", STRANGE])
def test_where_lvm_does_not_answer_it_is_said_and_nothing_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    new_program(tmp_path / "vgs", f"#!/bin/sh\n{answer}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    io: Any = RecordingIO()
    (found,) = (one for one in volumes(io) if one["backend"] == "lvm")
    assert (bool(found["why"]), set(found)) == (True, {"backend", "why"})


def test_a_device_that_goes_away_meanwhile_hides_no_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = "vg0-pool0-tpool: 0 131072 thin-pool 1 11/1024 80/1024 - rw discard_passdown queue_if_no_space - 1024 "
    says = f"#!/bin/sh\necho 'Device does not exist.' >&2\necho '{pool}'\nexit 1\n"  # dmsetup 1.02.185
    new_program(tmp_path / "dmsetup", says)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    io: Any = RecordingIO()
    assert [(one["name"], one["mode"], one["used"]) for one in lvm.thin_pools(io)] == [("pool0", "rw", 5 * MIB)]
