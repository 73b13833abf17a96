"""Where a request comes from. What a proxy says is believed only where the settings name that proxy."""

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from django.conf import settings

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
_WITH_PORT = re.compile(r"(\[(?P<v6>[^\]]+)\]|(?P<v4>[^:\[\]]+)):\d{1,5}", re.ASCII)


def address_of(request: Any) -> str | None:
    """The address of the browser or program that sent a request, ``None`` where nothing tells it.

    Behind proxies of ``settings.TRUSTED_PROXIES`` it is the last address of ``X-Forwarded-For`` that is none of them:
    all before that can be made up by whoever sends the request.

    Args:
        request: Django's, or REST framework's.
    """
    found = _parsed(request.META.get("REMOTE_ADDR", ""))
    trusted = [ip_network(one, strict=False) for one in settings.TRUSTED_PROXIES]
    told = request.META.get("HTTP_X_FORWARDED_FOR", "").split(",")
    while found is not None and told and _within(found, trusted):
        further = _parsed(_without_port(told.pop()))
        if further is None:
            break
        found = further
    return None if found is None else str(found)


def tries_of(request: Any) -> str | None:
    """Under which address wrong passwords are counted: of IPv6 the network (/64), as whoever has one of its addresses
    has them all.

    Args:
        request: as for :func:`address_of`.
    """
    address = address_of(request)
    if address is None or ":" not in address:
        return address
    return str(ip_network(f"{address}/64", strict=False).network_address)


def _without_port(text: str) -> str:
    """Some proxies tell the port, too: ``192.0.2.1:5678`` or ``[2001:db8::1]:443``."""
    found = _WITH_PORT.fullmatch(text.strip())
    return (found["v6"] or found["v4"]) if found else text


def _parsed(text: str) -> Address | None:
    try:
        found = ip_address(text.strip().strip("[]"))
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    # A zone ("%eth0") is of no use to others, and no database takes it.
    return mapped or ip_address(str(found).partition("%")[0])


def _within(address: Address, networks: list[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)
