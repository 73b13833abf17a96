"""``kill -9`` at any moment while a device is written to: the image is as it was, and the next job writes all of it."""

import contextlib
import os
import random
import time
from pathlib import Path

import pytest

from storage_admin.agent import protocol
from tests.agent.harness import ask, at_ready, leftovers, make_image, qemu_img
from tests.agent.test_from_device import MIB, behind, device
from tests.agent.test_to_device import args_for
from tests.chance import night, seed
from tests.harness.processes import wait_until

__all__ = ["behind", "device"]

pytestmark = [pytest.mark.faults, pytest.mark.qemu]


def test_one_that_dies_leaves_the_image_and_can_be_repeated(tmp_path: Path, behind: Path, device: Path) -> None:
    chance, pool = random.Random(seed()), tmp_path / "pool"
    pool.mkdir()
    image = make_image(pool / "disk.qcow2", "40M")
    qemu_img("convert", "-O", "raw", image, tmp_path / "expected.raw")
    before, expected = image.read_bytes(), (tmp_path / "expected.raw").read_bytes()
    for trial in range(100 if night() else 8):
        device.write_bytes(bytes(64) + b"\xff" * (41 * MIB))
        args = args_for(image, device, overwrite=True, bandwidth_bytes_sec=100 * MIB)
        with at_ready("to_device", args) as agent:
            agent.say(protocol.GO, generation=1)
            time.sleep(chance.uniform(0, 0.5))
            agent.process.kill()
        assert (image.read_bytes(), leftovers(pool)) == (before, set()), trial
        # Its tools end with it, as soon as the kernel is done with what they write.
        wait_until(lambda: _is_free(device), 10, "its tools are gone")
        again = ask("to_device", args, job=f"r{trial}")
        assert again.get("virtual_size") == 40 * MIB, (trial, again)
        assert behind.read_bytes()[: 40 * MIB] == expected, trial


def _is_free(device: Path) -> bool:
    """Whether nobody has it for himself."""
    with contextlib.suppress(OSError):
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL))
        return True
    return False
