"""Files, folders and small filesystems that tests make: full disks, power cuts, devices."""

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MIB = 1024**2


def new_folder(path: Path, mode: int = 0o777, *, parents: bool = False) -> Path:
    path.mkdir(mode, parents=parents)
    return path


def new_file(path: Path, content: bytes | bytearray | str = b"") -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def new_program(path: Path, script: str | bytes) -> Path:
    """A file that may be executed."""
    new_file(path, script).chmod(0o755)
    return path


def sparse_file(path: Path, size: int) -> Path:
    """A new file of so many bytes, none of them written."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def formatted(path: Path, size: int, form: str = "ext4", make: Sequence[str] = ()) -> Path:
    """A new file of so many bytes with a new filesystem in it."""
    _run(f"mkfs.{form}", "-q", *make, str(sparse_file(path, size)))
    return path


@contextlib.contextmanager
def loop_device(file: Path) -> Iterator[Path]:
    """A block device that a file is behind. Needs root."""
    device = _run("losetup", "--find", "--show", str(file)).strip()
    try:
        yield Path(device)
    finally:
        _run("losetup", "--detach", device)


@contextlib.contextmanager
def swap_area(path: Path) -> Iterator[None]:
    """A file or a device as swap of this machine. Needs root."""
    _run("mkswap", "-q", str(path))
    _run("swapon", str(path))
    try:
        yield
    finally:
        _run("swapoff", str(path))


@contextlib.contextmanager
def immutable(path: Path) -> Iterator[None]:
    """Nobody writes to a file, renames or deletes it (chattr(1)). Needs root."""
    _run("chattr", "+i", str(path))
    try:
        yield
    finally:
        _run("chattr", "-i", str(path))


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
    disk, place = formatted(folder / "disk.img", size_mib * MIB, form, make), new_folder(folder / "mounted")
    with mounted(disk, place, "-o", ",".join(filter(None, ["loop", options]))):
        yield place


@contextlib.contextmanager
def mounted(what: Path | str, place: Path, *options: str) -> Iterator[Path]:
    """Mounts a file or a folder at another one, or a filesystem as the options say. Needs root."""
    _run("mount", *(options or ["--bind"]), str(what), str(place))
    try:
        yield place
    finally:
        _unmount(place)


def _unmount(place: Path) -> None:
    """Somebody who looks at all processes' files may still hold one of its for a moment."""
    for _ in range(50):
        if subprocess.run(["umount", str(place)], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    _run("umount", "--lazy", str(place))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
