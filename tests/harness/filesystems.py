"""Small filesystems of their own, for full disks and power cuts."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

MIB = 1024**2


@contextlib.contextmanager
def loop_filesystem(
    folder: Path, size_mib: int, *, form: str = "ext4", options: str = "", make: Sequence[str] = ()
) -> Iterator[Path]:
    """Yields a folder on a filesystem of ``size_mib`` MiB, mounted from a file ``disk.img`` in ``folder``. Needs root.

    Args:
        form: ``ext4`` or ``xfs`` (at least 300 MiB).
        options: mount options such as ``noauto_da_alloc``.
        make: options of its ``mkfs``.
    """
    disk, place = folder / "disk.img", folder / "mounted"
    with disk.open("wb") as file:
        file.truncate(size_mib * MIB)
    _run(f"mkfs.{form}", "-q", *make, str(disk))
    place.mkdir()
    _run("mount", "-o", ",".join(filter(None, ["loop", options])), str(disk), str(place))
    try:
        yield place
    finally:
        _unmount(place)


def _unmount(place: Path) -> None:
    if subprocess.run(["umount", str(place)], capture_output=True).returncode:
        _run("umount", "--lazy", str(place))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
