"""Whether Proxmox VE would drop lines of a guest's file: looked for there, where an agent can read it."""

import hashlib

from storage_admin.agent.protocol import unb64
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import hidden
from storage_admin.hosts.proxmox.client import Api
from storage_admin.hosts.proxmox.config import Config, read_snapshots
from storage_admin.hosts.proxmox.errors import changed_meanwhile


def refuse_dropping(host: Host, api: Api, config: Config, name: str) -> None:
    """Refuse where a write of the configuration would drop lines of it. By the API alone nobody can tell.

    Args:
        config: as the API answers now.
        name: of the guest, for the sentence.

    Raises:
        RefusedError: ``hidden_lines``; ``stale_plan``: the file is another one by now.
        HostError: the file or the API cannot be read.
    """
    if host.by_api_alone:
        return
    ending = f"/{config.guest.file}"
    files = [file for file in asking.ask(host, "pve", {})["files"] if str(file["name"]).endswith(ending)]
    contents = [unb64(str(file["content_b64"])) for file in files]
    content = next((one for one in contents if _digest(one) == config.digest), None)
    if content is None:
        raise changed_meanwhile()
    hidden.refuse(name, hidden.lines(content, config, dict(read_snapshots(api, config))))


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
