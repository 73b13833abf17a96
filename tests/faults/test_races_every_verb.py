"""Names of a pool change places with links that lead out of it while a verb is at work: nothing outside is opened."""

import random
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from storage_admin.agent.protocol import CANCELLED, STRANGERS_KEPT
from tests.agent.every_verb import (
    CLEAN,
    NAMES,
    NEVER_DONE,
    PLANTED,
    REWRITES,
    UNDOES,
    Crew,
    plant_aside,
    plant_undo,
    pool_request,
    request,
    target_of,
)
from tests.agent.hostile import qcow2
from tests.agent.stranger import data_of, fingerprints
from tests.chance import night, seed
from tests.faults.swapper import Swapper, Watch

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

RACES = 1000 if night() else 60
#: As many agents at once as `make test` has processors for.
AGENTS = 2
#: Which names change places; see :meth:`Ground.pairs`.
TRICKS = ("folder", "image", "base", "new", "journal", "undo copy", "aside", "target", "all")
WAYS = [*REWRITES, *UNDOES, *sorted(NAMES), "analyze sample", "scan", "recover"]


class Ground:
    """A pool with an overlay and its base, links out of it, and a folder outside that has files of the same names."""

    def __init__(self, folder: Path) -> None:
        self.pool, self.outside = folder / "pool", folder / "outside"
        self.folder, self.image, self.base = self.pool / "vms", self.pool / "vms/vm.qcow2", self.pool / "vms/base"
        self.outside.mkdir(parents=True)
        for name in ("vm.qcow2", "base", "victim", "journal", "converted.raw"):
            (self.outside / name).write_bytes(qcow2(b"base", b"qcow2") if name == "vm.qcow2" else qcow2())
        self._outside = fingerprints(self.outside)

    def lay_out(self) -> None:
        """Everything as it is in the beginning of a race."""
        shutil.rmtree(self.pool, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.base.write_bytes(qcow2())
        self.image.write_bytes(qcow2(b"base", b"qcow2"))
        (self.pool / "link").symlink_to(self.outside)
        for name in ("vm.qcow2", "base", "victim", "journal"):
            (self.folder / f"to-{name}").symlink_to(self.outside / name)

    def pairs(self, trick: str, job: str) -> list[tuple[Path, Path]]:
        """The names that change places."""
        here = self.folder
        found = {
            "folder": [(here, self.pool / "link")],
            "image": [(self.image, here / "to-vm.qcow2")],
            "base": [(self.base, here / "to-base")],
            "new": [(here / f".sa-{job}.new", here / "to-victim")],
            "journal": [(here / f".sa-{job}.journal", here / "to-journal")],
            "undo copy": [(here / f".sa-{job}.orig", here / "to-victim")],
            "aside": [(here / f".sa-{job}.aside", here / "to-vm.qcow2")],
            "target": [(Path(target_of(bytes(self.image)).decode()), here / "to-victim")],
        }
        return found.get(trick, [pair for some in found.values() for pair in some])

    def race(self, crew: Crew, chance: random.Random) -> tuple[str, str, str]:
        """One of them: what was asked, which names changed places, and how it ended."""
        self.lay_out()
        how, trick = chance.choice(WAYS), chance.choice(TRICKS)
        job = f"h{crew.jobs + 1}"
        if how in UNDOES or how == "recover":
            plant_undo(bytes(self.image), qcow2(b"base", b"qcow2"))
            job = PLANTED
        if how in {"restore_aside", "delete_aside"}:
            plant_aside(bytes(self.image))
            job = PLANTED
        verb, args = (how, pool_request(how, self.pool)) if how in {"scan", "recover"} else self._request(how)
        before = self._contents()
        with closing(Watch(self.outside)) as watch:
            with Swapper(chance, self.pairs(trick, job), chance.choice((0.001, 0.01, 0.05))):
                answer = crew.ask(verb, args)
            assert watch.seen() == [], f"{how} with the {trick} swapped: {answer}"
        allowed = CLEAN | {"", CANCELLED, STRANGERS_KEPT}
        assert answer.code in allowed, f"{how} with the {trick} swapped: {answer.detail}"
        assert fingerprints(self.outside) == self._outside, f"{how} with the {trick} swapped"
        if answer.code and how not in UNDOES:
            # What a guest reads is still there, under whichever name it was put.
            assert before <= self._contents(), f"{how} with the {trick} swapped: {answer}"
        return how, trick, answer.code or "done"

    def _request(self, how: str) -> tuple[str, dict[str, object]]:
        return request(how, bytes(self.image), self.pool, "qcow2")

    def _contents(self) -> set[bytes]:
        """The contents of the image, of its base and of all other files."""
        paths = [path for path in self.pool.rglob("*") if path.is_file() and not path.is_symlink()]
        return {b"".join(block for _, block in data_of(bytes(path))) for path in paths if path.suffix != ".journal"}


def test_no_race_leads_a_verb_out_of_the_pool(tmp_path: Path) -> None:
    start, began = seed(), time.monotonic()
    ended: Counter[tuple[str, str, str]] = Counter()

    def run(number: int) -> None:
        ground = Ground(tmp_path / str(number))
        with Crew() as crew:
            for race in range(number, RACES, AGENTS):
                ended[ground.race(crew, random.Random(f"{start}-{race}"))] += 1

    with ThreadPoolExecutor(AGENTS) as agents:
        for _ in agents.map(run, range(AGENTS)):
            pass  # what one of them raises is raised here
    print(f"{sum(ended.values())} races in {time.monotonic() - began:.0f} s")
    for at, what in ((0, "asked"), (1, "swapped"), (2, "ended")):
        print(f"  {what}: {dict(Counter(one[at] for one in ended.elements()))}")
    assert sum(ended.values()) == RACES
    if not night():
        return
    # Both sides win some of them.
    assert {"stale_plan", "outside_pool"} <= {outcome for _, _, outcome in ended}
    assert {how for how, _, outcome in ended if outcome == "done"} == set(WAYS) - NEVER_DONE
