"""Tells whenever a domain starts, stops or pauses: ``events URI``, one JSON document a line.

Each line has the ``states`` of all domains as libvirt gives them at that time, and the ``event`` that it follows; the
first comes when the connection stands, so that nothing is missed in between. It ends when the connection does, of which
keepalive messages take care, or when its standard input does.
"""

import os
import sys
from typing import Any

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.states import states

#: Seconds between two keepalive messages, and how many may stay unanswered.
KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 3
EVENTS = {
    libvirt.VIR_DOMAIN_EVENT_DEFINED: "defined",
    libvirt.VIR_DOMAIN_EVENT_UNDEFINED: "undefined",
    libvirt.VIR_DOMAIN_EVENT_STARTED: "started",
    libvirt.VIR_DOMAIN_EVENT_SUSPENDED: "suspended",
    libvirt.VIR_DOMAIN_EVENT_RESUMED: "resumed",
    libvirt.VIR_DOMAIN_EVENT_STOPPED: "stopped",
    libvirt.VIR_DOMAIN_EVENT_SHUTDOWN: "shut down",
    libvirt.VIR_DOMAIN_EVENT_PMSUSPENDED: "suspended",
    libvirt.VIR_DOMAIN_EVENT_CRASHED: "crashed",
}


class Told:
    """What libvirt's callbacks leave for the loop, which alone asks and says things."""

    def __init__(self) -> None:
        self.event: dict[str, str] | None = {"uid": "", "event": "connected"}
        self.over = False

    def lifecycle(self, _connection: Any, domain: Any, event: int, _detail: int, _opaque: Any) -> None:
        """A domain's state may be another one."""
        self.event = {"uid": domain.UUIDString(), "event": EVENTS.get(event, "unknown")}

    def closed(self, *_: Any) -> None:
        """The connection has ended."""
        self.over = True

    def input(self, _watch: int, descriptor: int, _events: int, _opaque: Any) -> None:
        """Who started this says nothing, until it is gone."""
        self.over = self.over or not os.read(descriptor, 4096)


def main(uri: str) -> None:
    helper.prepare()
    libvirt.virEventRegisterDefaultImpl()
    told = Told()
    try:
        _watch(libvirt.openReadOnly(uri), told)
    except libvirt.libvirtError as error:
        helper.say({"error": str(error)})


def _watch(connection: Any, told: Told) -> None:
    connection.registerCloseCallback(told.closed, None)
    connection.setKeepAlive(KEEPALIVE_INTERVAL, KEEPALIVE_COUNT)
    connection.domainEventRegisterAny(None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, told.lifecycle, None)
    watched = libvirt.VIR_EVENT_HANDLE_READABLE | libvirt.VIR_EVENT_HANDLE_HANGUP
    libvirt.virEventAddHandle(sys.stdin.fileno(), watched, told.input, None)
    while not told.over:
        if told.event is not None:
            event, told.event = told.event, None
            helper.say({"states": states(connection), **event})
        else:
            libvirt.virEventRunDefaultImpl()


if __name__ == "__main__":
    main(sys.argv[1])
