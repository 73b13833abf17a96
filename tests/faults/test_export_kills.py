"""``kill -9`` at every step of an export in parts: all of them are there afterwards, or none."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.swap import exchange
from storage_admin.agent.swap.journal import Journal
from storage_admin.agent.swap.settle import settle
from tests.agent.harness import ask, leftovers, make_image, recover_args
from tests.agent.test_export import export_args, fill, unpacked
from tests.agent.test_unpack import MIB
from tests.chance import night
from tests.faults.test_kills import run_to_death
from tests.faults.trials import WHEN, steps
from tests.harness.filesystems import new_folder

pytestmark = [pytest.mark.faults, pytest.mark.qemu]


def full_image(folder: Path) -> Path:
    """In a pool below that folder: of its bytes, three parts come."""
    image = make_image(new_folder(folder / "pool", parents=True) / "disk.qcow2", "16M")
    fill(image, 3 * MIB)
    return image


@pytest.mark.parametrize("when", WHEN)
def test_one_that_dies_at_any_step_leaves_all_parts_or_none(tmp_path: Path, when: str) -> None:
    outcomes = set()
    for at in steps(stride=11, most=400):  # each piece that is written is one
        image = full_image(tmp_path / str(at))
        pool, before = image.parent, image.read_bytes()
        first = pool / "disk.qcow2.gz.001"
        died = run_to_death("export", export_args(image, first.name, "gzip", part_bytes=MIB), "j1", at, when)
        if died is None:
            break
        told = [row["outcome"] for row in ask("recover", recover_args(pool))["recovered"]]
        print(f"step {at} {when}: {died}: {told}")
        assert image.read_bytes() == before
        assert leftovers(pool) == set(), died
        outcomes.add(first.exists())
        if first.exists():
            assert unpacked(first) == before, died
        else:
            assert {one.name for one in pool.iterdir()} == {image.name}, died
    assert at > 20
    assert outcomes == {True, False}


def deaths_between_parts(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The second part of each export that died when that had its name and the first one had not, and where it died."""
    for at in steps(88, stride=1, most=400):  # where parts get their names
        image = full_image(tmp_path / str(at))
        pool, args = image.parent, export_args(image, "disk.qcow2.gz.001", "gzip", part_bytes=MIB)
        died = run_to_death("export", args, "j1", at, "after")
        if died is None:
            return
        if (pool / "disk.qcow2.gz.002").exists() and not (pool / "disk.qcow2.gz.001").exists():
            yield pool / "disk.qcow2.gz.002", str(died)


def test_what_somebody_puts_under_a_parts_name_after_a_death_stays(tmp_path: Path) -> None:
    seen = 0
    for second, died in deaths_between_parts(tmp_path):
        second.unlink()
        second.write_bytes(b"somebody's")
        ask("recover", recover_args(second.parent))
        assert (second.read_bytes(), leftovers(second.parent)) == (b"somebody's", set()), died
        seen += 1
        if not night():
            break
    assert seen


@pytest.mark.parametrize("exchanges", [True, False], ids=["", "on-nfs"])
def test_what_comes_under_a_parts_name_in_the_moment_of_its_removal_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    second, _ = next(deaths_between_parts(tmp_path))
    stranger = second.with_name("stranger")
    stranger.write_bytes(b"somebody's")

    def after_a_stranger(change: Any) -> Any:
        def changed(*args: Any, **more: Any) -> Any:
            if second.name.encode() in args and stranger.exists():
                stranger.replace(second)
            return change(*args, **more)

        return changed

    if not exchanges:
        monkeypatch.setattr(exchange, "_rename", lambda *args: False)
    for module, name in ((exchange, "_rename"), (os, "rename"), (os, "unlink")):
        monkeypatch.setattr(module, name, after_a_stranger(getattr(module, name)))
    folder = os.open(second.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        settle(Journal.open(folder, "j1"))
    finally:
        os.close(folder)
    assert not stranger.exists()
    assert (second.read_bytes(), leftovers(second.parent)) == (b"somebody's", set())
