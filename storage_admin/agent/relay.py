"""What the agent does instead of a request when it is started as ``agent libvirt-ro``: it carries bytes between its
controller and libvirt's read-only socket on this host, and nothing else.

A key that can only run the agent forwards no socket. So that libvirt can be asked all the same, its entry starts this
mode for one fixed word. Where the socket is stands here and comes from nobody; behind it, libvirt itself refuses
whatever changes something. One line of JSON goes out first (``hello`` with ``relay``, or ``error``), then libvirt's own
protocol begins.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Sequence

from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError

#: Where a libvirt daemon listens for those who may only read: the one of old or its stand-in, and the modular one.
FOLDER = "/run/libvirt"
SOCKETS = ("libvirt-sock-ro", "virtqemud-sock-ro")
#: Seconds without a byte from the controller after which it is taken for gone. Its longest question takes a minute, and
#: who listens for events says something every few seconds.
SILENCE_LIMIT = 300.0
CONNECT_LIMIT = 10
CHUNK = 1 << 16


def main(program_hash: str) -> int:
    """Connect, greet, carry.

    Args:
        program_hash: the agent's own content hash, for the greeting.

    Returns:
        0 where a connection was carried to its end, or there is no libvirt; 1 where that was refused.
    """
    try:
        connection = connected()
    except HostError as error:
        _say(protocol.encode(protocol.ERROR, code=error.code, detail=error.detail))
        return 1
    _say(
        protocol.encode(
            protocol.HELLO,
            protocol=protocol.VERSION,
            hash=program_hash,
            uid=os.geteuid(),
            relay=protocol.RELAY,
            listens=connection is not None,
        )
    )
    if connection is not None:
        with connection:
            carry([(0, connection.fileno()), (connection.fileno(), 1)], 0, SILENCE_LIMIT)
    return 0


def connected() -> socket.socket | None:
    """A connection to libvirt's read-only socket; ``None`` where there is none.

    Raises:
        HostError: what is there is not root's socket, or nobody answers at it.
    """
    try:
        folder = os.open(FOLDER, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError(f"{FOLDER} is not a folder of libvirt: {error.strerror}.") from error
    try:
        status = os.fstat(folder)
        if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HostError(f"{FOLDER} does not belong to root alone, so its sockets are not trusted.")
        for name in SOCKETS:
            try:
                # The very file that was looked at is connected to: a name could lead elsewhere a moment later.
                found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                continue
            try:
                return _connect(found, f"{FOLDER}/{name}")
            finally:
                os.close(found)
    finally:
        os.close(folder)
    return None


def _connect(found: int, path: str) -> socket.socket:
    status = os.fstat(found)
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != 0:
        raise HostError(f"{path} is not a socket of root, so it is not trusted.")
    connection = socket.socket(socket.AF_UNIX)
    try:
        # A daemon whose queue is full is waited for; a timeout of Python's own would not wait at all.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", CONNECT_LIMIT, 0))
        connection.connect(f"/proc/self/fd/{found}")
        _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != 0:
            raise HostError(f"The program that listens at {path} does not run as root, so it is not trusted.")
    except OSError as error:
        connection.close()
        raise HostError(f"libvirt does not answer at {path}: {error.strerror or error}.") from error
    except HostError:
        connection.close()
        raise
    return connection


def _say(line: bytes) -> None:
    with contextlib.suppress(OSError):  # who does not listen any more hears no bytes either
        os.write(1, line)


def carry(ways: Sequence[tuple[int, int]], watched: int, silence_limit: float | None = None) -> None:
    """Carries bytes each way until a source has ended and what it said was passed on, or a sink takes no more.

    Nothing is read from a source while its sink has not taken what came before. All descriptors become non-blocking.

    Args:
        ways: each a source and its sink, as descriptors.
        watched: the source whose silence ends it.
        silence_limit: seconds; ``None`` for no limit.
    """
    for descriptor in {descriptor for way in ways for descriptor in way}:
        os.set_blocking(descriptor, False)
    waiting = {source: b"" for source, _ in ways}
    heard = time.monotonic()
    with contextlib.suppress(OSError):
        while True:
            ready = _ready(ways, waiting)
            for source, sink in ways:
                if waiting[source] and sink in ready:
                    waiting[source] = waiting[source][_write(sink, waiting[source]) :]
                elif not waiting[source] and source in ready:
                    chunk = _read(source)
                    if chunk == b"":
                        return
                    waiting[source] = chunk or b""
                    if chunk and source == watched:
                        heard = time.monotonic()
            if silence_limit is not None and time.monotonic() - heard > silence_limit:
                return


def _ready(ways: Sequence[tuple[int, int]], waiting: dict[int, bytes]) -> set[int]:
    """The descriptors with something to read, or with room for what waits; after a second at most."""
    masks: dict[int, int] = {}
    for source, sink in ways:
        descriptor, mask = (sink, select.POLLOUT) if waiting[source] else (source, select.POLLIN)
        masks[descriptor] = masks.get(descriptor, 0) | mask
    poll = select.poll()
    for descriptor, mask in masks.items():
        poll.register(descriptor, mask)
    return {descriptor for descriptor, _ in poll.poll(1000)}


def _read(source: int) -> bytes | None:
    """What is there: nothing at the end, ``None`` where nothing is there yet."""
    try:
        return os.read(source, CHUNK)
    except BlockingIOError:
        return None


def _write(sink: int, data: bytes) -> int:
    try:
        return os.write(sink, data)
    except BlockingIOError:
        return 0
