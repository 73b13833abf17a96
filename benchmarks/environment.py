"""What a run's figures depend on, as words. It was told by an agent: whatever is not as expected is left out."""

from typing import Any

from django.utils.translation import gettext as _

from benchmarks.models import Benchmark
from storage_admin.words import size


def told(run: Benchmark) -> list[tuple[str, str]]:
    """Word and value of each fact that is known, in the order in which they matter."""
    facts = run.environment
    lines = [
        (_("Caches"), run.caches),
        (_("Load before"), _load(facts)),
        (_("Load after"), _load(run.environment_after)),
        (_("Filesystem"), _text(facts.get("filesystem"))),
        (_("Mount options"), _text(facts.get("mount_options"))),
        (_("Mounted from"), _text(facts.get("mount_source"))),
        (_("Device"), _device(facts.get("device"))),
        (_("Tools"), _tools(facts.get("tools"))),
        (_("Kernel"), " ".join(filter(None, (_text(facts.get("kernel")), _text(facts.get("machine")))))),
        (_("Processors"), _number(facts.get("cpus"))),
        (_("Memory"), size(facts["memory_bytes"]) if _is_whole(facts.get("memory_bytes")) else ""),
    ]
    return [(word, value) for word, value in lines if value]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> str:
    return f"{value:,}" if _is_whole(value) else ""


def _load(facts: dict[str, Any]) -> str:
    load = facts.get("load")
    if not isinstance(load, list) or not load or not all(isinstance(value, int | float) for value in load):
        return ""
    return _("{load:.2f} in the last minute").format(load=load[0])


def _tools(tools: Any) -> str:
    if not isinstance(tools, dict):
        return ""
    return ", ".join(f"{name} {version}" for name, version in tools.items() if isinstance(version, str) and version)


def _device(device: Any) -> str:
    if not isinstance(device, dict):
        return ""
    words = [_text(device.get("disk")), _text(device.get("model"))]
    if isinstance(device.get("rotational"), bool):
        words.append("rotating" if device["rotational"] else _("not rotating"))
    words += [f"{word} {_text(device[name])}" for name, word in (("scheduler", "scheduler"), ("write_cache", "cache"))
              if _text(device.get(name))]  # fmt: skip
    return ", ".join(word for word in words if word)
