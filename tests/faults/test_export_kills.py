"""``kill -9`` at every step of an export in parts: all of them are there afterwards, or none."""

from pathlib import Path

import pytest

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


def test_what_somebody_puts_under_a_parts_name_after_a_death_stays(tmp_path: Path) -> None:
    seen = 0
    for at in steps(88, stride=1, most=400):  # where parts get their names
        image = full_image(tmp_path / str(at))
        pool, args = image.parent, export_args(image, "disk.qcow2.gz.001", "gzip", part_bytes=MIB)
        died = run_to_death("export", args, "j1", at, "after")
        if died is None:
            break
        second = pool / "disk.qcow2.gz.002"
        if not second.exists() or (pool / "disk.qcow2.gz.001").exists():
            continue
        second.unlink()
        second.write_bytes(b"somebody's")
        ask("recover", recover_args(pool))
        assert (second.read_bytes(), leftovers(pool)) == (b"somebody's", set()), died
        seen += 1
        if not night():
            break
    assert seen
