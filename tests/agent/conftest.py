"""What tests of the agent share."""

from pathlib import Path

import pytest

from tests.agent.harness import make_image
from tests.harness.filesystems import new_folder
from tests.working import create


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """An empty folder for images, with nothing beside it."""
    return new_folder(tmp_path / "pool")


@pytest.fixture
def image(pool: Path) -> Path:
    """A qcow2 image in that folder."""
    return make_image(pool / "vm.qcow2")


@pytest.fixture
def overlay(image: Path) -> Path:
    """An empty one on that image."""
    return create(image.with_name("overlay.qcow2"), base=image)
