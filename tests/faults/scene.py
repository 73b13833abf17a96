"""A folder with an image to reclaim, and what must be true of it after any fault."""

import os
import random
import subprocess
from pathlib import Path
from typing import Any

from storage_admin.agent.protocol import b64
from tests.agent.harness import (
    ask,
    leftovers,
    make_image,
    qemu_img,
    reclaim_args,
    recover_args,
    same_content,
    write,
)


def build(folder: Path, options: str, form: str = "qcow2", *, based: bool = False) -> None:
    """A pool with an image and an overlay of it, and beside it copies of what a guest reads from both.

    Args:
        based: whether the image stands on another one, which it partly hides.
    """
    pool = folder / "pool"
    pool.mkdir(parents=True)
    image, overlay, noise = pool / f"vm.{form}", pool / "overlay.qcow2", folder / "noise"
    if based:
        make_image(pool / "root.qcow2")
        write(pool / "root.qcow2", 0x52, "7M", "512k")
    if form == "raw":
        with image.open("wb") as file:
            file.truncate(8 << 20)
        write(image, 0x61, "0", "2M", "raw")
        write(image, 0, "3M", "2M", "raw")
    else:
        make_image(image, options=options, base="root.qcow2" if based else None)
    noise.write_bytes(os.urandom(512 << 10))
    command = f"write -s {noise} 0 512k"
    subprocess.run(["qemu-io", "-f", form, "-c", command, image], check=True, capture_output=True)
    qemu_img("create", "-q", "-f", "qcow2", "-b", image.name, "-F", form, overlay)
    write(overlay, 0x44, "1M", "512k")
    qemu_img("convert", "-f", form, "-O", "qcow2", image, folder / "before.qcow2")
    qemu_img("convert", "-f", "qcow2", "-O", "qcow2", overlay, folder / "overlay-before.qcow2")


class Scene:
    """A fresh copy of what :func:`build` made."""

    def __init__(self, folder: Path, template: Path) -> None:
        subprocess.run(["cp", "-r", "--sparse=always", template, folder], check=True)
        self.pool = folder / "pool"
        (self.image,) = self.pool.glob("vm.*")
        self.form = self.image.suffix[1:]
        self.bases = list(self.pool.glob("root.qcow2"))
        self.overlay = self.pool / "overlay.qcow2"
        self._before = folder / "before.qcow2"
        self._overlay_before = folder / "overlay-before.qcow2"
        self.original = self.image.stat()
        self.converted = self.pool / "converted.img"

    @property
    def _target(self) -> dict[str, str]:
        return {"pool_path_b64": b64(bytes(self.pool)), "path_b64": b64(bytes(self.converted))}

    def works(self) -> list[tuple[str, dict[str, Any]]]:
        """Every way to rewrite the image: the verb, and what is its own in the arguments."""
        works: list[tuple[str, dict[str, Any]]] = [
            ("reclaim", {"method": "copy"}),
            ("convert", {"target": {**self._target, "format": "raw"}}),
        ]
        if self.form == "qcow2":
            works += [("reclaim", {"method": "compress"}), ("check", {"repair": "leaks"}), ("check", {"repair": "all"})]
        if self.bases:
            works += [("flatten", {"method": "rebase"}), ("flatten", {"method": "convert"})]
        return works

    def args(self, **own: Any) -> dict[str, Any]:
        """The arguments of such a work."""
        args = reclaim_args(self.image, *self.bases, format=self.form)
        del args["method"]
        return args | own

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
        assert self.form == "raw" or b"No errors" in qemu_img("check", "-f", self.form, self.image)
        assert self._reads(self.image)
        assert same_content(self.overlay, self._overlay_before)
        if self.converted.exists():
            compare = ("qemu-img", "compare", "-f", "raw", "-F", "qcow2", str(self.converted), str(self._before))
            assert subprocess.run(compare, capture_output=True).returncode == 0
            assert self.converted.stat().st_nlink == 1
        left = leftovers(self.pool)
        if self.swapped:
            assert left in ({".sa-j1.journal", ".sa-j1.orig"}, set()), left
            if left:
                copy = (self.pool / ".sa-j1.orig").stat()
                assert (copy.st_ino, copy.st_mtime_ns) == (self.original.st_ino, self.original.st_mtime_ns)
                assert self._reads(self.pool / ".sa-j1.orig")
        else:
            assert left == set(), left
            assert self.image.stat().st_mtime_ns == self.original.st_mtime_ns
            assert self.image.stat().st_nlink == 1

    def _reads(self, path: Path) -> bool:
        """Whether a guest reads from a file what it read from the image."""
        compare: list[str | Path] = ["qemu-img", "compare", "-f", self.form, "-F", "qcow2", path, self._before]
        return subprocess.run(compare, capture_output=True).returncode == 0


def seed() -> int:
    """The seed of this run: ``STORAGE_ADMIN_SEED`` where it is set, so that a run can be repeated."""
    return int(os.environ.get("STORAGE_ADMIN_SEED") or random.SystemRandom().randrange(1 << 32))
