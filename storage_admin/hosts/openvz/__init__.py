"""OpenVZ: its containers, and their I/O priority. Plain commands only: those hosts have no Python 3.

Rests on what vzctl 4.11 does (its sources: ``config.c``, ``vzlist.c``, ``io.c``) and on OpenVZ 7 where that differs.
"""

from storage_admin.hosts.openvz.commands import CommandRun, has_vzctl
from storage_admin.hosts.openvz.config import Recorded
from storage_admin.hosts.openvz.files import FOLDERS
from storage_admin.hosts.openvz.ids import checked_ctid, checked_priority
from storage_admin.hosts.openvz.listing import AbsentError, containers
from storage_admin.hosts.openvz.outcome import Effect, NotSetError, PrioritySet
from storage_admin.hosts.openvz.priority import set_priority

__all__ = [
    "FOLDERS",
    "AbsentError",
    "CommandRun",
    "Effect",
    "NotSetError",
    "PrioritySet",
    "Recorded",
    "checked_ctid",
    "checked_priority",
    "containers",
    "has_vzctl",
    "set_priority",
]
