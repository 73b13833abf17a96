"""The words of a job: its method, its options, the times in its result."""

import shlex
from datetime import datetime
from typing import Any

from django import template
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from images.rewrite.kind import Rewriting
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job
from storage_admin.words import said, size, words

register = template.Library()

WORDS = {
    "down_to": gettext_lazy("Flatten down to"),
    "undo_hours": gettext_lazy("Undo copy kept for"),
    "bandwidth_bytes_sec": gettext_lazy("Bandwidth limit"),
    "idle_io": gettext_lazy("Idle I/O priority"),
    "when_running": gettext_lazy("If a guest is running"),
    "start_after": gettext_lazy("Afterwards"),
    "format": gettext_lazy("Target format"),
    "format_options": gettext_lazy("Format options"),
    "size_bytes": gettext_lazy("Size"),
    "memory_bytes": gettext_lazy("Memory"),
    "part_bytes": gettext_lazy("Size of a part"),
    "target_pool": gettext_lazy("Target pool"),
    "target_name": gettext_lazy("New file name"),
    "replace": gettext_lazy("Original image"),
    "repoint_guest": gettext_lazy("Guest definitions"),
}
#: Those that are bytes.
SIZES = frozenset({"size", "size_bytes", "virtual_size", "memory_bytes", "part_bytes"})
#: Shown even where they are what the kind does by itself.
ALWAYS = frozenset({"undo_hours", "format", "repair"})


@register.filter
def method_word(method: str, kind: str) -> str:
    """A method's word as on the button that started it."""
    known = kinds.find(kind)
    return known.method_word(method) if known else words(method).capitalize()


@register.filter
def shell(argv: list[str]) -> str:
    """A command as it would be typed; what the agent says about it in brackets at its end becomes a comment."""
    if argv and argv[-1].startswith("(") and argv[-1].endswith(")"):
        return f"{shlex.join(argv[:-1])}  # {argv[-1][1:-1]}"
    return shlex.join(argv)


@register.filter
def moment(text: str | None) -> datetime | None:
    """A time in a job's result, which is kept as ISO 8601."""
    return datetime.fromisoformat(text) if text else None


@register.filter
def asked_for(job: Job) -> list[tuple[str, str]]:
    """Word and value of each option that differs from what the kind does by itself, and of those in :data:`ALWAYS`."""
    known = kinds.find(job.kind)
    defaults = {name: schema.get("default") for name, schema in known.properties.items()} if known else {}
    told = {"method", "wait_hours"} if replaces(job) else {"method", "wait_hours", "undo_hours"}
    shown = []
    for name, value in job.options.items():
        by_itself = name in defaults and value == defaults[name] and name not in ALWAYS
        if name not in told and not by_itself and value not in (None, {}):
            shown.append((str(WORDS.get(name, words(name).capitalize())), _value(job, name, value)))
    return shown


def replaces(job: Job) -> bool:
    """Whether an original is to be kept at all."""
    kind = kinds.find(job.kind)
    return not isinstance(kind, Rewriting) or kind.replaces((job.plan or {}).get("method", ""), job.options)


def _value(job: Job, name: str, value: Any) -> str:
    if name == "undo_hours":
        return _("{hours:g} hours").format(hours=value) if value else _("none kept")
    if name in SIZES:
        return _("{size} ({exact:,} bytes)").format(size=size(value), exact=value)
    if name == "bandwidth_bytes_sec":
        return f"{size(value)}/s"
    if name == "when_running" and value == "wait":
        hours = job.options.get("wait_hours", 0)
        return _("wait for shutdown, at most {hours:g} hours").format(hours=hours)
    if name == "start_after":
        return _("start the guest again") if value else _("keep the guest off")
    if name == "replace":
        return _("replaced") if value else _("unchanged")
    if name == "repoint_guest":
        return _("switched to the new file") if value else _("unchanged")
    if name == "format_options":
        return ", ".join(f"{option}={said(wanted)}" for option, wanted in value.items())
    if name == "down_to":
        return _name_in(job, value)
    return said(value)


def _name_in(job: Job, image_id: int) -> str:
    """The image's name as the plan knew it."""
    names = {affected["id"]: affected["name"] for affected in (job.plan or {}).get("affected_images", [])}
    return str(names.get(image_id, _("image {number}").format(number=image_id)))
