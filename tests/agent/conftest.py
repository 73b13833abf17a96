"""What tests of the agent share."""

from pathlib import Path

import pytest


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """An empty folder for images, with nothing beside it."""
    (tmp_path / "pool").mkdir()
    return tmp_path / "pool"
