"""What the tests of scanning share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from images.models import Image
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import kinds
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.models import Job
from tests.working import scanned_machine


@pytest.fixture
def pool(tmp_path: Path) -> StoragePool:
    """The only pool of this machine, scanned while its folder was empty. Modules that use it import it."""
    (tmp_path / "pool").mkdir()
    scanned_machine(tmp_path / "pool")
    return StoragePool.objects.get()


@pytest.fixture
def folder(pool: StoragePool) -> Path:
    return Path(pool.path)


def plain(path: Path, size: int = 4096) -> Path:
    """A raw image, quickly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def states(host: Host) -> dict[str, str]:
    return dict(Image.objects.filter(host=host).values_list("name", "state"))


def at_the_exchange(monkeypatch: pytest.MonkeyPatch, kind: str, act: Callable[[], object]) -> None:
    """Has something happen right after the files were exchanged, before anybody is asked."""
    cls = type(kinds.get(kind))
    look = cls.exchanged

    def first(kind: JobKind, job: Job) -> None:
        act()
        look(kind, job)

    monkeypatch.setattr(cls, "exchanged", first)
