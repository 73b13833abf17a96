"""The arguments of setting an image aside, restoring and deleting it, for the real agent."""

import os
from pathlib import Path
from typing import Any

from storage_admin.agent.protocol import b64
from tests.agent.harness import link, location

JOB = "j1"
ASIDE, JOURNAL = f".sa-{JOB}.aside", f".sa-{JOB}.journal"


def aside_args(path: Path, *pools: Path, **changes: Any) -> dict[str, Any]:
    """Of ``set_aside`` for an image as it is now; what needs it is looked for in its folder and in these ones."""
    args = link(path)
    del args["format"]
    looked_at = [pool_of(folder) for folder in (path.parent, *pools)]
    return {**args, "children_known": True, "pools": looked_at, **changes}


def pool_of(folder: Path) -> dict[str, str]:
    return {"path_b64": b64(os.fsencode(folder)), "kind": "dir", "known_b64": ""}


def back_args(path: Path, **changes: Any) -> dict[str, Any]:
    """Of ``restore_aside``."""
    return {**location(path), "aside_job": JOB, **changes}


def delete_args(path: Path, inode: int, **changes: Any) -> dict[str, Any]:
    """Of ``delete_aside``."""
    return {**back_args(path), "inode": inode, "pools": [pool_of(path.parent)], **changes}
