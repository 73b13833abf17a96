"""What the tests of scanning share."""

from pathlib import Path

from images.models import Image
from storage_admin.hosts.models import Host


def plain(path: Path, size: int = 4096) -> Path:
    """A raw image, quickly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def states(host: Host) -> dict[str, str]:
    return dict(Image.objects.filter(host=host).values_list("name", "state"))
