"""A block device becomes an image while nothing uses it, and is never written to."""

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from tests.agent.harness import NO_RESERVE, Writer, ask, at_ready, image_info, leftovers, location, qemu_img
from tests.harness.filesystems import loop_device, mounted, new_file, swap_area
from tests.harness.processes import holder

pytestmark = pytest.mark.qemu
MIB = 1 << 20


@pytest.fixture
def behind(tmp_path: Path) -> Path:
    """What is on the device: data, zeros, data."""
    return new_file(tmp_path / "behind", os.urandom(3 * MIB) + bytes(40 * MIB) + os.urandom(2 * MIB + 512))


@pytest.fixture
def device(behind: Path) -> Iterator[Path]:
    """A loop device: as any other one to whoever opens it."""
    with loop_device(behind) as found:
        yield found


def args_for(device: Path | bytes, pool: Path, name: str = "new.qcow2", **more: Any) -> dict[str, Any]:
    target = location(pool / name) | {"format": name.rpartition(".")[2]}
    return {"device_b64": b64(os.fsencode(device)), "target": target, "reserve": NO_RESERVE, **more}


@pytest.mark.parametrize("form", ["qcow2", "raw", "vmdk"])
def test_the_image_reads_as_the_device_and_takes_no_space_for_zeros(
    pool: Path, behind: Path, device: Path, form: str
) -> None:
    before = hashlib.sha256(behind.read_bytes()).digest()
    result = ask("from_device", args_for(device, pool, f"new.{form}"))
    assert (result.get("device_bytes"), result.get("virtual_size")) == (behind.stat().st_size,) * 2, result
    made = pool / f"new.{form}"
    assert image_info(made, form)["virtual-size"] == behind.stat().st_size
    assert qemu_img("compare", "-f", "raw", "-F", form, behind, made)
    assert made.stat().st_blocks * 512 == result["after_bytes"] < 10 * MIB
    assert (hashlib.sha256(behind.read_bytes()).digest(), leftovers(pool)) == (before, set())


@contextmanager
def with_a_mount(device: Path) -> Iterator[Path]:
    subprocess.run(["mkfs.ext4", "-q", "-F", device], check=True)
    with TemporaryDirectory() as place, mounted(device, Path(place), "-t", "ext4") as folder:
        yield folder


USES: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "mounted": with_a_mount,
    "swap": swap_area,
    "open": holder,
    "a guest": lambda device: Writer(device, "raw"),
    "a device above": loop_device,
}


@pytest.mark.parametrize("how", USES)
def test_a_device_that_something_uses_is_refused(pool: Path, behind: Path, device: Path, how: str) -> None:
    with USES[how](device):
        before = behind.read_bytes()
        answer = ask("from_device", args_for(device, pool))
        assert answer.get("code") == "device_in_use", answer
    # Whoever has mounted it may write to it.
    assert how == "mounted" or behind.read_bytes() == before
    assert list(pool.iterdir()) == []


def test_one_that_is_opened_before_the_name_is_given_gets_none(pool: Path, device: Path) -> None:
    with at_ready("from_device", args_for(device, pool)) as agent, device.open("rb"):
        assert agent.go()["code"] == "device_in_use"
    assert list(pool.iterdir()) == []


def test_what_is_no_device_is_refused(pool: Path, behind: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/null")
    wrong = {
        behind: "invalid", Path("/dev/null"): "invalid", Path("/dev/../etc/passwd"): "invalid",
        Path("/dev/nothing-here"): "stale_plan", tmp_path / "link": "invalid", Path("/dev"): "invalid",
    }  # fmt: skip
    for path, code in wrong.items():
        assert ask("from_device", args_for(path, pool))["code"] == code, path
    assert list(pool.iterdir()) == []


def test_a_name_that_is_taken_stays_and_the_device_needs_room(pool: Path, device: Path) -> None:
    (pool / "new.qcow2").write_bytes(b"somebody's")
    assert ask("from_device", args_for(device, pool))["code"] == "target_exists"
    assert (pool / "new.qcow2").read_bytes() == b"somebody's"
    full = args_for(device, pool, "other.qcow2") | {"reserve": {"percent": 0, "bytes": 1 << 60}}
    assert ask("from_device", full)["code"] == "not_enough_space"
    assert {path.name for path in pool.iterdir()} == {"new.qcow2"}
