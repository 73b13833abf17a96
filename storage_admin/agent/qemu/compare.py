"""``qemu-img compare``, in parts at the same time where that pays."""

from __future__ import annotations

import os
from collections.abc import Sequence

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import display
from storage_admin.agent.qemu.node import Effort, Node, fail, formats

_MIB = 1 << 20
#: Bytes that pay for the start of a process which compares them, and into how many parts an image is cut at most.
_WORTH_A_PART = 128 * _MIB
_MOST_PARTS = 16
_MOST_AT_ONCE = 4


def compare(io: AgentIO, first: Node, second: Node, virtual_size: int, effort: Effort) -> bool:
    """Whether a guest reads the same bytes from both images.

    Args:
        io: the controller.
        first, second: both of ``virtual_size`` bytes, a multiple of 512.

    Raises:
        HostError: one of them could not be read.
    """
    # Seen through another node, what an overlay does not hold would count as zeros and not as what its base holds.
    alone = first.backing is None and second.backing is None
    parts = parts_of(virtual_size) if alone else [(0, virtual_size)]
    asked = [[image.part(*part) if alone else image.argument() for image in (first, second)] for part in parts]
    answers = tools.run_all(
        [["qemu-img", "compare", "-U", "-p", *images] for images in asked],
        io,
        at_once=_at_once(),
        limits=None,
        idle_io=effort.idle_io,
        files=first.files(beside=[second]),
        on_output=effort.on_outputs([size for _, size in parts]),
        watch=effort.watch,
        shown=_shown_compare([first, second], len(parts)),
    )
    for answer in answers:
        if answer.exit_code not in {0, 1}:
            fail("compare", answer)
    return all(answer.exit_code == 0 for answer in answers)


def _at_once() -> int:
    """How many comparisons run at the same time: the processors belong to the guests, and the disk is one."""
    return min(_MOST_AT_ONCE, os.cpu_count() or 1)


def parts_of(virtual_size: int) -> list[tuple[int, int]]:
    """Offset and length, in bytes, of the parts that are compared by themselves.

    They are more than run at the same time: data stands together at one end of most disks, and who is done with an
    empty part takes the next one.
    """
    count = min(_MOST_PARTS, virtual_size // _WORTH_A_PART) if _at_once() > 1 else 1
    if count <= 1:
        return [(0, virtual_size)]
    size = -(-virtual_size // count) + _MIB - 1 & -_MIB
    return [(start, min(size, virtual_size - start)) for start in range(0, virtual_size, size)]


def _shown_compare(images: Sequence[Node], parts: int) -> list[str]:
    shown = ["qemu-img", "compare", "-U", *formats(images), *(display(image.path) for image in images)]
    return shown if parts == 1 else [*shown, f"(in {parts} parts)"]
