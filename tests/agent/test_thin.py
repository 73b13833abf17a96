"""What the verb ``exclusive`` makes of a pool's state, as a device mapper tells it that keeps what it is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host import private_device, thin
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import RefusedError
from tests.agent.recording import RecordingIO
from tests.agent.test_lvm import VOLUMES
from tests.harness.filesystems import new_program
from tests.working import refused_as

STATUS = "vg0-pool0-tpool: 0 131072 thin-pool 1 {used}/1024 80/1024 - {mode} discard_passdown queue_if_no_space - 1024"
#: Volumes of pool0 by the pool's own numbers of them, and the lines of a thin_ls of it.
NUMBERS, SAYS = {"thin1": "1", "snap1": "2"}, "1 4194304\n2 1048576\n7 65536\n"
NUMBERED = [
    line | {"lv_uuid": f"uuid-{line['lv_name'].strip('[]')}", "thin_id": NUMBERS.get(line["lv_name"], "")}
    for line in VOLUMES
]
Tools = Callable[..., None]


@pytest.fixture
def pool(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """``pool(used=, mode=, held=, says=)``: how the pool is; its snapshot of metadata is the file ``held``."""
    monkeypatch.setattr(thin, "FOLDER", str(tmp_path / "notes"))
    (tmp_path / "lvs.json").write_text(json.dumps({"report": [{"lv": NUMBERED}]}))

    def is_now(used: int = 100, mode: str = "rw", held: str = "", says: str = SAYS, status: str = STATUS) -> None:
        (tmp_path / "status").write_text(status.format(used=used, mode=mode) + "\n")
        (tmp_path / "says").write_text(says)
        if held:
            (tmp_path / "held").write_text(held)
        scripts = {
            "lvs": f"cat {tmp_path}/lvs.json",
            "thin_ls": f"[ -e {tmp_path}/held ] && cat {tmp_path}/says",
            "thin_dump": f"[ -e {tmp_path}/held ] && echo $* >{tmp_path}/asked && cat {tmp_path}/says",
            "dmsetup": f"""cd {tmp_path}; case "$1 $4 $3" in
                message*reserve_metadata_snap*) [ -e held ] && exit 1; echo 81 >held;;
                message*release_metadata_snap*) rm held;;
                *) sed "s/ - / $(cat held 2>/dev/null || echo -) /" status;;
            esac""",
        }
        for name, script in scripts.items():
            new_program(programs / name, f"#!/bin/sh\n{script}\n")

    return is_now


def told() -> dict[str, Any]:
    (one,) = thin.measure(RecordingIO())
    assert (one["group"], one["pool"]) == ("vg0", "pool0")
    return one


def test_each_volume_has_what_thin_ls_says_and_nothing_is_left(pool: Tools, tmp_path: Path) -> None:
    pool()
    assert told() == {
        "group": "vg0", "pool": "pool0", "why": "", "volumes": {"thin1": 4194304, "snap1": 1048576},
    }  # fmt: skip
    assert not (tmp_path / "held").exists()
    assert {file.read_text() for file in (tmp_path / "notes").iterdir()} == {""}


@pytest.mark.parametrize(
    "how",
    [{"used": 820}, {"mode": "Fail"}, {"mode": "ro"}, {"held": "55"},
     {"status": "vg0-pool0-tpool: 0 131072 thin-pool Fail"}, {"status": ""},
     {"status": "vg0-pool0-tpool: 0 131072 thin-pool 1 x/y"}],
)  # fmt: skip
def test_a_pool_in_which_nothing_may_be_reserved_is_left_as_it_is(
    pool: Tools, tmp_path: Path, how: dict[str, Any]
) -> None:
    pool(**how)
    one = told()
    assert (bool(one["why"]), one["volumes"]) == (True, {})
    assert (tmp_path / "held").exists() is ("held" in how)


@pytest.mark.parametrize("says", ["1 many\n", "1\n", "1 2 3\n", "\xff \xff\n"])
def test_an_answer_that_is_not_understood_is_none_and_nothing_is_left(pool: Tools, tmp_path: Path, says: str) -> None:
    pool(says=says)
    one = told()
    assert (bool(one["why"]), one["volumes"]) == (True, {})
    assert not (tmp_path / "held").exists()


#: As thin_dump 0.9 says it of one volume.
DUMP = """<superblock uuid="" time="1" transaction="2" flags="0" version="2" data_block_size="128" nr_data_blocks="0">
  <device dev_id="2" mapped_blocks="70" transaction="1" creation_time="1" snap_time="1">
    <range_mapping origin_begin="0" data_begin="80" length="64" time="0"/>
    <single_mapping origin_block="64" data_block="7" time="1"/>
    <single_mapping origin_block="100" data_block="8" time="1"/>
    <range_mapping origin_begin="101" data_begin="200" length="4" time="0"/>
  </device>
</superblock>
"""


def test_where_a_volume_has_anything_is_what_thin_dump_says(pool: Tools, tmp_path: Path) -> None:
    pool(says=DUMP)
    assert thin.mapped("vg0", "pool0", "uuid-pool0", 2, RecordingIO()) == [(0, 65), (100, 105)]
    assert "--metadata-snap --dev-id 2 /dev/mapper/vg0-pool0_tmeta" in (tmp_path / "asked").read_text()
    assert not (tmp_path / "held").exists()
    pool(held="55")
    with pytest.raises(RefusedError):
        thin.mapped("vg0", "pool0", "uuid-pool0", 2, RecordingIO())


@pytest.mark.parametrize(("note", "gone"), [("ours", True), ("81", True), ("80", False), ("", False)])
def test_only_the_snapshot_that_was_noted_is_released(pool: Tools, tmp_path: Path, note: str, gone: bool) -> None:
    pool(held="81")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "uuid-pool0").write_text(note)
    thin.release_left(RecordingIO())
    assert (tmp_path / "held").exists() is not gone
    assert (tmp_path / "notes" / "uuid-pool0").read_text() == ""


def test_a_host_without_lvm_has_nothing_to_release_and_nothing_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thin, "FOLDER", str(tmp_path / "notes"))
    monkeypatch.setattr(tools, "_SEARCH_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    thin.release_left(RecordingIO())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "uuid-pool0").write_text("81")
    thin.release_left(RecordingIO())
    assert refused_as(list, thin.measure(RecordingIO())) == "tool_missing"


def test_only_a_device_that_a_job_has_made_is_one_that_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume ``admin-data`` of a group ``storage`` has a device whose name begins alike, and so may anybody's."""
    ids = "a" * 64
    devices = {
        "storage-admin-j1": f"LVM-{ids}-private", "storage-admin--data": f"LVM-{ids}",
        "storage-admin--pool-tpool": f"LVM-{ids}-tpool", "storage-admin-home": "CRYPT-LUKS2-1-storage-admin-home",
        "storage-admin-plain": "", "vg0-thick": f"LVM-{ids}-private",
    }  # fmt: skip
    for number, (name, uuid) in enumerate(devices.items()):
        (tmp_path / f"dm-{number}/dm").mkdir(parents=True)
        (tmp_path / f"dm-{number}/dm/name").write_text(f"{name}\n")
        (tmp_path / f"dm-{number}/dm/uuid").write_text(f"{uuid}\n")
    (tmp_path / "sda").mkdir()
    monkeypatch.setattr(private_device, "BLOCKS", str(tmp_path))
    assert private_device.left() == ["storage-admin-j1"]
