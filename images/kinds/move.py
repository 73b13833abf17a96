"""The job kind ``move``: a disk goes onto a new volume of LVM or ZFS, or from one into a file; its guests follow."""

import os
from typing import Any, ClassVar

from django.db.models import Exists, OuterRef, QuerySet
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images import raidz
from images.kinds.convert import Convert, stem_of, target_of, wrong_target
from images.models import Image
from images.rewrite import forecasts, guest_locks, readers, record, refusals, repointing, volumes
from images.rewrite.kind import REWRITE_OPTIONS, Choice, Rewriting
from images.rewrite.neighbours import find, locks_on_chain
from images.rewrite.space import WRITTEN
from images.scan.volume_places import group_id, lvm_name
from storage_admin.agent.host import lvm, zfs
from storage_admin.agent.protocol import INVALID
from storage_admin.agent.rewrite.conversion import OPTIONS
from storage_admin.errors import NotFoundError
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import display, path_key
from storage_admin.jobs.kinds import Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal

Kind = StoragePool.Kind
#: Of pools in which a volume can be made.
VOLUMES = (Kind.LVM, Kind.LVMTHIN, Kind.ZFS)
#: Of a new volume of ZFS, unless its version takes larger ones, which take less space beside their bytes.
_SMALL_BLOCK = 8192
_PROXMOX = _(
    "A volume of Proxmox VE carries its guest and its format in its name. Use Move disk on the page of the guest, "
    "which has Proxmox VE move it."
)


class Move(Rewriting):
    """Copies a disk to where it is to be, and has its guests use the copy; the original stays, and is used no more."""

    name = "move"
    title = _("Move")
    description = _(
        "Copies the disk of a guest that is shut down to a new volume of LVM or ZFS, or from a volume to a file, and "
        "compares both. Its guests then use the copy. The original is kept unchanged."
    )
    verb = "file_to_volume"
    volumes = frozenset(VOLUMES)
    volume_verbs = dict.fromkeys(VOLUMES, "volume_to_volume")
    volume_options: ClassVar[frozenset[str]] = frozenset({"target_pool", "format", "repoint_guest"})
    stages = {"checking": (0, 2), "creating": (2, 70), "copying": (2, 70)} | WRITTEN
    properties = {
        "target_pool": {
            "type": ["integer", "null"],
            "default": None,
            "description": _("Id of a pool on the same host. Required."),
        },
        "target_name": Convert.properties["target_name"]
        | {"description": _("Name of the new volume or file; null for the name of the disk.")},
        "format": {
            "enum": list(OPTIONS),
            "default": "qcow2",
            "description": _("The format of a new file. What is on a volume is raw."),
        },
        "repoint_guest": {
            "type": "boolean",
            "default": True,
            "description": _("Update the definitions of the libvirt guests that use the disk. Else it is only copied."),
        },
        **{name: REWRITE_OPTIONS[name] for name in REWRITE_OPTIONS if name != "undo_hours"},
    }
    methods = {"to_volume": _("Move to a volume"), "to_file": _("Move to a file")}
    no_undo = _("the original stays as it is")
    guarantee = _(
        "The original is only read. The copy gets its name only when it is complete and verified to be identical. A "
        "guest cannot start from a volume while it is copied."
    )
    unchanged = _("stays unchanged")
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The original is unchanged. The copy is complete, or there is none."),
            gettext_noop("The original is unchanged, and its guests use it. This job made no copy."),
        )
    }

    def wrong(self, options: dict[str, Any]) -> dict[str, str]:
        return {"target_name": wrong_target(options["target_name"], "")}

    def replaces(self, method: str, options: dict[str, Any]) -> bool:  # noqa: ARG002 (never)
        return False

    #: In a query of images: whether there is a pool of volumes beside the image's own.
    beside_volumes = Exists(
        StoragePool.objects.filter(host=OuterRef("host"), kind__in=VOLUMES).exclude(pk=OuterRef("pool"))
    )

    @staticmethod
    def is_of_use(image: Image, *, beside_volumes: bool) -> bool:
        """Whether there is anywhere to move an image to."""
        return not _is_of_proxmox(image) and image.format != "subvol" and (image.is_volume or beside_volumes)

    @staticmethod
    def target_pools(image: Image) -> QuerySet[StoragePool]:
        """The pools that a disk can be moved to."""
        kinds = [*VOLUMES, *(refusals.FOLDERS if image.is_volume else ())]
        return StoragePool.objects.filter(host=image.host_id, kind__in=kinds).exclude(pk=image.pool_id)

    def verb_for(self, job: Job) -> str:
        pool, __ = place(find(job.target_id), job.options)
        return super().verb_for(job) if pool.is_of_volumes else "volume_to_file"

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        image = find(target.id)
        __, path = place(image, options)
        chain = locks_on_chain(image, exclusive=image.is_volume or options["repoint_guest"])
        return [*chain, Lock(f"path:{image.host_id}:{path_key(path)}", exclusive=True)]

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:
        # What is only read keeps what a copy does not carry.
        kept = {"has_internal_snapshots", "hard_linked", "immutable"}
        found = self.against_volume(image) if image.is_volume else refusals.for_rewrite(image)
        found = [one for one in found if one.code not in kept]
        if _is_of_proxmox(image):
            found.append(Refusal("unsupported_pool", str(_PROXMOX)))
        if image.format == "subvol":
            told = gettext("{image} is a filesystem of a container, and no disk. Only disks are moved.")
            found.append(Refusal("unsupported_pool", told.format(image=image.name)))
        if image.volume.get("snapshots"):
            found += volumes.has_snapshots(image)
        try:
            pool, path = place(image, options)
        except NotFoundError as error:
            return [*found, Refusal(INVALID, error.detail)]
        if pool.is_of_volumes:
            found += [*refusals.for_pool(pool, VOLUMES), *volumes.elsewhere(pool, pool.name)]
            if why := _wrong_name(pool, os.fsdecode(path).rpartition("/")[2]):
                found.append(Refusal(INVALID, why))
            if Image.objects.filter(host=image.host_id, path_key=path_key(path), missing_since=None).exists():
                found.append(refusals.target_exists(path))
        elif not image.is_volume:
            told = gettext("{image} is a file, and {pool} a folder. Convert it there instead.")
            found.append(Refusal("unsupported_pool", told.format(image=image.name, pool=pool.name)))
        else:
            found += refusals.for_new_file(pool, path)
            if options["format"] not in repointing.DRIVERS and options["repoint_guest"]:
                told = gettext("libvirt has no driver for {form}, so its guests could not use the image.")
                found.append(Refusal(INVALID, told.format(form=options["format"])))
        move = _move(image, options)
        return [*found, *(repointing.refusals(image, move) if move.repoint else ())]

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        try:
            pool, path = place(image, options)
        except NotFoundError:
            return Choice("to_volume", str(self.description), scratch=0)
        size, whole = image.virtual_size or 0, sum(one.occupied_bytes for one in (image, *below))
        is_all_asked_for = pool.kind == Kind.LVM or (image.is_volume and pool.is_of_volumes)
        taken = size if is_all_asked_for else min(size, whole) or size
        full = size
        if size and (layout := (pool.volume_facts or {}).get("raidz")):
            full = raidz.full_bytes(size, _SMALL_BLOCK, **layout)
            taken = taken * full // size
        foreign, allowed = readers.for_taken(image, below)
        told = gettext(
            "What a guest reads of {image}, {size:,} bytes, is copied to {path} and compared with it. The original is "
            "kept and still takes its space: set it aside once the guests have run well with the copy."
        )
        guests = image.guest_names if options["repoint_guest"] else []
        warnings = [gettext("{name} uses the copy from then on.").format(name=name) for name in guests]
        if image.snapshots:
            told_kept = gettext(
                "The {count} internal snapshots of the image are not copied. They stay in the original."
            )
            warnings.append(told_kept.format(count=len(image.snapshots)))
        if pool.kind == Kind.ZFS:
            told_sparse = gettext(
                "Nothing is reserved for the new volume: if its ZFS pool fills up, its guests cannot write. To reserve "
                "its size: zfs set refreservation=auto {dataset}"
            )
            warnings.append(told_sparse.format(dataset=volumes.dataset(display(path))))
        if image.is_volume:
            warnings.append(gettext("While it is copied, the volume has another name, so that no guest can start."))
        if guests:
            told_back = gettext("What guests write to the copy is not in the original.")
            warnings.append(told_back)
        return Choice(
            "to_volume" if pool.is_of_volumes else "to_file",
            told.format(image=image.name, size=size, path=display(path)),
            _commands(image, pool, path, options),
            low=0 if pool.kind != Kind.LVM else taken,
            high=full + (full >> 6) + (4 << 20),
            took=forecasts.seconds(image, self.name, 2 * size, options["bandwidth_bytes_sec"]),
            scratch=taken,
            refusals=foreign,
            by_hand=allowed,
            warnings=warnings,
            below={image.pk: gettext("read, not changed")},
            space_in=pool,
        )

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        image = find(job.target_id)
        move = _move(image, job.options)
        if move.repoint:
            repointing.look(image, move)

    def before_swap(self, job: Job) -> None:
        image = find(job.target_id)
        move = _move(image, job.options)
        if move.repoint:
            repointing.lead_to_the_new_one(job, image, move)

    def asked_of_volume(self, image: Image, job: Job) -> dict[str, Any]:
        return image.volume_place | self.asked(image, [], job) | record.limits(job)

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        pool, path = place(image, job.options)
        if pool.is_of_volumes:
            return {"volume": made(pool, path)}
        return {"target": {**pool.place_of(path), "format": job.options["format"], "options": {}}}

    def made_at(self, job: Job) -> tuple[StoragePool, bytes] | None:
        image = self.written(job)
        try:
            return place(image, job.options) if image is not None else None
        except NotFoundError:
            return None

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        image = find(job.target_id)
        pool, path = place(image, job.options)
        record.write_line_beside(job, pool, result["after_bytes"])
        return {
            "before_bytes": image.occupied_bytes, "after_bytes": result["after_bytes"], "held_bytes": 0,
            "freed_bytes": 0, "freed_at": None, "method": job.plan.get("method"), "path": display(path),
            "pool": pool.pk, "seconds": result["seconds"], "swapped": False,
        }  # fmt: skip

    def ended(self, job: Job) -> None:
        guest_locks.give_back(job)
        repointing.agree(job)
        super().ended(job)


def place(image: Image, options: dict[str, Any]) -> tuple[StoragePool, bytes]:
    """The pool and the path of the copy.

    Raises:
        NotFoundError: no pool was chosen, or there is no such pool on the host.
    """
    if options["target_pool"] is None:
        raise NotFoundError(gettext("Choose the pool to move to (target_pool)."))
    pool = StoragePool.objects.filter(pk=options["target_pool"], host=image.host_id).first()
    if pool is None or not pool.is_of_volumes:
        return target_of(image, options | {"replace": False})
    before = bytes(image.path_bytes)
    name = os.fsencode(options["target_name"] or b"") or stem_of(before.rpartition(b"/")[2])
    folder = zfs.device(group_of(pool)) if pool.kind == Kind.ZFS else f"/dev/{group_of(pool)}"
    path = folder.encode() + b"/" + name
    same = options["target_name"] is None and path == before
    return pool, path + b"-copy" if same else path


def _is_of_proxmox(image: Image) -> bool:
    return image.host.runs_proxmox or image.pool.source == StoragePool.Source.PROXMOX


def group_of(pool: StoragePool) -> str:
    """The volume group, or the dataset, in which a pool has its volumes."""
    if pool.kind == Kind.ZFS:
        return pool.shared_key.partition(" ")[2].partition(" ")[2]
    return lvm_name(pool).partition("/")[0]


def _wrong_name(pool: StoragePool, name: str) -> str:
    """What is wrong with the name of a new volume, as a sentence; empty where nothing is."""
    if pool.kind != Kind.ZFS and not lvm.can_be_named(name):
        return gettext(
            "LVM takes letters, digits and + _ . - in a name, and keeps some names for itself. Choose a name "
            "(target_name)."
        )
    if pool.kind == Kind.ZFS and not zfs.can_be_named(f"{group_of(pool)}/{name}"):
        return gettext(
            "ZFS takes letters, digits and _ . : - in a name, 255 with those of its datasets. Choose another name "
            "(target_name)."
        )
    return ""


def made(pool: StoragePool, path: bytes) -> dict[str, str]:
    """A volume that is to be made, as the agent's verbs take it."""
    backend = pool.shared_key.partition(" ")[0]
    thin = lvm_name(pool).partition("/")[2] if pool.kind == Kind.LVMTHIN else ""
    name = os.fsdecode(path).rpartition("/")[2]
    return {"backend": backend, "group": group_of(pool), "group_id": group_id(pool), "name": name, "pool": thin}


def _move(image: Image, options: dict[str, Any]) -> repointing.Move:
    pool, path = place(image, options)
    form = "raw" if pool.is_of_volumes else options["format"]
    return repointing.Move(bytes(image.path_bytes), path, form, options["repoint_guest"], stays=True)


def _commands(image: Image, pool: StoragePool, path: bytes, options: dict[str, Any]) -> list[list[str]]:
    """What it amounts to, as an admin would type it."""
    form, target = ("raw" if pool.is_of_volumes else options["format"]), display(path)
    begin, source, back = _hiding(image) if image.is_volume else ([], image.path, [])
    create, written, name = _making(image, pool, target) if pool.is_of_volumes else ([], target, [])
    source_form = image.declared_format or "raw"
    copy = [
        ["qemu-img", "convert", "-p", "-W", "-f", source_form, "-O", form, source, written],
        ["qemu-img", "compare", "-p", "-f", source_form, "-F", form, source, written],
    ]
    return [*begin, *create, *copy, *name, *back]


Commands = tuple[list[list[str]], str, list[list[str]]]


def _hiding(image: Image) -> Commands:
    """What is done to a volume before it is read, its device then, and what is done afterwards."""
    group = image.volume.get("group", "")
    if image.pool.kind == Kind.ZFS:
        own, work = f"{group}/{image.name}", f"{group}/.sa-JOB.work"
        begin = [["zfs", "set", "volmode=none", own], ["zfs", "rename", own, work], ["zfs", "set", "volmode=dev", work]]
        return begin, zfs.device(work), [["zfs", "rename", work, own], ["zfs", "inherit", "volmode", own]]
    work = f"{group}/.sa-JOB.work"
    begin = [["lvchange", "-an", image.path], ["lvrename", group, image.name, ".sa-JOB.work"]]
    back = [["lvrename", group, ".sa-JOB.work", image.name]]
    return [*begin, ["lvchange", "-ay", "-K", work]], f"/dev/{work}", back


def _making(image: Image, pool: StoragePool, target: str) -> Commands:
    """How a volume is made, its device, and how it gets its name."""
    group, size, name = group_of(pool), str(image.virtual_size or 0), target.rpartition("/")[2]
    if pool.kind == Kind.ZFS:
        new, own = f"{group}/.sa-JOB.new", f"{group}/{name}"
        create = ["zfs", "create", "-s", "-V", size, "-o", "volmode=dev", new]
        return [create], zfs.device(new), [["zfs", "rename", new, own], ["zfs", "inherit", "volmode", own]]
    thin = lvm_name(pool).partition("/")[2]
    kind = ["-V", f"{size}b", "--thinpool", thin] if thin else ["-L", f"{size}b"]
    create = ["lvcreate", *kind, "-n", ".sa-JOB.new", group]
    return [create], f"/dev/{group}/.sa-JOB.new", [["lvrename", group, ".sa-JOB.new", name]]
