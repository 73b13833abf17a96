"""The kind ``boot``: how long guests take to come up when several start at once, with their disks laid out differently.

What they boot is copied once a run, out of an image that nobody uses; every step makes its disks from that copy
(``source.raw``), and the guests write to these alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from storage_admin.agent.bench import boot_files, memory
from storage_admin.agent.bench.step import Bench, Fields, Setting, Step
from storage_admin.agent.bench.storm import INITRD, KERNEL, Machine, Storm
from storage_admin.agent.host import facts
from storage_admin.agent.protocol import INVALID, RefusedError
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite import volume_chains
from storage_admin.agent.rewrite.chain import Chain, Planned

TOOLS = ("qemu-img", "virsh", "stdbuf")
#: Each guest's disk: a raw file of its own; or an overlay on one raw base, or on one qcow2 base.
LAYOUTS = ("raw", "raw+qcow2", "qcow2+qcow2")
MOST_GUESTS = 64
CONSOLE, AGENT = "console", "agent"
FORMATS = frozenset({"qcow2", "raw"})
_SOURCE = "source.raw"
_LEAST_MEMORY, _MOST_MEMORY = 32 << 20, 64 << 30
_LONGEST_WAIT = 3600
_LONGEST_WORD, _LONGEST_PATH, _LONGEST_LINE = 100, 1000, 2000
#: Tables of a qcow2: 10 bytes for each cluster of 64 KiB, generously, and a few clusters.
_CLUSTER, _TABLE_BYTES, _TABLES = 64 << 10, 16, 1 << 20
#: Of what does not matter whether it is kept while it is copied.
_CARRIED = frozenset({"has_internal_snapshots", "hard_linked", "immutable"})
_FIELDS = frozenset(
    (
        *("layout", "guests", "memory_bytes", "seconds", "up", "pattern", "kernel", "initrd", "append", "image"),
        *("chain", "image_bytes", "virtual_bytes", "growth_bytes"),
    )
)


@dataclass(frozen=True)
class Boots:
    """What boots, the same in all steps of a run.

    Args:
        machine: what each guest is.
        image: that is copied, ``None`` for an empty disk; ``chain`` are the images below it.
        image_bytes: that the copy takes at most; ``virtual_bytes`` is the size of the disk.
        growth_bytes: that a guest may write.
        kernel, initrd: absolute paths on this host; empty where the disk boots.
    """

    machine: Machine
    image: Planned | None
    chain: tuple[Planned, ...]
    image_bytes: int
    virtual_bytes: int
    growth_bytes: int
    kernel: str
    initrd: str

    @property
    def tables_bytes(self) -> int:
        """What the tables of one qcow2 take."""
        return self.virtual_bytes // _CLUSTER * _TABLE_BYTES + _TABLES

    @property
    def overlay_bytes(self) -> int:
        """What an overlay takes at most."""
        return min(self.virtual_bytes, self.growth_bytes) + self.tables_bytes

    @property
    def source_bytes(self) -> int:
        """What is made once."""
        return self.image_bytes + (boot_files.MOST_BYTES if self.kernel else 0) + _TABLES

    def refuse_unbootable(self) -> None:
        """Refuse what nobody would ever see coming up; raises RefusedError(``invalid``)."""
        if self.image is None and not self.kernel:
            raise RefusedError(INVALID, "a guest boots from an image or from a kernel: name one of them")
        if self.initrd and not self.kernel:
            raise RefusedError(INVALID, "an initial file system goes with a kernel")
        if self.image is not None and self.image.format not in FORMATS:
            raise RefusedError(INVALID, "guests boot from a copy of a qcow2 or a raw image")
        for path in filter(None, (self.kernel, self.initrd)):
            if not os.path.isabs(path):
                raise RefusedError(INVALID, f"{path} is not an absolute path")


@dataclass(frozen=True)
class BootStep(Step):
    """So many guests at once, in one layout.

    Args:
        fewest: whether no other step of the run has fewer guests; without it, a run would say nothing.
    """

    setting: Setting
    layout: str
    guests: int
    boots: Boots
    fewest: bool = False

    @property
    def needed_bytes(self) -> int:
        """What is made once, the base, and what each guest writes, or its whole disk."""
        boots = self.boots
        if self.layout == "raw":
            disk = min(boots.virtual_bytes, boots.image_bytes + boots.growth_bytes)
            return boots.source_bytes + self.guests * disk
        base = 0
        if self.layout == "qcow2+qcow2":
            base = min(boots.virtual_bytes, boots.image_bytes * 9 // 8) + boots.tables_bytes
        return boots.source_bytes + base + self.guests * boots.overlay_bytes

    def unsupported(self, bench: Bench) -> str | None:  # noqa: ARG002
        """More guests than fit into the host's memory are left out; refused, where fewer were not asked for."""
        available = facts.memory_bytes("MemAvailable")
        each = self.boots.machine.memory_bytes
        if available is None or self.guests <= (fit := memory.most_guests(available, each)):
            return None
        why = (
            f"{self.guests} guests need {memory.needed_bytes(self.guests, each)} bytes of memory; {available} are "
            f"available, of which {memory.KEPT_BYTES} stay reserved for the host, so {fit} fit"
        )
        if self.fewest:
            raise RefusedError("not_enough_memory", f"{why}; give each guest less memory, or start fewer")
        return f"{why}: left out"

    def run(self, bench: Bench) -> None:
        """Make the disks, bring them out of the host's memory, let the guests go and wait for each."""
        storm = Storm(bench, self.boots.machine)
        bench.scratch.clear(_SOURCE, KERNEL, INITRD)
        make_source(bench, self.boots)
        disks, bases = lay_out(bench, self.layout, self.guests, self.boots.virtual_bytes)
        bench.measure_scratch()
        direct = bench.past_memory(*bases, *disks, direct=False)
        most = max(self.needed_bytes, bench.scratch.allocated_bytes() + self.guests * self.boots.growth_bytes)
        took = storm.run(disks, direct=direct, most_bytes=most)
        for seconds in took:
            bench.sample(self.setting, "boot_seconds", round(seconds, 3))
        bench.sample(self.setting, "boot_all_seconds", round(max(took), 3))
        bench.measure_scratch()
        bench.scratch.clear(_SOURCE, KERNEL, INITRD)


def make_source(bench: Bench, boots: Boots) -> None:
    """The disk that all others are made from, and the copies of the kernel's files, unless an earlier step made them.

    Raises:
        RefusedError: as :class:`links.Chain`; ``image_in_use``, also where a guest starts meanwhile; ``invalid``;
            ``not_enough_space``: the image holds more than was set aside.
    """
    there = bench.scratch.names()
    for path, name, marks, what in (
        (boots.kernel, KERNEL, boot_files.KERNELS, "kernel"),
        (boots.initrd, INITRD, boot_files.ARCHIVES, "archive of an initial file system"),
    ):
        if path and name not in there:
            boot_files.bring(bench, path, name, marks, what)
    if bench.scratch.allocated_bytes(KERNEL, INITRD) > boot_files.MOST_BYTES:
        raise RefusedError(
            INVALID, f"kernel and initial file system together are larger than {boot_files.MOST_BYTES} bytes"
        )
    if _SOURCE in there:
        return
    if boots.image is None:
        bench.tool(["qemu-img", "create", "-q", "-f", "raw", bench.scratch.path(_SOURCE), str(boots.virtual_bytes)])
        return
    chain = Chain(boots.image, boots.chain)
    try:
        _copy_image(bench, chain, boots)
    finally:
        chain.close()


def _copy_image(bench: Bench, chain: Chain, boots: Boots) -> None:
    """Read an image that nobody uses; a guest that starts on it meanwhile wins."""
    links.refuse_unsafe(chain, children_known=True, carried=_CARRIED)
    if chain.image.facts.virtual_size != boots.virtual_bytes:
        raise RefusedError(
            "stale_plan", f"{chain.image.shown} was resized since it was scanned; scan the host and try again"
        )
    volume_chains.refuse_foreign(chain.image, chain.ancestors)
    chain.refuse_in_use()

    def watch() -> None:
        chain.refuse_changes()
        if bench.scratch.allocated_bytes(_SOURCE) > boots.image_bytes + _TABLES:
            raise RefusedError(
                "not_enough_space",
                f"{chain.image.shown} is compressed and needs more than the {boots.image_bytes} bytes that were "
                "reserved for its copy; analyze it, then try again",
            )

    node = chain.node()
    past = ["-T", "none", "-t", "none"] if bench.direct else []
    # Made here and given as it is: with the folder, the tool could reach what is above it.
    new = Node(bench.scratch.open(_SOURCE, os.O_RDWR | os.O_CREAT), "raw", os.fsencode(bench.scratch.path(_SOURCE)))
    try:
        bench.tool(
            ["qemu-img", "convert", "-U", *past, "-O", "raw", node.argument(), new.path_by_descriptor()],
            files=new.files(written=True, beside=[node]), watch=watch,
        )  # fmt: skip
    finally:
        os.close(new.fd)
    watch()
    chain.refuse_stale()


def lay_out(bench: Bench, layout: str, guests: int, virtual_bytes: int) -> tuple[list[str], list[str]]:
    """Make the guests' disks from the source.

    Args:
        layout: one of :data:`LAYOUTS`.

    Returns:
        Names of the disks, and of what they stand on.
    """
    path = bench.scratch.path

    def convert(form: str, name: str) -> None:
        past = ["-T", "none", "-t", "none"] if bench.direct else []
        bench.tool(["qemu-img", "convert", "-f", "raw", "-O", form, *past, path(_SOURCE), path(name)])

    if layout == "raw":
        names = [f"guest-{number}.raw" for number in range(guests)]
        for name in names:
            convert("raw", name)
        return names, []
    form, base = ("raw", _SOURCE) if layout == "raw+qcow2" else ("qcow2", "base.qcow2")
    if base != _SOURCE:
        convert(form, base)
    names = [f"guest-{number}.qcow2" for number in range(guests)]
    for name in names:
        # A base beside the image is named without its folder, so that no path of this process stands in it.
        bench.tool(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", form, path(name), str(virtual_bytes)])
    return names, [base]


def parse(steps: list[Any]) -> list[Step]:
    """Steps of ``layout`` and ``guests``, and of what boots: ``image`` with its ``chain`` (as every verb takes an
    image), ``image_bytes``, ``virtual_bytes``, ``growth_bytes``, ``kernel``, ``initrd``, ``append``, ``memory_bytes``,
    ``up`` (``console`` or ``agent``), ``pattern``, ``seconds``.
    """
    parsed = [_parse(raw) for raw in steps]
    if len({step.boots for step in parsed}) > 1:
        raise RefusedError(INVALID, "all steps of a boot storm boot the same")
    fewest = min(step.guests for step in parsed)
    return [replace(step, fewest=step.guests == fewest) for step in parsed]


def _parse(raw: Any) -> BootStep:
    fields = Fields(raw, set(_FIELDS))
    kernel, initrd = (_line(fields, name, _LONGEST_PATH) for name in ("kernel", "initrd"))
    boots = Boots(
        machine=Machine(
            memory_bytes=fields.number("memory_bytes", _LEAST_MEMORY, _MOST_MEMORY),
            seconds=float(fields.number("seconds", 1, _LONGEST_WAIT)),
            pattern=_pattern(fields),
            kernel=bool(kernel),
            initrd=bool(initrd),
            append=_line(fields, "append", _LONGEST_LINE),
        ),
        image=Planned.parse(given) if (given := fields.maybe("image", dict)) is not None else None,
        chain=tuple(map(Planned.parse, fields.get("chain", list, []))),
        image_bytes=fields.number("image_bytes", 0, 1 << 46, 0),
        virtual_bytes=fields.bytes("virtual_bytes"),
        growth_bytes=fields.bytes("growth_bytes"),
        kernel=kernel,
        initrd=initrd,
    )
    boots.refuse_unbootable()
    return BootStep(fields.setting(), fields.word("layout", LAYOUTS), fields.number("guests", 1, MOST_GUESTS), boots)


def _pattern(fields: Fields) -> bytes:
    """What is waited for on the console; empty where the guest agent is asked."""
    pattern = _line(fields, "pattern", _LONGEST_WORD)
    if fields.word("up", (CONSOLE, AGENT)) == AGENT:
        return b""
    if not pattern.strip():
        raise RefusedError(
            INVALID, "pattern must not be empty: enter the text that a guest prints on its console once it is up"
        )
    return pattern.encode("utf-8")


def _line(fields: Fields, name: str, most: int) -> str:
    """A line of text, which may be missing."""
    text = fields.get(name, str, "")
    if len(text) > most or not text.isprintable():
        raise RefusedError(INVALID, f"{name} is one line of at most {most} characters")
    return text
