"""What a boot storm boots: its options, what stands against it, how many guests fit, what the agent is told of it."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.rewrite import readers, refusals, space
from images.rewrite.kind import format_below
from images.rewrite.neighbours import ancestors, facts, find, locks_on
from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.bench import boot as agent
from storage_admin.agent.bench import memory
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import of_fields
from storage_admin.hosts.models import Host
from storage_admin.jobs.kinds import Lock
from storage_admin.jobs.plan_and_progress import Affected, Refusal, StrictValidator, refuse
from storage_admin.words import size

KIND = "boot"
MIB = 1 << 20
#: Guests at once in the quick and in the thorough variant, as far as they fit into the host's memory.
QUICK_GUESTS, THOROUGH_GUESTS = (1, 4), (1, 5, 10, 15)
#: Seconds that guests may take, and bytes of a guest's memory, unless told otherwise.
SECONDS, MEMORY_BYTES = 300, 256 * MIB
_MOST_COUNTS = 10
#: Of the refusals of a rewrite, those that do not hold for a copy that is thrown away.
_CARRIED = frozenset({"has_internal_snapshots", "hard_linked", "shared_pool"})

PROPERTIES: dict[str, dict[str, Any]] = {
    "image": {
        "type": ["integer", "null"], "minimum": 1, "default": None,
        "description": _("Id of a qcow2 or raw image on the host of the pool that nothing uses. Guests boot copies "
                         "of it."),
    },
    "kernel": {
        "type": "string", "maxLength": 1000, "default": "",
        "description": (
            _("Absolute path of a kernel on the host, which guests boot instead of their disk (admin). The kernel "
              "must be in an image folder, or below /boot or /lib/modules and readable by everyone.")
        ),
    },
    "initrd": {
        "type": "string", "maxLength": 1000, "default": "",
        "description": _("Absolute path of the initrd for the kernel, with the same restrictions "
                         "(admin)."),
    },
    "append": {
        "type": "string", "maxLength": 2000, "default": "",
        "description": _("Command line for the kernel (admin)."),
    },
    "up": {
        "enum": [agent.CONSOLE, agent.AGENT], "default": agent.CONSOLE,
        "description": _("How a guest counts as up. console: its serial console shows the pattern. agent: its "
                         "guest agent answers."),
    },
    "pattern": {
        "type": "string", "minLength": 1, "maxLength": 100, "default": "login:",
        "description": _("Text that a guest shows on its serial console when it is up."),
    },
    "guests": {
        "type": ["array", "null"], "minItems": 1, "maxItems": _MOST_COUNTS, "uniqueItems": True, "default": None,
        "items": {"type": "integer", "minimum": 1, "maximum": agent.MOST_GUESTS},
        "description": _("How many guests start at once, one step for each number. Null for 1 and 4 (quick) or 1, "
                         "5, 10 and 15 (thorough), limited to what fits into the memory of the host."),
    },
    "memory_bytes": {
        "type": "integer", "minimum": 32 * MIB, "maximum": 64 << 30, "multipleOf": MIB, "default": MEMORY_BYTES,
        "description": _("Memory of each guest, a whole number of MiB."),
    },
    "layouts": {
        "type": "array", "minItems": 1, "uniqueItems": True, "items": {"enum": list(agent.LAYOUTS)},
        "default": list(agent.LAYOUTS),
        "description": _("Disk layouts: separate raw files, overlays on one raw base, or overlays on one qcow2 "
                         "base."),
    },
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": ["object", "null"], "properties": PROPERTIES, "additionalProperties": False, "default": None,
    "description": _("For the kind boot: what boots, and how many guests at once. Null for other kinds."),
}  # fmt: skip


def clean(kind: Any, given: Any) -> dict[str, Any] | None:
    """The option ``boot`` with its defaults; ``None`` for other kinds.

    Raises:
        InvalidError: it says which of its fields is wrong.
    """
    if kind != KIND:
        if given is not None:
            raise of_fields({"boot": gettext("only for the kind boot.")})
        return None
    fields = {}
    for error in StrictValidator(SCHEMA).iter_errors(given):
        name = ".".join(["boot", *(str(part) for part in error.path if isinstance(part, str))])
        fields[name] = f"{error.message}."
    if fields:
        raise of_fields(fields)
    defaults = {name: deepcopy(schema["default"]) for name, schema in PROPERTIES.items()}
    wanted = defaults | (given or {})
    if wanted["image"] is None and not wanted["kernel"]:
        fields["boot.image"] = gettext("choose what boots: an image on this host, or a kernel on it.")
    if (wanted["initrd"] or wanted["append"]) and not wanted["kernel"]:
        fields["boot.kernel"] = gettext("required with an initial file system or a command line.")
    fields |= {
        f"boot.{name}": gettext("must be a single line.")
        for name in ("kernel", "initrd", "append", "pattern")
        if not wanted[name].isprintable()
    }
    fields |= {
        f"boot.{name}": gettext("must be an absolute path on the host.")
        for name in ("kernel", "initrd")
        if wanted[name] and not wanted[name].startswith("/")
    }
    if fields:
        raise of_fields(fields)
    return wanted


@dataclass(frozen=True)
class Boots:
    """What boots, worked out for a host.

    Args:
        image: ``None`` for an empty disk; ``below`` is what it stands on, its immediate base first.
        options: the option ``boot``, cleaned.
        available_bytes: of the host's memory at its last scan; ``None`` where it is not known.
    """

    image: Image | None
    below: tuple[Image, ...]
    options: dict[str, Any]
    available_bytes: int | None

    @property
    def memory_bytes(self) -> int:
        return int(self.options["memory_bytes"])

    @property
    def fit(self) -> int | None:
        """How many guests fit into the host's memory; ``None`` where that is not known."""
        if self.available_bytes is None:
            return None
        return memory.most_guests(self.available_bytes, self.memory_bytes)

    @property
    def image_bytes(self) -> int:
        """The most that an uncompressed copy takes, as far as is known: what its files occupy, or an analysis says."""
        if self.image is None:
            return 0
        return min(sum(map(_unpacked, (self.image, *self.below))), self.image.virtual_size or 0)

    def counts(self, *, quick: bool) -> tuple[int, ...]:
        """How many guests are started at once, one step each."""
        if self.options["guests"]:
            return tuple(self.options["guests"])
        usual = QUICK_GUESTS if quick else THOROUGH_GUESTS
        if self.fit is None or self.fit >= usual[-1]:
            return usual
        return tuple(sorted({1, *(count for count in usual if count <= self.fit), max(self.fit, 1)}))

    def memory_sentence(self, most: int) -> str:
        """What so many guests need, and how many fit."""
        told = ngettext(
            "A guest of {size} needs {needed} of memory, including the overhead of qemu",
            "{most} guests of {size} need {needed} of memory, including the overhead of qemu",
            most,
        ).format(most=most, size=size(self.memory_bytes), needed=size(memory.needed_bytes(most, self.memory_bytes)))
        if self.fit is None or self.available_bytes is None:
            return gettext("{told}. It is not known how much memory the host has available.").format(told=told)
        sentence = gettext("{told}. {available} were available at the last scan, enough for {fit}.").format(
            told=told, available=size(self.available_bytes), fit=self.fit
        )
        return (
            f"{sentence} {gettext('Guests that do not fit at the start are left out.')}"
            if most > self.fit
            else sentence
        )


def _unpacked(image: Image) -> int:
    """What an image's own data takes when none of it is compressed."""
    return max(image.occupied_bytes, space.predicted(image, "copy").high or 0)


def of(host: Host, options: dict[str, Any] | None) -> Boots:
    """What options ask for; without any, a guest with an empty disk, so that its cost can be told.

    Raises:
        InvalidError: there is no such image on the host.
    """
    wanted = options or {name: schema["default"] for name, schema in PROPERTIES.items()}
    available = host.capabilities.get("memory_available_bytes")
    image = _image(host, wanted["image"]) if wanted["image"] is not None else None
    below: list[Image] = []
    if image is not None:
        try:
            below = ancestors(image)
        except RefusedError:
            pass  # said by what stands against it
    return Boots(image, tuple(below), wanted, available if isinstance(available, int) else None)


def _image(host: Host, image_id: int) -> Image:
    found = Image.objects.select_related("host", "pool").filter(pk=image_id, host=host).first()
    if found is None:
        sentence = gettext("there is no image {image} on {host}.").format(image=image_id, host=host.name)
        raise of_fields({"boot.image": sentence})
    return found


def require_role(actor: Actor, host: Host, options: dict[str, Any] | None) -> None:
    """A kernel is named by a path on the host, like a folder that becomes a pool: that is an admin's word.

    Raises:
        ForbiddenError: the actor is none.
    """
    if options and options["kernel"]:
        actor.require(Role.ADMIN, host.slug)


def against(boots: Boots) -> list[Refusal]:
    """What stands against booting copies of an image: who uses it, its state, its chain."""
    image = boots.image
    if image is None:
        return []
    try:
        below = ancestors(image)
    except RefusedError as error:
        return [Refusal(error.code, error.detail)]
    found = [one for one in refusals.for_rewrite(image) if one.code not in _CARRIED]
    if not found and image.declared_format not in agent.FORMATS:
        told = gettext("Guests boot from qcow2 and raw images only; this image is {format}.")
        found.append(Refusal("unsupported_subformat", told.format(format=image.declared_format)))
    foreign, __ = readers.for_taken(image, below)
    return [*found, *refusals.for_bases(image, below), *foreign]


def read(boots: Boots) -> list[Affected]:
    """The image that is copied, and what it stands on."""
    images = [] if boots.image is None else [boots.image, *boots.below]
    return [Affected(image.pk, image.name, gettext("read once, not changed")) for image in images]


def locks(options: dict[str, Any] | None) -> list[Lock]:
    """The image and its bases, together with others that read them: nobody rewrites them meanwhile."""
    if not options or options["image"] is None:
        return []
    image = find(options["image"])
    return [lock for one in (image, *ancestors(image)) for lock in locks_on(one, exclusive=False)]


def told(host: Host, steps: Sequence[dict[str, Any]], options: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps as the agent takes them: the image by its path and its facts, as they are now.

    Raises:
        RefusedError: it cannot be booted by now.
    """
    boots = of(host, options)
    refuse(against(boots))
    image: dict[str, Any] = {}
    if boots.image is not None:
        chain = [
            facts(base) | {"format": format_below(boots.image, base), "for_all": base.pool.share_bases}
            for base in boots.below
        ]
        image = {"image": facts(boots.image), "chain": chain}
    return [{name: value for name, value in step.items() if name != "image_id"} | image for step in steps]


#: What is needed beside virsh: its name in a host's capabilities, and the Debian package.
NEEDED = (("qemu-img", "qemu-utils"), ("qemu-system", "qemu-system-x86"), ("libvirt", "libvirt-daemon-system"))


def missing(host: Host, needed: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Which of the tools that are needed a host has not, in a sentence, and the package of it; empty where it has all.

    A host that was never scanned may have them: its agent will tell.
    """
    there = (host.capabilities.get("tools") or {}) | {"libvirt": host.capabilities.get("libvirt") != "absent"}
    for name, package in needed:
        if not there.get(name, True):
            told = gettext("{name} is not installed on {host}. Install {package} there, then scan the host.")
            return told.format(name=name, host=host.name, package=package), package
    return "", ""
