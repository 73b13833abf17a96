"""Sixty disks that look like a lost base and are none: other states of it, and other guests of its template."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.harness import ask, leftovers
from tests.agent.lost_base import LATER, MADE, USED, args_for, as_qcow2, disk, overlay, used
from tests.chance import seed

pytestmark = [pytest.mark.qemu, pytest.mark.night]

SIXTY = 60
#: Numbers of files that tell a state from the next one.
FEW, MANY = 3, 40


def test_none_of_sixty_look_alikes_is_taken_for_the_base(pool: Path, tmp_path: Path) -> None:
    chance = random.Random(seed())
    older = disk(tmp_path / "older", chance.randrange(1 << 30))
    base = used(older, tmp_path / "base", MADE + 1000, chance.randrange(1 << 30))
    left = used(base, tmp_path / "left", USED, chance.randrange(1 << 30))
    was = as_qcow2(base, pool / "base.qcow2")
    path = overlay(base, left, was, pool / "vm.qcow2")
    was.unlink()
    before, taken, codes = path.read_bytes(), list[str](), dict[str, int]()

    def files() -> int:
        return chance.randrange(FEW, MANY)

    def of(start: Path, when: int) -> Path:
        return used(start, tmp_path / "state", when, chance.randrange(1 << 30), files=files())

    kinds: dict[str, Callable[[], Path]] = {
        "as it was before": lambda: of(older, MADE + chance.randrange(100, 900)),
        "used meanwhile": lambda: of(base, MADE + chance.randrange(2000, USED - MADE)),
        "used afterwards": lambda: of(base, chance.randrange(USED + 1, LATER)),
        "another guest of its template": lambda: of(of(older, MADE + 500).rename(tmp_path / "step"), MADE + 1000),
        "of another guest": lambda: disk(tmp_path / "state", chance.randrange(1 << 30)),
    }
    for number in range(SIXTY):
        kind = list(kinds)[number % len(kinds)]
        wrong = as_qcow2(kinds[kind](), pool / f"look-alike {number}.qcow2")
        code = str(ask("relink", args_for(path, wrong), job=f"j{number}").get("code", "taken"))
        codes[code] = codes.get(code, 0) + 1
        if code not in {"unproven", "filesystem_damaged"}:
            taken.append(f"{number}: {kind}: {code}")
        wrong.unlink()
    print(codes)
    assert not taken
    assert (path.read_bytes() == before, leftovers(pool)) == (True, set())
