"""What the fault tests start from."""

from pathlib import Path

import pytest

from tests.faults.scene import build


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders to make scenes from, one for each kind of image."""
    folder = tmp_path_factory.mktemp("templates")
    made = []
    for number, options in enumerate(["", "cluster_size=4k", "compat=0.10"]):
        build(folder / str(number), options)
        made.append(folder / str(number))
    return made


@pytest.fixture(scope="session")
def all_templates(tmp_path_factory: pytest.TempPathFactory, templates: list[Path]) -> list[Path]:
    """The same, with an image that stands on another one, and a raw one."""
    folder = tmp_path_factory.mktemp("more-templates")
    build(folder / "based", "", based=True)
    build(folder / "raw", "", "raw")
    return [*templates, folder / "based", folder / "based", folder / "raw"]
