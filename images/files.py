"""Files of a guest on an image that nobody uses: what is in a folder, and the bytes of one, for admins alone.

A tenant's files are private: an admin allows it for each pool, and every path that is looked at stands in the trail.
"""

import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _

from images import download
from images.kinds.create import links_of
from images.kinds.inside import against
from images.models import Image
from images.rewrite.neighbours import chain_of
from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.agent.protocol import RESULT, HostError, RefusedError
from storage_admin.agent.verbs.files import LIST, LOOK, READ
from storage_admin.errors import require_right
from storage_admin.hosts import asking
from storage_admin.hosts.names import display
from storage_admin.jobs.plan_and_progress import refuse

#: How a file's kind is called, by the bits of its mode.
_KINDS: Mapping[int, str] = {
    stat.S_IFDIR: "folder", stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFBLK: "device", stat.S_IFCHR: "device",
    stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket",
}  # fmt: skip


def look(actor: Actor, image: Image) -> dict[str, Any]:
    """The filesystems and operating systems on an image, as the agent's ``files`` tells them.

    Raises:
        ForbiddenError: the actor is no admin.
        RefusedError: ``inside_off``, ``tool_missing``, ``unreadable_inside``, ``busy``, ``host_unreachable``; somebody
            uses the image.
    """
    told = _asked(actor, image, LOOK, {})
    return {name: [_plain(one) for one in told[name]] for name in ("filesystems", "systems")}


def _plain(told: dict[str, Any]) -> dict[str, Any]:
    """What a disk says of itself, without what is no plain text."""
    return {name: shown(value) if isinstance(value, str) else value for name, value in told.items()}


def shown(name: str) -> str:
    """A name of the guest's as a page shows it."""
    return display(name.encode("utf-8", "surrogatepass"))


def listing(actor: Actor, image: Image, device: str, path: str) -> dict[str, Any]:
    """What is in a folder: ``entries``, each with ``kind``, ``mode`` in octal and ``mtime``, and their ``count``.

    Raises:
        ForbiddenError, RefusedError: as :func:`look`.
    """
    told = _asked(actor, image, LIST, {"device": device, "path": path})
    return told | {"entries": [_entry(one) for one in told["entries"]]}


def _entry(told: dict[str, Any]) -> dict[str, Any]:
    mode = told["mode"]
    try:
        at = datetime.fromtimestamp(told["mtime"], UTC)
    except (ValueError, OverflowError, OSError):
        at = None
    return told | {"kind": _KINDS.get(stat.S_IFMT(mode), "other"), "mode": f"{stat.S_IMODE(mode):04o}", "mtime": at}


def content(actor: Actor, image: Image, device: str, path: str) -> HttpResponseBase:
    """A file of the guest as an answer of the web server, sent piece by piece.

    Raises:
        ForbiddenError, RefusedError: as :func:`look`.
    """
    where = {"device": device, "path": path}
    plain = "".join(one if one.isprintable() else "_" for one in path.rpartition("/")[2]) or "file"
    headers = {"Content-Disposition": content_disposition_header(as_attachment=True, filename=plain) or "attachment"}
    args = _request(actor, image, READ, where)
    events = asking.told(image.host, "files", args, seconds=asking.APPLIANCE_TIMEOUT)
    sending = download.Sending(actor, image, events, "file of a guest downloaded", where)
    return StreamingHttpResponse(sending, headers=headers, content_type="application/octet-stream")


def _request(actor: Actor, image: Image, do: str, where: dict[str, str]) -> dict[str, Any]:
    actor.require(Role.ADMIN, image.host.slug)
    require_right({name: _("This cannot be a name.") for name, value in where.items() if "\0" in value})
    refuse(against(image))
    own, *below = links_of(chain_of(image))
    audit(actor, "files of a guest looked at", image.name, after={"image": image.pk, "do": do, **where})
    return own | {"virtual_size": image.virtual_size, "chain": below, "children_known": True, "do": do, **where}


def _asked(actor: Actor, image: Image, do: str, where: dict[str, str]) -> dict[str, Any]:
    args = _request(actor, image, do, where)
    download.take_place()
    try:
        for event in asking.told(image.host, "files", args, seconds=asking.APPLIANCE_TIMEOUT):
            if event["event"] == RESULT:
                return dict(event["data"])
    except HostError as error:
        raise RefusedError("host_unreachable", error.detail) from error
    finally:
        download.give_place()
    raise RefusedError("host_unreachable", _("The agent ended without an answer."))
