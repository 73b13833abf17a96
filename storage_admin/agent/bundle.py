"""The agent as one file: a zipapp with the same bytes on every build.

The controller builds it; the agent carries this module along and never uses it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import os
import stat
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

_SHEBANG = b"#!/usr/bin/env python3\n"
#: Everything is said when ``main`` returns; taking a large process down piece by piece would only take time.
_MAIN = b"import os\n\nfrom storage_admin.agent.main import main\n\nos._exit(main())\n"
#: The earliest time that a zip file can say, so that the bytes depend on the content alone.
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Bundle:
    """A built agent: where it is, and the hash of its bytes, which it greets with."""

    path: Path
    hash: str


def build(target_dir: Path) -> Bundle:
    """Write the agent into a folder, as ``agent-<hash>.pyz``, or find it there.

    Args:
        target_dir: made (mode 0700) where it is missing. Who may write to it becomes root on every host.

    Returns:
        The file and its hash: the first 32 hex digits of the SHA-256 of its bytes.

    Raises:
        OSError: the folder cannot be written.
    """
    content = _archive()
    digest = hashlib.sha256(content).hexdigest()[:32]
    target_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = target_dir / f"agent-{digest}.pyz"
    if path.is_file() and path.read_bytes() == content:
        return Bundle(path, digest)
    descriptor, temporary = tempfile.mkstemp(dir=target_dir, prefix=".agent-")
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).chmod(0o755)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return Bundle(path, digest)


def _archive() -> bytes:
    """Stored, not deflated: what deflate makes of it differs between versions of zlib.

    Each module stands twice: as source, and compiled by the Python that builds. A host with the same Python starts the
    agent in half the time; any other one passes the compiled modules over, by their magic number.
    """
    package = Path(__file__).parent
    root = package.parent.parent
    members = {"__main__.py": _MAIN, "storage_admin/__init__.py": b""}
    for path in package.rglob("*.py"):
        name, source = path.relative_to(root).as_posix(), path.read_bytes()
        members[name] = source
        members[name + "c"] = _compiled(name, source)
    out = io.BytesIO()
    out.write(_SHEBANG)
    with zipfile.ZipFile(out, "a", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system = 3
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, members[name])
    return out.getvalue()


def _compiled(name: str, source: bytes) -> bytes:
    """A module as a ``.pyc`` that is not checked against its source: flags 1, then the source's hash (PEP 552)."""
    code = compile(source, name, "exec", dont_inherit=True)
    # Version 2 knows no references, whose marks would depend on what else the building process holds.
    content = marshal.dumps(code, 2)
    return importlib.util.MAGIC_NUMBER + struct.pack("<I", 1) + importlib.util.source_hash(source) + content
