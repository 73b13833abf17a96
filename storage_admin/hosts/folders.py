"""What a path on a host is, while an admin registers it; and the host's own list of folders, made longer."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _

from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.folders import image_folders
from storage_admin.agent.host import special_mounts
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.protocol import HostError, RefusedError, b64, unb64
from storage_admin.agent.verbs import folder
from storage_admin.hosts import asking, transport
from storage_admin.hosts.models import Host


@dataclass(frozen=True)
class Found:
    """A path as its host sees it.

    Args:
        kind: ``folder``, ``other``, ``missing`` or ``unknown``.
        path: without links, of a folder.
        detail: why it cannot be looked at.
        root: which folder it is, as the agent tells it; ``None`` where it cannot.
        forbidden: why it can never hold images, else empty.
        refusal: why the host does no work in it before root has listed it, else empty.
    """

    kind: str
    path: bytes = b""
    detail: str = ""
    root: dict[str, Any] | None = None
    forbidden: str = ""
    refusal: str = ""


def look(host: Host, path: bytes) -> Found:
    """Looks at a path: itself where the host is this machine and root asks, by its agent elsewhere.

    Raises:
        RefusedError: ``host_unreachable``.
    """
    if transport.is_here(host):
        if not _answers(path):
            return Found("unknown", detail=_("its filesystem does not answer"))
        if os.geteuid() == 0:
            return _of(host, folder.look(path))
    return _of(host, _asked(host, {"path_b64": b64(path)}))


def allow(host: Host, path: bytes) -> Found:
    """Has a folder listed as one of images, where the dashboard is root on the host.

    Raises:
        RefusedError: ``folder_not_listed``, with what root has to run there; ``host_unreachable``.
    """
    args = {"path_b64": b64(path), "add": True, "never_b64": [b64(one) for one in own(host)]}
    try:
        return _of(host, _asked(host, args, image_folders.ALLOW))
    except RefusedError as error:
        if error.code != "host_unreachable":
            raise
        found = look(host, path)
        raise RefusedError("folder_not_listed", found.refusal or error.detail) from error


def may_list(actor: Actor, host: Host) -> bool:
    """Whether an actor may have a folder listed on a host: an admin of all, where the dashboard can say so as root."""
    return actor.hosts is None and actor.role == Role.ADMIN and host.transport != Host.Transport.FORCED


def exclude_own(host: Host) -> None:
    """Has the dashboard's own folders listed as none of images.

    Raises:
        RefusedError: as :func:`allow`.
    """
    _asked(host, {"path_b64": b64(b"/"), "never_b64": [b64(one) for one in own(host)]}, image_folders.ALLOW)


def own(host: Host) -> list[bytes]:
    """The dashboard's code, its Python and its data, where they are on this host."""
    if not transport.is_here(host):
        return []
    mine = (settings.BASE_DIR, settings.DATA_DIR, sys.prefix)
    return sorted({os.path.realpath(os.fsencode(Path(one))) for one in mine} - {b"/", b"/usr"})


def _asked(host: Host, args: dict[str, Any], word: str = "") -> dict[str, Any]:
    try:
        return asking.ask(host, "folder", args, word)
    except HostError as error:
        raise RefusedError("host_unreachable", error.detail) from error


def _of(host: Host, told: dict[str, Any]) -> Found:
    path = unb64(told["path_b64"]) if told["path_b64"] else b""
    forbidden = str(told["forbidden"])
    mine = own(host)
    if (
        path
        and not forbidden
        and (image_folders.is_beneath(path, mine) or any(image_folders.is_beneath(one, [path]) for one in mine))
    ):
        forbidden = _("contains files of this dashboard")
    return Found(told["kind"], path, str(told["detail"]), told["root"], forbidden, str(told["refusal"]))


def _answers(path: bytes) -> bool:
    """Whether it may be looked at here: of a network filesystem whose server is away, a web process would wait on."""
    try:
        return not Mounts.of_this_machine().waits or not special_mounts.silent([path], lambda: None)
    except OSError:
        return True  # too long to be a path at all, as looking at it will tell
