"""Folders and images that the tests of jobs begin with."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from storage_admin.hosts.models import Host
from tests.agent.harness import make_image
from tests.images.node import pve
from tests.working import scan, this_machine

__all__ = ["pve"]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """An empty folder for images; what shall not be scanned stands beside it."""
    (tmp_path / "pool").mkdir()
    return tmp_path / "pool"


@pytest.fixture
def host(pool: Path) -> Host:
    """This machine with that folder, not scanned yet."""
    return this_machine(pool)


@pytest.fixture
def path(pool: Path) -> Path:
    """A scanned image with something to win; a copy of it stands beside the pool."""
    path = Path(os.fsdecode(make_image(pool / "disk.qcow2")))
    subprocess.run(["cp", "--sparse=always", path, pool.parent / "copy.qcow2"], check=True)
    scan(this_machine(pool))
    return path


@pytest.fixture
def patient_looks(settings: Any) -> None:
    """A loaded machine may take longer than a second for a look."""
    settings.LOOK_SECONDS = 60.0
