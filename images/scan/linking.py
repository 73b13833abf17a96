"""Chains, states and owners, worked out from rows alone: no database, no host.

:func:`resolve` takes every image of a host and every disk of its guests and says what each image is.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from images.models import Image
from images.orphans.evidence import Facts, Naming, World, judge

State = Image.State

#: Formats whose magic in a disk that is declared raw means that somebody wrote a header into it.
HEADER_FORMATS = frozenset({"qcow2", "qcow", "vmdk", "vdi", "vpc", "vhdx", "qed", "parallels"})
EXTENSIONS = {
    "qcow2": "qcow2", "raw": "raw", "vmdk": "vmdk", "vdi": "vdi", "vhd": "vpc", "vpc": "vpc", "vhdx": "vhdx",
    "qed": "qed", "qcow": "qcow", "luks": "luks",
}  # fmt: skip
#: Characters that the column ``declared_by`` takes.
DECLARED_BY = 40
#: What is said of images that an admin has taken out of use.
GONE = {
    "set_aside": "The image is set aside. Its file keeps its data under another name until an admin restores or "
    "deletes it.",
    "deleted": "The image was set aside and then deleted.",
}


class Row(NamedTuple):
    """An image as it stands in the database. ``inode`` is ``device:inode``."""

    id: int
    name: str
    path_key: str
    inode: str
    format: str
    unreadable: str
    missing: bool
    admin_format: str
    backing_file: str
    backing_format: str
    backing_key: str
    backing_found: str
    backing_unsafe: str
    held: str
    owners_unknown: str
    path: str = ""
    #: ``set_aside`` or ``deleted`` where it is one of these; an image that is set aside stands on its base still.
    gone: str = ""
    #: Its folder could not be entered: all of it is as last seen, and its inode may be another file's by now.
    unseen: bool = False
    #: The number of the job that has merged it into the image below it.
    merged: str = ""
    #: It is no file, but a volume of its pool.
    is_volume: bool = False


@dataclass(frozen=True)
class Disk:
    """A guest's disk; what ``target`` and ``only_in`` are, the guest's definition says."""

    id: int
    #: Its name; empty for a guest of another host, which may not exist for whoever reads the sentence.
    guest: str
    guest_off: bool
    path_key: str
    inode: str
    format: str
    target: str = ""
    only_in: str = ""
    kind: str = ""
    uid: str = ""
    #: Of a guest of another host: that host's rows say which image it uses there.
    of_another_host: bool = False

    @property
    def who(self) -> str:
        """The guest, as a sentence names it."""
        return f"guest {self.guest}" if self.guest else "a guest of another host"

    @property
    def naming(self) -> Naming:
        """The disk as evidence."""
        return Naming(self.guest, self.target, self.only_in, self.kind, self.uid)


@dataclass(slots=True)
class Resolved:
    """What an image is, among the others."""

    id: int
    backing_id: int | None = None
    root_id: int = 0
    chain_depth: int = 1
    overlays: list[int] = field(default_factory=list)
    #: Files that stand on its file, by whatever names of both.
    overlays_count: int = 0
    disks: list[Disk] = field(default_factory=list)
    declared_format: str = ""
    declared_by: str = ""
    state: str = State.OK
    state_detail: str = ""
    in_use: bool | None = None
    in_use_detail: str = ""
    orphan: bool | None = None
    orphan_evidence: list[str] = field(default_factory=list)

    def set_state(self, state: str, why: str) -> None:
        """Its state, and why it is that."""
        self.state, self.state_detail = state, why


class Resolver:
    """Works on all images of a host at once."""

    def __init__(self, rows: Iterable[Row], disks: Iterable[Disk], world: World) -> None:
        """Sorts what is there.

        Args:
            world: what else is known of the host; it says which images are orphans.
        """
        self.rows = {row.id: row for row in rows}
        self.answers = {row_id: Resolved(row_id) for row_id in self.rows}
        self.world = world
        present = [row for row in self.rows.values() if not row.missing and not row.gone]
        self._by_path = {row.path_key: row.id for row in present}
        # What was seen comes before what stands there as last seen, and of that the first.
        self._by_inode = {
            row.inode: row.id for unseen in (True, False) for row in reversed(present) if row.unseen is unseen
        }
        self._same_inode: dict[str, list[int]] = defaultdict(list)
        for row in present:
            self._same_inode[row.inode].append(row.id)
        self._attach(disks)

    def resolve(self) -> dict[int, Resolved]:
        """Every image's answer by its id."""
        for row in self.rows.values():
            self._link(row)
        for row in self.rows.values():
            self._declare(row)
        for row in self.rows.values():
            self._own_state(row)
        order = self._base_first()
        for row_id in order:
            self._from_base(row_id)
        used = self._used()
        for row in self.rows.values():
            self.answers[row.id].overlays_count = len({overlay.inode for overlay in self._above(row, twins=True)})
            self._use(row, used[row.id])
        return self.answers

    def _attach(self, disks: Iterable[Disk]) -> None:
        for disk in disks:
            image = self._by_path.get(disk.path_key) if disk.path_key else None
            if image is None and disk.inode != ":":
                image = self._by_inode.get(disk.inode)
            if image is not None:
                self.answers[image].disks.append(disk)

    def _link(self, row: Row) -> None:
        if row.missing or row.unreadable or not row.backing_file or row.backing_unsafe:
            return
        # By another path, as through a link, it is the file that stands there.
        base = self._by_path.get(row.backing_key) or self._by_inode.get(row.backing_found)
        if base is not None:
            self.answers[row.id].backing_id = base
            self.answers[base].overlays.append(row.id)

    def _declare(self, row: Row) -> None:
        """In this order: the guest's definition, an overlay's backing format, an admin, the extension."""
        answer = self.answers[row.id]
        for disk in answer.disks:
            if disk.format:
                answer.declared_format, answer.declared_by = disk.format, _short(disk.who)
                return
        for overlay in answer.overlays:
            if declared := self.rows[overlay].backing_format:
                answer.declared_format = declared
                answer.declared_by = _short(f"overlay {self.rows[overlay].name}")
                return
        if row.admin_format:
            answer.declared_format, answer.declared_by = row.admin_format, "an admin"
            return
        extension = row.name.rsplit(".", 1)[-1].lower() if "." in row.name else ""
        if extension in EXTENSIONS:
            answer.declared_format, answer.declared_by = EXTENSIONS[extension], f"its name (.{extension})"

    def _own_state(self, row: Row) -> None:
        answer = self.answers[row.id]
        if row.gone:
            answer.set_state(State(row.gone), GONE[row.gone])
        elif row.missing:
            gone = "The file is no longer at its path. Its facts are from when it was last seen."
            answer.set_state(State.MISSING, gone)
        elif row.merged:
            answer.set_state(State.MERGED, _merged(row, answer))
        elif wrong := self._mismatch(row, answer):
            answer.set_state(State.FORMAT_MISMATCH, wrong)
        elif row.unreadable:
            answer.set_state(State.UNREADABLE, row.unreadable)
        elif row.backing_unsafe:
            answer.set_state(State.OUTSIDE_POOL, row.backing_unsafe)
        elif row.backing_file and answer.backing_id is None and row.backing_found:
            outside = f"The backing file {row.backing_file} is outside every registered pool. Register its folder."
            answer.set_state(State.OUTSIDE_POOL, outside)
        elif row.backing_file and answer.backing_id is None:
            answer.set_state(State.CHAIN_BROKEN, f"The backing file {row.backing_file} is missing.")

    @staticmethod
    def _mismatch(row: Row, answer: Resolved) -> str:
        declared = answer.declared_format
        if not declared or not row.format or declared == row.format:
            return ""
        if declared in {"raw", "luks"} and row.format not in HEADER_FORMATS:
            return ""
        return (
            f"The format is {declared} according to {answer.declared_by}, but the content looks like {row.format}. "
            "A guest may have written that header, or the declaration is wrong."
        )

    def _base_first(self) -> list[int]:
        """Every image after its base; those on a cycle, or above one, are marked and come last."""
        order: list[int] = [row_id for row_id, answer in self.answers.items() if answer.backing_id is None]
        for row_id in order:  # it grows while we walk it
            order.extend(self.answers[row_id].overlays)
        placed = set(order)
        for row_id in self.rows:
            if row_id not in placed:
                placed.update(self._mark_cycle(row_id))
        return order

    def _mark_cycle(self, row_id: int) -> list[int]:
        """Marks the cycle that an image's chain ends in, and all that stands above it; gives them all."""
        seen: set[int] = set()
        step = row_id
        while step not in seen:
            seen.add(step)
            step = self.answers[step].backing_id or step
        cycle = [step]
        while (below := self.answers[cycle[-1]].backing_id) not in {None, step}:
            cycle.append(below or step)
        for one in cycle:
            self._call_cyclic(one, min(cycle), len(cycle))
        marked, on_it = list(cycle), set(cycle)
        for one in marked:  # it grows while we walk it
            for overlay in self.answers[one].overlays:
                if overlay not in on_it:
                    self._call_cyclic(overlay, min(cycle), self.answers[one].chain_depth + 1)
                    marked.append(overlay)
        return marked

    def _call_cyclic(self, row_id: int, root_id: int, depth: int) -> None:
        answer = self.answers[row_id]
        answer.root_id, answer.chain_depth = root_id, depth
        if answer.state not in {State.FORMAT_MISMATCH, *Image.NOT_THERE}:
            answer.set_state(State.CHAIN_CYCLE, "The backing chain loops back on itself; no tool can open it.")

    def _from_base(self, row_id: int) -> None:
        answer = self.answers[row_id]
        if answer.backing_id is None:
            answer.root_id = row_id
            if answer.state == State.OUTSIDE_POOL and not self.rows[row_id].backing_unsafe:
                answer.chain_depth = 2  # itself and the base that lies elsewhere
            return
        base, base_row = self.answers[answer.backing_id], self.rows[answer.backing_id]
        answer.root_id, answer.chain_depth = base.root_id, base.chain_depth + 1
        if answer.state != State.OK or base.state == State.OK:
            return
        if base.state in {State.UNREADABLE, State.FORMAT_MISMATCH, State.MERGED}:
            problem = f"The backing file {base_row.name} has a problem: {base.state_detail}"
            answer.set_state(State.CHAIN_BROKEN, problem)
        elif base.state in {State.CHAIN_BROKEN, State.CHAIN_CYCLE, State.OUTSIDE_POOL}:
            below = f"The problem is further down the chain, at {base_row.name}: {base.state_detail}"
            answer.set_state(base.state, below)

    def _used(self) -> dict[int, list[Disk]]:
        """The disks that need each image: its own and those of all its overlays, by whatever name they reach it."""
        used: dict[int, list[Disk]] = {row_id: [] for row_id in self.rows}
        for row_id, answer in self.answers.items():
            if answer.disks:
                for needed in self._needed_by(row_id):
                    used[needed].extend(answer.disks)
        return used

    def _needed_by(self, row_id: int) -> set[int]:
        """An image, all that is below it, and every other name of these files."""
        found, waiting = set(), [row_id]
        while waiting:
            step = waiting.pop()
            if step in found:
                continue
            found.add(step)
            base = self.answers[step].backing_id
            waiting += [*self._same_inode.get(self.rows[step].inode, ()), *([] if base is None else [base])]
        return found

    def _use(self, row: Row, disks: list[Disk]) -> None:
        answer = self.answers[row.id]
        if row.missing or row.gone:
            return
        running = [disk.who for disk in disks if not disk.guest_off]
        if running or row.held:
            answer.in_use = True
            answer.in_use_detail = f"{running[0]} is running" if running else row.held
        elif not row.owners_unknown:
            answer.in_use = False
        else:
            answer.in_use_detail = row.owners_unknown
        above = self._above(row)
        facts = Facts(
            row.id, row.name, row.path, row.inode, [disk.naming for disk in disks], bool(above),
            [overlay.name for overlay in above if overlay.gone], row.held, row.owners_unknown,
            [twin.name for twin in self._perhaps(row)], row.is_volume, not (row.is_volume and row.format == "subvol"),
        )  # fmt: skip
        answer.orphan, answer.orphan_evidence = judge(facts, self.world)

    def _above(self, row: Row, *, twins: bool = False) -> list[Row]:
        """The images that stand right on its file, by whatever name of that.

        Args:
            twins: only where the file has the same name, as in a folder that is registered twice; there also as last
                seen, because a merge into the file asks for them.
        """
        there = not row.missing and not row.gone
        names = self._same_inode[row.inode] if there else [row.id]  # else its inode may be another file's by now
        names = [one for one in names if one == row.id or twins or not self.rows[one].unseen]
        names = [one for one in names if not twins or self.rows[one].name == row.name]
        return [self.rows[overlay] for row_id in names for overlay in self.answers[row_id].overlays]

    def _perhaps(self, row: Row) -> list[Row]:
        """Images with overlays, in folders that could not be entered, which may be its file by another name."""
        twins = [self.rows[one] for one in self._same_inode[row.inode] if one != row.id]
        return [twin for twin in twins if twin.unseen and self.answers[twin.id].overlays]


def _merged(row: Row, answer: Resolved) -> str:
    told = (
        f"Job {row.merged} merged its data into the image below it, which has changed since: what a guest reads "
        "through this image now may be damaged. Never attach it to a guest; set it aside and delete it."
    )
    by = [disk.who for disk in answer.disks]
    return f"{told} The definition of {by[0]} names it: correct that before the guest starts." if by else told


def _short(text: str) -> str:
    """As much of a name as the column takes."""
    return text if len(text) <= DECLARED_BY else text[: DECLARED_BY - 1] + "…"
