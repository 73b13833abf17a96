"""The unfinished file of a copy that came to nothing: it goes, and no other file does."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import Writer, ask, location, make_image

pytestmark = pytest.mark.qemu


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return make_image(tmp_path / "copy.qcow2")


def drop(path: Path, since: float = 0) -> dict[str, Any]:
    return ask("drop", location(path) | {"since": int(since)})


def test_it_is_deleted_and_what_it_occupied_is_told(copy: Path) -> None:
    occupied = copy.stat().st_blocks * 512
    assert drop(copy, time.time() - 60) == {"freed_bytes": occupied}
    assert not copy.exists()
    assert drop(copy)["code"] == "stale_plan"


def test_what_is_older_than_the_copy_stays(copy: Path) -> None:
    os.utime(copy, (time.time() - 3600, time.time() - 3600))
    assert drop(copy, time.time() - 60)["code"] == "stale_plan"
    assert copy.exists()


def test_what_somebody_uses_or_has_named_stays(copy: Path) -> None:
    with Writer(copy, "qcow2"):
        assert drop(copy)["code"] == "image_in_use"
    os.link(copy, copy.with_name("other"))
    assert drop(copy)["code"] == "hard_linked"
    copy.unlink()
    copy.symlink_to("other")
    assert drop(copy)["code"] == "outside_pool"
    assert (copy.parent / "other").exists()
