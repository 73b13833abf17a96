"""The power goes at a random moment (fault F2).

The image lies on an ext4 of its own, mounted without the heuristic that hides a missing fsync; its disk is a file.
What has reached that file at a random moment is cloned in one step, as if the power had gone then. The clone is
mounted, which replays ext4's journal, and recovered.
"""

import contextlib
import fcntl
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.harness import Agent
from tests.faults.scene import Scene, seed
from tests.faults.test_kills import listen, tools_of, wait_until_gone

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

CUTS = int(os.environ.get("STORAGE_ADMIN_CUTS", "20"))
_FICLONE = 0x40049409


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def mounted(device: Path, folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    run("mount", "-o", options, device, folder)
    try:
        yield folder
    finally:
        unmount(folder)


def unmount(folder: Path) -> None:
    """Somebody who looks at all processes' files may still hold one of its for a moment."""
    for _ in range(50):
        if subprocess.run(["umount", folder], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    run("umount", "--lazy", folder)


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Path]:
    """A folder in which a file can be cloned as it is in one moment."""
    host = tmp_path / "host.img"
    with host.open("wb") as file:
        file.truncate(1 << 30)
    run("mkfs.xfs", "-q", "-m", "reflink=1", host)
    with mounted(host, tmp_path / "host", "loop") as folder:
        yield folder


def test_a_power_cut_leaves_the_original_or_the_result(tmp_path: Path, disks: Path, all_templates: list[Path]) -> None:
    start = seed()
    print(f"STORAGE_ADMIN_SEED={start}")
    tally: dict[str, int] = {}
    for trial in range(CUTS):
        rng = random.Random(f"{start}-{trial}")
        disk, cut = disks / "disk.img", disks / "cut.img"
        with disk.open("wb") as file:
            file.truncate(128 << 20)
        run("mkfs.ext4", "-q", disk)
        with mounted(disk, tmp_path / "disk", "loop,noauto_da_alloc") as folder:
            scene = Scene(folder / "scene", rng.choice(all_templates))
            verb, own = rng.choice(scene.works())
            run("sync", "-f", folder)
            with Agent() as agent:
                agent.request(verb, scene.args(**own, undo_hours=rng.choice([0, 24])))
                listen(agent, time.monotonic() + rng.uniform(0.05, 0.8))
                clone(disk, cut)
                tools = tools_of(agent)
                agent.process.kill()
            wait_until_gone(tools)
            original = scene.original
        with mounted(cut, tmp_path / "cut", "loop,noauto_da_alloc") as folder:
            after = Scene.__new__(Scene)
            after.__dict__ |= moved(scene, folder / "scene")
            after.original = original
            rows = [row["outcome"] for row in after.recover()]
            try:
                after.verify()
            except AssertionError as error:
                raise AssertionError(f"trial {trial} of seed {start}, {verb} {own}, {rows}: {error}") from error
            outcome = f"{'result' if after.swapped else 'original'}"
        tally[outcome] = tally.get(outcome, 0) + 1
        disk.unlink()
        cut.unlink()
    print(f"power cuts: {tally}")
    assert CUTS < 10 or tally.keys() == {"original", "result"}


def clone(disk: Path, cut: Path) -> None:
    """The disk's bytes as they are in this moment."""
    with disk.open("rb") as source, cut.open("wb") as target:
        fcntl.ioctl(target, _FICLONE, source.fileno())


def moved(scene: Scene, folder: Path) -> dict[str, object]:
    """The same scene in another folder."""
    old = scene.pool.parent
    fields = dict(scene.__dict__)
    for name, value in fields.items():
        if isinstance(value, Path):
            fields[name] = folder / value.relative_to(old)
    fields["bases"] = [folder / base.relative_to(old) for base in scene.bases]
    return fields
