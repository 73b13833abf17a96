"""What a domain may take of the disks: what is asked for, checked before anything runs, and what came of it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from django.utils.translation import gettext as _

from storage_admin.errors import InvalidError, of_field
from storage_admin.hosts.libvirt.limits import HIGHEST, SETTABLE, SHOWN

LEAST_WEIGHT, MOST_WEIGHT = 1, 1000
#: Below it some kernels refuse a weight, and then a guest does not start that has it in its definition.
SAFE_WEIGHT = 100
_TARGET = re.compile(r"[a-z][a-z0-9]{0,31}", re.ASCII)


@dataclass(frozen=True)
class IoSettings:
    """What is set.

    Args:
        weight: ``None`` where none is.
        limits: by disk, bytes or operations a second; what is not limited is not there.
        others: by disk, what else libvirt keeps beside the limits: bursts, lengths, the group that shares them.
    """

    weight: int | None = None
    limits: dict[str, dict[str, int]] = field(default_factory=dict)
    others: dict[str, dict[str, int | str]] = field(default_factory=dict)


@dataclass(frozen=True)
class IoOutcome:
    """What was there, what is there now (read again), and since when it counts.

    Args:
        before, now: what holds: of the running domain where it runs, else of its definition.
        running: whether it runs.
        as_asked: whether all that was asked for is there now, where it was to be set.
        effect: ``now``, ``next_start``, ``unsupported`` where no disk of the host weighs guests, or ``unknown`` where
            libvirt has refused a part, or nobody told whether a disk weighs.
        words: all of it in sentences.
        notes: what an admin should know beside.
    """

    before: IoSettings
    now: IoSettings
    running: bool
    as_asked: bool
    effect: str
    words: str
    notes: tuple[str, ...] = ()


def checked(weight: object, limits: object) -> tuple[int | None, dict[str, dict[str, int]] | None]:
    """What is to be set, if it can be.

    Raises:
        InvalidError: it is nothing, out of range, or libvirt has no such limit.
    """
    if weight is None and not limits:
        raise InvalidError(_("Set a weight or limits."), {"weight": _("Enter a number from 1 to 1000.")})
    return _weight(weight), _limits(limits)


def _weight(weight: object) -> int | None:
    if weight is None:
        return None
    if not _is_number(weight, LEAST_WEIGHT, MOST_WEIGHT):
        raise of_field(
            "weight",
            _("The weight must be a whole number from {least} to {most}.").format(least=LEAST_WEIGHT, most=MOST_WEIGHT),
        )
    return weight


def _limits(limits: object) -> dict[str, dict[str, int]] | None:
    if limits is None:
        return None
    if not isinstance(limits, Mapping):
        raise of_field("limits", _("limits must map each disk to its limits."))
    checked: dict[str, dict[str, int]] = {}
    for target, values in limits.items():
        if not isinstance(target, str) or not _TARGET.fullmatch(target):
            raise of_field("limits", _("Use the disk's name from the guest's definition, such as vda."))
        if not isinstance(values, Mapping) or set(values) - set(SETTABLE):
            raise of_field(
                "limits", _("Unknown limit. Available limits: {settable}.").format(settable=", ".join(SETTABLE))
            )
        checked[target] = {}
        for name, value in values.items():
            if not _is_number(value, 0, HIGHEST):
                sentence = _("{name} must be a whole number from 0 (no limit) to {highest:,}.")
                raise of_field("limits", sentence.format(name=name, highest=HIGHEST))
            checked[target][name] = value
    return checked


def _is_number(value: object, least: int, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _settings_of(told: dict[str, Any]) -> IoSettings:
    """What ``tune`` read."""
    limits, others = {}, {}
    for target, values in told["disks"].items():
        if shown := {name: values[name] for name in SHOWN if name in values}:
            limits[target] = shown
        if more := {name: value for name, value in values.items() if name not in SHOWN}:
            others[target] = more
    return IoSettings(told["weight"], limits, others)


def outcome(
    answer: dict[str, Any], weight: int | None, limits: dict[str, dict[str, int]] | None, weighing: list[str] | None
) -> IoOutcome:
    """What came of it, from the answer of ``tune``.

    Args:
        weighing: disks of the host on which a weight counts, as its last scan saw; ``None`` where no scan told.
    """
    before = {scope: _settings_of(told) for scope, told in answer["before"].items()}
    now = {scope: _settings_of(told) for scope, told in answer["now"].items()}
    holds = "live" if "live" in now else "config"
    as_asked = not answer["failed"] and all(_is_there(now[scope], weight, limits or {}) for scope in answer["set"])
    effect = "unknown" if not as_asked else "now" if "live" in answer["set"] else "next_start"
    if effect == "now" and weight is not None and not weighing:
        effect = "unknown" if weighing is None else "unsupported"
    words = [*_changes(answer, before, now), _since(answer, as_asked=as_asked)]
    words += [_where_weighed(weighing)] if weight is not None else []
    notes = tuple(dict.fromkeys(_notes(answer, before, now, weight)))
    return IoOutcome(
        before=before[holds], now=now[holds],
        running="live" in now, as_asked=as_asked, effect=effect, words=" ".join(words), notes=notes,
    )  # fmt: skip


def _is_there(now: IoSettings, weight: int | None, limits: dict[str, dict[str, int]]) -> bool:
    if weight is not None and now.weight != weight:
        return False
    return all(
        now.limits.get(target, {}).get(name, 0) == value
        for target, values in limits.items()
        for name, value in values.items()
    )


def _changes(answer: dict[str, Any], before: dict[str, IoSettings], now: dict[str, IoSettings]) -> Iterator[str]:
    for scope in answer["set"]:
        old, new = before[scope], now[scope]
        parts = [] if old.weight == new.weight else [f"weight {_or_none(new.weight)} (was {_or_none(old.weight)})"]
        for target in sorted({*old.limits, *new.limits}):
            was, became = old.limits.get(target, {}), new.limits.get(target, {})
            parts += [
                f"{target} {name} {_or_none(became.get(name))} (was {_or_none(was.get(name))})"
                for name in SHOWN
                if became.get(name) != was.get(name)
            ]
        yield f"{'Running guest' if scope == 'live' else 'Definition'}: {', '.join(parts) or 'unchanged'}."


def _or_none(value: int | None) -> str:
    return "none" if not value else f"{value:,}"


def _since(answer: dict[str, Any], *, as_asked: bool) -> str:
    if answer["failed"]:
        return _("libvirt refused the remaining changes: {failed}.").format(failed=answer["failed"])
    if not as_asked:
        return _("libvirt reports values that differ from the requested ones.")
    match answer["set"]:
        case ["live", "config"]:
            return _("Set for the running guest and for every start.")
        case ["live"]:
            return _("Set for the running guest, until it is shut down.")
        case _:
            return _("Set in the definition, which applies from the next start.")


def _where_weighed(weighing: list[str] | None) -> str:
    if weighing:
        return _("Weights take effect on {weighing}, where the kernel applies them.").format(
            weighing=", ".join(weighing)
        )
    if weighing is None:
        return _(
            "A weight takes effect only with the I/O scheduler BFQ or with io.cost. Whether the disk uses one of "
            "them is unknown."
        )
    return _(
        "The weight has no effect yet: no disk of this host applies weights. Choose the I/O scheduler BFQ for "
        "the disk (/sys/block/DISK/queue/scheduler), or configure io.cost, then scan the host."
    )


def _notes(
    answer: dict[str, Any], before: dict[str, IoSettings], now: dict[str, IoSettings], weight: int | None
) -> Iterator[str]:
    if weight is not None and "config" in answer["set"]:
        if answer["can_weigh"] is None:
            yield (
                _(
                    "No guest is running on the host, so its support for weights could not be checked. If the "
                    "host does not support them, libvirt refuses to start a guest that has a weight."
                )
            )
        elif weight < SAFE_WEIGHT and "live" not in answer["set"]:
            yield _("Some hosts refuse weights below {safe}. A guest with a lower weight does not start there.").format(
                safe=SAFE_WEIGHT
            )
    for scope in answer["set"]:
        old, new = before[scope], now[scope]
        for target, limits in old.limits.items():
            gone = [name for name in limits if name.startswith("total_") and name not in new.limits.get(target, {})]
            if gone:
                yield _(
                    "{target}: {gone} was replaced by separate limits for reading and writing. The two kinds cannot "
                    "be combined."
                ).format(target=target, gone=", ".join(gone))
        for target, values in old.others.items():
            kept = new.others.get(target, {})
            ways = ("read", "write")
            lost = [
                name
                for name in values
                if name.endswith("_max")
                and name not in kept
                and not any(name.replace("total", way) in kept for way in ways)
            ]
            if lost:
                yield _("{target}: {lost} was removed together with its limit.").format(
                    target=target, lost=", ".join(lost)
                )
    for one in now.values():
        # A running disk that is in none has one of its own.
        groups = Counter(str(values["group_name"]) for values in one.others.values() if "group_name" in values)
        for group, disks in groups.items():
            if disks > 1:
                yield _("{disks} disks share their limits, because they belong to the group {group}.").format(
                    disks=disks, group=group
                )
