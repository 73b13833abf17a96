"""States of disks whose snapshots Proxmox VE keeps as files, as real images in a folder and as a VM's configuration.

What a deletion that failed leaves was seen with Proxmox VE 9.2 itself: a commit that fails leaves chain, section and
lock; a file that cannot be removed after a rebase leaves section and lock and a file out of the chain; with ``--force``
the section goes and the file stays.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

from tests.working import create

KINDS = (
    "plain", "clone", "commit failed", "not removed", "forced", "forced in chain", "renamed", "rolled back", "libvirt",
    "similar",
)  # fmt: skip
TEMPLATE = "base-999-disk-0.qcow2"
_NAMES = ("s", "before_upgrade", "a-vm-1", "x-vm-100-disk-0", "snap-1", "vm-5-disk-0", "Z9")


@dataclass
class State:
    """One state.

    Args:
        kind: of :data:`KINDS`.
        config: the VM's; empty where there is none.
        inner: files that are snapshots by their names; ``disk``: the one that stands on them, where it is there.
        needed: those of them that are no orphans; ``left``: those that nothing needs any more.
        others: images that are in no such chain, whatever they are called.
    """

    kind: str
    vmid: int
    config: str = ""
    inner: list[Path] = field(default_factory=list)
    disk: Path | None = None
    needed: list[Path] = field(default_factory=list)
    left: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    #: An image and what it stands on, in that order, for each that stands on something.
    bases: dict[Path, Path] = field(default_factory=dict)

    def ancestors(self, image: Path) -> list[Path]:
        """What an image stands on, down to the end."""
        found = []
        while image in self.bases:
            image = self.bases[image]
            found.append(image)
        return found


def make(kind: str, vmid: int, store: Path, elsewhere: Path, rng: random.Random) -> State:
    """A state with its files.

    Args:
        store: of the VMs' images, with the template's in it.
        elsewhere: a folder of no VM.
    """
    if kind == "libvirt":
        return _libvirt(vmid, elsewhere, rng)
    state = State(kind, vmid)
    name = f"vm-{vmid}-disk-0.qcow2" if rng.random() < 0.8 else "data.qcow2"
    linked = kind == "clone" or (kind not in {"plain", "similar"} and rng.random() < 0.3)
    least = {"plain": 0, "clone": 0, "similar": 0, "not removed": 2, "forced": 2}.get(kind, 1)
    snapshots = [f"{rng.choice(_NAMES)}{number}" for number in range(rng.randint(least, 3))]
    folder = store / str(vmid)
    folder.mkdir(parents=True)
    below = store / "999" / TEMPLATE if linked else None
    middle = rng.randrange(1, len(snapshots)) if kind in {"not removed", "forced"} else None
    for number, snapshot in enumerate(snapshots):
        path = _create(state, folder / f"snap-{snapshot}-{name}", below)
        state.inner.append(path)
        if number == middle:
            (state.left if kind == "forced" else state.needed).append(path)
        else:
            below = path
            state.needed.append(path)
    if kind not in {"renamed", "rolled back"}:
        state.disk = _create(state, folder / name, below)
        state.needed.append(state.disk)
    if kind == "similar":
        assert state.disk is not None
        state.others = [_create(state, folder / f"snapshot-{name}", None)]
        state.others.append(_create(state, folder / "snap-backup.qcow2", state.disk))
    volume = f"store:{'999/' + TEMPLATE + '/' if linked else ''}{vmid}/{name}"
    state.config = _config(kind, vmid, volume, snapshots, middle)
    return state


def _create(state: State, path: Path, below: Path | None) -> Path:
    beside = below is not None and below.parent == path.parent
    named = None if below is None else below.name if beside else f"../{below.parent.name}/{below.name}"
    create(path, "1M", base=named)
    if below is not None:
        state.bases[path] = below
    return path


def _config(kind: str, vmid: int, volume: str, snapshots: list[str], middle: int | None) -> str:
    locks = {
        "commit failed": "snapshot-delete", "not removed": "snapshot-delete", "renamed": "snapshot",
        "rolled back": "rollback",
    }  # fmt: skip
    gone = {"forced": middle, "forced in chain": 0}.get(kind)
    marked = {"commit failed": (0, "delete"), "not removed": (middle, "delete"), "renamed": (-1, "prepare")}.get(kind)
    lines = [f"name: vm{vmid}", f"scsi0: {volume},size=1M"]
    lines += [f"lock: {locks[kind]}"] if kind in locks else []
    for number, snapshot in enumerate(snapshots):
        if number == gone:
            continue
        lines += ["", f"[{snapshot}]", f"scsi0: {volume},size=1M", "snaptime: 1795448752"]
        if marked and marked[0] is not None and number == marked[0] % len(snapshots):
            lines.append(f"snapstate: {marked[1]}")
    return "\n".join([*lines, ""])


def _libvirt(number: int, elsewhere: Path, rng: random.Random) -> State:
    """External snapshots of libvirt, and files whose names look like Proxmox VE's, in a folder of no VM."""
    folder = elsewhere / f"web{number}"
    folder.mkdir()
    state, below = State("libvirt", number), None
    named = [["web.qcow2", "web.s1", "web.s2"], ["snap-old-web.qcow2", "web.qcow2"], ["web.qcow2", "snap-a-web.qcow2"]]
    for name in rng.choice(named):
        below = _create(state, folder / name, below)
        state.others.append(below)
    return state
