"""Whom a job would give the content of bases: an overlay can name anybody's image, and root can read it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from storage_admin.agent.host import access
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.rewrite.chain import Link


def refuse(image: Link, taken: Sequence[Link], *folders: int) -> None:
    """Refuse to write out of an image what its owner may not read.

    Root's overlays may stand on anything, unless the folder is somebody else's who may read them: he chooses what the
    names in it lead to. So is the folder that the content comes into.

    Args:
        image: whose content is written; what is made is owned and may be read as it is.
        taken: the bases whose content moves along.
        folders: descriptors of those that the content comes into, beside the image's own.

    Raises:
        RefusedError: ``foreign_base``; as :meth:`Link.folder`.
    """
    if not taken:
        return
    with image.folder() as folder:
        places = [os.fstat(fd) for fd in (folder, *folders)]
    readers = [access.Who.owns(os.fstat(image.fd), places[0])]
    rights = access.Rights.of(image.fd)
    readers += [keeper for keeper in map(access.Who.keeps, places) if rights.allow(keeper, access.READ)]
    for base in taken:
        for who in readers:
            if not base.planned.for_all and not access.may_read(who, base.fd):
                raise RefusedError(
                    "foreign_base",
                    f"{base.shown} may not be read by user {who.uid}, who would get its content with {image.shown}; "
                    "let that user read it, or have an admin allow it for the pool",
                )
