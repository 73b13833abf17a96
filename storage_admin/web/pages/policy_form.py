"""The form of a policy: what its fields hold, as texts, and what that means."""

from dataclasses import dataclass, field
from typing import Any

from django.http import QueryDict
from django.utils.translation import gettext as _

from images.models import Policy
from images.policies.shape import KINDS
from storage_admin.accounts.models import Actor
from storage_admin.errors import InvalidError
from storage_admin.jobs import kinds
from storage_admin.jobs.kinds import JobKind
from storage_admin.moments import zones
from storage_admin.web.lists import as_choices
from storage_admin.web.pages.policy_boxes import LISTS, boxes_of, checked

MIB = 1 << 20
#: What a policy never asks for, or what would name one image.
HIDDEN = frozenset({"start_after", "disk", "down_to", "accept_hidden_lines"})
TEXTS = ("name", "cron", "timezone", "name_pattern", "kind")
NUMBERS = (
    "window_minutes", "quiet_minutes", "min_reclaimable_percent", "min_age_hours", "min_chain_depth",
    "max_jobs_per_host", "backup_max_days",
)  # fmt: skip
#: Of them, those that nobody can leave empty; the others are what a policy has without them.
REQUIRED = frozenset({"window_minutes", "quiet_minutes", "max_jobs_per_host"})
SWITCHES = ("enabled", "include_decayed", "include_preallocated")
#: Fields of the form that are not named as their columns.
FIELDS = {"min_reclaimable_bytes": "min_reclaimable_mib"}
#: Whose columns have their defaults.
_DEFAULTS = Policy()
#: The form's name of each option begins with it.
OPTION = "option-"


@dataclass(frozen=True)
class Field:
    """One option of the job's kind.

    Args:
        choices: of a select element; empty for a number.
    """

    name: str
    word: str
    hint: str
    value: str
    choices: list[dict[str, Any]] = field(default_factory=list)


def least_gain(kind: str) -> str:
    """What a new policy asks an image to win unless somebody says otherwise, in MiB."""
    return "100" if kind == "reclaim" else "0"


def of_its_kind(form: QueryDict) -> QueryDict:
    """A new policy's form where another job was chosen: the gain that it asks for is that job's, if nobody typed it."""
    kind = form.get("kind", "")
    shown = form.get("options_of", kind)
    if shown == kind or form.get("min_reclaimable_mib") != least_gain(shown):
        return form
    changed = form.copy()
    changed["min_reclaimable_mib"] = least_gain(kind)
    return changed


def texts_of(policy: Policy) -> QueryDict:
    """A policy as its form holds it."""
    form = QueryDict(mutable=True)
    for name in (*TEXTS, *NUMBERS):
        value = getattr(policy, name)
        form[name] = "" if value is None else str(value)
    form["min_reclaimable_mib"] = _plain(policy.min_reclaimable_bytes / MIB)
    for name in SWITCHES:
        if getattr(policy, name):
            form[name] = "on"
    for name in LISTS:
        form.setlist(name, [str(one) for one in getattr(policy, name)])
    for name, value in policy.options.items():
        form[OPTION + name] = _written(name, value)
    return form


def values_of(form: QueryDict, kept: Policy, wrong: dict[str, str]) -> dict[str, Any]:
    """What a form says, as columns of a policy; what cannot be read has its default.

    Args:
        kept: the policy as it is kept: a list that names something becomes empty, which means all, only on purpose.
        wrong: gets a sentence for each field that cannot be read, by the form's name of it.
    """
    values: dict[str, Any] = {name: form.get(name, "").strip() for name in TEXTS}
    for name in NUMBERS:
        text = form.get(name, "").strip()
        is_given = text or name in REQUIRED
        default = getattr(_DEFAULTS, name)
        values[name] = _number(text, name, wrong, default, whole=True) if is_given else default
    values["min_reclaimable_bytes"] = 0
    if text := form.get("min_reclaimable_mib", "").strip():
        values["min_reclaimable_bytes"] = int(_number(text, "min_reclaimable_mib", wrong, 0) * MIB)
    for name in SWITCHES:
        values[name] = name in form
    for name in LISTS:
        values[name] = checked(form, name, kept, wrong)
    values["options"] = _options(form, wrong) if values["kind"] in KINDS else {}
    return values


def fields_of(kind_name: str, form: QueryDict) -> list[Field]:
    """The options of a kind, with what the form holds."""
    kind = kinds.get(kind_name if kind_name in KINDS else KINDS[0])
    return [_field(kind, name, form) for name in kind.properties if name not in HIDDEN]


def choices_of(form: QueryDict, actor: Actor, kept: Policy) -> dict[str, Any]:
    """What the form offers.

    Args:
        kept: the policy as it is kept: what it names is offered, also where there is no such thing any more.
    """
    titles = [(name, kinds.get(name).title) for name in KINDS]
    return {
        "kinds": as_choices(titles, form.get("kind", "")),
        "zones": zones(),
        "options": fields_of(form.get("kind", ""), form),
    } | boxes_of(form, actor, kept)


def _field(kind: JobKind, name: str, form: QueryDict) -> Field:
    schema = kind.properties[name]
    word = name.replace("_", " ").replace("idle io", "idle I/O")
    hint = schema.get("description", "").replace("null for", "empty for")
    if "boolean" in schema.get("type", ""):
        hint = hint.replace("empty for the host default", "the host default")
    if in_mib(name):
        hint = hint.replace("Limit in bytes per second", "Limit")
        word = f"{word.removesuffix(' sec').removesuffix(' bytes')} (MiB{'/s' if name.endswith('sec') else ''})"
    if name.endswith("_hours"):
        word = f"{word.removesuffix(' hours')} (hours)"
    default = _written(name, schema.get("default"))
    value = form.get(OPTION + name, default)
    pairs: list[tuple[str, str]] = [(one, one.replace("_", " ")) for one in schema.get("enum", ())]
    if "boolean" in schema.get("type", ""):
        pairs = [("true", "yes"), ("false", "no")]
        pairs = [("", _("host default")), *pairs] if "null" in schema["type"] else pairs
    return Field(OPTION + name, word, hint, value, as_choices(pairs, value))


def in_mib(name: str) -> bool:
    """Whether the form shows an option in MiB."""
    return name.endswith(("_bytes", "_bytes_sec"))


def _options(form: QueryDict, wrong: dict[str, str]) -> dict[str, Any]:
    kind, options = kinds.get(form.get("kind", "")), dict[str, Any]()
    for name, schema in kind.properties.items():
        text = form.get(OPTION + name, "").strip()
        if not text or name in HIDDEN:
            continue
        if "enum" in schema:
            options[name] = text
        elif "boolean" in schema["type"]:
            options[name] = text == "true"
        else:
            number = _number(text, OPTION + name, wrong, 0)
            scaled = number * (MIB if in_mib(name) else 1)
            options[name] = int(scaled) if scaled == int(scaled) or in_mib(name) else scaled
    try:
        kind.clean(options)
    except InvalidError as error:
        known = {OPTION + name: text for name, text in error.fields.items() if name in kind.properties}
        wrong.update(known | wrong)
        return {} if known else options
    return options


def _number(text: str, name: str, wrong: dict[str, str], default: float, *, whole: bool = False) -> Any:
    try:
        value = int(text) if whole else float(text)
        if abs(value) < 1e15:
            return value
    except (ValueError, OverflowError):
        pass
    wrong[name] = _("Enter a whole number.") if whole else _("Enter a number.")
    return default


def _written(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return _plain(value / MIB) if in_mib(name) else _plain(value) if isinstance(value, float) else str(value)


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
