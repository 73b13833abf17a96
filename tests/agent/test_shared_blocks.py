"""What is freed of an image whose blocks a reflinked copy shares: what df says, not what stat says."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.test_analyze import analyzed
from tests.agent.test_in_place import MIB, reclaim
from tests.harness.filesystems import loop_filesystem

pytestmark = pytest.mark.qemu

ZEROS = 60 * MIB


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with loop_filesystem(tmp_path_factory.mktemp("xfs"), 512, form="xfs") as place:
        yield place


def used(place: Path) -> int:
    subprocess.run(["sync", "-f", place], check=True)
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def image_with_clone(folder: Path, own: int) -> Path:
    """Zeros and data that a clone shares, and zeros of its own, in bytes."""
    folder.mkdir()
    path = folder / "vm.raw"
    path.write_bytes(os.urandom(4 * MIB) + bytes(ZEROS))
    subprocess.run(["cp", "--reflink=always", path, folder / "clone.raw"], check=True)
    with path.open("r+b") as file:
        file.seek(4 * MIB)
        file.write(bytes(own))
    subprocess.run(["sync", "-f", folder], check=True)
    return path


@pytest.mark.parametrize("own", [0, 24 * MIB])
def test_holes_free_what_df_says_and_the_analysis_says_so_before(disk: Path, own: int) -> None:
    path = image_with_clone(disk / f"own{own}", own)
    told = analyzed(path, "raw", mode="full")
    before, taken = used(disk), path.stat().st_blocks * 512
    answer = reclaim(path, form="raw", shared=True)
    freed = before - used(disk)
    assert answer["before_bytes"] == taken
    assert answer["before_bytes"] - answer["after_bytes"] >= ZEROS
    # The filesystem's own tables change by some blocks.
    assert abs(answer["freed_bytes"] - own) <= MIB
    assert abs(freed - own) <= MIB
    assert told["basis"]["shared_bytes"] == 4 * MIB + ZEROS - own
    numbers = told["methods"]["in_place"]
    assert numbers["reclaimable_low"] <= max(answer["freed_bytes"], 0) <= numbers["reclaimable_high"]
    # A copy gives back what was the image's own alone, and takes what it writes.
    assert told["methods"]["copy"]["reclaimable_bytes"] <= own
