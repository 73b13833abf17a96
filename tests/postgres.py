"""A private PostgreSQL cluster in a temporary folder, for one run of tests; only its unix socket listens."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DATABASE = "storage_admin"
_START_SECONDS = 30


def binaries() -> Path:
    """The folder of the newest PostgreSQL that Debian has installed.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if not found:
        raise FileNotFoundError("PostgreSQL is not installed: apt install postgresql")
    return max(found, key=lambda path: int(path.parent.name))


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Starts a cluster and yields its DATABASE_URL; stops and removes it afterwards.

    The server does not run as root: then the user ``postgres``, which the package makes, runs it. Nothing is synced to
    disk, which a test has no use for.
    """
    tools = binaries()
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    # A short path: it becomes that of a socket.
    folder = Path(tempfile.mkdtemp(prefix="sa-pg-", dir="/tmp"))
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if os.geteuid() == 0 else ["setpriv"]
    try:
        shutil.chown(folder, user)
        data = folder / "data"
        subprocess.run(
            [*become, "--", tools / "initdb", "-D", data, "-U", user, "-A", "trust", "-E", "UTF8", "--locale=C", "-N"],
            check=True, capture_output=True, cwd=folder,
        )  # fmt: skip
        settings = {"listen_addresses": "", "unix_socket_directories": str(folder), "fsync": "off",
                    "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "100"}  # fmt: skip
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [*become, "--pdeathsig=QUIT", "--", tools / "postgres", "-D", data, *options],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder, start_new_session=True,
            )  # fmt: skip
        try:
            _create_database(tools, folder, user, server)
            yield f"postgres://{user}@/{folder}/{DATABASE}"  # the way django-environ reads a socket's folder
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _create_database(tools: Path, folder: Path, user: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        made = subprocess.run(
            [tools / "createdb", "-h", folder, "-U", user, DATABASE], capture_output=True, text=True, cwd=folder
        )
        if made.returncode == 0:
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL did not start: {made.stderr}{(folder / 'log').read_text(errors='replace')}")
        time.sleep(0.1)
