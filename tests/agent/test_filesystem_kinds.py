"""Each kind of filesystem: as full as virt-df says, or what the host lacks to look at it is named."""

import csv
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage_admin.agent.appliance import appliance
from storage_admin.agent.appliance.appliance import Appliance
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.qemu.node import Node
from tests.agent.harness import ask, held_open, rewrite_args
from tests.agent.recording import RecordingIO
from tests.agent.test_shrink import MAKERS
from tests.harness.filesystems import sparse_file

pytestmark = pytest.mark.qemu
MIB = 1 << 20
SIZES = {"ext4": 64, "xfs": 320, "btrfs": 128, "vfat": 64, "ntfs": 32, "luks": 16}
BY_EMULATION = {**os.environ, "LIBGUESTFS_BACKEND": "direct", "LIBGUESTFS_BACKEND_SETTINGS": "force_tcg"}
#: How each is made; of FAT one whose superblock says how much is free.
KINDS = {name: MAKERS[name] for name in ("ext4", "xfs", "btrfs")} | {
    "vfat": [*MAKERS["vfat"], "-F", "32"], "ntfs": ["mkfs.ntfs", "-q", "-Q", "-F"],
}  # fmt: skip


def disk(path: Path, *names: str, group: bool = False) -> Path:
    """A disk with a partition of each kind; ``group`` with an LVM behind them, which has an ext4 on a volume."""
    pieces = {}
    for name in names:
        part = path.with_suffix(f".{name}")
        sparse_file(part, SIZES[name] * MIB)
        maker = KINDS.get(name, ["cryptsetup", "luksFormat", "-q", "--pbkdf-force-iterations=1000", "--type=luks1"])
        subprocess.run([*maker, str(part)], check=True, capture_output=True, input=b"x")
        pieces[part] = SIZES[name]
    if group:
        part = path.with_suffix(".lvm")
        sparse_file(part, 100 * MIB)
        pieces[part] = 100
    starts = [1 + sum(list(pieces.values())[:number]) for number in range(len(pieces))]
    sparse_file(path, (2 + sum(pieces.values())) * MIB)
    table = "".join(f"{at * 2048} {size * 2048} L\n" for at, size in zip(starts, pieces.values(), strict=True))
    subprocess.run(["sfdisk", "-q", "--label=gpt", path], input=table.encode(), check=True)
    for part, at in zip(pieces, starts, strict=True):
        command = ["dd", f"if={part}", f"of={path}", "bs=1M", f"seek={at}", "conv=notrunc,sparse"]
        subprocess.run(command, check=True, capture_output=True)
        part.unlink()
    if group:
        device = f"/dev/sda{len(pieces)}"
        asked = (
            f"run : pvcreate {device} : vgcreate guest {device} : lvcreate root guest 64 : mkfs ext4 /dev/guest/root"
        )
        subprocess.run(["guestfish", "--format=raw", "-a", path, *asked.split()], check=True, env=BY_EMULATION)
    return path


@contextmanager
def inside(path: Path) -> Iterator[Appliance]:
    with held_open(path) as fd, appliance.on(RecordingIO(), Node(fd, "raw", bytes(path)), lambda: None) as started:
        yield started


def test_each_is_as_full_as_virt_df_says(pool: Path) -> None:
    path = disk(pool / "vm.raw", *KINDS, group=True)
    told = subprocess.run(
        ["virt-df", "--csv", "--format=raw", "-a", path], capture_output=True, text=True, check=True,
        env=BY_EMULATION,
    )  # fmt: skip
    rows = {
        row["Filesystem"]: (int(row["1K-blocks"]), int(row["Used"])) for row in csv.DictReader(told.stdout.splitlines())
    }
    with inside(path) as started:
        looked = [one for one in started.ask("look", 600)["filesystems"] if one["size"] is not None]
        for number in range(1, len(KINDS) + 1):
            started.ask("list", device=f"/dev/sda{number}", path="/")
    found = {one["device"]: (one["size"] // 1024, (one["size"] - one["free"]) // 1024) for one in looked}
    assert found == rows
    assert len(found) == len(KINDS) + 1
    args = rewrite_args(path, format="raw")
    parts = {part["volume"] or f"/dev/sda{part['number']}": part for part in ask("inside", args)["parts"]}
    free = {one["device"]: one["free"] for one in looked}
    for device, volume in (("/dev/sda1", "/dev/sda1"), ("/dev/sda4", "/dev/sda4"), ("/dev/guest/root", "guest/root")):
        assert parts[volume]["free_bytes"] == free[device], device
    # What the kernel keeps back for itself, and for metadata, is free in the superblock.
    for device in ("/dev/sda2", "/dev/sda3"):
        assert free[device] <= parts[device]["free_bytes"] <= free[device] + 32 * MIB, device


@pytest.fixture
def poor(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An appliance that was made on a host without these packages."""
    parts, built = shared_folder / "parts", shared_folder / "built"
    (whole,) = Path("/usr/lib").glob("*/guestfs/supermin.d")
    shutil.copytree(whole, parts, ignore=shutil.ignore_patterns("packages-*", "zz-*"))
    names = (parts / "packages").read_text().split()
    assert "ntfs-3g" in names
    (parts / "packages").write_text("".join(f"{name}\n" for name in names if name not in {"ntfs-3g", "xfsprogs"}))
    how = ["--build", "--copy-kernel", "-f", "ext2", "--host-cpu", os.uname().machine]
    subprocess.run(["supermin", *how, str(parts), "-o", str(built)], check=True, capture_output=True)
    (built / "README.fixed").write_text("fixed\n")
    for one in (built, *built.iterdir()):
        one.chmod(0o755 if one == built else 0o644)
    monkeypatch.setattr(appliance, "_built", lambda _io: str(built))


@pytest.mark.usefixtures("poor")
def test_what_the_appliance_lacks_is_named_with_the_package_that_brings_it(pool: Path) -> None:
    with inside(disk(pool / "vm.raw", "ntfs", "xfs", "luks")) as started:
        ntfs, xfs, luks = started.ask("look")["filesystems"]
        assert (ntfs["type"], ntfs["size"]) == ("ntfs", None)
        assert "ntfs-3g" in ntfs["why"]
        assert 0 < xfs["free"] < xfs["size"], "the kernel mounts it without"
        for do, path, package in (
            ("list", "/", "ntfs-3g"),
            ("read", "/x", "ntfs-3g"),
            ("unclean", "", "libguestfs-xfs"),
        ):
            with pytest.raises(RefusedError) as caught:
                started.ask(do, device="/dev/sda1", path=path)
            assert (caught.value.code, package in caught.value.detail) == ("tool_missing", True), do
        assert (luks["type"], luks["size"], luks["why"] != "") == ("crypto_LUKS", None, True)
        # What nobody can look into is not taken for sound.
        states = {one["device"]: one["state"] for one in started.ask("check")["filesystems"]}
        assert states == {f"/dev/sda{number}": "unknown" for number in (1, 2, 3)}
