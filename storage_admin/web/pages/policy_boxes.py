"""The lists in a policy's form, of which several may be checked; an empty one means all."""

from dataclasses import dataclass
from typing import Any

from django.http import QueryDict
from django.utils.translation import gettext as _

from images.filters import FORMATS
from images.models import Policy
from images.policies.shape import IMAGE_KINDS
from storage_admin.accounts.models import Actor
from storage_admin.hosts.selectors import hosts_for, pools_for

#: The lists, and what one of each is called.
LISTS = {"hosts": "host", "pools": "pool", "formats": "format"}
#: Formats that no job of a policy works on: only a policy that has them already shows them.
_NOT_OFFERED = frozenset({"subvol", "unknown"})


@dataclass(frozen=True)
class Box:
    """One that may be checked.

    Args:
        beside: what tells it from others of its name.
    """

    value: str
    word: str
    beside: str
    chosen: bool


@dataclass(frozen=True)
class Boxes:
    """A list.

    Args:
        one: what one of them is called.
        all_word: what stands for all of them; empty where nothing was named yet: then none checked means all.
        all_chosen: whether that is checked.
    """

    name: str
    one: str
    boxes: list[Box]
    all_word: str
    all_chosen: bool


def boxes_of(form: QueryDict, actor: Actor, kept: Policy) -> dict[str, Boxes]:
    """The lists, by their names.

    Args:
        kept: the policy as it is kept: what it names is offered, also where there is no such thing any more.
    """
    pools = pools_for(actor).order_by("host__name", "name")
    offered = {
        "hosts": [(str(host.pk), host.name, "") for host in hosts_for(actor)],
        "pools": [(str(pool.pk), pool.name, pool.host.name) for pool in pools],
        "formats": [(name, name, "") for name in FORMATS if name not in _NOT_OFFERED],
    }
    return {name: _boxes(form, name, offered[name], kept) for name in LISTS}


def checked(form: QueryDict, name: str, kept: Policy, wrong: dict[str, str]) -> list[Any]:
    """What of a list is checked: ids, or names of formats.

    Args:
        kept: the policy as it is kept: where it names something, an empty list has to be asked for.
        wrong: gets a sentence where it was not, or where something cannot be read.
    """
    if name in form.getlist("all"):
        return []
    given, one = form.getlist(name), LISTS[name]
    has_none = name == "formats" and form.get("kind") not in IMAGE_KINDS
    if not given and getattr(kept, name) and not has_none:
        wrong[name] = _("No {one} is selected. Select at least one, or “{all}”.").format(one=one, all=_all_word(name))
    if name == "formats":
        return given
    if not all(_is_id(text) for text in given):
        wrong[name] = _("There is no such {one}.").format(one=one)
        return []
    return [int(text) for text in given]


def _boxes(form: QueryDict, name: str, offered: list[tuple[str, str, str]], kept: Policy) -> Boxes:
    """A list; what is not offered, and was named, stays in it until somebody unchecks it."""
    given, one = form.getlist(name), LISTS[name]
    named = [str(value) for value in getattr(kept, name)]
    if name == "formats":
        others = [(value, value, "") for value in named]
    else:
        others = [(value, f"{one} {value} (removed)", "") for value in [*named, *filter(_is_id, given)]]
    known = {value for value, _word, _beside in offered}
    lost = {other[0]: other for other in others if other[0] not in known}
    boxes = [Box(*each, chosen=each[0] in given) for each in [*offered, *lost.values()]]
    return Boxes(name, one, boxes, _all_word(name) if named else "", name in form.getlist("all"))


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19


def _all_word(name: str) -> str:
    return f"All {name}{', including new ones' if name == 'hosts' else ''}"
