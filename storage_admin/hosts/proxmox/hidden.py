"""Lines of a guest's file that Proxmox VE passes over, told by comparing the file with what its API answers.

Whatever writes the file drops them: a change of the configuration, ``move_disk``, ``resize``, a snapshot (tried with
qemu-server 9.2). A trim by the guest agent writes nothing. The API never shows them.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import RefusedError, unb64
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import shown
from storage_admin.hosts.proxmox.client import Api
from storage_admin.hosts.proxmox.conffiles import BESIDE, LINE, LXC
from storage_admin.hosts.proxmox.config import Config, read_snapshots
from storage_admin.hosts.proxmox.drives import VM
from storage_admin.hosts.proxmox.errors import changed_meanwhile

CODE = "hidden_lines"

_HEADING = re.compile(r"\[([a-z][a-z0-9_:-]*)\]\s*", re.IGNORECASE | re.ASCII)
#: Sections that Proxmox VE keeps as they are.
_KEPT_SECTIONS = frozenset({"special:cloudinit", "special:fleecing"})


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
    return tuple(shown(line, 200) for line in found)


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
        elif (values := told[section]) is not None and line.strip() and not line.startswith("#"):
            where = f"[{section}] " if section else ""
            key = _key(line)
            if not key or (key not in values and key not in BESIDE):
                yield where + line
            elif key in seen and not LXC.fullmatch(line):  # the last one holds
                yield where + seen[key]
            seen[key] = line


def _key(line: str) -> str:
    found = LINE[VM].fullmatch(line) or LXC.fullmatch(line)
    return "" if found is None else "ide2" if found[1] == "cdrom" else found[1]


def refuse_dropping(host: Host, api: Api, config: Config, name: str) -> None:
    """Refuse where a write of the configuration would drop lines of it. By the API alone nobody can tell.

    Args:
        config: as the API answers now.
        name: of the guest, for the sentence.

    Raises:
        RefusedError: ``hidden_lines``, with the first of them; ``stale_plan``: the file is another one by now.
        HostError: the file or the API cannot be read.
    """
    if host.by_api_alone:
        return
    ending = f"/{config.guest.file}"
    files = [file for file in asking.ask(host, "pve", {})["files"] if str(file["name"]).endswith(ending)]
    contents = [unb64(str(file["content_b64"])) for file in files]
    digests = {hashlib.sha1(content, usedforsecurity=False).hexdigest(): content for content in contents}
    if config.digest not in digests:
        raise changed_meanwhile()
    if found := lines(digests[config.digest], config, dict(read_snapshots(api, config))):
        raise RefusedError(
            CODE,
            _(
                "The configuration of {name} has lines that Proxmox VE drops when it writes the file, such as "
                "{found!r}. Correct them on the node first."
            ).format(name=name, found=found[0][:100]),
        )
