"""Images that several parts of the benchmark work on."""

import subprocess
from pathlib import Path

MIB = 1024**2
SIZE_MIB = 2048


def filled(folder: Path, name: str) -> Path:
    """A qcow2 image of a guest's disk with every cluster allocated: files, and zeros where there are none."""
    raw, image = folder / "source.raw", folder / name
    with raw.open("wb") as file:
        file.truncate(SIZE_MIB * MIB)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", "/usr/share", str(raw)], check=True, capture_output=True)
    subprocess.run(["qemu-img", "convert", "-S", "0", "-f", "raw", "-O", "qcow2", str(raw), str(image)], check=True)
    raw.unlink()
    return image


def warm(path: Path) -> None:
    """Reads a file once, so that the host's page cache holds it."""
    with path.open("rb") as file:
        while file.read(8 * MIB):
            pass
