"""Runs pytest with the libvirt and QEMU of Debian 13: `python -m tests.debian_13 ARGUMENTS`.

The daemon and its guests run in a tree of that Debian, which is built once, of the packages that apt here knows, and
kept in :data:`KEPT`; the tests, their agent and its tools are this machine's.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.harness.debian_trees import Tree

KEPT = Path("/var/cache/storage-admin-trees")
SUITE = "trixie"
PACKAGES = (
    "libvirt-daemon-system", "libvirt-daemon-driver-qemu", "libvirt-daemon", "libvirt-clients", "qemu-system-x86",
    "qemu-utils", "python3-libvirt", "procps", "seabios", "ovmf", "iproute2",
)  # fmt: skip


def built() -> Path:
    """The tree; it is there once it is whole."""
    place = KEPT / f"{SUITE}-{hashlib.sha256(' '.join(PACKAGES).encode()).hexdigest()[:16]}"
    if not place.exists():
        KEPT.mkdir(mode=0o755, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=KEPT, prefix="new-"))
        try:
            Tree(made / SUITE, SUITE, PACKAGES)
            (made / SUITE).rename(place)
        finally:
            shutil.rmtree(made)
    return place


if __name__ == "__main__":
    pytest = str(Path(sys.executable).parent / "pytest")
    os.execve(pytest, [pytest, *sys.argv[1:]], os.environ | {"STORAGE_ADMIN_LIBVIRT_TREE": str(built())})
