"""Why an image may not be rewritten, as far as the database knows. The agent looks again, on the spot."""

from collections.abc import Collection

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from images.models import Image
from images.rewrite import mount
from storage_admin.guests.models import Guest
from storage_admin.hosts import transport
from storage_admin.hosts.libvirt import alone
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import display, path_key
from storage_admin.hosts.proxmox import by_api_alone
from storage_admin.jobs.plan_and_progress import Refusal
from storage_admin.words import Translatable

#: Chains deeper than that are refused: walking them costs more than they are worth, and they hint at a mistake.
DEEPEST_CHAIN = 64
#: Formats whose headers are read; what is unreadable in them is damaged rather than unknown.
READ_FORMATS = frozenset({"qcow2", "vmdk", "vdi", "vpc", "vhdx", "qed", "luks", "raw"})
#: An image in one of these states may be lost: its undo copies wait, also after their windows have closed.
MAY_BE_LOST = (
    Image.State.MISSING,
    Image.State.UNREADABLE,
    Image.State.FORMAT_MISMATCH,
    Image.State.CHAIN_BROKEN,
    Image.State.CHAIN_CYCLE,
)
#: Kinds of pools whose images are files in a folder, which an agent can look at.
FOLDERS = (StoragePool.Kind.DIR, StoragePool.Kind.NFS)
#: States of a pool whose folder no work is done in, with the codes that say so.
NOT_ENTERED = {"changed": "pool_changed", "not_listed": "folder_not_listed"}
#: Images that are not to be written: a template's disks, as Proxmox VE calls them, and what is protected (``chattr +i``
#: or ``+a``) as the last scan found it.
_BASE = "base-"
PROTECTED = Q(header__immutable=True) | Q(pool__source=StoragePool.Source.PROXMOX, name__startswith=_BASE)
#: What must stay free on a filesystem while a job works: the larger of a share of it and a number of bytes.
RESERVE_PERCENT = 5
RESERVE_BYTES = 2 * 1024**3


def for_rewrite(image: Image) -> list[Refusal]:
    """What stands against replacing this image, the most fundamental first."""
    return [*_host(image), *of_itself(image)]


def for_undo(image: Image) -> list[Refusal]:
    """What stands against putting an original back: its content is known, so only who uses the image counts."""
    return [*_host(image), *_use(image)]


def only_copy(image: Image) -> list[Refusal]:
    """What stands against removing an undo copy of this image."""
    if image.state not in MAY_BE_LOST:
        return []
    sentence = _(
        "The undo copy is not removed. The state of {image} is “{label}”, so the copy may be the only good one "
        "left. Repair the image, or force the removal."
    ).format(image=image.name, label=Image.State(image.state).label.lower())
    return [Refusal("stale_plan", sentence)]


def for_bases(image: Image, below: list[Image]) -> list[Refusal]:
    """What of an image's bases stands against reading them; ``below`` begins with the immediate one."""
    away = next((base for base in below if base.pool.state == StoragePool.SILENT), None)
    files = [base for base in below if not base.is_volume]
    undeclared = [base for base in files if not base.declared_format and not image.backing_format]
    return (silent(away.pool) if away is not None else []) + [
        Refusal(
            "format_undeclared",
            _("The format of the backing file {base} is not declared. Declare it first.").format(base=base.name),
        )
        for base in undeclared
    ]


def for_base(base: Image) -> list[Refusal]:
    """What stands against a new overlay on an image: it is read, and must not be written to any more."""
    kept = {"has_internal_snapshots", "hard_linked", "immutable"}
    running = [disk.guest for disk in base.disks if not disk.guest.off]
    return [
        *silent(base.pool),
        *not_a_file(base),
        *_unconfined(base),
        *_state(base),
        *([Refusal("guest_running", _running(running[0], base))] if running else ()),
        *(one for one in of_content(base) if one.code not in kept),
    ]


def _host(image: Image) -> list[Refusal]:
    return [*for_host(image.host), *_unconfined(image), *for_pool(image.pool)]


def reachable(host: Host) -> list[Refusal]:
    """What stands against all that an agent does on a host."""
    refusals = without_agent(host)
    if host.status == Host.Status.UNREACHABLE:
        told = _("{host} does not answer: {why} Scan the host first.")
        refusals.append(Refusal("host_unreachable", told.format(host=host.name, why=host.status_detail)))
    return refusals


def for_host(host: Host) -> list[Refusal]:
    """What stands against all that an agent does with qemu-img on a host."""
    refusals = reachable(host)
    if not refusals and host.capabilities and not host.capabilities.get("qemu_img"):
        told = _("qemu-img is not installed on {host}. Install qemu-utils there, then scan the host.")
        refusals.append(Refusal("tool_missing", told.format(host=host.name)))
    return refusals


def of_itself(image: Image) -> list[Refusal]:
    """What stands against changing an image, wherever it is."""
    return [*_state(image), *_use(image), *of_content(image)]


def _unconfined(image: Image) -> list[Refusal]:
    """A host that cannot confine tools, and a file that others than root may write; of folders the agent knows."""
    if image.host.capabilities.get("confinement", "") is not None:
        return []
    uid, mode = image.from_header("uid"), image.from_header("mode")
    if uid == 0 and not (mode or 0) & 0o022:
        return []
    sentence = _(
        "Users other than root can write to {image}, and {host} cannot restrict qemu-img to the files of its job. "
        "Change the file's owner to root, or use kernel 5.13 or newer."
    ).format(image=image.name, host=image.host.name)
    return [Refusal("not_confined", sentence)]


def without_agent(host: Host) -> list[Refusal]:
    """What stands against all that needs an agent on a host."""
    if transport.by_libvirt_alone(host):
        return [Refusal("tool_missing", alone.why_not(host))]
    return [Refusal("tool_missing", by_api_alone.why_not(host))] if host.by_api_alone else []


def for_pool(pool: StoragePool, kinds: Collection[str] = FOLDERS) -> list[Refusal]:
    """What stands against writing into a pool; ``kinds`` are those of pools in which it can be done."""
    refusals = silent(pool)
    if code := NOT_ENTERED.get(pool.state):
        refusals.append(Refusal(code, f"{pool.name}: {pool.state_detail}"))
    if pool.kind not in kinds:
        told = _("Images in {kind} pools are not files and cannot be rewritten.")
        refusals.append(Refusal("unsupported_pool", told.format(kind=pool.kind)))
    if pool.network and not pool.all_hosts_registered:
        where = _("{pool} is exported by NFS.") if pool.is_exported else _("{pool} is on a network filesystem.")
        confirm = _("An admin must first confirm that every host that uses this storage is registered here.")
        refusals.append(Refusal("shared_pool", f"{where.format(pool=pool.name)} {confirm}"))
    return refusals


def for_new_file(pool: StoragePool, path: bytes) -> list[Refusal]:
    """What stands against making a file of that path in a pool."""
    there = Image.objects.filter(host=pool.host_id, path_key=path_key(path), missing_since=None).exists()
    return for_pool(pool) + mount.unwritable(pool) + ([target_exists(path)] if there else [])


def target_exists(path: bytes) -> Refusal:
    """A file that would be overwritten."""
    return Refusal("target_exists", _("{path} already exists. Choose another name.").format(path=display(path)))


def silent(pool: StoragePool) -> list[Refusal]:
    """Whether a pool answers at all: whoever touched it would wait until it does."""
    if pool.state != StoragePool.SILENT:
        return []
    told = _(
        "The storage pool {pool} does not answer, so no job can start there. {why} Check its server and "
        "the network, then scan the host."
    )
    return [Refusal("pool_silent", told.format(pool=pool.name, why=pool.state_detail))]


def not_a_file(image: Image) -> list[Refusal]:
    """What stands against reading an image's data."""
    if image.pool.kind in FOLDERS:
        return []
    told = _("{image} is a volume of a {kind} pool, not a file, and cannot be read.")
    return [Refusal("unsupported_pool", told.format(image=image.name, kind=image.pool.kind))]


def _state(image: Image) -> list[Refusal]:
    state, detail = image.state, image.state_detail
    match state:
        case Image.State.OK:
            pass
        case Image.State.MISSING | Image.State.DELETED:
            return [Refusal("stale_plan", _("The image is no longer at its path. Scan the host."))]
        case Image.State.SET_ASIDE:
            return [Refusal("set_aside", _("{image} is set aside. Restore it first.").format(image=image.name))]
        case Image.State.UNREADABLE:
            code = "dirty_or_corrupt" if image.format in READ_FORMATS else "unsupported_subformat"
            return [Refusal(code, _("The header of the image cannot be read: {detail}").format(detail=detail))]
        case Image.State.MODIFYING:
            return [Refusal("busy", detail or _("A job is rewriting the image."))]
        case _:
            return [Refusal(str(state), detail)]
    refusals = []
    if not image.declared_format:
        looks = _("its content looks like {format}, but anyone who can write to the file could have faked that").format(
            format=image.format
        )
        told = _("The format of {image} is not declared: {looks}. Declare it first.")
        refusals.append(Refusal("format_undeclared", told.format(image=image.name, looks=looks)))
    if image.chain_depth > DEEPEST_CHAIN:
        told = _("The backing chain of the image has {depth} images; the limit is {deepest}.")
        refusals.append(Refusal("chain_too_deep", told.format(depth=image.chain_depth, deepest=DEEPEST_CHAIN)))
    return refusals


def named(guest: Guest, image: Image) -> str:
    """One of another host, on a storage that both mount, may not exist for whoever reads the sentence."""
    return (
        _("Guest {guest}").format(guest=guest.name) if guest.host_id == image.host_id else _("A guest of another host")
    )


def _running(guest: Guest, image: Image) -> str:
    """A guest that uses the image, and what can be done meanwhile."""
    sentence = _("{who} is {state} and uses the image. Shut it down first.")
    if guest.kind == Guest.Kind.DOMAIN and guest.state == "running" and guest.host_id == image.host_id:
        sentence = _(
            "{who} is {state} and uses the image. Shut it down first, or trim, flatten, merge or enlarge its disk "
            "from the guest's page while it runs."
        )
    return sentence.format(who=named(guest, image), state=guest.state)


def _use(image: Image) -> list[Refusal]:
    if device := image.attached:
        told = _("{image} is attached to {host} as {path}. Detach it first.")
        told = told.format(image=image.name, host=image.host.name, path=device["path"])
        return [Refusal("image_in_use", told)]
    if image.in_use is None:
        why = image.pool.owners_unknown or image.host.owners_unknown or _("The image has not been scanned yet.")
        return [
            Refusal("guests_unknown", _("{why} The image is not changed until its users are known.").format(why=why))
        ]
    locked = [disk.guest for disk in image.disks if disk.guest.lock]
    if locked:
        sentence = _(
            "{who} is locked ({lock}). Wait until the lock is released, or unlock the guest in its hypervisor."
        ).format(who=named(locked[0], image), lock=locked[0].lock)
        return [Refusal("guest_locked", sentence)]
    if not image.in_use:
        return []
    running = [disk.guest for disk in image.disks if not disk.guest.off]
    if running:
        return [Refusal("guest_running", _running(running[0], image))]
    told = _("The image is in use ({why}). Shut down the guest or stop the program that uses it, then try again.")
    return [Refusal("image_in_use", told.format(why=image.in_use_detail))]


#: What stands against a rewrite in what an image holds, by its code.
_CONTENT: dict[str, Translatable] = {
    "immutable": gettext_lazy(
        "{image} is protected (chattr +i or +a), or is the disk of a Proxmox VE template that linked clones use. It "
        "cannot be changed. Reclaim the clones instead."
    ),
    "encrypted": gettext_lazy("The image is encrypted. Without its key, zeros and unused data cannot be recognised."),
    "has_internal_snapshots": gettext_lazy(
        "The image has {snapshots} internal snapshots, which a rewrite would drop. Delete those that you do not need "
        "(qemu-img snapshot -d)."
    ),
    "external_data_file": gettext_lazy(
        "The data of the image is in a separate data file, which a rewrite would not copy."
    ),
    "unsupported_subformat": gettext_lazy(
        "The size of the image is ambiguous: {size:,} bytes by its geometry, {other_size:,} by its footer. A rewrite "
        "could truncate it. Convert it with the program that created it."
    ),
    "dirty_or_corrupt": gettext_lazy(
        "The image was not closed cleanly, or is marked corrupt. Check it first (qemu-img check)."
    ),
    "hard_linked": gettext_lazy(
        "The file has {names} names (hard links). A rewrite would separate them and free nothing."
    ),
}


#: Digging changes nothing that anybody reads: snapshots and further names of the file keep what they have.
DIGGING_KEEPS = frozenset({"has_internal_snapshots", "hard_linked"})


def of_content(image: Image) -> list[Refusal]:
    """What stands against a rewrite in what an image is and holds."""
    header, other_size = image.from_header, image.from_header("other_size")
    is_template = image.pool.source == StoragePool.Source.PROXMOX and image.name.startswith(_BASE)
    stands = {
        "immutable": header("immutable") is True or is_template,
        "encrypted": image.encrypted,
        "has_internal_snapshots": image.snapshots,
        "external_data_file": header("data_file"),
        "unsupported_subformat": other_size is not None,
        "dirty_or_corrupt": header("dirty") or header("corrupt"),
        "hard_linked": image.nlink > 1,
    }
    sizes = {"size": image.virtual_size or 0, "other_size": other_size or 0}
    values = {"image": image.name, "snapshots": len(image.snapshots), "names": image.nlink} | sizes
    return [Refusal(code, str(_CONTENT[code]).format(**values)) for code, is_so in stands.items() if is_so]


def for_space(pool: StoragePool, scratch_bytes: int | None, others_bytes: int = 0) -> list[Refusal]:
    """Whether the pool has room for that much scratch space, for what other jobs there need, and for the reserve."""
    capacity, available = pool.capacity_bytes, pool.available_bytes
    if not scratch_bytes or capacity is None or available is None:
        return []
    reserve = reserve_of(capacity)
    if available - reserve >= scratch_bytes + others_bytes:
        return []
    sentence = _(
        "The job needs up to {scratch:,} bytes beside the original, and {reserve:,} must stay free. {pool} has "
        "{available:,} free. Free some space, or reclaim smaller images first."
    )
    if others_bytes:
        sentence = _(
            "The job needs up to {scratch:,} bytes beside the original, queued and running jobs need up to "
            "{others:,} more, and {reserve:,} must stay free. {pool} has {available:,} free. Free some space, wait "
            "for those jobs or cancel some, or keep no undo copies."
        )
    told = sentence.format(
        scratch=scratch_bytes, others=others_bytes, reserve=reserve, pool=pool.name, available=available
    )
    return [Refusal("not_enough_space", told)]


def reserve_of(capacity_bytes: int) -> int:
    """What must stay free on a filesystem of that capacity, in bytes."""
    return max(capacity_bytes * RESERVE_PERCENT // 100, RESERVE_BYTES)


def age_warning(image: Image) -> list[str]:
    """A warning when the facts are old."""
    if image.last_scanned is None or (timezone.now() - image.last_scanned).total_seconds() < 3600:
        return []
    told = _("These facts are from {at:%Y-%m-%d %H:%M} UTC. The agent checks them again before the job starts.")
    return [told.format(at=image.last_scanned)]
