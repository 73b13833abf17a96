"""A sound disk with hostile filesystems: what a guest's root could have put there for whoever looks at it."""

import os
import stat
import subprocess
from pathlib import Path

from tests.agent.harness import overwrite, qemu_img
from tests.agent.test_inside import physical_volume
from tests.harness.filesystems import formatted, mounted, new_folder, sparse_file

MIB, TIB = 1 << 20, 1 << 40
#: How many files are in one folder; the deepest folder, whose path is longer than any that a system takes.
MANY, DEEP = 50_000, ["d" * 100] * 60
NAMES = ["new\nline", "\x1b[31mred", "<script>alert(1)", "\u202egpj.exe", "-rf", "a\\b", "%00"]
NO_UTF_8 = b"\xff\xfe"
OWN = b"what the guest has there itself\n"
#: Names that lead to what is no file, or to none at all; the first is not even in the guest.
NOWHERE = ["/to-secret", "/to-disk", "/loop", "/pipe", "/disk", "/memory", "/many", "/socket", "/etc/nothing"]
#: Names that lead to the guest's own file, however far they reach.
TO_ITS_OWN = ["/to-passwd", "/to-above", "/../../../etc/passwd", "/to-root/etc/passwd"]


def fill(root: Path, secret: Path, many: int) -> None:
    """What such a filesystem holds."""
    for name in ("etc", "dev", "many"):
        (root / name).mkdir(parents=True)
    (root / "etc/passwd").write_bytes(OWN)
    for name, to in {
        "to-passwd": "/etc/passwd", "to-above": "../../../../../etc/passwd", "to-secret": str(secret), "to-root": "/",
        "to-disk": "/dev/sda", "loop": "loop",
    }.items():  # fmt: skip
        (root / name).symlink_to(to)
    for name, kind, device in (
        ("disk", stat.S_IFBLK, (8, 0)), ("dev/sda", stat.S_IFBLK, (8, 0)), ("memory", stat.S_IFCHR, (1, 1)),
        ("pipe", stat.S_IFIFO, (0, 0)), ("socket", stat.S_IFSOCK, (0, 0)),
    ):  # fmt: skip
        os.mknod(root / name, kind | 0o666, os.makedev(*device))
    for odd in (*NAMES, os.fsdecode(NO_UTF_8)):
        (root / odd).write_bytes(b"x")
    for number in range(many):
        (root / f"many/{number}").touch()
    here = os.open(root, os.O_RDONLY)
    for name in DEEP:
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def filesystem(path: Path, secret: Path | None = None, *, sparse: bool, many: int = MANY) -> Path:
    """An ext4 of that, where links lead to a ``secret`` of the host; ``sparse`` with a file of a tebibyte besides."""
    formatted(path, 96 * MIB, make=("-N", "60000"))
    with mounted(path, new_folder(path.with_suffix(".mounted")), "-o", "loop") as root:
        if secret is not None:
            fill(root, secret, many)
        if sparse:
            sparse_file(root / "sparse", TIB)
    return path


def disk(path: Path, secret: Path) -> Path:
    """A raw disk: that filesystem; one whose superblock is damaged; LUKS; an LVM of which a part is lost."""
    parts = new_folder(path.parent / "parts")
    hostile = filesystem(parts / "0", secret, sparse=True)
    damaged, luks, group = parts / "1", parts / "2", parts / "3"
    formatted(damaged, 16 * MIB)
    overwrite(damaged, 1024 + 4, b"\xff" * 48)  # its sizes; what it is stays to be seen
    key = "secret,id=s,data=x"
    qemu_img("create", "-q", "-f", "luks", "--object", key, "-o", "key-secret=s,iter-time=10", luks, "16M")
    group.write_bytes(physical_volume())
    spans, at = [], 2048
    for part in (hostile, damaged, luks, group):
        spans.append((at, -(-part.stat().st_size // 512)))
        at += -(-sum(spans[-1][1:]) // 2048) * 2048
    sparse_file(path, (at + 2048) * 512)
    table = "".join(f"{start} {size} L\n" for start, size in spans)
    subprocess.run(["sfdisk", "-q", path], input=table.encode(), check=True)
    for part, (start, _) in zip((hostile, damaged, luks, group), spans, strict=True):
        command = ["dd", f"if={part}", f"of={path}", "bs=1M", "oflag=seek_bytes", f"seek={start * 512}"]
        subprocess.run([*command, "conv=notrunc,sparse"], check=True, capture_output=True)
        part.unlink()
    return path
