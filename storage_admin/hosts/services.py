"""Writes: hosts and pools."""

import os
import socket
from enum import Enum
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError, of_fields
from storage_admin.hosts import folders, transport
from storage_admin.hosts.folders import Found
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import display, path_key

#: The least that a job's speed can be limited to, in bytes a second: below it a job would not end.
LEAST_BANDWIDTH = 1_048_576
#: Characters of a name of a host or a pool, which its column has room for.
LONGEST_NAME = 200


#: Thresholds of a pool that may be none: the least and the most.
THRESHOLDS = {"warn_overcommit": (0.1, 1000), "warn_days": (1, 365), "warn_undo_percent": (1, 100)}


class Unchanged(Enum):
    """Stands for a setting that stays as it is, where ``None`` is a value of its own."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED

#: libvirt's standard folder for images; it is a pool of its own even where libvirt is not asked.
STANDARD_FOLDER = "/var/lib/libvirt/images"


def ensure_local_host() -> Host:
    """The row ``local``, made at the first start together with libvirt's standard folder where there is one.

    It says which machine that is. It stays another one's where it is that already (:func:`.transport.take_local`).
    """
    with transaction.atomic():
        host, __ = Host.objects.get_or_create(
            slug="local", defaults={"name": socket.gethostname() or "this machine", "kind": Host.Kind.LOCAL}
        )
        if transport.take_local(host) and os.path.isdir(STANDARD_FOLDER):
            add_pool(host, os.fsencode(STANDARD_FOLDER), StoragePool.Source.STANDARD)
    return host


def add_pool(host: Host, path: bytes, source: str, *, name: str = "", kind: str = StoragePool.Kind.DIR) -> StoragePool:
    """The pool at ``path``, made where there is none. A pool that an admin registered stays theirs."""
    pool, __ = StoragePool.objects.get_or_create(
        host=host,
        path_key=path_key(path),
        defaults={
            "name": name or display(path.rpartition(b"/")[2]),
            "path": display(path),
            "path_bytes": path,
            "source": source,
            "kind": kind,
        },
    )
    return pool


def register_folder(actor: Actor, host: Host, path: str, *, name: str = "", add_to_list: bool = False) -> StoragePool:
    """Registers a folder of a host as a pool.

    Args:
        add_to_list: have it listed on the host as a folder of images, where it is not. That gives the dashboard a right
            which only root has given so far, so it takes an admin of all hosts.

    Raises:
        ForbiddenError: the actor is no admin, or only one of some hosts and has to be one of all.
        InvalidError: it is no folder, one of the system's or the dashboard's, or registered already.
        RefusedError: ``folder_not_listed``: root has not said that images are there; it says what root has to run.
            ``host_unreachable``: the host cannot be asked.
    """
    actor.require(Role.ADMIN, host.slug)
    if add_to_list:
        actor.require_everywhere(Role.ADMIN)
    found = _folder(host, path)
    raw = found.path
    if StoragePool.objects.filter(host=host, path_key=path_key(raw)).exists():
        raise _bad_path(_("{raw} is already registered as a pool.").format(raw=display(raw)))
    added = bool(found.refusal) and add_to_list
    found = _listed(host, found, add_to_list=add_to_list)
    with transaction.atomic():
        pool = add_pool(host, raw, StoragePool.Source.ADMIN, name=name.strip()[:200])
        pool.root = found.root
        pool.save(update_fields=["root"])
        listed = {"listed": pool.path} if added else {}
        audit(actor, "pool registered", pool.path, after={"host": host.slug, **listed})
    return pool


def confirm_folder(actor: Actor, pool: StoragePool, *, add_to_list: bool = False) -> StoragePool:
    """Takes the folder that a pool's path leads to now for the pool's, whichever it was before.

    Args:
        add_to_list: as for :func:`register_folder`.

    Raises:
        ForbiddenError, InvalidError, RefusedError: as :func:`register_folder`.
    """
    actor.require(Role.ADMIN, pool.host.slug)
    if add_to_list:
        actor.require_everywhere(Role.ADMIN)
    found = _listed(pool.host, _folder(pool.host, os.fsdecode(bytes(pool.path_bytes))), add_to_list=add_to_list)
    with transaction.atomic():
        pool.root = found.root
        pool.save(update_fields=["root"])
        audit(actor, "folder confirmed", pool, after={"path": display(found.path), "listed": add_to_list})
    return pool


def _listed(host: Host, found: Found, *, add_to_list: bool) -> Found:
    """The folder, once the host lists it as one of images; raises RefusedError, with what root has to run."""
    if found.refusal and add_to_list:
        found = folders.allow(host, found.path)
    if found.refusal:
        raise RefusedError("folder_not_listed", found.refusal[:1].upper() + found.refusal[1:])
    return found


def _folder(host: Host, path: str) -> Found:
    if not path.startswith("/") or "\0" in path:
        raise _bad_path(_("Enter the absolute path of the folder, such as /srv/images."))
    try:
        given = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _bad_path(_("This path cannot be checked: it is not a valid name.")) from None
    found = folders.look(host, given)
    if found.kind == "missing":
        raise _bad_path(
            _("{given} does not exist on {host}. Create the folder first, or check the spelling.").format(
                given=display(given), host=host.name
            )
        )
    if found.kind == "unknown":
        raise _bad_path(_("This path cannot be checked: {detail}.").format(detail=found.detail))
    if found.kind != "folder":
        raise _bad_path(
            _("{given} is a file, not a folder. Register the folder that contains it.").format(given=display(given))
        )
    if found.forbidden:
        raise _bad_path(
            _("{path} {forbidden}. Register a folder that holds only images.").format(
                path=display(found.path), forbidden=found.forbidden
            )
        )
    return found


def _bad_path(sentence: str) -> InvalidError:
    return InvalidError(sentence, {"path": sentence})


def update_pool(
    actor: Actor,
    pool: StoragePool,
    *,
    name: str | None = None,
    warn_percent: int | None = None,
    warn_overcommit: float | Unchanged | None = UNCHANGED,
    warn_days: int | Unchanged | None = UNCHANGED,
    warn_undo_percent: int | Unchanged | None = UNCHANGED,
    all_hosts_registered: bool | None = None,
    share_bases: bool | None = None,
    look_inside: bool | None = None,
) -> StoragePool:
    """Changes what an admin decides of a pool; ``None`` leaves a setting as it is, and ends an optional threshold.

    Raises:
        ForbiddenError: the actor is no admin; or says that all hosts are registered, and does not see all.
        InvalidError: values are out of range; it names all of them.
    """
    actor.require(Role.ADMIN, pool.host.slug)
    if all_hosts_registered and not pool.all_hosts_registered:
        actor.require_everywhere(Role.ADMIN)
    wrong = _wrong_name(name, pool.name)
    if warn_percent is not None and not 1 <= warn_percent <= 100:
        wrong["warn_percent"] = _("Enter a number from 1 to 100.")
    given = {"name": name, "warn_percent": warn_percent, "all_hosts_registered": all_hosts_registered}
    given |= {"share_bases": share_bases, "look_inside": look_inside}
    ends = {"warn_overcommit": warn_overcommit, "warn_days": warn_days, "warn_undo_percent": warn_undo_percent}
    thresholds = {key: value for key, value in ends.items() if not isinstance(value, Unchanged)}
    for key, value in thresholds.items():
        least, most = THRESHOLDS[key]
        if value is not None and not least <= value <= most:
            wrong[key] = _("Enter a number from {least} to {most}.").format(least=least, most=most)
    _refuse(wrong)
    _change(actor, pool, "pool changed", {key: value for key, value in given.items() if value is not None} | thresholds)
    return pool


def remove_pool(actor: Actor, pool: StoragePool) -> None:
    """Forgets a pool and the rows of its images. Nothing on the host is touched.

    Raises:
        ForbiddenError: the actor is no admin.
        InvalidError: somebody else than an admin named it, so that the next scan would bring it back.
    """
    actor.require(Role.ADMIN, pool.host.slug)
    is_gone = pool.is_own_place and pool.state == "missing"
    if pool.source not in {StoragePool.Source.ADMIN, StoragePool.Source.DEMO} and not is_gone:
        raise InvalidError(
            _(
                "{pool} cannot be removed here: it comes from {source}. Remove it there. The next scan then removes "
                "it here."
            ).format(pool=pool.name, source=pool.get_source_display())
        )
    with transaction.atomic():
        Host.objects.select_for_update().get(pk=pool.host_id)  # no job is submitted meanwhile
        if why := in_the_way_of_removal(pool):
            raise InvalidError(why)
        audit(actor, "pool removed", pool.path, before={"host": pool.host.slug, "images": pool.images_count})
        pool.delete()


def in_the_way_of_removal(row: Host | StoragePool) -> str:
    """Why a host or a pool may not be forgotten now: a sentence, empty where nothing speaks against it."""
    if isinstance(row, StoragePool):
        host, jobs = row.host, row.host.jobs.filter(rewrites=True)
        copies = row.host.jobs.filter(target_kind="image", target_id__in=row.images.values("pk"))
        busy = _(
            "{name} cannot be removed: a job is queued or running on {host}. Wait for the job to finish, or cancel it."
        )
    else:
        host, jobs, copies = row, row.jobs.all(), row.jobs.all()
        busy = _(
            "{name} cannot be removed: a job is queued or running there. Wait for the job to finish, or cancel it."
        )
    sentence = ""
    if jobs.filter(state__in=("queued", "running")).exists():
        sentence = busy
    elif copies.filter(undo_state="available").exists():
        sentence = _(
            "{name} cannot be removed: it has undo copies, which would then never be deleted. Undo the jobs or "
            "discard the copies first."
        )
    elif row.images.filter(aside_since__isnull=False).exists():
        sentence = _(
            "{name} cannot be removed: some of its images are set aside and would no longer be listed anywhere. "
            "Restore or delete them first."
        )
    return sentence.format(name=row.name, host=host.name)


def update_host(
    actor: Actor,
    host: Host,
    *,
    name: str | None = None,
    max_jobs: int | None = None,
    bandwidth_bytes_sec: int | Unchanged | None = UNCHANGED,
    idle_io: bool | None = None,
) -> Host:
    """Changes what an admin decides of a host; ``None`` leaves a setting as it is.

    Args:
        bandwidth_bytes_sec: at most so many bytes a second for each rewriting job; ``None`` takes the limit away.
        idle_io: whether rewriting jobs only use the disk when nobody else does.

    Raises:
        ForbiddenError: the actor is no admin.
        InvalidError: values are out of range; it names all of them.
    """
    actor.require(Role.ADMIN, host.slug)
    wrong = _wrong_name(name, host.name)
    if max_jobs is not None and not 1 <= max_jobs <= 64:
        wrong["max_jobs"] = _("Enter a number from 1 to 64.")
    given: dict[str, Any] = {"name": name, "max_jobs": max_jobs, "idle_io": idle_io}
    given = {key: value for key, value in given.items() if value is not None}
    if bandwidth_bytes_sec is not UNCHANGED:
        if bandwidth_bytes_sec is not None and not LEAST_BANDWIDTH <= bandwidth_bytes_sec < 1 << 63:
            wrong["bandwidth_bytes_sec"] = _(
                "Enter at least {least:,} bytes per second (1 MiB/s), or no limit."
            ).format(least=LEAST_BANDWIDTH)
        given["bandwidth_bytes_sec"] = bandwidth_bytes_sec
    _refuse(wrong)
    _change(actor, host, "host changed", given)
    return host


def _wrong_name(name: str | None, before: str) -> dict[str, str]:
    """Whether a name can be read and kept: empty, or what is wrong with it; ``None`` gives no name."""
    if name is None or name == before:
        return {}
    if not name.strip():
        return {"name": _("Enter a name.")}
    return (
        {} if is_name(name) else {"name": _("Use at most {longest} visible characters.").format(longest=LONGEST_NAME)}
    )


def is_name(name: str) -> bool:
    """Whether a host or a pool can be called that: it can be kept, and seen."""
    return len(name) <= LONGEST_NAME and name.isprintable()


def _refuse(wrong: dict[str, str]) -> None:
    """Raises InvalidError where something is wrong with a field."""
    if wrong:
        raise of_fields(wrong)


def _change(actor: Actor, row: Host | StoragePool, what: str, values: dict[str, Any]) -> None:
    before = {key: getattr(row, key) for key in values}
    for key, value in values.items():
        setattr(row, key, value)
    with transaction.atomic():
        row.save(update_fields=list(values))
        audit(actor, what, row, before=before, after=values)


def host_failed(host: Host, sentence: str, *, degraded: bool = False) -> None:
    """A host could not be reached, or not with the rights that are needed. What is known of it stays."""
    status = Host.Status.DEGRADED if degraded else Host.Status.UNREACHABLE
    Host.objects.filter(pk=host.pk).update(status=status, status_detail=sentence)
