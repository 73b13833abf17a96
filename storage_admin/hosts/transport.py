"""How the agent is started on a host: here as root, else by ``sudo -n``. (Over ssh comes with remote hosts.)"""

import getpass
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from django.conf import settings

from storage_admin.agent import bundle
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import Host


@lru_cache(maxsize=1)
def agent_bundle() -> bundle.Bundle:
    """The agent as one file, built once per process into the data folder."""
    return bundle.build(Path(settings.DATA_DIR) / "agent")


def agent_command(host: Host) -> list[str]:
    """The argument list that starts the agent on ``host``.

    Raises:
        RefusedError: ``host_unreachable``, with the command that mends it.
    """
    if host.kind != Host.Kind.LOCAL:
        raise RefusedError("host_unreachable", f"{host.name} is of a kind that this version does not reach.")
    command = [sys.executable, "-I", str(agent_bundle().path)]
    if os.geteuid() == 0:
        return command
    sudo = shutil.which("sudo")
    if sudo is None or subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode != 0:
        raise RefusedError(
            "host_unreachable",
            "Images belong to root here, and this program may not become root. Run as root: "
            f"echo '{getpass.getuser()} ALL=(root) NOPASSWD: ALL' > /etc/sudoers.d/storage-admin",
        )
    return [sudo, "-n", *command]
