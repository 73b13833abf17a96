"""A Redis of our own: a unix socket in the data folder, an append-only file, nothing ever evicted."""

import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: ``sun_path`` of a unix socket holds 108 bytes, the last one being zero (unix(7)).
LONGEST_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True)
class PrivateRedis:
    """Where it keeps its data and where it listens. ``short_folder`` was made for a socket whose path is too long."""

    folder: Path
    socket: Path
    short_folder: Path | None

    @property
    def url(self) -> str:
        """The address for ``REDIS_URL``."""
        return f"unix://{self.socket}"

    def argv(self) -> tuple[str, ...]:
        """The command that runs it in the foreground."""
        return ("redis-server", str(self.folder / "redis.conf"))

    def write_configuration(self) -> None:
        """Writes redis.conf; run before each start, so that a moved data folder is followed."""
        lines = [
            f"dir {_quoted(self.folder)}",
            f"unixsocket {_quoted(self.socket)}",
            "unixsocketperm 600",
            "port 0",
            "daemonize no",
            "appendonly yes",
            "appendfsync everysec",
            "maxmemory-policy noeviction",
            'save ""',
            "loglevel warning",
        ]
        made = self.folder / ".redis.conf.new"
        made.write_text("\n".join(lines) + "\n")
        made.replace(self.folder / "redis.conf")

    def answers(self) -> bool:
        """True when it answers a ping (no longer loading its file)."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(1)
                link.connect(str(self.socket))
                link.sendall(b"PING\r\n")
                return link.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def remove_short_folder(self) -> None:
        """Clears what was made outside the data folder."""
        if self.short_folder is not None:
            self.socket.unlink(missing_ok=True)
            self.short_folder.rmdir()


def prepare(data_dir: Path) -> PrivateRedis:
    """Makes the folders, mode 0700, and writes the configuration.

    A socket path over 107 bytes works for no client: then a short folder beneath /run or /tmp takes the socket.
    """
    folder = data_dir / "redis"
    folder.mkdir(mode=0o700, exist_ok=True)
    wanted = folder / "redis.sock"
    short_folder = None
    if len(os.fsencode(wanted)) > LONGEST_SOCKET_PATH_BYTES:
        parent = "/run" if os.access("/run", os.W_OK) else "/tmp"  # noqa: S108 (mkdtemp makes a private folder there)
        short_folder = Path(tempfile.mkdtemp(prefix="storage-admin-", dir=parent))
        wanted = short_folder / "redis.sock"
    redis = PrivateRedis(folder=folder, socket=wanted, short_folder=short_folder)
    if wanted.exists() and stat.S_ISSOCK(wanted.lstat().st_mode):
        wanted.unlink()  # left behind by a kill; the lock on the data folder says that nobody listens
    redis.write_configuration()
    return redis


def _quoted(path: Path) -> str:
    """A value of redis.conf in double quotes; its bytes outside plain ASCII are written as ``\\x..``."""
    plain = set(range(0x20, 0x7F)) - set(b'"\\')
    return '"' + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(path)) + '"'
