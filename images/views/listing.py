"""What the address bar of the images page says: filters, search and order, with the API's names."""

from dataclasses import dataclass, field

from django.db.models import Q, QuerySet

from images import selectors
from images.models import Image
from images.selectors.lists import ORDERINGS
from images.views.access import PageRequest
from storage_admin.accounts.saved_views import list_page

FORMATS = ("qcow2", "raw", "vmdk", "vdi", "vpc", "vhdx", "qed", "luks")
#: The costliest first, until somebody wants another order.
DEFAULT_ORDERING = "-allocated_size"
#: Words for what is known, not so, or not known, and what they mean of a column.
KNOWN: dict[str, tuple[str, bool]] = {"true": ("", True), "false": ("", False), "unknown": ("__isnull", True)}
LEAST = {"min_reclaimable": "reclaimable_bytes", "min_chain_depth": "chain_depth"}
MOST = {"max_chain_depth": "chain_depth"}
LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Listing:
    """A list of images as it was asked for.

    Args:
        values: each filter that is set, as its text; the form shows it again.
        ignored: filters with values that mean nothing. They are named on the page, as silence would show a wrong list.
    """

    rows: QuerySet[Image]
    ordering: str
    values: dict[str, str]
    ignored: list[str] = field(default_factory=list)


def listing_of(request: PageRequest) -> Listing:
    """The images that the query string asks for, in its order, before they are cut into pages."""
    rows = selectors.images_for(request.actor)
    values: dict[str, str] = {}
    ignored: list[str] = []
    for name, value in request.GET.items():
        text = str(value).replace("\0", "").strip()
        condition = _condition(name, text) if text else None
        if text and name in _NAMES:
            values[name] = text
            if condition is None:
                ignored.append(name)
        if condition is not None:
            rows = rows.filter(condition)
    ordering = request.GET.get("ordering", DEFAULT_ORDERING)
    if ordering.removeprefix("-") not in ORDERINGS:
        ordering = DEFAULT_ORDERING
    return Listing(rows=selectors.ordered(rows, ordering), ordering=ordering, values=values, ignored=ignored)


_NAMES = frozenset({"search", "format", "state", "in_use", "orphan", "guest", "host", "pool", *LEAST, *MOST})
PAGE = list_page("images", "Images", _NAMES)


def _condition(name: str, text: str) -> Q | None:
    """What a filter means, ``None`` where it means nothing."""
    if name == "search":
        return selectors.with_text(text)
    if name == "format":
        return Q(declared_format=text) | Q(declared_format="", format=text) if text in FORMATS else None
    if name == "state":
        return Q(state=text) if text in Image.State.values else None
    if name in {"in_use", "orphan"}:
        suffix, value_of = KNOWN.get(text, ("", None))
        return None if value_of is None else Q(**{f"{name}{suffix}": value_of})
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    return _number(name, value) if 0 <= value <= LARGEST else None


def _number(name: str, value: int) -> Q | None:
    if name in LEAST:
        return selectors.at_least(LEAST[name], value)
    if name in MOST:
        return selectors.at_most(MOST[name], value)
    if name == "guest":
        return _guest(value)
    if name == "host":
        return selectors.of_host(value)
    return Q(pool=value) if name == "pool" else None


def _guest(guest_id: int) -> Q:
    """Images of a guest. By their ids, as a guest may use an image twice and it is listed once."""
    return Q(pk__in=Image.objects.filter(uses__disk__guest_id=guest_id).values("pk"))
