"""What a path on this host is, before somebody registers it as a storage pool; and the list of folders, made longer."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Collection
from typing import Any

from storage_admin.agent.folders import image_folders, pools
from storage_admin.agent.folders.image_folders import HEADER
from storage_admin.agent.folders.pools import held
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request, b64, display, unb64


def run(request: Request, io: AgentIO) -> dict[str, Any]:  # noqa: ARG001 (it is over at once)
    """Look at one path, and have it listed before, where that is wanted.

    Args:
        request: ``args``: ``path_b64``; ``add``: whether to list it as a folder of images, which needs the word
            :data:`image_folders.ALLOW` on the agent's command line; ``never_b64``: folders to list as none, likewise.
        io: the controller.

    Returns:
        As :func:`look`.

    Raises:
        RefusedError: ``folder_not_listed``, where it cannot be listed, or not this way; ``invalid``.
    """
    args = Arguments(request.args, frozenset({"path_b64", "add", "never_b64"}))
    path, add = args.path("path_b64"), args.get("add", bool, default=False)
    try:
        never = [os.path.realpath(unb64(one)) for one in args.get("never_b64", list, [])]
    except (AttributeError, TypeError, ValueError) as error:
        raise RefusedError(INVALID, "never_b64 is no list of folders") from error
    found = look(path)
    real = [unb64(found["path_b64"])] if add and found["refusal"] else []
    if real or never:
        if image_folders.ALLOW not in sys.argv[1:]:
            raise image_folders.refusal(real[0] if real else path)
        _add(real, never)
        found = look(path)
    return found


def look(path: bytes) -> dict[str, Any]:
    """What a path is.

    Returns:
        ``kind``: ``folder``, ``other``, ``missing`` or ``unknown``; ``detail``: why it cannot be looked at. Of a folder
        ``path_b64``: its path without links; ``root``: which folder it is (:class:`pools.Identity`), null where that
        cannot be told; ``forbidden``: why no images can be there, else empty; ``refusal``: why nothing is done there as
        long as root does not list it, else empty.
    """
    try:
        if b"\0" in path:
            raise FileNotFoundError  # no file has such a name
        real = os.path.realpath(path)
        mode = os.stat(real).st_mode
        if not stat.S_ISDIR(mode):
            return _told("other")
        return _of_folder(real)
    except FileNotFoundError:
        return _told("missing")
    except OSError as error:
        return _told("unknown", detail=error.strerror or "it cannot be looked at")


def _told(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "path_b64": None, "detail": "", "root": None, "forbidden": "", "refusal": "", **more}


def _of_folder(real: bytes) -> dict[str, Any]:
    try:
        found = image_folders.reach(real)
    except RefusedError as error:  # a link has come this moment
        return _told("unknown", detail=error.detail)
    refusal = ""
    with held(found.fd):
        try:
            which = pools.identity(found.fd)
            image_folders.check(found)
        except RefusedError as error:
            refusal = error.detail
    return _told(
        "folder", path_b64=b64(real), root=None if which is None else vars(which),
        forbidden=image_folders.forbidden(real), refusal=refusal,
    )  # fmt: skip


def _add(folders: Collection[bytes], never: Collection[bytes]) -> None:
    """Append folders to the list, and folders that are never in it; what it has already is left out.

    Args:
        folders: real paths.

    Raises:
        RefusedError: ``folder_not_listed``, for a folder that can never be one; ``invalid``, where a line cannot say
            a name, or the file is not root's alone.
    """
    for path in (*folders, *never):
        if not path.startswith(b"/") or b"\n" in path or b"\r" in path or path != path.strip():
            raise RefusedError(
                "invalid", f"{display(path)} contains characters that the list of image folders cannot hold"
            )
    listed = image_folders.read()
    if listed.wrong:
        raise RefusedError("invalid", listed.wrong)
    new = [b"!" + path for path in never if path not in listed.never]
    wanted = [path for path in folders if path not in listed.folders]
    for path in wanted:
        if image_folders.forbidden(path) or any(
            image_folders.is_beneath(path, [one]) or image_folders.is_beneath(one, [path]) for one in never
        ):
            raise image_folders.refusal(path)
    if not new and not wanted:
        return
    place = image_folders.file_path()
    os.makedirs(os.path.dirname(place), mode=0o755, exist_ok=True)
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "ab") as file:
        begin = HEADER.encode() if os.fstat(fd).st_size == 0 else b"" if _ends_a_line(place) else b"\n"
        file.write(begin + b"".join(line + b"\n" for line in (*new, *wanted)))
        file.flush()
        os.fsync(fd)


def _ends_a_line(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
