"""A chain as lines of a table: base to leaf, each line indented below what it stands on."""

from dataclasses import dataclass

from django.utils.translation import gettext as _

from images.selectors import Chain, Node
from storage_admin.web.templatetags.storage import bar_scale

#: A template may have thousands of overlays: so many lines are shown, always with the image itself and its bases.
MOST_LINES = 150
#: Deeper lines are indented no further.
DEEPEST = 16


@dataclass(frozen=True)
class Line:
    """One image of the tree.

    Args:
        twigs: the strokes before its name: ``pipe``, ``gap``, ``tee`` or ``corner``.
        overlays: how many images stand right on it.
        needed: why nothing would be freed, in words; empty where something would, or where that is not known.
    """

    node: Node
    twigs: tuple[str, ...]
    here: bool
    overlays: int
    needed: str


@dataclass(frozen=True)
class Tree:
    """``hidden`` is the number of images that are not shown."""

    lines: tuple[Line, ...]
    hidden: int
    scale: int


def tree_of(chain: Chain, image_id: int) -> Tree:
    """The lines for a chain, around the image of that id. A circle is cut open where it was entered."""
    nodes = {node.id: node for node in chain.nodes}
    base_of = {edge.overlay: edge.base for edge in chain.edges if edge.base in nodes}
    overlays: dict[int, list[int]] = {}
    for node in chain.nodes:
        if node.id in base_of:
            overlays.setdefault(base_of[node.id], []).append(node.id)
    own = _way_down(image_id, base_of)
    for ids in overlays.values():
        ids.sort(key=lambda pk: (pk not in own, nodes[pk].name, pk))
    order = _walk([node.id for node in chain.nodes if node.id not in base_of], nodes, overlays)
    lines = tuple(
        Line(
            node=nodes[pk],
            twigs=twigs[-DEEPEST:],
            here=pk == image_id,
            overlays=len(overlays.get(pk, ())),
            needed=_needed(nodes[pk], len(overlays.get(pk, ()))),
        )
        for pk, twigs in order
    )
    shown = tuple(line for at, line in enumerate(lines) if at < MOST_LINES or line.node.id in own)
    scale = bar_scale((line.node.virtual_size, line.node.allocated_size) for line in shown)
    return Tree(lines=shown, hidden=len(lines) - len(shown), scale=scale)


def _way_down(image_id: int, base_of: dict[int, int]) -> set[int]:
    way: set[int] = set()
    at: int | None = image_id
    while at is not None and at not in way:
        way.add(at)
        at = base_of.get(at)
    return way


def _walk(
    roots: list[int], nodes: dict[int, Node], overlays: dict[int, list[int]]
) -> list[tuple[int, tuple[str, ...]]]:
    """Depth first, without recursion: chains may be deeper than Python's stack."""
    order: list[tuple[int, tuple[str, ...]]] = []
    seen: set[int] = set()
    for start in (*roots, *nodes):  # what no root leads to lies on a circle
        waiting: list[tuple[int, tuple[str, ...], bool]] = [(start, (), True)]
        while waiting:
            pk, outer, last = waiting.pop()
            if pk in seen:
                continue
            seen.add(pk)
            is_root = pk == start
            order.append((pk, () if is_root else (*outer, "corner" if last else "tee")))
            inner = () if is_root else (*outer, "gap" if last else "pipe")
            below = [child for child in overlays.get(pk, ()) if child not in seen]
            waiting += [(child, inner, at == len(below) - 1) for at, child in reversed(list(enumerate(below)))]
    return order


def _needed(node: Node, overlays: int) -> str:
    if node.freed_if_deleted != 0:
        return ""
    if node.state == "missing":
        return _("already gone")
    if overlays:
        return f"used by {overlays:,} {'overlay' if overlays == 1 else 'overlays'}"
    if node.guests:
        return _("used by guest {name}").format(name=node.guests[0].name)
    if node.in_use:
        return _("in use")
    return _("file has other hard links") if node.allocated_size else _("occupies no space")
