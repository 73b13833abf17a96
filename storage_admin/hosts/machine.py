"""Which machine this is: what tells the host ``local`` from every other one that shares its database.

``local`` is the machine on which ``manage.py up`` runs. Its row says which that is, by the machine's id (machine-id(5))
or, where there is none, by its name; each scan says it again. A process on another machine leaves ``local`` alone.
"""

import socket
from typing import Any

from django.db import connection

from storage_admin.agent.host import facts as hostfacts
from storage_admin.hosts.models import Host


def facts() -> dict[str, Any]:
    """What a host's capabilities say of the machine itself, as a scan writes it."""
    return {"hostname": socket.gethostname(), "machine_id": hostfacts.machine_id()}


def own() -> str:
    """The identity of this machine."""
    return _identity(facts())


def of(host: Host) -> str:
    """The identity of a host's machine; empty where nobody has looked at it yet."""
    return _identity(host.capabilities)


def _identity(facts: dict[str, Any]) -> str:
    return str(facts.get("machine_id") or facts.get("hostname") or "")


def is_this(host: Host) -> bool:
    """Whether a host's row is about this machine, as far as anybody knows."""
    return of(host) in {"", own()}


def take(host: Host) -> bool:
    """Writes into the row of ``local`` that it is this machine.

    Returns:
        ``False`` where it is another one: then nothing is written. A database in a file is where its machine is: a data
        folder that was moved takes ``local`` along.
    """
    if of(host) == own():
        return True
    if of(host) and connection.vendor != "sqlite":
        return False
    replace(host)
    return True


def replace(host: Host) -> None:
    """Writes into a host's row that it is this machine, whatever it was."""
    host.capabilities = host.capabilities | facts()
    host.save(update_fields=["capabilities"])
