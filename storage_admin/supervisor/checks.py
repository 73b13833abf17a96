"""What must be in order before anything is started. Each finding is one sentence that says what to do."""

import errno
import fcntl
import os
import shlex
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from storage_admin.supervisor.errors import SetupError

#: Tool, Debian package and what it is for.
TOOLS: Mapping[str, tuple[str, str]] = {
    "setpriv": ("util-linux", "ends every tool together with the process that started it"),
    "qemu-img": ("qemu-utils", "reads and rewrites disk images"),
}
REDIS_TOOL: Mapping[str, tuple[str, str]] = {"redis-server": ("redis-server", "carries the messages to the worker")}


def require_tools(tools: Mapping[str, tuple[str, str]]) -> None:
    """Raises SetupError when a tool is not there, with the package that brings it."""
    for tool, (package, purpose) in tools.items():
        if shutil.which(tool) is None:
            raise SetupError(f"{tool} is missing: it {purpose}. Install it with: apt install {package}")


def require_writable(folder: Path) -> None:
    """Makes the folder, readable by its owner alone, and writes a file into it.

    Raises:
        SetupError: it cannot be made or written to, or belongs to somebody else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"0")
            probe.flush()
    except OSError as error:
        raise SetupError(
            f"The data folder {folder} cannot be used ({error.strerror}). "
            "Make it writable or set STORAGE_ADMIN_DATA_DIR to a folder that is."
        ) from error
    require_private(folder)


def require_private(folder: Path) -> None:
    """Takes away what others than its owner may do in the data folder: its keys and its database open every host.

    Raises:
        SetupError: it belongs to another user, who can read it and give it to others.
    """
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise SetupError(
            f"The data folder {folder} belongs to another user (uid {found.st_uid}, not {os.geteuid()}), who can read "
            f"the keys in it. Run: chown -R {os.geteuid()} {shlex.quote(str(folder))} or set STORAGE_ADMIN_DATA_DIR to "
            "a folder of your own."
        )
    _close(folder, found)
    with os.scandir(folder) as entries:
        for entry in entries:
            # What is deeper is behind this folder; what an earlier version left open in it is closed.
            if entry.is_file(follow_symlinks=False):
                _close(Path(entry.path), entry.stat(follow_symlinks=False))


def _close(path: Path, found: os.stat_result) -> None:
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        path.chmod(stat.S_IMODE(found.st_mode) & 0o700)


def lock_folder(folder: Path, patience_seconds: float = 15.0) -> int:
    """Takes the folder for this process and the children that inherit the lock.

    A supervisor that was killed leaves children that are just ending: they are waited for.

    Returns:
        The descriptor that holds the lock; it is free when its last copy is closed.

    Raises:
        SetupError: somebody else has it.
    """
    path = folder / "up.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            alive = holder.isdigit() and Path("/proc", holder).exists()
            if alive or time.monotonic() > deadline:
                os.close(descriptor)
                whose = f"process {holder}" if alive else "a process of an earlier start that has not ended yet"
                raise SetupError(
                    f"Storage Admin already runs on {folder} ({whose}). "
                    "Stop that one, or set STORAGE_ADMIN_DATA_DIR and STORAGE_ADMIN_BIND for a second one."
                ) from None
            time.sleep(0.1)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def parse_bind(bind: str) -> tuple[str, int]:
    """Address and port of ``address:port``, ``[v6]:port`` or ``:port`` (every address).

    Raises:
        SetupError: it is none of these.
    """
    address, colon, port = bind.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise SetupError(f"STORAGE_ADMIN_BIND is {bind!r}, which is no address and port such as 127.0.0.1:8000.")
    return address.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)  # noqa: S104 (what the admin chose)


def require_free_port(bind: str) -> None:
    """Raises SetupError when the web server could not listen there."""
    address, port = parse_bind(bind)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise SetupError(
                    f"Port {port} on {address} is in use. Stop what listens there, or choose another one: "
                    "STORAGE_ADMIN_BIND=127.0.0.1:8001 make run"
                ) from error
            raise SetupError(f"Nothing can listen on {bind} ({error}); set STORAGE_ADMIN_BIND.") from error


def answers(bind: str) -> bool:
    """True when something accepts connections there."""
    address, port = parse_bind(bind)
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 (compared, not bound)
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False


def browser_address(bind: str) -> str:
    """What to type into a browser to get there."""
    address, port = parse_bind(bind)
    if address in {"0.0.0.0", "::"}:  # noqa: S104 (compared, not bound)
        address = socket.gethostname()
    return f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"
