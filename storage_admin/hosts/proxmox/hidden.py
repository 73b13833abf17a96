"""Lines of a guest's file that Proxmox VE passes over, told by comparing the file with what its API answers.

Whatever writes the file drops them: a change of the configuration, ``move_disk``, ``resize``, a snapshot (tried with
qemu-server 9.2). A trim by the guest agent writes nothing. The API never shows them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.names import display
from storage_admin.hosts.proxmox.config import Config

CODE = "hidden_lines"

_HEADING = re.compile(r"\[([a-z][a-z0-9_:-]*)\]\s*", re.IGNORECASE | re.ASCII)
_LINE = re.compile(r"([a-z][a-z_-]*\d*):\s*(.+?)\s*", re.ASCII)
#: What a container passes to LXC as it is.
_LXC = re.compile(r"(lxc\.[a-z0-9_.-]+)(?::|\s*=)\s*(.*?)\s*", re.ASCII)
#: Sections that Proxmox VE keeps as they are, and keys that stand in no answer.
_KEPT_SECTIONS = frozenset({"special:cloudinit", "special:fleecing"})
_KEPT = frozenset({"description", "snapstate", "delete"})


def lines(content: bytes, config: Config, snapshots: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """The lines of a guest's file that its API does not show, each with its section.

    Args:
        content: of the file.
        config: as the API answers about that file.
        snapshots: the values of each snapshot, as the API answers.
    """
    told: dict[str, Mapping[str, str] | None] = {"": config.now, "pending": config.next, "pve:pending": config.next}
    told |= {name.lower(): values for name, values in snapshots.items()} | dict.fromkeys(_KEPT_SECTIONS)
    found = list(_passed_over(content.decode("utf-8", "surrogateescape"), told))
    return tuple(display(line.encode("utf-8", "surrogateescape"))[:200] for line in found)


def _passed_over(text: str, told: Mapping[str, Mapping[str, str] | None]) -> Iterator[str]:
    section, seen = "", dict[str, str]()
    for line in text.split("\n"):
        heading = _HEADING.fullmatch(line)
        if heading is not None:
            section, seen = heading[1].lower(), {}
            if section not in told:
                yield line
        elif section not in told:
            yield from [f"[{section}] {line}"] if line.strip() else []
        elif (shown := told[section]) is not None and line.strip() and not line.startswith("#"):
            where = f"[{section}] " if section else ""
            key = _key(line)
            if not key or (key not in shown and key not in _KEPT):
                yield where + line
            elif key in seen and not _LXC.fullmatch(line):  # the last one holds
                yield where + seen[key]
            seen[key] = line


def _key(line: str) -> str:
    found = _LINE.fullmatch(line) or _LXC.fullmatch(line)
    return "" if found is None else "ide2" if found[1] == "cdrom" else found[1]


def refuse(name: str, found: Sequence[str]) -> None:
    """Refuse to have a file written that has such lines.

    Raises:
        RefusedError: ``hidden_lines``, with the first of them.
    """
    if found:
        raise RefusedError(
            CODE,
            _(
                "The configuration of {name} has lines that Proxmox VE drops when it writes the file, such as "
                "{found!r}. Correct them on the node first."
            ).format(name=name, found=found[0][:100]),
        )
