"""The demo's folder as a storage pool of this machine, and its end."""

import os
from pathlib import Path

from django.db import transaction
from django.db.models import Q

from images.demo.recipes import DemoError
from images.models import Image
from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts import folders
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.hosts.services import add_pool, ensure_local_host, remove_pool
from storage_admin.jobs import routing
from storage_admin.jobs.models import Job
from storage_admin.jobs.services import submit


def register(actor: Actor, folder: Path) -> StoragePool:
    """The pool at the demo's folder, made where there is none.

    Raises:
        ForbiddenError: the actor is no admin.
    """
    actor.require(Role.ADMIN, "local")
    host = ensure_local_host()
    path = os.fsencode(folder.resolve())
    with transaction.atomic():
        known = StoragePool.objects.filter(host=host, path_key=path_key(path)).first()
        if known:
            return known
        pool = add_pool(host, path, StoragePool.Source.DEMO, name="demo")
        audit(actor, "demo registered", pool.path, after={"host": host.slug})
    return pool


def allow(folder: Path) -> str:
    """Has the folder listed as one of images; a sentence that says what root has to run where that cannot be done."""
    try:
        folders.allow(ensure_local_host(), os.fsencode(folder.resolve()))
    except RefusedError as error:
        return error.detail
    return ""


def scan_if_a_worker_is_up(actor: Actor, pool: StoragePool) -> Job | None:
    """Queues a scan of the pool's host, or answers ``None`` where nobody would do it."""
    if not routing.is_served(pool.host):
        return None
    return submit(actor, "scan", pool.host.pk, {})


def forget(actor: Actor, folder: Path) -> None:
    """Takes the demo's pool and the rows of its images out of the inventory; the files stay for now.

    Raises:
        DemoError: a guest or a process uses one of the images.
        ForbiddenError: the actor is no admin.
        InvalidError: a job is at work.
    """
    host = ensure_local_host()
    pool = StoragePool.objects.filter(
        host=host, path_key=path_key(os.fsencode(folder.resolve())), source=StoragePool.Source.DEMO
    ).first()
    if pool is None:
        return
    of_pool = Image.every.filter(pool=pool)
    used = of_pool.filter(Q(in_use=True) | Q(uses__isnull=False)).order_by("name").first()
    if used:
        raise DemoError(f"{used.name} is used by a guest or a process: stop it or take the disk away, scan, try again.")
    with transaction.atomic():
        undoable = Job.objects.filter(
            target_kind="image", target_id__in=list(of_pool.values_list("pk", flat=True)), undo_state="available"
        )
        undoable.update(undo_state=Job.UndoState.DISCARDED, undo_bytes=0)
        remove_pool(actor, pool)
