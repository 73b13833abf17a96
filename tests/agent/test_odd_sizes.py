"""A raw image that ends within a sector: what is written of it ends there as well."""

from pathlib import Path

import pytest

from tests.agent.harness import ask, leftovers, reclaim_args
from tests.agent.test_convert import convert_args
from tests.agent.test_replace import replace_args

pytestmark = pytest.mark.qemu


def odd(path: Path, size: int) -> Path:
    """Text at both ends, and allocated zeros between."""
    with path.open("wb") as file:
        file.write(b"x" * 100_000 + bytes(1 << 20))
        file.seek(size - 1000)
        file.write(b"y" * 1000)
    assert path.stat().st_size == size
    return path


@pytest.mark.parametrize("size", [(2 << 20) + 1, (2 << 20) + 511, (300 << 20) + 100])
def test_a_copy_ends_where_the_image_does(tmp_path: Path, size: int) -> None:
    path = odd(tmp_path / "disk.raw", size)
    was = path.read_bytes()
    result = ask("reclaim", reclaim_args(path, method="copy", format="raw"))
    assert result.get("swapped"), result
    assert path.stat().st_size == size
    assert path.read_bytes() == was


def test_so_does_one_that_ends_with_zeros(tmp_path: Path) -> None:
    path = tmp_path / "disk.raw"
    path.write_bytes(b"x" * 4096 + bytes(1 << 20) + bytes(77))
    was = path.read_bytes()
    assert ask("reclaim", reclaim_args(path, method="copy", format="raw")).get("swapped")
    assert path.read_bytes() == was


@pytest.mark.parametrize("options", [{}, {"preallocation": "full"}])
def test_a_raw_file_beside_it_is_as_long(tmp_path: Path, options: dict[str, str]) -> None:
    path, other = odd(tmp_path / "disk.raw", 2_000_001), tmp_path / "other.raw"
    assert ask("convert", convert_args(path, to=other, form="raw", source="raw", **options)).get("swapped")
    assert other.read_bytes() == path.read_bytes()


def test_one_that_takes_its_place_is_as_long(tmp_path: Path) -> None:
    path = odd(tmp_path / "disk.raw", 2_000_001)
    was = path.read_bytes()
    assert ask("convert", replace_args(path, form="raw", source="raw", undo_hours=0.0)).get("swapped")
    assert (path.read_bytes(), leftovers(tmp_path)) == (was, set())
