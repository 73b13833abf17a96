"""What the fault tests start from."""

from pathlib import Path

import pytest

from tests.faults.scene import build
from tests.harness.filesystems import new_folder


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """An empty folder for images, with nothing beside it."""
    return new_folder(tmp_path / "pool")


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders to make scenes from: qcow2 images on nothing, of several layouts."""
    folder = tmp_path_factory.mktemp("templates")
    made = []
    for number, options in enumerate(["", "cluster_size=4k", "compat=0.10"]):
        build(folder / str(number), options)
        made.append(folder / str(number))
    return made


@pytest.fixture(scope="session")
def by_format(tmp_path_factory: pytest.TempPathFactory, templates: list[Path]) -> dict[str, list[Path]]:
    """Folders to make scenes from, by the format of their image; of qcow2 also one that stands on two others."""
    folder = tmp_path_factory.mktemp("more-templates")
    build(folder / "based", "", based=True)
    found = {"qcow2": [*templates, folder / "based"]}
    for form in ("raw", "vmdk", "vdi"):
        build(folder / form, "", form)
        found[form] = [folder / form]
    return found


@pytest.fixture(scope="session")
def all_templates(by_format: dict[str, list[Path]]) -> list[Path]:
    """All of these, the one that stands on others twice: it has the most that can be done to it."""
    return [*by_format["qcow2"], by_format["qcow2"][-1], *by_format["raw"], *by_format["vmdk"], *by_format["vdi"]]
