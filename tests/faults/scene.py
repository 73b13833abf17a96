"""A folder with an image to reclaim, and what must be true of it after any fault."""

import os
import random
import shutil
import subprocess
from pathlib import Path

from tests.agent.harness import ask, leftovers, make_image, qemu_img, recover_args, same_content, write


def build(folder: Path, options: str) -> None:
    """A pool with an image and an overlay of it, and beside it copies of what a guest reads from both."""
    pool = folder / "pool"
    pool.mkdir(parents=True)
    image, overlay, noise = pool / "vm.qcow2", pool / "overlay.qcow2", folder / "noise"
    make_image(image, options=options)
    noise.write_bytes(os.urandom(512 << 10))
    command = f"write -s {noise} 0 512k"
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", command, image], check=True, capture_output=True)
    qemu_img("create", "-q", "-f", "qcow2", "-b", "vm.qcow2", "-F", "qcow2", overlay)
    write(overlay, 0x44, "1M", "512k")
    shutil.copyfile(image, folder / "before.qcow2")
    qemu_img("convert", "-O", "qcow2", overlay, folder / "overlay-before.qcow2")


class Scene:
    """A fresh copy of what :func:`build` made."""

    def __init__(self, folder: Path, template: Path) -> None:
        subprocess.run(["cp", "-r", "--sparse=always", template, folder], check=True)
        self.pool = folder / "pool"
        self.image = self.pool / "vm.qcow2"
        self.overlay = self.pool / "overlay.qcow2"
        self._before = folder / "before.qcow2"
        self._overlay_before = folder / "overlay-before.qcow2"
        self.original = self.image.stat()

    @property
    def swapped(self) -> bool:
        """Whether another file stands under the image's name."""
        return self.image.stat().st_ino != self.original.st_ino

    def recover(self) -> list[dict[str, object]]:
        """What ``recover`` says about the pool."""
        rows = ask("recover", recover_args(self.pool))["recovered"]
        assert isinstance(rows, list)
        return rows

    def verify(self) -> None:
        """The original or the result, whole, and nothing else but a valid undo copy."""
        assert b"No errors" in qemu_img("check", "-f", "qcow2", self.image)
        assert same_content(self.image, self._before)
        assert same_content(self.overlay, self._overlay_before)
        left = leftovers(self.pool)
        if self.swapped:
            assert left in ({".sa-j1.journal", ".sa-j1.orig"}, set()), left
            if left:
                copy = (self.pool / ".sa-j1.orig").stat()
                assert (copy.st_ino, copy.st_mtime_ns) == (self.original.st_ino, self.original.st_mtime_ns)
                assert same_content(self.pool / ".sa-j1.orig", self._before)
        else:
            assert left == set(), left
            assert self.image.stat().st_mtime_ns == self.original.st_mtime_ns
            assert self.image.stat().st_nlink == 1


def seed() -> int:
    """The seed of this run: ``STORAGE_ADMIN_SEED`` where it is set, so that a run can be repeated."""
    return int(os.environ.get("STORAGE_ADMIN_SEED") or random.SystemRandom().randrange(1 << 32))
