"""Disks with an ext4 whose guest has written to an overlay, and bases in other states than the one it began with."""

import os
import random
import subprocess
from pathlib import Path
from typing import Any

from tests.agent.harness import link, qemu_img, qemu_io, rewrite_args
from tests.harness.filesystems import sparse_file

MIB, BLOCK, FOLDERS = 1 << 20, 4096, 12
#: When the disk was made, used by a guest, and used once more; seconds since the epoch.
MADE, USED, LATER = 1_700_000_000, 1_710_000_000, 1_720_000_000


def args_for(path: Path, *onto: Path, **more: Any) -> dict[str, Any]:
    """The arguments of ``relink`` with a proof."""
    return rewrite_args(path, onto=[link(one) for one in onto], prove=True, **more)


def disk(path: Path, seed: int, *, files: int = 240) -> Path:
    """A raw disk, all of it an ext4 with files of noise, whose groups are as far from each other as on a large disk."""
    sparse_file(path, 96 * MIB)
    identity = f"{seed:08x}-0000-4000-8000-000000000001"
    make: list[str | Path] = ["mkfs.ext4", "-q", "-b", str(BLOCK), "-g", "1024", "-O", "^flex_bg", "-U", identity, path]
    subprocess.run(make, check=True, env=at(MADE))
    chance = random.Random(seed)
    _run(path, MADE, [f"mkdir /folder{number}" for number in range(FOLDERS)])
    return _written(path, MADE, [_noise(path, chance, f"file{number}") for number in range(files)])


def _noise(disk: Path, chance: random.Random, name: str) -> str:
    """The command of debugfs that writes a file of noise into one of the folders."""
    folder = disk.with_suffix(".noise")
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(chance.randbytes(chance.randrange(1000, 150_000)))
    return f"write {folder / name} /folder{chance.randrange(FOLDERS)}/{name}"


def _written(disk: Path, when: int, commands: list[str]) -> Path:
    _run(disk, when, commands)
    subprocess.run(["e2fsck", "-fy", disk], check=False, capture_output=True, env=at(when))
    return disk


def _run(disk: Path, when: int, commands: list[str]) -> None:
    script = disk.with_suffix(".commands")
    script.write_text("\n".join([f"set_current_time @{when}", *commands]))
    subprocess.run(["debugfs", "-w", "-f", script, disk], check=True, capture_output=True, env=at(when))


def at(when: int) -> dict[str, str]:
    """The environment of a tool that takes another time for now."""
    return {**os.environ, "E2FSPROGS_FAKE_TIME": str(when), "E2FSCK_TIME": str(when)}


def used(before: Path, after: Path, when: int, seed: int, *, files: int = 40) -> Path:
    """That disk after a guest has written files at that time, and removed as many."""
    subprocess.run(["cp", "--sparse=always", before, after], check=True)
    chance = random.Random(seed)
    commands = [_noise(after, chance, f"new{seed}-{number}") for number in range(files)]
    for folder in chance.sample(range(FOLDERS), FOLDERS // 2):
        said = subprocess.run(["debugfs", "-R", f"ls -p /folder{folder}", before], check=True, capture_output=True)
        there = [line.split("/")[5] for line in said.stdout.decode().splitlines() if "/file" in line]
        gone = chance.sample(there, min(len(there), 1 + files // 10))
        commands += [*(f"rm /folder{folder}/{name}" for name in gone), f"sif /folder{folder} ctime @{when}"]
    return _written(after, when, commands)


def as_qcow2(raw: Path, path: Path) -> Path:
    """That disk as a base."""
    qemu_img("convert", "-O", "qcow2", raw, path)
    return path


def overlay(before: Path, after: Path, base: Path, path: Path) -> Path:
    """An overlay on that base in which a guest has written what differs between the two."""
    qemu_img("create", "-q", "-f", "qcow2", "-b", base.name, "-F", "qcow2", path)
    old, new = before.read_bytes(), after.read_bytes()
    places = [at for at in range(0, len(new), BLOCK) if old[at : at + BLOCK] != new[at : at + BLOCK]]
    commands, begin = list[str](), 0
    for place, at_ in enumerate(places):
        if place + 1 == len(places) or places[place + 1] != at_ + BLOCK:
            first = places[begin]
            piece = path.with_name(f"piece{first}")
            piece.write_bytes(new[first : at_ + BLOCK])
            commands.append(f"write -q -s {piece} {first} {at_ + BLOCK - first}")
            begin = place + 1
    for some in range(0, len(commands), 50):
        qemu_io(path, *commands[some : some + 50])
    for piece in path.parent.glob("piece*"):
        piece.unlink()
    return path


#: Has libguestfs lay out a disk as installers do: a boot loader's partition, one for UEFI, swap and a root by LVM.
_LAYOUT = """
import guestfs, sys
guest = guestfs.GuestFS(python_return_dict=True)
guest.set_network(False)
guest.add_drive_opts(sys.argv[1], format="raw")
guest.launch()
guest.part_init("/dev/sda", "gpt")
for first, last in ((2048, 4095), (4096, 36863), (36864, -34)):
    guest.part_add("/dev/sda", "p", first, last)
guest.part_set_gpt_type("/dev/sda", 1, "21686148-6449-6E6F-744E-656564454649")
guest.mkfs("vfat", "/dev/sda2")
guest.pvcreate("/dev/sda3")
guest.vgcreate("guest", ["/dev/sda3"])
guest.lvcreate("swap", "guest", 8)
guest.lvcreate("root", "guest", int(sys.argv[3]))
guest.mkswap("/dev/guest/swap")
guest.upload(sys.argv[2], "/dev/guest/root")
guest.shutdown()
"""


def partitioned(states: list[Path], folder: Path) -> list[Path]:
    """Disks, alike but for the filesystem that is their root: a logical volume with each of these."""
    disk, first = folder / "disk0", states[0].read_bytes()
    sparse_file(disk, 160 * MIB)
    command: list[str | Path] = ["/usr/bin/python3", "-c", _LAYOUT, disk, states[0], str(len(first) // MIB)]
    how = {"LIBGUESTFS_BACKEND": "direct", "LIBGUESTFS_BACKEND_SETTINGS": "force_tcg"}
    subprocess.run(command, check=True, env={**os.environ, **how})
    whole, found = disk.read_bytes(), [disk]
    start = whole.index(first[1024 : 2 * BLOCK]) - 1024
    for number, state in enumerate(states[1:], 1):
        disk = folder / f"disk{number}"
        disk.write_bytes(whole[:start] + state.read_bytes() + whole[start + len(first) :])
        found.append(disk)
    return found


def damaged(disk: Path, after: Path) -> Path:
    """That disk, in which blocks of its files are free, in each group."""
    subprocess.run(["cp", "--sparse=always", disk, after], check=True)
    _run(after, MADE, [f"freeb {group * 1024 + 600} 20" for group in range(9)])
    return after
