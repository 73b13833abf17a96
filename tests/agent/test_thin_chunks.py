"""What a copy takes of a thin pool: it gives whole chunks, of which a few bytes may lie in each."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.harness import ask, rewrite_args
from tests.harness.filesystems import new_file
from tests.harness.lvm import GROUP, VOLUME, Lvm

pytestmark = pytest.mark.qemu

KIB, MIB = 1 << 10, 1 << 20
GROUP_NAME = f"sat{os.getpid()}chunks"


@pytest.fixture
def lvm(programs: Path) -> Iterator[Lvm]:
    """A group with an empty thin pool of 256 MiB."""
    state = Lvm(programs)
    pool = VOLUME | {"vg_name": GROUP_NAME, "lv_name": "data", "lv_uuid": "p", "lv_layout": "thin,pool", "zero": "zero"}
    thin = f"{GROUP_NAME}-data-tpool: 0 524288 thin-pool 1 10/1024 0/128 - rw discard_passdown queue_if_no_space - 1024"
    state.install(vg=[GROUP | {"vg_name": GROUP_NAME}], lv=[pool], thin=thin)
    yield state
    state.let_go()
    shutil.rmtree(f"/dev/{GROUP_NAME}", ignore_errors=True)


def is_enough(lvm: Lvm, image: Path, chunk: int) -> bool:
    """Whether a move is let begin, into a pool of such chunks."""
    told = lvm.read()
    told["lv"][0]["chunk_size"] = str(chunk)
    lvm.write(told)
    volume = {"backend": "lvm", "group": GROUP_NAME, "group_id": "g1", "name": "new", "pool": "data"}
    told = ask("file_to_volume", rewrite_args(image, format="raw", volume=volume))
    assert told.get("code") in {None, "not_enough_space"}, told
    lvm.let_go()
    lvm.write(lvm.read() | {"lv": [one for one in lvm.read()["lv"] if one["lv_name"] == "data"]})
    return "code" not in told


@pytest.mark.parametrize(
    ("chunk", "fits"), [(64 * KIB, True), (192 * KIB, True), (512 * KIB, True), (1 * MIB, True), (2 * MIB, False),
                        (6 * MIB, False), (64 * MIB, False)],
)  # fmt: skip
def test_a_disk_with_a_little_in_many_places_takes_whole_chunks(lvm: Lvm, pool: Path, chunk: int, fits: bool) -> None:
    image = pool / "disk.raw"
    with image.open("wb") as file:
        file.truncate(320 * MIB)
        for at in range(0, 320 * MIB, 2 * MIB):
            file.seek(at)
            file.write(b"x" * 4 * KIB)
    assert is_enough(lvm, image, chunk) == fits


@pytest.mark.parametrize("chunk", [64 * KIB, 2 * MIB, 64 * MIB, 256 * MIB])
def test_no_disk_takes_more_than_all_chunks_that_it_lies_in(lvm: Lvm, pool: Path, chunk: int) -> None:
    image = new_file(pool / "disk.raw", b"x" * 10 * MIB)
    assert is_enough(lvm, image, chunk)
