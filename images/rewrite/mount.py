"""What a pool's mount of NFS can do, and what that stands against: the one place that reads these facts.

They are what the kernel told the last scan (:func:`storage_admin.agent.host.nfs.facts`); a pool that NFS has no part in
has none, and nothing stands against it.
"""

import re
from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.plan_and_progress import Refusal


def unwritable(pool: StoragePool) -> list[Refusal]:
    """What stands against writing into a pool."""
    if pool.mount.get("writable") is False:
        why = _("{pool} is mounted read-only. Mount it with write access (rw), then scan the host.")
    elif pool.mount.get("root_writes") is False:
        why = _(
            "The NFS server of {pool} does not let root write there. Export it with no_root_squash and rw, then scan "
            "the host."
        )
    else:
        return []
    return [Refusal("immutable", why.format(pool=pool.name))]


def against_replacing(pool: StoragePool) -> list[Refusal]:
    """What stands against taking a file's name away."""
    found = unwritable(pool)
    if not pool.mount.get("locks", True):
        why = _(
            "{pool} is mounted without locks on its server (nolock or local_lock). A guest that starts on another host "
            "could not be kept away. Mount it with locks, then scan the host."
        )
        found.append(Refusal("locks_missing", why.format(pool=pool.name)))
    return found


def warnings(pool: StoragePool, format_options: Mapping[str, Any]) -> list[str]:
    """What a plan says of a file that is to be made there: reserved space is all written where the server cannot do it
    (measured over version 3: 64 MiB in 17 s).
    """
    if format_options.get("preallocation") != "falloc" or pool.mount.get("reserves") is not False:
        return []
    why = _("The NFS server of {pool} cannot reserve space: preallocation falloc takes as long there as full.")
    return [why.format(pool=pool.name)]


def has_no_holes(pool: StoragePool) -> bool:
    """Whether parts of a file cannot be freed there: below version 4.2, or where the server has refused it."""
    version = re.fullmatch(r"nfs (\d+)(?:\.(\d+))?", pool.filesystem)
    is_old = version is not None and (int(version[1]), int(version[2] or 0)) < (4, 2)
    return is_old or pool.mount.get("holes") is False


def facts(pool: StoragePool) -> list[tuple[str, str, str]]:
    """What its page says: of each fact the name, the value, and what follows from it."""
    told = pool.mount
    if not told or told["version"] is None:
        return []
    yes_or_no = {True: _("yes"), False: _("no"), None: _("not known")}
    untried = _("nothing has tried since it was mounted")
    return [
        (_("NFS version"), str(told["version"]), ""),
        (
            _("Locks"),
            _("on the server") if told["locks"] else _("on this host only"),
            "" if told["locks"] else _("no image is replaced there"),
        ),
        (
            _("Punch holes"),
            yes_or_no[told["holes"]],
            untried if told["holes"] is None else "" if told["holes"] else _("trimming guests frees nothing"),
        ),
        (
            _("Reserve space"),
            yes_or_no[told["reserves"]],
            untried
            if told["reserves"] is None
            else ""
            if told["reserves"]
            else _("preallocation falloc takes as long as full"),
        ),
        (
            _("When the server is away"),
            _("errors after a while (soft)") if told["soft"] else _("programs wait (hard)"),
            _("a guest may lose what it wrote last") if told["soft"] else "",
        ),
        (
            _("Write access"),
            yes_or_no[told["root_writes"]] if told["writable"] else _("read-only"),
            _("the server does not let root write") if told["writable"] and not told["root_writes"] else "",
        ),
    ]
